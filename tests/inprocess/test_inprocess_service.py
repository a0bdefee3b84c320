"""The service that runs groups: sessions, processes, refusals, and deletion."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Timeouts
from regrow.inprocess.group.group_service import FORGET, InprocessService

TIMEOUTS = Timeouts()


class Asking:
    """Sessions that ask a service, and the answers that each received."""

    def __init__(self) -> None:
        self.service = InprocessService()
        self.now = 0.0
        self.replies: dict[tuple[object, int], messages.GroupReply] = {}
        self._number = 0

    def ask(self, session: str, question: messages.Asked) -> int:
        """Put a question; returns its number."""
        self._number += 1
        self.take(self.service.asked(session, self._number, messages.encode(question), self.now))
        return self._number

    def answer(self, session: str, question: messages.Asked) -> Any:
        """Put a question that is answered at once."""
        return self.replies[session, self.ask(session, question)]

    def due_at(self) -> float | None:
        """When the service wants to be called."""
        return self.service.deadline

    def take(self, answers: Any) -> None:
        for answer in answers:
            assert (answer.session, answer.id) not in self.replies, "answered twice"
            self.replies[answer.session, answer.id] = messages.decode_reply(answer.body)


def me(rank: int, process: str = "") -> tuple[str, int, str]:
    return "group", rank, process or f"process-{rank}"


def refusal(answer: Any) -> str:
    """The reason for which a question was refused."""
    assert isinstance(answer, messages.GroupRefusal)
    return answer.reason


def join(rank: int, size: int, process: str = "", incarnation: int = 0) -> messages.Join:
    return messages.Join(*me(rank, process), size, TIMEOUTS, incarnation)


def running(size: int) -> Asking:
    asking = Asking()
    for rank in range(size):
        asking.ask(f"session-{rank}", join(rank, size))
    for rank in range(size):
        asking.ask(f"session-{rank}", messages.Enter(*me(rank), 0, rank, size))
    return asking


def test_a_question_that_waits_is_answered_once_and_forgotten_with_its_connection() -> None:
    asking = running(2)
    lost = asking.ask("session-0", messages.Follow(*me(0), 0))
    asking.take(asking.service.suspended("session-0", 0.0))
    asking.take(asking.service.resumed("session-0", 0.1))
    again = asking.ask("session-0", messages.Follow(*me(0), 0))
    asking.ask("session-1", messages.Report(*me(1), 0, 1, "EXCEPTION", "a mistake"))
    assert ("session-0", lost) not in asking.replies
    assert isinstance(asking.replies["session-0", again], messages.Interrupted)


def test_a_question_that_was_given_up_is_not_answered() -> None:
    asking = running(2)
    given_up = asking.ask("session-0", messages.WaitCompleted(*me(0), 0))
    asking.service.cancelled("session-0", given_up)
    asking.ask("session-1", messages.Completed(*me(1), 0))
    assert ("session-0", given_up) not in asking.replies


def test_a_closed_session_is_an_end_and_a_silent_one_is_no_answer() -> None:
    for closed, kind, expected in (
        (True, "TERMINATED", "its process is gone: it is over"),
        (False, "UNRESPONSIVE", "its process sends nothing: it is over"),
    ):
        asking = running(2)
        following = asking.ask("session-1", messages.Follow(*me(1), 0))
        asking.take(asking.service.ended("session-0", "it is over", closed, 7.0))
        reply = asking.replies["session-1", following]
        assert isinstance(reply, messages.Interrupted)
        (fault,) = reply.faults.records
        assert (fault.kind, fault.rank, fault.message, fault.at) == (kind, 0, expected, 7.0)


def test_a_fault_has_the_seconds_since_it_happened() -> None:
    asking = running(3)
    asking.now = 5.0
    asking.ask("session-0", messages.Report(*me(0), 0, 1, "EXCEPTION", "a mistake", 0.25))
    asking.take(asking.service.suspended("session-1", 6.0))
    asking.take(asking.service.ended("session-1", "it is over", True, 6.5))
    asking.take(asking.service.suspended("session-2", 7.0))
    asking.take(asking.service.resumed("session-2", 7.25))
    asking.take(asking.service.suspended("session-2", 8.0))
    asking.now = 9.0
    asking.ask("watcher", messages.ReportDead(*me(2), "TERMINATED", "it was killed"))
    reply = asking.answer(
        "watcher", messages.LeaveGroup(*me(0), 0, "BASE_EXCEPTION", "", False, 0.5)
    )
    assert isinstance(reply, messages.Left)
    times = [(fault.at, fault.lag) for fault in reply.faults.records]
    assert times == [(5.0, 0.25), (6.5, 0.5), (9.0, 1.0), (9.0, 0.5)]


def test_a_process_that_sends_over_another_session_outlives_the_old_one() -> None:
    asking = running(2)
    asking.ask("another", messages.Follow(*me(0), 0))
    asking.take(asking.service.ended("session-0", "it is over", True, 1.0))
    reply = asking.answer("session-1", messages.Report(*me(1), 0, 1, "EXCEPTION", ""))
    assert isinstance(reply, messages.Noted)
    assert len(asking.replies) == 4 + 2, "the follower over the other session got a reply too"


def test_another_process_replaces_a_suspended_one_before_all_have_joined() -> None:
    asking = Asking()
    asking.ask("session-0", join(0, 2))
    refused = asking.answer("another", join(0, 2, "another process"))
    assert refusal(refused) == "mismatch"
    assert "another process has joined as initial rank 0 already" in refused.text
    asking.take(asking.service.suspended("session-0", 1.0))
    waiting = asking.ask("another", join(0, 2, "another process"))
    asking.ask("session-1", join(1, 2))
    assert asking.replies["another", waiting] == messages.Go(0)
    asking.take(asking.service.ended("session-0", "it is over", True, 2.0))
    assert asking.ask("another", messages.Follow(*me(0, "another process"), 0))
    assert refusal(asking.answer("session-0", messages.Follow(*me(0), 0))) == "unknown"


def test_another_process_cannot_replace_a_rank_that_was_evicted() -> None:
    asking = running(2)
    asking.ask("watcher", messages.ReportDead(*me(0), "HARD_TIMEOUT", "it hangs"))
    refused = asking.answer("another", join(0, 2, "another process"))
    assert refusal(refused) == "mismatch"
    assert (
        "initial rank 0 of the group 'group' was removed as lost, and the other ranks have already "
        "started" in refused.text
    )


def test_a_report_about_a_process_does_not_end_the_next_one_of_its_rank() -> None:
    asking = running(2)
    following = asking.ask("session-1", messages.Follow(*me(1), 0))
    old = messages.ReportDead(*me(0, "an older process"), "TERMINATED", "it was killed")
    assert refusal(asking.answer("monitor", old)) == "unknown"
    assert ("session-1", following) not in asking.replies
    now = messages.ReportDead(*me(0), "TERMINATED", "it was killed")
    assert asking.answer("monitor", now) == messages.Noted()
    assert isinstance(asking.replies["session-1", following], messages.Interrupted)


def test_ranks_that_mean_other_groups_are_refused_with_what_differs() -> None:
    asking = Asking()
    asking.ask("session-0", join(0, 2))
    refused = asking.answer("session-1", join(1, 3))
    assert refusal(refused) == "impossible"
    assert "the first rank joined with 2 ranks" in refused.text
    assert (
        "initial rank 2 does not exist in the group 'group' of 2 ranks"
        in asking.answer("session-2", join(2, 2)).text
    )


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    asking = running(2)
    for question, expected in (
        (
            messages.Enter(*me(0), 5, 0, 2),
            "initial rank 0 is in iteration 5, but the group is in iteration 0",
        ),
        (messages.Ready(*me(0), 0), "but the iteration has no fault"),
        (messages.Follow("other", 0, "process-0", 0), "initial rank 0 of the group 'other'"),
        (messages.Follow(*me(0, "a stranger"), 0), "no entry for this process (initial rank 0"),
    ):
        session = "session-0" if question.group == "group" else "another"
        assert expected in asking.answer(session, question).text
    other_rank = asking.answer("session-0", messages.Follow(*me(1), 0))
    assert "this session belongs to initial rank 0" in other_rank.text
    assert (
        "this session belongs to initial rank 0"
        in asking.answer("session-0", messages.Follow(*me(1), 0)).text
    )
    asking.take(asking.service.asked("session-0", 99, b"\x93\x01nonsense", 0.0))
    assert refusal(asking.replies["session-0", 99]) == "impossible"
    following = asking.ask("session-0", messages.Follow(*me(0), 0))
    assert ("session-0", following) not in asking.replies


def test_a_group_is_forgotten_a_while_after_all_ranks_are_gone() -> None:
    asking = running(1)
    asking.take(asking.service.ended("session-0", "it is over", True, 1.0))
    assert asking.due_at() == 1.0 + FORGET
    reply = asking.answer("late", messages.Ready(*me(0), 0))
    assert refusal(reply) == "evicted"
    asking.take(asking.service.ended("late", "it is over", True, 2.0))
    asking.now = 2.0 + FORGET
    asking.take(asking.service.due(asking.now))
    assert asking.due_at() is None
    assert refusal(asking.answer("later", messages.Ready(*me(0), 0))) == "unknown"


def test_a_group_that_is_over_makes_room_for_another_of_its_name() -> None:
    asking = running(1)
    asking.ask("session-0", messages.RankDone(*me(0), 0))
    asking.ask("session-0", messages.Confirm(*me(0), 0))
    assert asking.answer("session-0", join(0, 1, "the next call")) == messages.Go(0)
    entered = messages.Enter(*me(0, "the next call"), 0, 0, 1)
    assert asking.answer("session-0", entered) == messages.Go(0)


def over_and_deleted() -> Asking:
    asking = running(1)
    asking.ask("session-0", messages.RankDone(*me(0), 0))
    asking.ask("session-0", messages.Confirm(*me(0), 0))
    asking.take(asking.service.ended("session-0", "it is over", True, 1.0))
    asking.now = 1.0 + FORGET
    asking.take(asking.service.due(asking.now))
    assert asking.due_at() is None
    return asking


def test_a_call_that_is_over_stays_over_for_a_process_that_replaces_another() -> None:
    asking = over_and_deleted()
    for session in ("first", "second"):
        assert asking.answer(session, join(0, 1, session, incarnation=1)) == messages.Over()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_group_whose_ranks_were_all_replaced_continues_the_numbers_of_the_iterations(
    deleted: bool,
) -> None:
    """Keys of its iterations may be left in the store, such as the addresses of gloo."""
    asking = running(2)
    for rank in range(2):
        asking.take(asking.service.ended(f"session-{rank}", "it is over", True, 1.0))
    if deleted:
        asking.now = 1.0 + FORGET
        asking.take(asking.service.due(asking.now))
        assert asking.due_at() is None
    waits = asking.ask("first", join(0, 2, "first", incarnation=1))
    assert asking.answer("second", join(1, 2, "second", incarnation=1)) == messages.Go(1)
    assert asking.replies["first", waits] == messages.Go(1)
    for rank, process in enumerate(("first", "second")):
        enters = asking.ask(process, messages.Enter(*me(rank, process), 1, rank, 2))
    assert asking.replies["second", enters] == messages.Go(1)


def test_a_group_that_was_over_and_deleted_makes_room_for_another_of_its_name() -> None:
    asking = over_and_deleted()
    assert asking.answer("another", join(0, 1, "the next call")) == messages.Go(0)
    replaced = asking.answer("third", join(0, 1, "its replacement", incarnation=1))
    assert replaced == messages.Go(1), "the later group is not over"
