"""The countdown timers of all workers: which is due, and when the next one will be.

A heap gives the earliest deadline, but nothing can be taken out of its middle, and nearly every
timer is released long before it is due. So the heap is a list of *promises to look*: releasing or
re-arming a timer leaves its promise where it is, and one that no longer matches the timer kept for
its worker and scope means nothing. Promises that mean nothing are dropped when they come to the
top, and all at once when they outnumber the others: at least as many requests have come since the
last time as are looked at then, so a request costs the logarithm of the timers, and the heap is
never much more than twice as long as there are timers.

This file knows no clock: `at` and `now` are seconds on whichever clock the caller keeps to.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W", bound=Hashable)
R = TypeVar("R")

_SPARE = 64
"""Promises without meaning that are always borne, so that a few timers are not tidied up all the
time."""


class _Armed(NamedTuple, Generic[R]):
    """A timer that counts."""

    at: float
    """When it is due."""
    serial: int
    """How many timers were armed before it; tells its promise from older ones."""
    request: R
    """What was asked for, as the caller put it."""


class Timers(Generic[W, R]):
    """Timers by worker and scope, a request kept with each."""

    __slots__ = ("_armed", "_count", "_promises", "_serial")

    def __init__(self) -> None:
        self._armed: dict[W, dict[str, _Armed[R]]] = {}
        self._count = 0
        self._promises: list[tuple[float, int, W, str]] = []
        self._serial = 0

    def __len__(self) -> int:
        """How many timers are armed."""
        return self._count

    def count(self, worker: W) -> int:
        """How many timers of a worker are armed."""
        return len(self._armed.get(worker, ()))

    def __contains__(self, timer: tuple[W, str]) -> bool:
        """Whether the timer of a worker and scope is armed."""
        worker, scope = timer
        return scope in self._armed.get(worker, ())

    def arm(self, worker: W, scope: str, at: float, request: R) -> None:
        """Arm the worker's timer of this scope, or arm it anew.

        Args:
            at: when it is due; infinity: never.
            request: returned by `due`.

        Raises:
            ValueError: `at` is not a number, which is before and after no time.
        """
        if math.isnan(at):
            raise ValueError(f"the deadline of scope {scope!r} of worker {worker!r} is {at}")
        scopes = self._armed.setdefault(worker, {})
        self._count += scope not in scopes
        self._serial += 1
        scopes[scope] = _Armed(at, self._serial, request)
        heapq.heappush(self._promises, (at, self._serial, worker, scope))
        self._tidy()

    def release(self, worker: W, scope: str) -> None:
        """Disarm a timer; one that is not armed is as well."""
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

    def workers(self) -> Collection[W]:
        """The workers that have timers; follows what changes."""
        return self._armed.keys()

    def next(self) -> float | None:
        """When the earliest timer is due, None without timers."""
        promises = self._promises
        while promises:
            if self._kept(promises[0]) is not None:
                return promises[0][0]
            heapq.heappop(promises)
        return None

    def due(self, now: float) -> dict[W, list[R]]:
        """The requests of the timers that are due at `now`, which stay armed.

        Returns:
            for each worker that has any, those with the earliest deadline first; the worker with
            the earliest of all first.
        """
        # What is due stands together at the top of the heap: nobody is later than those below.
        due: list[tuple[float, int, W, R]] = []
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._promises) and self._promises[place][0] <= now:
                promise = self._promises[place]
                armed = self._kept(promise)
                if armed is not None:
                    due.append((armed.at, armed.serial, promise[2], armed.request))
                places += (2 * place + 1, 2 * place + 2)
        requests: dict[W, list[R]] = {}
        for _, _, worker, request in sorted(due):  # by the serial at last, no two have the same
            requests.setdefault(worker, []).append(request)
        return requests

    def postpone(self, worker: W, at: float) -> None:
        """Let no timer of a worker be due before `at`: those that would be are due then.

        For a worker that could not be reaped and is to be tried again.
        """
        for scope, armed in list(self._armed.get(worker, {}).items()):
            if armed.at < at:
                self.arm(worker, scope, at, armed.request)

    def _kept(self, promise: tuple[float, int, W, str]) -> _Armed[R] | None:
        """The timer that a promise is about, if it still counts."""
        _, serial, worker, scope = promise
        armed = self._armed.get(worker, {}).get(scope)
        return armed if armed is not None and armed.serial == serial else None

    def _tidy(self) -> None:
        if len(self._promises) <= 2 * self._count + _SPARE:
            return
        self._promises = [
            (armed.at, armed.serial, worker, scope)
            for worker, scopes in self._armed.items()
            for scope, armed in scopes.items()
        ]
        heapq.heapify(self._promises)
