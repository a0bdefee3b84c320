"""Deadlines of ranks: when the monitor reports a rank, and when it ends it; without a clock."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from regrow.inprocess.watchdog.monitor import STANDSTILL, Deadlines, ExpiredDeadline
from regrow.inprocess.watchdog.monitor_client import MARGIN, UNCHECKED, RankDeadline, overdue_after


def ended(id: int) -> ExpiredDeadline:
    return ExpiredDeadline(id, UNCHECKED)


def test_a_rank_is_due_once_at_its_deadline() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 10.0))
    deadlines.set(8, RankDeadline(1, 9.0))
    assert deadlines.next() == 9.0
    assert deadlines.due(8.9) == []
    assert deadlines.due(10.0) == [ended(8), ended(7)]
    assert deadlines.due(11.0) == []
    assert deadlines.next() == math.inf


def test_progress_and_leaving_the_function_put_the_end_off() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 10.0))
    deadlines.set(7, RankDeadline(1, 20.0))
    assert deadlines.due(19.0) == []
    deadlines.set(7, RankDeadline(2, math.inf))
    assert deadlines.due(1e9) == []
    deadlines.set(7, RankDeadline(3, 30.0))
    assert deadlines.due(30.0) == [ended(7)]


def test_a_rank_that_is_gone_is_not_ended() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(5, 10.0))
    deadlines.remove(7)
    assert deadlines.due(11.0) == []
    deadlines.set(7, RankDeadline(1, 12.0))  # another rank has its id now
    assert deadlines.due(12.0) == [ended(7)]


def test_a_deadline_that_is_no_number_does_not_count() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 10.0))
    deadlines.set(7, RankDeadline(2, math.nan))
    assert deadlines.due(10.0) == [ended(7)]


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 100)), min_size=1))
def test_a_late_message_does_not_override_a_later_change(words: list[tuple[int, float]]) -> None:
    deadlines = Deadlines()
    for change, until in words:
        deadlines.set(7, RankDeadline(change, until))
    latest = max(change for change, _ in words)
    meant = next(until for change, until in reversed(words) if change == latest)
    assert deadlines.next() == meant


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1000))
def test_a_suspended_host_postpones_the_deadlines(
    deadline: float, slept_at: float, late: float
) -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, deadline))
    woke_at = max(deadline, slept_at) + late
    slept = deadlines.woke(slept_at, deadline, woke_at)
    if woke_at > deadline + STANDSTILL:
        assert slept == woke_at - slept_at
        assert deadlines.next() == deadline + slept
    else:
        assert slept == 0.0
        assert deadlines.due(woke_at) == [ended(7)]


def test_a_suspended_host_ends_no_rank_without_a_deadline() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, math.inf))
    deadlines.set(8, RankDeadline(1, 10.0))
    deadlines.woke(0.0, 10.0, 60.0)
    assert deadlines.due(1e9) == [ended(8)]


def test_a_rank_is_overdue_before_it_is_ended() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 90.0, 3), 29.0)
    assert deadlines.next() == 61.0
    assert deadlines.due(61.0) == [ExpiredDeadline(7, 3)]
    assert deadlines.due(89.0) == []
    assert deadlines.due(90.0) == [ended(7)]


def test_a_rank_has_time_to_report_its_own_time_out() -> None:
    assert overdue_after(60.0, 90.0, 0.5) == 60.0 + MARGIN
    assert overdue_after(1.5, 2.0, 0.1) == 1.75
    assert overdue_after(60.0, 90.0, 30.0) == 90.0


def test_a_rank_with_a_late_soft_deadline_is_only_ended() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 90.0, 3), -5.0)
    assert deadlines.next() == 90.0
    assert deadlines.due(100.0) == [ended(7)]


def test_a_rank_that_has_reported_its_time_out_is_not_overdue() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 90.0, 3), 30.0)
    deadlines.set(7, RankDeadline(1, 90.0, UNCHECKED), 30.0)
    assert deadlines.due(90.0) == [ended(7)]


def test_a_rank_may_be_overdue_again_in_another_iteration() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 90.0, 3), 30.0)
    assert deadlines.due(70.0) == [ExpiredDeadline(7, 3)]
    deadlines.set(7, RankDeadline(2, 100.0, 4), 30.0)
    assert deadlines.due(75.0) == [ExpiredDeadline(7, 4)]


def test_a_rank_past_both_deadlines_is_only_ended() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 90.0, 3), 30.0)
    deadlines.set(8, RankDeadline(1, 95.0, 3), 30.0)
    assert deadlines.due(90.0) == [ended(7), ExpiredDeadline(8, 3)]


def test_a_suspended_host_postpones_the_soft_deadline_and_repeats_none() -> None:
    deadlines = Deadlines()
    deadlines.set(7, RankDeadline(1, 90.0, 3), 30.0)
    deadlines.set(8, RankDeadline(1, 80.0, 3), 30.0)
    assert deadlines.due(51.0) == [ExpiredDeadline(8, 3)]
    deadlines.woke(51.0, 61.0, 71.0)
    assert deadlines.next() == 80.0
    assert deadlines.due(99.0) == [ExpiredDeadline(7, 3)]
    assert deadlines.due(110.0) == [ended(8), ended(7)]
