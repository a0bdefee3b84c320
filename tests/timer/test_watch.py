"""When a server wakes, and whom it tries to reap by then; and the clock it does this on."""

from __future__ import annotations

import math

import pytest

from regrow.timer._steady import NOISE, SteadyClock
from regrow.timer._watch import LAST_PAUSE, STANDSTILL, Watch


def test_it_waits_for_the_earliest_deadline_and_no_longer_than_the_limit() -> None:
    watch = Watch()
    assert watch.patience(100.0, 60.0) == 60.0
    watch.note("a", "slow", 130.0)
    watch.note("b", "quick", 110.0)
    assert watch.patience(100.0, 60.0) == 10.0
    assert watch.patience(100.0, 5.0) == 5.0
    assert watch.patience(115.0, 60.0) == 0.0
    watch.note("b", "quick", -1)
    assert watch.patience(100.0, 60.0) == 30.0


@pytest.mark.parametrize("never", [math.nan, math.inf])
def test_a_deadline_that_is_never_reached_wakes_nobody(never: float) -> None:
    watch = Watch()
    watch.note("a", "scope", never)
    assert watch.patience(100.0, 60.0) == 60.0


def test_a_timer_that_the_server_does_not_call_expired_is_no_reason_to_wake_again() -> None:
    watch = Watch()
    watch.note("a", "scope", 100.0)
    watch.note("a", "later", 107.0)
    watch.woken(101.0, expired=[])
    assert watch.patience(101.0, 60.0) == 6.0


def test_a_worker_that_survives_is_tried_at_once_and_then_at_growing_pauses() -> None:
    watch, now, pauses = Watch(), 100.0, []
    for _ in range(12):
        assert watch.ripe(["a", "b"], now) == ["a", "b"]
        pauses.append(watch.survived("a", now))
        assert watch.patience(now, 60.0) == pytest.approx(pauses[-1])
        assert watch.ripe(["a"], now + 0.99 * pauses[-1]) == (["a"] if not pauses[-1] else [])
        now += pauses[-1]
    assert pauses[:5] == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.4])
    assert max(pauses) == pauses[-1] == LAST_PAUSE


def test_a_worker_that_released_its_timers_meanwhile_begins_anew() -> None:
    watch = Watch()
    for _ in range(3):
        watch.survived("a", 100.0)
    watch.woken(100.01, expired=["b"])
    assert watch.ripe(["a"], 100.02) == ["a"]
    assert watch.survived("a", 100.02) == 0.0


def test_of_a_reaped_worker_nothing_remains() -> None:
    watch = Watch()
    watch.note("a", "scope", 100.0)
    watch.survived("a", 100.0)
    watch.reaped("a")
    assert watch.patience(100.0, 60.0) == 60.0


def test_after_a_standstill_of_the_host_workers_get_a_moment_to_release_their_timers() -> None:
    watch = Watch()
    watch.note("a", "scope", 100.0)
    watch.survived("b", 90.0)
    watch.late(40.0, 140.0)
    watch.woken(140.0, expired=["a", "b"])
    assert watch.ripe(["a", "b"], 140.0) == []
    assert watch.patience(140.0, 60.0) == STANDSTILL
    assert watch.ripe(["a", "b"], 140.0 + STANDSTILL) == ["a", "b"]
    watch.late(0.5, 150.0)
    assert watch.ripe(["a"], 150.0) == ["a"]


class Clocks:
    """A wall clock that is set, and a monotonic one; reading takes a microsecond."""

    def __init__(self) -> None:
        self.passed = 50.0
        self.ahead = 1_700_000_000.0

    def monotonic(self) -> float:
        self.passed += 1e-6
        return self.passed

    def wall(self) -> float:
        return self.monotonic() + self.ahead


@pytest.mark.parametrize("days", [1.0, -1.0, 0.001, -0.001])
def test_the_steady_clock_is_not_set(days: float) -> None:
    clocks = Clocks()
    clock = SteadyClock(clocks.wall, clocks.monotonic)
    before = clock.now()
    assert clock.jumped() == 0.0
    clocks.ahead += 86400 * days
    clocks.passed += 2.0
    assert clock.now() - before == pytest.approx(2.0, abs=1e-4)
    assert clock.jumped() == pytest.approx(86400 * days, abs=1e-4)


def test_an_interruption_while_the_clocks_are_read_is_no_jump() -> None:
    clocks = Clocks()
    clock = SteadyClock(clocks.wall, clocks.monotonic)
    readings = 0

    def interrupted() -> float:
        nonlocal readings
        readings += 1
        if readings == 2:  # between the wall clock and the monotonic one
            clocks.passed += 1000 * NOISE
        return clocks.monotonic()

    clock._monotonic = interrupted
    assert clock.jumped() == 0.0
