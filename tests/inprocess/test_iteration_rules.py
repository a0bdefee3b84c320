"""The rules of a group: properties that hold for all events in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import Group, GroupPhase, bit, ranks_of, reply
from regrow.inprocess.group.group_messages import Timeouts
from regrow.inprocess.group.group_rules import Lost, Tick, step

TIMEOUTS = Timeouts(barrier=10.0, completion=8.0, last_call=1.0)
SIZE = 4

Told = messages.GroupReply | None


def me(rank: int) -> tuple[str, int, str]:
    return "group", rank, f"process-{rank}"


def question(kind: str, rank: int, iteration: int, number: int = 0) -> messages.Asked:
    """A message that one of four ranks may send, valid or not."""
    match kind:
        case "join":
            return messages.Join(*me(rank), SIZE, TIMEOUTS)
        case "enter":
            return messages.Enter(*me(rank), iteration, rank, SIZE)
        case "report":
            return messages.Report(*me(rank), iteration, number, "EXCEPTION", "a mistake")
        case "leave":
            return messages.LeaveGroup(*me(rank), iteration, "BASE_EXCEPTION", "exits", False)
        case "discarded":
            return messages.LeaveGroup(*me(rank), iteration, "EXCEPTION", "no place", True)
    of: dict[str, Any] = {
        "follow": messages.Follow,
        "answered": messages.AnswerLastCall,
        "ready": messages.Ready,
        "completed": messages.Completed,
        "wait": messages.WaitCompleted,
        "done": messages.RankDone,
        "confirm": messages.Confirm,
    }
    asked: messages.Asked = of[kind](*me(rank), iteration)
    return asked


KINDS = ("enter", "answered", "ready", "follow", "wait", "completed", "done", "confirm", "report")
TOGETHER = {
    "all enter": "enter",
    "all answered": "answered",
    "all ready": "ready",
    "all done": "done",
    "all confirm": "confirm",
}
ENDS = ("leave", "discarded", "lost")

events = st.lists(
    st.tuples(
        st.sampled_from((*KINDS, *KINDS, *ENDS, *TOGETHER, "join", "tick")),
        st.integers(0, SIZE - 1),
        st.integers(-1, 1),  # offset of its iteration from the current one
        st.integers(0, 3),
        st.sampled_from([0.0, 0.0, 0.1, 1.0, 9.0]),
    ),
    max_size=60,
)


def joined() -> Group:
    group = Group(SIZE, TIMEOUTS)
    for rank in range(SIZE):
        group = step(group, question("join", rank, 0), 0.0)
    return group


def apply(group: Group, kind: str, rank: int, iteration: int, number: int, now: float) -> Group:
    """Apply an event; an invalid event is refused and changes nothing."""
    if kind in TOGETHER:
        for each in ranks_of(group.living):
            group = apply(group, TOGETHER[kind], each, group.iteration, number, now)
        return group
    if kind == "tick":
        return step(group, Tick(), now)
    if kind == "lost":
        return step(group, Lost(rank, "TERMINATED", "gone"), now)
    try:
        return step(group, question(kind, rank, max(iteration, 0), number), now)
    except ValueError:
        return group


@given(events)
def test_iterations_only_increase_and_an_ended_rank_stays_ended(history: list[Any]) -> None:
    group, now = joined(), 0.0
    for kind, rank, off, number, passes in history:
        now += passes
        before = group
        group = apply(group, kind, rank, group.iteration + off, number, now)
        assert group.iteration - before.iteration in (0, 1)
        assert group.living & ~before.living == 0
        assert group.here & ~group.living == 0 or group.here & ~before.here == 0
        assert len(group.ends) + group.living.bit_count() == SIZE
        assert group is before or group.deadline is None or group.deadline > now
        if before.finished:
            assert group is before
        if group.iteration == before.iteration:
            assert group.faults[: len(before.faults)] == before.faults
        else:
            assert group.before is not None
            assert group.before.faults.records[: len(before.faults)] == before.faults


@given(events)
def test_a_repeated_message_changes_nothing(history: list[Any]) -> None:
    group, now = joined(), 0.0
    for kind, rank, off, number, passes in history:
        now += passes
        group = step(group, Tick(), now)  # as the service does before the next message
        iteration = group.iteration + off
        group = apply(group, kind, rank, iteration, number, now)
        if kind != "ready" and kind not in TOGETHER:  # of the next iteration
            assert apply(group, kind, rank, iteration, number, now) is group


@given(events)
def test_a_repeated_question_gets_the_same_answer_on_all_ranks(history: list[Any]) -> None:
    group, now = joined(), 0.0
    for kind, rank, off, number, passes in history:
        now += passes
        group = apply(group, kind, rank, group.iteration + off, number, now)
        living = ranks_of(group.living)
        for wanted in ("enter", "follow", "answered", "ready", "wait", "done", "confirm"):
            for iteration in {group.iteration, max(group.iteration - 1, 0)}:
                replies = [reply(group, question(wanted, r, iteration), now) for r in living]
                assert all(answer == replies[0] for answer in replies)
                past = iteration < group.iteration
                assert not past or None not in replies
                reasons = {a.reason for a in replies if isinstance(a, messages.GroupRefusal)}
                assert reasons <= {"missing", "mismatch"}


@given(events)
def test_every_barrier_ends_at_its_deadline(history: list[Any]) -> None:
    group, now = joined(), 0.0
    for kind, rank, off, number, passes in history:
        now += passes
        group = apply(group, kind, rank, group.iteration + off, number, now)
    waits_for = {
        GroupPhase.ENTERING: "enter",
        GroupPhase.RUNNING: "done",
        GroupPhase.CONFIRMING: "confirm",
        GroupPhase.LAST_CALL: "answered",
        GroupPhase.ENDING: "ready",
    }
    while group.living and not group.finished:  # one does its part, and waits
        one = ranks_of(group.living)[0]
        asked = question(waits_for[group.phase], one, group.iteration)
        if group.phase is GroupPhase.ENDING:
            group = apply(group, "enter", one, group.iteration, 0, now)
        group = step(group, asked, now)
        if reply(group, asked, now) is None:
            assert group.deadline is not None
            now = group.deadline
            group = step(group, Tick(), now)
            assert reply(group, asked, now) is not None


def entered(worlds: list[tuple[int, int]]) -> Group:
    group = joined()
    for rank, (place, size) in enumerate(worlds):
        group = step(group, messages.Enter(*me(rank), 0, place, size), 0.0)
    return group


@pytest.mark.parametrize(
    ("worlds", "expected"),
    [
        ([(0, 4), (1, 4), (2, 4), (2, 4)], "initial ranks 2 and 3 both entered as rank 2"),
        ([(0, 4), (1, 4), (2, 4), (3, 5)], "rank 0 entered a world of 4 ranks, and initial rank 3"),
        ([(0, 5), (1, 5), (2, 5), (3, 5)], "4 ranks entered a world of 5 ranks"),
    ],
)
def test_a_world_that_the_ranks_disagree_about_never_runs(
    worlds: list[tuple[int, int]], expected: str
) -> None:
    group = entered(worlds)
    assert group.phase is GroupPhase.ENTERING
    assert group.failure is not None
    assert expected in group.failure.text


def test_the_first_rank_to_come_decides_how_long_the_others_may_take() -> None:
    group = joined()
    assert group.deadline is None
    group = step(group, question("enter", 1, 0), 3.0)
    group = step(group, question("enter", 2, 0), 9.0)
    assert group.deadline == 13.0
    group = step(group, Tick(), 13.0)
    assert group.failure is not None
    assert group.failure.text.startswith("2 of 4 ranks (0, 3) did not arrive at the barrier")


def test_another_process_takes_the_place_of_one_that_died_before_all_had_joined() -> None:
    group = Group(2, TIMEOUTS)
    group = step(group, messages.Join(*me(0), 2, TIMEOUTS), 0.0)
    group = step(group, Lost(0, "TERMINATED", "gone"), 0.0)
    assert group.faults
    group = step(group, messages.Join(*me(0), 2, TIMEOUTS), 0.0)
    group = step(group, messages.Join(*me(1), 2, TIMEOUTS), 0.0)
    assert (group.phase, group.faults, group.ends) == (GroupPhase.ENTERING, (), ())


def test_a_report_that_comes_when_all_have_met_is_of_the_iteration_it_names() -> None:
    group = entered([(0, 4), (1, 4), (2, 4), (3, 4)])
    group = step(group, question("report", 0, 0), 0.0)
    for kind in ("answered", "ready"):
        for rank in range(SIZE):
            group = step(group, question(kind, rank, 0), 0.0)
    group = step(group, question("report", 3, 0, number=1), 1.0)
    assert (group.iteration, group.faults) == (1, ())
    assert group.before is not None
    assert [fault.rank for fault in group.before.faults.records] == [0, 3]


def test_many_faults_keep_their_records_and_the_first_of_them_their_messages() -> None:
    size = 40
    group = Group(size, TIMEOUTS)
    for rank in range(size):
        group = step(group, messages.Join(*me(rank), size, TIMEOUTS), 0.0)
    for rank in range(size):
        group = step(group, messages.LeaveGroup(*me(rank), 0, "EXCEPTION", "x" * 5000, False), 0.0)
    assert [fault.rank for fault in group.faults] == list(range(size))
    lengths = [len(fault.message) for fault in group.faults]
    assert lengths == [messages.TEXT] * messages.TEXTS + [0] * (size - messages.TEXTS)
    assert group.living & bit(0) == 0


def test_a_rank_that_was_not_done_in_time_has_one_soft_time_out() -> None:
    group = entered([(rank, SIZE) for rank in range(SIZE)])
    for rank in range(SIZE - 1):
        group = step(group, messages.RankDone(*me(rank), 0), 1.0)
    group = step(group, Tick(), 1.0 + TIMEOUTS.completion)
    assert [(fault.kind, fault.rank) for fault in group.faults] == [("SOFT_TIMEOUT", SIZE - 1)]
    name, rank, process = me(SIZE - 1)
    again = messages.Report(
        name, rank, process, 0, messages.OVERDUE, "SOFT_TIMEOUT", "seen by its monitor"
    )
    assert step(group, again, 11.0).faults == group.faults


def running() -> Group:
    return entered([(rank, SIZE) for rank in range(SIZE)])


def send_all(group: Group, kind: str, ranks: range = range(SIZE)) -> Group:
    for rank in ranks:
        group = step(group, question(kind, rank, 0), 1.0)
    return group


def leaves(group: Group, rank: int) -> Told:
    asked = question("leave", rank, group.iteration)
    return reply(step(group, asked, 2.0), asked, 2.0)


def test_a_rank_that_leaves_a_failed_group_receives_the_failure() -> None:
    late = step(send_all(joined(), "enter", range(SIZE - 1)), Tick(), 1.0 + TIMEOUTS.barrier)
    disagree = entered([(0, 4), (1, 4), (2, 4), (2, 4)])
    for group in (late, disagree):
        assert isinstance(group.failure, messages.GroupRefusal)
        assert leaves(group, 0) == group.failure


def test_a_rank_that_left_before_the_group_failed_has_left() -> None:
    group = step(running(), question("leave", 0, 0), 1.0)
    for kind in ("answered", "ready"):
        group = send_all(group, kind, range(1, SIZE - 1))
    group = step(group, Tick(), 3.0)  # the last call is over
    group = step(group, Tick(), 20.0)
    assert group.failure is not None
    assert isinstance(leaves(group, 0), messages.Left)
    assert leaves(group, 1) == group.failure


def test_the_call_is_over_when_all_ranks_know_that_all_are_done() -> None:
    group = send_all(running(), "done")
    assert group.phase is GroupPhase.CONFIRMING
    assert reply(group, question("done", 0, 0), 1.0) == messages.Go(0)
    assert reply(group, question("follow", 0, 0), 1.0) is None
    group = send_all(group, "confirm")
    assert group.phase is GroupPhase.OVER
    assert reply(group, question("confirm", 0, 0), 1.0) == messages.Over()


def test_the_others_continue_without_a_rank_that_dies_before_the_call_is_over() -> None:
    group = send_all(send_all(running(), "done"), "confirm", range(SIZE - 1))
    group = step(group, Lost(SIZE - 1, "TERMINATED", "gone"), 2.0)
    assert group.phase is GroupPhase.LAST_CALL
    assert isinstance(reply(group, question("confirm", 0, 0), 2.0), messages.Interrupted)


def test_no_rank_continues_in_place_of_another_when_the_call_is_over() -> None:
    group = send_all(send_all(running(), "done"), "confirm")
    assert leaves(group, 0) == messages.Over()
    assert step(group, Lost(0, "TERMINATED", "gone"), 3.0) is group


def test_a_rank_that_does_not_confirm_in_time_has_a_fault() -> None:
    group = send_all(send_all(running(), "done"), "confirm", range(SIZE - 1))
    assert group.deadline == 1.0 + TIMEOUTS.completion
    group = step(group, Tick(), 1.0 + TIMEOUTS.completion)
    assert [(fault.kind, fault.rank) for fault in group.faults] == [("SOFT_TIMEOUT", SIZE - 1)]
    assert "did not confirm the end of the call 8 s after" in group.faults[0].message


def test_a_rank_cannot_confirm_before_all_are_done() -> None:
    with pytest.raises(ValueError, match="but not all ranks are done"):
        step(send_all(running(), "done", range(2)), question("confirm", 0, 0), 1.0)
