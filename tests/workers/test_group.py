"""Rules for the life of a group of workers."""

from __future__ import annotations

from regrow.workers.group import EndKind, GroupState, WorkerEnd, ended

STOPPED = 2.0


def end(
    group: GroupState, rank: int, outcome: EndKind = "failed", *, replaceable: bool = False
) -> GroupState:
    code = {"completed": 0, "stopped": -15}.get(outcome, 1)
    return ended(group, rank, WorkerEnd(code, 1.0, outcome), replaceable)


def outcomes(group: GroupState) -> dict[int, EndKind]:
    return {rank: end.outcome for rank, end in group.ends.items()}


def test_a_failed_worker_has_failed_and_a_stopped_one_has_not() -> None:
    group = end(GroupState(3), 1)
    group = end(group._replace(stopped_at=STOPPED), 0, "stopped")
    assert group.failed == (1,)


def test_a_second_failure_before_the_stop_reaches_the_worker_is_a_failure() -> None:
    group = end(end(GroupState(3), 2)._replace(stopped_at=STOPPED), 1)
    assert group.failed == (1, 2)


def test_a_group_is_over_when_all_workers_are_gone_not_when_all_have_ended() -> None:
    group = GroupState(2)
    for rank in (0, 1):
        group = end(group, rank, "completed")
    assert not group.over
    assert group._replace(gone=frozenset((0, 1))).over


def test_the_others_continue_without_a_replaceable_worker() -> None:
    group = end(GroupState(3), 1, replaceable=True)
    assert (group.failed, outcomes(group)) == ((), {1: "lost"})
    group = end(group, 0, "completed")
    group = end(group, 2, replaceable=True)
    assert group.failed == ()


def test_losses_are_failures_when_no_worker_is_left_to_continue() -> None:
    group = GroupState(3)
    for rank in (1, 0, 2):
        group = end(group, rank, replaceable=True)
    assert group.failed == (0, 1, 2)


def test_a_worker_that_ends_during_a_stop_is_not_lost() -> None:
    group = end(end(GroupState(4), 1, replaceable=True), 0)
    group = end(group._replace(stopped_at=STOPPED), 3, replaceable=True)
    assert outcomes(group) == {0: "failed", 1: "lost", 3: "failed"}


def test_a_worker_that_left_the_others_and_completed_its_task_compensates_no_loss() -> None:
    left, lost = ("completed", 0), ("failed", 1)
    for ends in ([left, lost, ("failed", 2)], [lost, ("failed", 2), left]):
        group = GroupState(3)
        for outcome, rank in ends:
            assert group.failed == ()
            group = end(group, rank, outcome, replaceable=True)  # type: ignore[arg-type]
        assert group.failed == (1, 2)


def test_workers_that_all_left_and_completed_their_tasks_have_not_failed() -> None:
    group = GroupState(3)
    for rank in range(3):
        group = end(group, rank, "completed", replaceable=True)
    assert outcomes(group) == {0: "left", 1: "left", 2: "left"}


def test_a_loss_remains_a_loss_when_the_last_of_the_others_fails() -> None:
    group = end(end(GroupState(2), 1, replaceable=True), 0)
    assert outcomes(group) == {0: "failed", 1: "lost"}
