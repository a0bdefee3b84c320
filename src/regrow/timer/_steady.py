"""Wall time without its jumps.

The interface of the timers speaks of seconds since the epoch, and that clock is set: by a day when
somebody corrects it, by hours when a virtual machine wakes. A deadline on it would reap everybody
or spare everybody. On Linux the monotonic clock and the wall clock are slewed together, so the
distance between the two changes when the wall clock is *set* and at no other time. So that distance
is measured once, and the wall clock is taken to be where it was then plus what has passed on the
monotonic one. What somebody reads off the wall clock now is moved by the jumps since.
"""

from __future__ import annotations

import time
from collections.abc import Callable

NOISE = 0.001
"""Seconds by which two readings may differ without a jump: an interruption between them. A smaller
jump does no harm."""


class SteadyClock:
    """Seconds since the epoch that pass evenly, whatever the wall clock is set to.

    Args:
        wall: seconds since the epoch.
        monotonic: seconds since whenever.
    """

    __slots__ = ("_distance", "_monotonic", "_wall")

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._distance = self._measured()

    def now(self) -> float:
        """The time: what the wall clock would show if nobody had set it since the beginning."""
        return self._monotonic() + self._distance

    def jumped(self) -> float:
        """Seconds by which the wall clock has been set forward since the beginning, else 0.0."""
        jump = self._measured() - self._distance
        return jump if abs(jump) > NOISE else 0.0

    def monotonic(self, wall: float) -> float:
        """When a time that is read off the wall clock as it is set now is on the monotonic one."""
        return wall - self.jumped() - self._distance

    def _measured(self) -> float:
        """How far the wall clock is ahead of the monotonic one."""
        # An interruption in the middle of a measurement makes it wrong by as long as it took. So
        # the one that took the shortest counts.
        measurements = []
        for _ in range(3):
            before = self._monotonic()
            wall = self._wall()
            took = self._monotonic() - before
            measurements.append((took, wall - before - took / 2))
        return min(measurements)[1]
