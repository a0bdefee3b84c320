"""Rules for the life of a group of workers."""

from __future__ import annotations

from regrow.workers.group import EndKind, GroupState, WorkerEnd, ended, given_up, replaced

STOPPED = 2.0


def end(
    group: GroupState, rank: int, outcome: EndKind = "failed", *, others_continue: bool = False
) -> GroupState:
    code = {"completed": 0, "stopped": -15}.get(outcome, 1)
    return ended(group, rank, WorkerEnd(code, 1.0, outcome), others_continue)


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


def test_the_others_continue_without_a_worker() -> None:
    group = end(GroupState(3), 1, others_continue=True)
    assert (group.failed, outcomes(group)) == ((), {1: "lost"})
    group = end(group, 0, "completed")
    group = end(group, 2, others_continue=True)
    assert group.failed == ()


def test_losses_are_failures_when_no_worker_is_left_to_continue() -> None:
    group = GroupState(3)
    for rank in (1, 0, 2):
        group = end(group, rank, others_continue=True)
    assert group.failed == (0, 1, 2)


def test_a_worker_that_ends_during_a_stop_is_not_lost() -> None:
    group = end(end(GroupState(4), 1, others_continue=True), 0)
    group = end(group._replace(stopped_at=STOPPED), 3, others_continue=True)
    assert outcomes(group) == {0: "failed", 1: "lost", 3: "failed"}


def test_a_worker_that_left_the_others_and_completed_its_task_compensates_no_loss() -> None:
    left, lost = ("completed", 0), ("failed", 1)
    for ends in ([left, lost, ("failed", 2)], [lost, ("failed", 2), left]):
        group = GroupState(3)
        for outcome, rank in ends:
            assert group.failed == ()
            group = end(group, rank, outcome, others_continue=True)  # type: ignore[arg-type]
        assert group.failed == (1, 2)


def test_workers_that_all_left_and_completed_their_tasks_have_not_failed() -> None:
    group = GroupState(3)
    for rank in range(3):
        group = end(group, rank, "completed", others_continue=True)
    assert outcomes(group) == {0: "left", 1: "left", 2: "left"}


def test_a_loss_remains_a_loss_when_the_last_of_the_others_fails() -> None:
    group = end(end(GroupState(2), 1, others_continue=True), 0)
    assert outcomes(group) == {0: "failed", 1: "lost"}


# --- places that another process may take


def vacate(group: GroupState, rank: int) -> GroupState:
    return ended(group, rank, WorkerEnd(-9, 1.0, "failed"), others_continue=True, vacates=True)


def test_a_group_with_a_vacant_place_is_not_over_until_the_owner_has_decided() -> None:
    group = vacate(GroupState(2), 1)
    group = end(group, 0, "completed")._replace(gone=frozenset((0, 1)))
    assert (outcomes(group)[1], group.failed, group.over) == ("vacant", (), False)
    assert given_up(group, 1).over
    assert not replaced(group, 1).over


def test_a_worker_that_fails_or_completes_leaves_no_vacant_place() -> None:
    failed = WorkerEnd(1, 1.0, "failed")
    group = ended(GroupState(3), 0, failed, others_continue=False, vacates=True)
    group = ended(group, 1, WorkerEnd(0, 1.0, "completed"), others_continue=True, vacates=True)
    assert outcomes(group) == {0: "failed", 1: "left"}
    stopped = ended(
        GroupState(3, stopped_at=STOPPED), 0, failed, others_continue=True, vacates=True
    )
    assert outcomes(stopped) == {0: "failed"}


def test_a_replaced_worker_has_not_ended_and_is_not_gone() -> None:
    group = vacate(vacate(GroupState(3), 1), 2)._replace(gone=frozenset((1, 2)))
    group = replaced(group, 1)
    assert outcomes(group) == {2: "vacant"}
    assert group.gone == {2}
    group = end(group, 1, "completed")
    assert outcomes(group) == {1: "completed", 2: "vacant"}


def test_a_place_that_is_given_up_is_a_loss_and_other_ends_stay() -> None:
    group = end(vacate(vacate(GroupState(4), 1), 2), 0, "completed")
    group = given_up(group, 0, 1, 3)
    assert (outcomes(group), group.failed) == ({0: "completed", 1: "lost", 2: "vacant"}, ())


def test_losses_are_failures_when_the_last_place_is_given_up() -> None:
    group = vacate(vacate(GroupState(2), 0), 1)
    assert group.failed == ()
    group = given_up(group, 0)
    assert group.failed == ()
    assert given_up(group, 1).failed == (0, 1)
