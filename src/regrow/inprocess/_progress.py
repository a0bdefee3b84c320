"""Whether a rank makes progress.

Two kinds of progress are judged. The *automatic* one is that the main thread executes Python code
at all; whoever finds that out (`Watch`) says so here. The *manual* one is the wrapped function's
own `ping`, which counts from its first `ping` of an iteration on. Either one that is older than the
soft time-out ends the iteration.

Only the wrapped function is judged by it, and what is called just before. Between two calls of the
function a rank *recovers*: it aborts, finalizes, checks its health and takes a new rank. There is
nothing to restart then, but all others wait for it: so where it stands is logged at the soft
time-out, and the hard one ends it. Who waits for other ranks is *at rest*: there the time-outs of
barriers hold, and other ranks'. So is who has asked for it (`CallWrapper.disable_hang_protection`).

`Progress` decides and knows no clock; times are seconds of a monotonic one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

Which = Literal["automatic", "manual"]


@dataclass(slots=True)
class Progress:
    """What is known of a rank's progress.

    Several threads tell and ask, without a lock: the function is interrupted anywhere, also while
    it holds one. Each fact is one store; what is true for a moment only is asked again.
    """

    allowed: float
    """Seconds that either progress may be old: the soft time-out."""
    hard: float = math.inf
    """Seconds after which the process is ended: the hard time-out."""
    judged: bool = False
    """Whether the function runs; only the thread that runs it says so."""
    recovering: bool = False
    """Whether this rank does its own part between two calls; said by the same thread."""
    automatic_at: float = 0.0
    """When the main thread was last seen to execute Python code."""
    manual_at: float | None = None
    """When the function last said that it makes progress; None if it did not in this iteration."""
    unjudged: int = 0
    """How many sections without hang protection the function is in."""

    def begin(self, now: float) -> None:
        """An iteration begins: automatic progress is due from now on, manual is not yet."""
        self.automatic_at, self.manual_at, self.unjudged = now, None, 0
        self.judged, self.recovering = True, False

    def recover(self, now: float) -> None:
        """The function was left, and what follows takes no longer than the hard time-out."""
        self.automatic_at = now
        self.judged, self.recovering = False, True

    def rest(self) -> None:
        """Others are waited for: nothing is due."""
        self.judged = self.recovering = False

    def ran(self, now: float) -> None:
        """The main thread has executed Python code."""
        self.automatic_at = now

    def ping(self, now: float) -> None:
        """The function says that it makes progress."""
        self.manual_at = now

    def suspend(self) -> None:
        """Judge nothing until `resume` was called as often."""
        self.unjudged += 1

    def resume(self, now: float) -> None:
        """Judge again; what was not judged meanwhile is not held against the rank."""
        self.automatic_at = now
        if self.manual_at is not None:
            self.manual_at = now
        self.unjudged = max(self.unjudged - 1, 0)

    @property
    def due(self) -> float | None:
        """When one of them will be stale if nothing happens; None if none is judged."""
        if self.recovering:
            return self.automatic_at + self.allowed
        if not self.judged or self.unjudged:
            return None
        manual = self.manual_at
        at = self.automatic_at if manual is None else min(self.automatic_at, manual)
        return at + self.allowed

    @property
    def ends(self) -> float | None:
        """When the process is to be ended if nothing happens; None if it is at rest."""
        due = self.due
        return None if due is None else due - self.allowed + self.hard

    def stale(self, now: float) -> Which | None:
        """Say which of them is older than allowed, if any; the automatic one if both are."""
        due = self.due
        if due is None or now < due:
            return None
        return "automatic" if now >= self.automatic_at + self.allowed else "manual"


class Watch(Protocol):
    """Watches one rank's progress, from the main thread's first iteration to its last.

    It has the soft time-out reported, for which it is made with a function to call, from a thread
    of its own; at most once an iteration.
    """

    def begin(self, iteration: int) -> None:
        """The main thread begins an iteration."""

    def recover(self) -> None:
        """The function was left; what the main thread does now has the hard time-out only."""

    def rest(self) -> None:
        """The main thread waits for other ranks, and is not judged."""

    def ping(self) -> None:
        """Manual progress; as cheap as the wrapped function may call it in each of its steps."""

    def unjudged(self) -> AbstractContextManager[None]:
        """A section that may take as long as it likes."""
        ...

    def close(self) -> None:
        """The call is over."""
