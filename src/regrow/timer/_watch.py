"""When a timer server wakes, and whom it may try to reap by then.

A server whose timers are kept by a subclass knows of them only what passes by. That is enough for
when to wake, and a mistake costs nothing: who has really expired is asked of the subclass each
time. So a deadline is forgotten once it has been woken for, whatever the subclass made of it; a
timer that it does not call expired, for reasons of its own, is no reason to wake again and again.

A worker that could not be reaped remains expired. It is tried again at once, in case the reason was
a passing one, and then at pauses that grow, however many requests of others come in between.

A server that wakes long after it wanted to has not been running, and most likely the workers have
not, either: the host was suspended, or all of the job stopped and continued. They had no chance to
release their timers, so they get a moment before anybody is reaped.

No clock is read here: `now` is seconds on the clock that the expirations of requests are on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple

from regrow.timer._timers import Timers

FIRST_PAUSE = 0.05
"""Seconds from the second attempt to reap a worker to the third; doubled after each."""
LAST_PAUSE = 5.0
"""Seconds between two attempts at most."""
STANDSTILL = 1.0
"""Seconds too late, so that the host is taken to have stood still; and that workers get then."""


class _Retry(NamedTuple):
    """A worker whose reaping has failed."""

    at: float
    """When to try again."""
    pause: float
    """Seconds to wait if that fails, too."""


class Watch:
    """The deadlines that a server is to wake for."""

    __slots__ = ("_deadlines", "_retries", "_spared")

    def __init__(self) -> None:
        self._deadlines: Timers[Hashable, str] = Timers()
        self._retries: dict[Hashable, _Retry] = {}
        self._spared = -math.inf  # nobody is reaped before

    def note(self, worker: Hashable, scope: str, at: float) -> None:
        """Note a request that passes: its timer is due `at`; negative: it is released."""
        if at >= 0:
            self._deadlines.arm(worker, scope, at, scope)
        else:  # or not a number, which is never reached
            self._deadlines.release(worker, scope)

    def patience(self, now: float, limit: float) -> float:
        """Seconds, `limit` at most, until there is something to do even if no request comes."""
        times = [retry.at for retry in self._retries.values()]
        deadline = self._deadlines.next()
        if deadline is not None:
            times.append(deadline)
        if self._spared > now:  # what is due by then has been woken for
            times = [self._spared, *(max(at, self._spared) for at in times)]
        return min([limit, *(max(0.0, at - now) for at in times)])

    def late(self, seconds: float, now: float) -> None:
        """The server woke so many seconds after its patience had ended."""
        if seconds > STANDSTILL:
            self._spared = now + STANDSTILL

    def woken(self, now: float, expired: Collection[Hashable]) -> None:
        """All that was due at `now` has been looked at, and these workers have expired timers."""
        for worker, scopes in self._deadlines.due(now).items():
            for scope in scopes:
                self._deadlines.release(worker, scope)
        self._retries = {worker: r for worker, r in self._retries.items() if worker in expired}

    def ripe(self, workers: Iterable[Hashable], now: float) -> list[Hashable]:
        """Those of some expired workers that are to be reaped now."""
        retries = self._retries
        if now < self._spared:
            return []
        return [w for w in workers if w not in retries or retries[w].at <= now]

    def reaped(self, worker: Hashable) -> None:
        """A worker was reaped."""
        self._deadlines.clear(worker)
        self._retries.pop(worker, None)

    def survived(self, worker: Hashable, now: float) -> float:
        """A worker could not be reaped.

        Returns:
            seconds until it is to be tried again.
        """
        retry = self._retries.get(worker, _Retry(now, 0.0))
        following = min(max(2 * retry.pause, FIRST_PAUSE), LAST_PAUSE)
        self._retries[worker] = _Retry(now + retry.pause, following)
        return retry.pause
