"""When each rank of a host is to be ended, unless it makes progress before: pure.

A rank says until when it may go on. Two of its threads say so: the main one at every change (the
function begins, is left, is not to be judged), and the one that looks for progress in between. So
that nothing the second has found can undo a later word of the first, what is said carries the
number of the change that it is about, and counts only if there was none since.

This file knows no clock: times are seconds on CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import math
from typing import Final

from regrow.timer._timers import Timers

STANDSTILL: Final = 1.0
"""Seconds that the watcher wakes too late, so that the whole host is taken to have stood still, and
no rank had a chance to say anything. Then the time in which it slept does not count."""


class HardDeadlines:
    """The deadlines of the ranks, each known by a number of the caller's."""

    __slots__ = ("_at", "_changes", "_timers")

    def __init__(self) -> None:
        self._timers: Timers[int, int] = Timers()
        self._at: dict[int, float] = {}
        self._changes: dict[int, int] = {}

    def said(self, who: int, change: int, until: float) -> None:
        """A rank may go on until then; infinity: for ever.

        Args:
            who: the rank.
            change: the number of the change that this is about; what is older does not count.
            until: the time.
        """
        if change < self._changes.get(who, 0) or math.isnan(until):
            return
        self._changes[who] = change
        self._at[who] = until
        self._timers.arm(who, "", until, who)

    def gone(self, who: int) -> None:
        """A rank has left, or ended, or is being ended."""
        self._timers.clear(who)
        self._at.pop(who, None)
        self._changes.pop(who, None)

    def next(self) -> float:
        """When the earliest deadline is; infinity without any."""
        at = self._timers.next()
        return math.inf if at is None else at

    def woke(self, slept_at: float, until: float, now: float) -> float:
        """Put all deadlines off if the watcher could not wake when it should have.

        Args:
            slept_at: when it went to sleep.
            until: when it wanted to wake at the latest.
            now: when it woke.

        Returns:
            By how many seconds, mostly none.
        """
        if now <= until + STANDSTILL:
            return 0.0
        slept = now - slept_at
        for who, at in self._at.items():
            self._at[who] = at + slept
            self._timers.arm(who, "", at + slept, who)
        return slept

    def due(self, now: float) -> list[int]:
        """The ranks that are to be ended, the earliest first; each is `gone` by this."""
        late = list(self._timers.due(now))
        for who in late:
            self.gone(who)
        return late
