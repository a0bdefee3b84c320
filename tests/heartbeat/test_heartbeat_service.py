"""The heartbeat service without a server: its answers and their times."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.heartbeat import Progress
from regrow.heartbeat import messages as messages
from regrow.heartbeat.failure import NEVER_TOGETHER, NO_RANKS, Ranks
from regrow.heartbeat.merge import Agreed, Beat, Broken, StalledSteps, WorkersLeft
from regrow.heartbeat.messages import (
    BeatQuestion,
    FollowGroup,
    GetProgress,
    InStep,
    Missing,
    UnknownGroup,
)
from regrow.heartbeat.service import GROUPS, HeartbeatService
from regrow.store import Answer, StoreServiceError

TOKEN = 4711


class Desk:
    """A service, and workers that ask it: each has a session, and numbers its messages."""

    def __init__(self) -> None:
        self.service = HeartbeatService()
        self.now = 50.0
        self.id = 0

    def ask(self, session: str, question: messages.Question) -> dict[str, Any]:
        """Ask, and return the resulting answers, by session."""
        self.id += 1
        return decoded(self.service.asked(session, self.id, messages.encode(question), self.now))

    def beat(self, rank: int, session: str = "", **fields: Any) -> dict[str, Any]:
        return self.ask(session or f"s{rank}", beat(rank, **fields))

    def due(self) -> dict[str, Any]:
        """Advance the time to the deadline of the service."""
        assert self.service.deadline is not None
        self.now = max(self.now, self.service.deadline)
        return decoded(self.service.due(self.now))

    def ended(self, session: str, closed: bool = True) -> dict[str, Any]:
        self.service.suspended(session, self.now)
        return decoded(self.service.ended(session, "its connection broke", closed, self.now))


def decoded(answers: list[Answer]) -> dict[str, Any]:
    return {str(each.session): messages.decode_answer(each.body) for each in answers}


def beat(rank: int, **fields: Any) -> BeatQuestion:
    """The question of one of three workers after some beats; `fields` replaces parts."""
    question: dict[str, Any] = {"group": "job", "size": 3, "seen": 0, "wait": 2.0}
    question |= {name: fields.pop(name) for name in question.keys() & fields.keys()}
    return BeatQuestion(beat=Beat(**{**fields_of(rank), **fields}), **question)


def fields_of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "token": TOKEN, "incarnation": 1000 + rank, "joined": True}


def follow(rank: int) -> FollowGroup:
    return FollowGroup("job", rank, 1000 + rank)


@pytest.fixture
def desk() -> Desk:
    """Three workers that have beaten once, and follow the group under sessions of their own."""
    desk = Desk()
    for rank in range(3):
        answers = desk.beat(rank, joined=False, token=TOKEN if rank == 0 else 0)
    assert answers == {f"s{rank}": InStep(1, Agreed(TOKEN, None, 0.0)) for rank in range(3)}
    for rank in range(3):
        assert desk.ask(f"s{rank}", follow(rank)) == {}
    return desk


def test_all_workers_get_the_answer_when_the_last_one_has_arrived(desk: Desk) -> None:
    assert desk.beat(2, seen=1, step=4) == {}
    assert desk.beat(0, seen=1, step=5) == {}
    assert set(desk.beat(1, seen=1)) == {"s0", "s1", "s2"}
    desk.beat(2, seen=2, step=4)
    desk.beat(0, seen=2, step=5)
    answers = desk.beat(1, seen=2)
    stalled = StalledSteps(1, Ranks.of([2]), 4, "", 5)
    assert answers["s0"] == InStep(3, Agreed(TOKEN, stalled, 0.0))


def test_the_length_of_an_answer_does_not_depend_on_the_number_of_workers() -> None:
    lengths = []
    for size in (16, 512):
        service = HeartbeatService()
        for rank in range(size):
            question = beat(rank, size=size, joined=False, step=rank % 2)
            answers = service.asked(rank, 1, messages.encode(question), 0.0)
        assert len(answers) == size
        lengths.append(len(answers[0].body))
    assert lengths[1] - lengths[0] <= 8  # the digits of two counts


def test_a_worker_gets_the_missing_ranks_when_its_wait_ends(desk: Desk) -> None:
    desk.beat(0, seen=1)
    desk.now += 0.01
    desk.beat(1, seen=1)
    assert desk.due() == {"s0": Missing(Ranks.of([2])), "s1": Missing(Ranks.of([2]))}
    assert desk.service.deadline is None


def test_a_worker_that_gave_up_a_moment_ago_is_not_missing(desk: Desk) -> None:
    desk.beat(0, seen=1, wait=1.0)
    desk.now += 0.5
    desk.beat(1, seen=1, wait=2.0)
    assert desk.due() == {"s0": Missing(Ranks.of([2]))}
    assert desk.due() == {"s1": Missing(Ranks.of([2]))}
    desk.now += 1.0
    desk.beat(1, seen=1, wait=2.0)
    assert desk.due() == {"s1": Missing(Ranks.of([0, 2]))}


def test_a_worker_that_gave_up_does_not_count_as_present(desk: Desk) -> None:
    desk.beat(0, seen=1)
    desk.due()
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1) == {}
    assert set(desk.beat(0, seen=1)) == {"s0", "s1", "s2"}


def test_the_first_worker_with_a_final_failure_ends_the_group(desk: Desk) -> None:
    desk.beat(0, seen=1, final=True)
    desk.beat(1, seen=1, wait=9.0)
    verdict = Broken("missing", Ranks.of([2]))
    answers = desk.due()
    assert answers == {"s0": verdict, "s1": verdict, "s2": verdict}
    assert desk.beat(2, seen=1) == {"s2": verdict}  # too late


def test_ranks_without_a_beat_never_started() -> None:
    desk = Desk()
    desk.beat(0, joined=False, final=True)
    assert desk.due() == {"s0": Broken("never started", Ranks.of([1, 2]))}


def test_workers_that_take_turns_are_not_called_missing(desk: Desk) -> None:
    desk.beat(1, seen=1, wait=1.0)
    desk.beat(0, seen=1, final=True)
    desk.due()
    desk.beat(2, seen=1, wait=5.0)
    assert desk.due()["s0"] == Broken("no exchange", NO_RANKS, NEVER_TOGETHER)


def test_all_workers_learn_at_once_of_an_ended_process(desk: Desk) -> None:
    desk.beat(0, seen=1)
    lost = Broken("lost", Ranks.of([2]), "its connection broke")
    answers = decoded(desk.service.ended("s2", "its connection broke", True, desk.now))
    assert answers == {"s0": lost, "s1": lost}
    assert desk.beat(1, seen=1) == {"s1": lost}  # a worker that did not follow


def test_a_broken_connection_does_not_end_the_group(desk: Desk) -> None:
    assert desk.ended("s2", closed=False) == {}
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert set(desk.beat(2, "another session", seen=1)) == {"s0", "s1", "another session"}
    assert desk.ended("another session")["s0"].kind == "lost"


def test_the_end_of_an_older_session_has_no_effect(desk: Desk) -> None:
    desk.beat(2, "another session", seen=1)
    assert desk.ended("s2") == {}


def test_a_worker_gets_an_answer_that_its_connection_lost(desk: Desk) -> None:
    for rank in (2, 0):
        desk.beat(rank, seen=1)
    desk.service.suspended("s2", desk.now)
    assert desk.beat(1, seen=1) == {}  # it is not present
    assert set(desk.beat(2, seen=1)) == {"s0", "s1", "s2"}
    desk.service.suspended("s2", desk.now)  # before the answer arrived
    desk.now += 0.25
    assert desk.beat(2, seen=1) == {"s2": InStep(2, Agreed(TOKEN, None, 0.25))}
    assert desk.beat(2, seen=2) == {}


def test_a_lost_first_answer_makes_no_new_process(desk: Desk) -> None:
    first: dict[str, Any] = {"joined": False, "token": 0}
    assert desk.beat(2, **first) == {"s2": InStep(1, Agreed(TOKEN, None, 0.0))}


def test_a_new_process_of_a_running_rank_ends_the_group(desk: Desk) -> None:
    verdict = Broken("restarted", Ranks.of([2]))
    answers = desk.beat(2, "new", incarnation=7, joined=False, token=0)
    assert answers == {"new": verdict, "s0": verdict, "s1": verdict, "s2": verdict}


def test_a_process_of_another_run_is_out_of_step_and_not_restarted(desk: Desk) -> None:
    verdict = Broken("out of step", Ranks.of([2]), f"the others show {TOKEN}")
    answers = desk.beat(2, "old", incarnation=7, token=TOKEN + 1)
    assert answers == {"old": verdict, "s0": verdict, "s1": verdict, "s2": verdict}


def test_the_newer_process_of_a_rank_counts_while_the_group_forms() -> None:
    desk = Desk()
    first: dict[str, Any] = {"joined": False, "token": 0}
    desk.beat(2, **first)
    assert desk.beat(2, "new", incarnation=7, **first) == {"s2": Broken("twice", Ranks.of([2]))}
    assert desk.ended("s2") == {}
    desk.beat(0, joined=False)
    assert set(desk.beat(1, **first)) == {"s0", "s1", "new"}


def test_a_process_that_ends_while_the_group_forms_can_be_replaced() -> None:
    desk = Desk()
    desk.beat(2, joined=False, token=0)
    assert desk.ended("s2") == {}
    desk.beat(0, joined=False)
    desk.beat(1, joined=False, token=0)
    assert set(desk.beat(2, "new", incarnation=7, joined=False, token=0)) == {"s0", "s1", "new"}


@pytest.mark.parametrize("rank", [2, 5])
def test_another_world_size_ends_the_group(desk: Desk, rank: int) -> None:
    verdict = Broken("wrong world size", Ranks.of([rank]), "8 instead of 3")
    answers = desk.beat(rank, "new", size=8, incarnation=7, joined=False)
    assert answers == {"new": verdict, "s0": verdict, "s1": verdict, "s2": verdict}


def test_all_workers_learn_that_one_leaves(desk: Desk) -> None:
    left = WorkersLeft(Ranks.of([1]))
    assert desk.beat(1, seen=1, leaving=True) == {"s0": left, "s1": left, "s2": left}
    assert desk.ended("s1") == {}
    assert desk.beat(0, seen=1) == {"s0": left}
    assert desk.beat(2, seen=1, leaving=True) == {"s2": left}


def test_a_worker_that_leaves_early_can_be_replaced() -> None:
    desk = Desk()
    for rank in range(2):
        assert desk.beat(rank, joined=False) == {}
    assert desk.beat(1, joined=False, leaving=True) == {"s1": WorkersLeft(Ranks.of([1]))}
    assert desk.ended("s1") == {}
    assert desk.beat(2, joined=False) == {}
    assert set(desk.beat(1, "new", incarnation=7, joined=False)) == {"s0", "s2", "new"}


def test_the_leave_of_an_unknown_process_has_no_effect(desk: Desk) -> None:
    left = WorkersLeft(Ranks.of([1]))
    assert desk.beat(1, "another", incarnation=7, leaving=True) == {"another": left}
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1)["s0"].number == 2


def test_a_new_group_can_use_the_name_of_an_ended_group(desk: Desk) -> None:
    desk.beat(1, leaving=True)
    for rank in range(2):
        desk.beat(rank, "new", incarnation=rank + 1, joined=False, size=2)
    answers = desk.beat(0, "new", incarnation=1, size=2, wait=1.0)
    assert desk.beat(2, seen=1) == {"s2": WorkersLeft(Ranks.of([1]))}  # one of the old group
    assert desk.due() == {"new": Missing(Ranks.of([1]))} or answers


def test_workers_continue_with_a_restarted_server() -> None:
    desk = Desk()
    desk.beat(0, seen=40)
    desk.beat(1, seen=40)
    assert desk.beat(2, seen=40)["s0"] == InStep(1, Agreed(TOKEN, None, 0.0))
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1)["s0"].number == 2


def test_the_service_returns_the_progress_of_all_workers(desk: Desk) -> None:
    desk.beat(1, seen=1, step=7, phase="train")
    desk.now += 0.5
    rows = desk.ask("anyone", GetProgress("job"))["anyone"].rows
    assert rows == [
        Progress(0, None, None, 0.5),
        Progress(1, 7, "train", 0.5),
        Progress(2, None, None, 0.5),
    ]
    assert desk.ask("anyone", GetProgress("another"))["anyone"].rows == []


def test_an_unknown_group_cannot_be_followed() -> None:
    assert Desk().ask("s0", follow(0)) == {"s0": UnknownGroup()}


def test_a_cancelled_beat_is_not_answered(desk: Desk) -> None:
    desk.beat(0, seen=1)
    desk.service.cancelled("s0", desk.id)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1) == {}


def test_a_group_without_sessions_is_removed(desk: Desk) -> None:
    for rank in range(3):
        desk.ended(f"s{rank}", closed=False)
    assert desk.ask("anyone", GetProgress("job"))["anyone"].rows == []


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (b"\x00", "Expected `array`"),
        (messages.encode(beat(3)), "rank 3 is not in a world of 3"),
        (messages.encode(beat(0, token=70000)), "Expected `int` <= 65535"),
        (bytes(messages.BODY_BYTES + 1), "bytes"),
    ],
)
def test_an_invalid_question_is_refused_and_changes_nothing(
    desk: Desk, question: bytes, why: str
) -> None:
    with pytest.raises(StoreServiceError, match=why):
        desk.service.asked("s0", 99, question, desk.now)
    desk.beat(0, seen=1)
    desk.beat(1, seen=1)
    assert desk.beat(2, seen=1)["s0"].number == 2


def test_the_number_of_groups_is_limited() -> None:
    desk = Desk()
    for number in range(GROUPS):
        desk.beat(0, group=f"job {number}")
    with pytest.raises(StoreServiceError, match="this server already has"):
        desk.beat(0, group="one too many")
