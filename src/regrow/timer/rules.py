"""Rules of a timer server: due timers, and a steady clock.

`Timers` keeps the timers of all workers. A heap returns the earliest deadline, but an entry in its
middle cannot be removed, and nearly every timer is released long before its deadline. So an entry
of the heap is only a *reminder*. If a timer is released or armed again, its old reminder stays. A
reminder that does not match the armed timer of its worker and scope is ignored. Such reminders are
dropped at the top of the heap, and all at once when they outnumber the timers. So a request costs
O(log timers), and the heap has at most twice as many entries as there are timers, plus `SPARE`.

`SteadyClock` is wall time without its jumps. Requests carry seconds since the epoch, and that clock
may be set: by a day when an operator corrects it, by hours when a virtual machine resumes. Linux
slews the monotonic clock and the wall clock together, so their difference changes only when the
wall clock is *set*. `SteadyClock` measures the difference once. It then corrects each reading of
the wall clock by the jumps since.

`Timers` reads no clock: `at` and `now` are seconds on the clock of the caller.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W", bound=Hashable)
R = TypeVar("R")

SPARE = 64
"""Number of reminders without a timer that are always kept.

So a heap with few timers is not cleaned up all the time.
"""
STANDSTILL = 1.0
"""Least delay of a wake-up, in seconds, after which the host counts as suspended."""
NOISE = 0.001
"""Largest difference of two readings of the clocks, in seconds, that does not count as a jump."""


class _Armed(NamedTuple, Generic[R]):
    """An armed timer."""

    at: float
    """Time at which the timer is due."""
    serial: int
    """Number of timers armed before this one; distinguishes its reminder from older ones."""
    request: R
    """The request, as passed by the caller."""


class Timers(Generic[W, R]):
    """Timers by worker and scope, each with its request."""

    __slots__ = ("_armed", "_count", "_reminders", "_serial")

    def __init__(self) -> None:
        self._armed: dict[W, dict[str, _Armed[R]]] = {}
        self._count = 0
        self._reminders: list[tuple[float, int, W, str]] = []
        self._serial = 0

    def __len__(self) -> int:
        """The number of armed timers."""
        return self._count

    @property
    def size(self) -> int:
        """Return the number of kept entries: at most twice the armed timers, and `SPARE`."""
        return len(self._reminders)

    def count(self, worker: W) -> int:
        """Return the number of armed timers of a worker."""
        return len(self._armed.get(worker, ()))

    def __contains__(self, timer: tuple[W, str]) -> bool:
        """Return whether the timer of a worker and scope is armed."""
        worker, scope = timer
        return scope in self._armed.get(worker, ())

    def arm(self, worker: W, scope: str, at: float, request: R) -> None:
        """Arm the worker's timer of this scope, or arm it again.

        Args:
            at: the time at which it is due; infinity: never.
            request: returned by `due`.

        Raises:
            ValueError: `at` is not a number.
        """
        if math.isnan(at):
            raise ValueError(
                f"the deadline of scope {scope!r} of worker {worker!r} is not a number: {at}"
            )
        scopes = self._armed.setdefault(worker, {})
        self._count += scope not in scopes
        self._serial += 1
        scopes[scope] = _Armed(at, self._serial, request)
        heapq.heappush(self._reminders, (at, self._serial, worker, scope))
        self._tidy()

    def release(self, worker: W, scope: str) -> None:
        """Disarm a timer, if it is armed."""
        scopes = self._armed.get(worker)
        if scopes is not None and scopes.pop(scope, None) is not None:
            self._count -= 1
            if not scopes:
                del self._armed[worker]
            self._tidy()

    def clear(self, worker: W) -> None:
        """Disarm all timers of a worker."""
        self._count -= len(self._armed.pop(worker, ()))
        self._tidy()

    def next(self) -> float | None:
        """Return the time at which the earliest timer is due; None without timers."""
        reminders = self._reminders
        while reminders:
            if self._timer_of(reminders[0]) is not None:
                return reminders[0][0]
            heapq.heappop(reminders)
        return None

    def due(self, now: float) -> dict[W, list[R]]:
        """Return the requests of the timers that are due at `now`; the timers stay armed.

        Returns:
            the due requests of each worker, the earliest deadline first. The worker with the
            earliest deadline comes first.
        """
        # In a heap, no entry is earlier than its parent. So the due entries are connected.
        due: list[tuple[float, int, W, R]] = []
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._reminders) and self._reminders[place][0] <= now:
                reminder = self._reminders[place]
                armed = self._timer_of(reminder)
                if armed is not None:
                    due.append((armed.at, armed.serial, reminder[2], armed.request))
                places += (2 * place + 1, 2 * place + 2)
        requests: dict[W, list[R]] = {}
        for _, _, worker, request in sorted(due):  # serials differ, so workers are not compared
            requests.setdefault(worker, []).append(request)
        return requests

    def _timer_of(self, reminder: tuple[float, int, W, str]) -> _Armed[R] | None:
        """Return the armed timer of a reminder; None: it was released or armed again."""
        _, serial, worker, scope = reminder
        armed = self._armed.get(worker, {}).get(scope)
        return armed if armed is not None and armed.serial == serial else None

    def _tidy(self) -> None:
        if len(self._reminders) <= 2 * self._count + SPARE:
            return
        self._reminders = [
            (armed.at, armed.serial, worker, scope)
            for worker, scopes in self._armed.items()
            for scope, armed in scopes.items()
        ]
        heapq.heapify(self._reminders)


class SteadyClock:
    """Seconds since the epoch that pass evenly, even when the wall clock is set.

    Args:
        wall: seconds since the epoch.
        monotonic: seconds since any fixed time.
    """

    __slots__ = ("_distance", "monotonic", "wall")

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wall = wall
        self.monotonic = monotonic
        self._distance = self._measured()

    def now(self) -> float:
        """Return the time that the wall clock would show if it had not been set since the start."""
        return self.monotonic() + self._distance

    def jumped(self) -> float:
        """Return by how many seconds the wall clock was set forward since the start, else 0.0."""
        jump = self._measured() - self._distance
        return jump if abs(jump) > NOISE else 0.0

    def to_monotonic(self, wall: float) -> float:
        """Convert a time on the current wall clock to the monotonic clock."""
        return wall - self.jumped() - self._distance

    def _measured(self) -> float:
        """Measure by how many seconds the wall clock is ahead of the monotonic clock."""
        # An interruption falsifies a measurement by its own length, so the quickest one is used.
        measurements = []
        for _ in range(3):
            before = self.monotonic()
            wall = self.wall()
            took = self.monotonic() - before
            measurements.append((took, wall - before - took / 2))
        return min(measurements)[1]
