"""The clock of a timer server, which does not jump with the wall clock."""

from __future__ import annotations

import pytest

from regrow.timer.rules import NOISE, SteadyClock


class Clocks:
    """A wall clock that a test sets, and a monotonic clock; each reading takes a microsecond."""

    def __init__(self) -> None:
        self.passed = 50.0
        self.ahead = 1_700_000_000.0

    def monotonic(self) -> float:
        self.passed += 1e-6
        return self.passed

    def wall(self) -> float:
        return self.monotonic() + self.ahead


@pytest.mark.parametrize("days", [1.0, -1.0, 0.001, -0.001])
def test_the_steady_clock_ignores_a_change_of_the_wall_clock(days: float) -> None:
    clocks = Clocks()
    clock = SteadyClock(clocks.wall, clocks.monotonic)
    before = clock.now()
    assert clock.jumped() == 0.0
    clocks.ahead += 86400 * days
    clocks.passed += 2.0
    assert clock.now() - before == pytest.approx(2.0, abs=1e-4)
    assert clock.jumped() == pytest.approx(86400 * days, abs=1e-4)


def test_an_interruption_between_two_readings_is_no_jump() -> None:
    clocks = Clocks()
    clock = SteadyClock(clocks.wall, clocks.monotonic)
    readings = 0

    def interrupted() -> float:
        nonlocal readings
        readings += 1
        if readings == 2:  # between the wall clock and the monotonic one
            clocks.passed += 1000 * NOISE
        return clocks.monotonic()

    clock.monotonic = interrupted
    assert clock.jumped() == 0.0
