"""When each rank of a host has made no progress for too long, as far as its monitor knows: pure.

A rank says until when it may go on. Two of its threads say so: the main one at every change (the
function begins, is left, is not to be judged), and the one that looks for progress in between. So
that nothing the second has found can undo a later word of the first, what is said carries the
number of the change that it is about, and counts only if there was none since.

There are two deadlines. At the *hard* one the rank is ended. At the *soft* one the others are told,
and it may still come back. That is for the rank itself to say, and it does so in time unless it
holds the interpreter's lock, or is stopped; the monitor's soft deadline is later (`overdue_after`).

This file knows no clock: times are seconds on CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from regrow.timer._timers import Timers

STANDSTILL: Final = 1.0
"""Seconds that the watcher wakes too late, so that the whole host is taken to have stood still, and
no rank had a chance to say anything. Then the time in which it slept does not count."""
MARGIN: Final = 1.0
"""Seconds after the soft time-out that a rank has to report it itself, or half of those from the
soft to the hard one if that is less; and no less than it has between two looks at its progress,
which are all that its monitor knows of."""
NOT_JUDGED: Final = -1
"""In place of an iteration: nothing is to be told of the rank before the hard time-out."""


class Word(NamedTuple):
    """What a rank says."""

    change: int
    """The number of the change that this is about; what is older does not count."""
    until: float
    """When it is to be ended; infinity: never."""
    iteration: int = NOT_JUDGED
    """Which one is to end at the soft time-out."""


class Due(NamedTuple):
    """A rank that has said nothing for too long."""

    who: int
    iteration: int
    """Which one is to end; `NOT_JUDGED`: the rank is."""


def overdue_after(soft: float, hard: float, interval: float) -> float:
    """Return for how long a monitor has to know of no progress before it tells of a rank.

    Args:
        soft: the rank's soft time-out, seconds.
        hard: its hard time-out, seconds.
        interval: between two looks of its own, seconds.
    """
    return soft + max(min(MARGIN, (hard - soft) / 2), interval)


class Deadlines:
    """The deadlines of the ranks, each known by a number of the caller's."""

    __slots__ = ("_timers", "_words")

    def __init__(self) -> None:
        self._timers: Timers[int, int] = Timers()
        self._words: dict[int, tuple[Word, float]] = {}  # and by how much the soft one is earlier

    def said(self, who: int, word: Word, earlier: float = 0.0) -> None:
        """A rank may go on for so long.

        Args:
            who: the rank.
            word: what it says.
            earlier: by how many seconds it is to be told of before it is to be ended.
        """
        known = self._words.get(who)
        if math.isnan(word.until) or (known is not None and word.change < known[0].change):
            return
        self._arm(who, word, earlier)

    def gone(self, who: int) -> None:
        """A rank has left, or ended, or is being ended."""
        self._timers.clear(who)
        self._words.pop(who, None)

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
        for who, (word, earlier) in list(self._words.items()):
            self._arm(who, word._replace(until=word.until + slept), earlier)
        return slept

    def due(self, now: float) -> list[Due]:
        """What is due, the earliest first, and once; who is to be ended is `gone` by this."""
        late: list[Due] = []
        for who, iterations in self._timers.due(now).items():
            if NOT_JUDGED in iterations:
                self.gone(who)
                late.append(Due(who, NOT_JUDGED))
                continue
            (iteration,) = iterations
            late.append(Due(who, iteration))
            word, earlier = self._words[who]
            self._arm(who, word._replace(iteration=NOT_JUDGED), earlier)
        return late

    def _arm(self, who: int, word: Word, earlier: float) -> None:
        self._words[who] = word, earlier
        self._timers.arm(who, "hard", word.until, NOT_JUDGED)
        if word.iteration == NOT_JUDGED:
            self._timers.release(who, "soft")
        else:
            self._timers.arm(who, "soft", word.until - earlier, word.iteration)
