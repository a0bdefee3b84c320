"""The life of a group of workers, as a pure function."""

from __future__ import annotations

import signal

from regrow.workers._group import Close, Ended, Gone, Group, Member, Stop, step


def _group(size: int = 3) -> Group:
    return Group((Member(),) * size, grace=30.0)


def _ended(rank: int, code: int, *, told_to: bool = False, at: float = 1.0) -> Ended:
    return Ended(rank, code, code == 0, told_to, at)


def test_one_failure_stops_all_with_the_configured_grace() -> None:
    group, stop = step(_group(), _ended(1, -9), now=2.0)
    assert stop == Stop((0, 1, 2), signal.SIGTERM, 30.0)
    assert group.failed == (1,)
    assert group.stopped_at == 2.0


def test_a_success_stops_nobody() -> None:
    group, stop = step(_group(), _ended(0, 0), now=2.0)
    assert stop is None
    assert group.failed == ()


def test_an_exit_with_0_that_did_not_do_its_work_is_a_failure() -> None:
    group, stop = step(_group(), Ended(0, 0, False, False, 1.0), now=2.0)
    assert group.failed == (0,)
    assert stop is not None


def test_a_second_failure_before_the_stop_reached_it_is_a_failure_but_stops_nobody_again() -> None:
    group, _ = step(_group(), _ended(1, 1), now=2.0)
    group, stop = step(group, _ended(2, 1), now=2.1)
    assert group.failed == (1, 2)
    assert stop is None
    assert group.stopped_at == 2.0


def test_who_ends_because_it_was_told_to_has_not_failed() -> None:
    group, _ = step(_group(), _ended(1, 1), now=2.0)
    group, _ = step(group, _ended(0, -15, told_to=True), now=2.1)
    assert group.failed == (1,)


def test_a_group_is_over_when_all_are_gone_not_when_all_have_ended() -> None:
    group = _group(2)
    for rank in (0, 1):
        group, _ = step(group, _ended(rank, 0), now=1.0)
    assert not group.over
    for rank in (0, 1):
        group, _ = step(group, Gone(rank), now=1.0)
    assert group.over


def test_closing_stops_those_that_are_left_and_a_second_time_with_another_grace() -> None:
    group, _ = step(_group(), Gone(0), now=1.0)
    group, stop = step(group, Close(signal.SIGINT, 5.0), now=2.0)
    assert stop == Stop((1, 2), signal.SIGINT, 5.0)
    group, stop = step(group, Close(signal.SIGKILL, 0.0), now=3.0)
    assert stop == Stop((1, 2), signal.SIGKILL, 0.0)
    assert group.stopped_at == 2.0


def test_closing_what_is_over_does_nothing() -> None:
    group, _ = step(_group(1), Gone(0), now=1.0)
    assert step(group, Close(signal.SIGTERM, 1.0), now=2.0) == (group, None)


def _lost(rank: int, at: float = 1.0) -> Ended:
    return Ended(rank, -9, False, False, at, replaceable=True)


def test_the_others_go_on_without_a_worker_that_they_can_do_without() -> None:
    group, stop = step(_group(), _lost(1), now=2.0)
    assert stop is None
    assert (group.failed, group.members[1].lost) == ((), True)
    group, stop = step(group, _ended(0, 0), now=3.0)
    group, stop = step(group, _lost(2), now=4.0)
    assert stop is None
    assert group.failed == ()


def test_when_nobody_is_left_to_go_on_all_losses_were_failures() -> None:
    group = _group()
    for rank in (1, 0, 2):
        group, stop = step(group, _lost(rank), now=2.0)
    assert group.failed == (0, 1, 2)
    assert stop is not None


def test_after_a_loss_a_failure_is_one_as_ever_and_a_loss_while_stopping_is_none() -> None:
    group, _ = step(_group(4), _lost(1), now=2.0)
    group, stop = step(group, _ended(0, 1), now=3.0)
    assert stop is not None
    assert group.failed == (0,)
    group, _ = step(group, _lost(3), now=3.1)  # it did not wait for the signal
    assert (group.failed, group.members[3].lost) == ((0, 3), False)
