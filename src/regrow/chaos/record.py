"""Which failures follow from an injected fault.

A failure counts as injected if it happens on a rank with an injected fault, while the fault lasts
or at most `AFTER_S` later. This is a guess: a worker that fails by itself in this time is counted
as well. A rank that fails because another rank failed is not counted; the story shows such failures
below the first one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

AFTER_S = 60.0
"""Seconds after the end of a fault in which a failure counts as its effect: time-outs that notice a
hang are of this size."""
_MOST = 1000


@dataclass(frozen=True, slots=True)
class Injection:
    """One injected fault."""

    fault: str
    ranks: frozenset[int]
    """Global ranks that the fault concerns."""
    at: float
    """Time of the injection, in monotonic seconds of its host."""
    until: float
    """End of the fault; infinite for a fault that ends with the worker."""


class Injections:
    """The injected faults of the job, as far as this node knows."""

    def __init__(self) -> None:
        self._found: list[Injection] = []

    def add(
        self, fault: str, ranks: Collection[int], at: float, for_s: float | None, *, ends: bool
    ) -> None:
        """Add a fault.

        Args:
            fault: its name.
            ranks: global ranks that it concerns.
            at: its time, in monotonic seconds.
            for_s: seconds that it lasts, if it is given.
            ends: whether the fault is over at once, such as a SIGKILL.
        """
        lasts = 0.0 if ends else math.inf if for_s is None else for_s
        self._found.append(Injection(fault, frozenset(ranks), at, at + lasts))
        del self._found[:-_MOST]

    def new_workers(self, now: float) -> None:
        """End the faults that end with their workers: new workers have started at `now`."""
        self._found = [
            replace(each, until=now) if math.isinf(each.until) else each for each in self._found
        ]

    def cause(self, rank: int, at: float) -> str | None:
        """Return the latest fault that explains a failure of `rank` at `at`; None without one."""
        for each in reversed(self._found):
            if rank in each.ranks and each.at <= at <= each.until + AFTER_S:
                return each.fault
        return None
