"""Which ranks a monitor ends, and when: by what they say, without a clock."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from regrow.inprocess._hard_deadlines import STANDSTILL, HardDeadlines


def test_a_rank_is_due_when_it_has_said_nothing_until_then_and_only_once() -> None:
    deadlines = HardDeadlines()
    deadlines.said(7, 1, 10.0)
    deadlines.said(8, 1, 9.0)
    assert deadlines.next() == 9.0
    assert deadlines.due(8.9) == []
    assert deadlines.due(10.0) == [8, 7]
    assert deadlines.due(11.0) == []
    assert deadlines.next() == math.inf


def test_progress_and_leaving_the_function_put_the_end_off() -> None:
    deadlines = HardDeadlines()
    deadlines.said(7, 1, 10.0)
    deadlines.said(7, 1, 20.0)
    assert deadlines.due(19.0) == []
    deadlines.said(7, 2, math.inf)
    assert deadlines.due(1e9) == []
    deadlines.said(7, 3, 30.0)
    assert deadlines.due(30.0) == [7]


def test_a_rank_that_is_gone_is_not_ended() -> None:
    deadlines = HardDeadlines()
    deadlines.said(7, 5, 10.0)
    deadlines.gone(7)
    assert deadlines.due(11.0) == []
    deadlines.said(7, 1, 12.0)  # its number is another's now
    assert deadlines.due(12.0) == [7]


def test_a_deadline_that_is_no_number_does_not_count() -> None:
    deadlines = HardDeadlines()
    deadlines.said(7, 1, 10.0)
    deadlines.said(7, 2, math.nan)
    assert deadlines.due(10.0) == [7]


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 100)), min_size=1))
def test_nothing_that_is_said_late_undoes_a_later_change(words: list[tuple[int, float]]) -> None:
    deadlines = HardDeadlines()
    for change, until in words:
        deadlines.said(7, change, until)
    latest = max(change for change, _ in words)
    meant = next(until for change, until in reversed(words) if change == latest)
    assert deadlines.next() == meant


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1000))
def test_a_host_that_stood_still_has_no_rank_ended_for_that_time(
    deadline: float, slept_at: float, late: float
) -> None:
    deadlines = HardDeadlines()
    deadlines.said(7, 1, deadline)
    woke_at = max(deadline, slept_at) + late
    slept = deadlines.woke(slept_at, deadline, woke_at)
    if woke_at > deadline + STANDSTILL:
        assert slept == woke_at - slept_at
        assert deadlines.next() == deadline + slept
    else:
        assert slept == 0.0
        assert deadlines.due(woke_at) == [7]


def test_a_standstill_ends_no_rank_that_may_go_on_for_ever() -> None:
    deadlines = HardDeadlines()
    deadlines.said(7, 1, math.inf)
    deadlines.said(8, 1, 10.0)
    deadlines.woke(0.0, 10.0, 60.0)
    assert deadlines.due(1e9) == [8]
