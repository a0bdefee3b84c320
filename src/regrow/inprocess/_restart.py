"""What follows when the wrapped function was left, and when each part of a restart was through.

Whose fault it is depends on when the function was left. What it raises before this rank has heard
of a fault is its own, which the others are told of; several may fail at once. What it raises from
then on is what the abort is for: collectives fail because others are not in them any more, and
nobody begins to abort before all have heard. It is nobody's fault, is not counted, and is not told.

Whose connections a dead process leaves broken has an exception before anybody can know of the
death. So of the faults that the last call has collected, a process that ended is the root cause;
or what it had failed by before, if it ended because it did not get over that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from regrow.inprocess._link import Fault, Faults
from regrow.inprocess._spared import RankShouldRestart


class Next(enum.Enum):
    """What a rank does when the function was left."""

    RETURN = enum.auto()
    """All ranks are done."""
    REPORT = enum.auto()
    """It has a fault of its own: the others are told, and all restart."""
    RESTART = enum.auto()
    """Others have, or it was reported by who watches this rank."""
    LEAVE = enum.auto()
    """This rank's wrapper ends, and the others restart without it."""


def after(error: BaseException | None, *, ended: bool, interrupted: bool, told: bool) -> Next:
    """Return what follows.

    Args:
        error: what was raised; None if the function, and the barrier after it, returned.
        ended: that barrier said that the iteration has ended by a fault.
        interrupted: the interrupt was asked for before the function was left.
        told: this rank had heard of a fault by then.
    """
    if error is None:
        return Next.RESTART if ended else Next.RETURN
    if isinstance(error, RankShouldRestart) and interrupted:
        return Next.RESTART
    if isinstance(error, Exception):
        return Next.RESTART if told else Next.REPORT
    return Next.LEAVE


_ENDS: Final = {"TERMINATED", "UNRESPONSIVE", "HARD_TIMEOUT"}


def root_cause(faults: Faults) -> Fault | None:
    """Return the first fault of the first process that ended, or of all; None if there is none."""
    records = faults.records
    if not records:
        return None
    ended = next((fault for fault in records if fault.kind in _ENDS), records[0])
    return next(fault for fault in records if fault.rank == ended.rank)


PHASES: Final = ("detected", "told", "aborted", "finalized", "checked", "met", "called")
"""What happens in a restart, in this order; from "told" on on each rank."""


@dataclass(slots=True)
class Timeline:
    """When each phase of a restart was over, counted from when the first fault happened."""

    faults: Faults
    """What ended the iteration."""
    told_at: float
    """When this rank knew of it, in seconds of the clock that `reached` is given."""
    lost: tuple[int, ...] = ()
    """The initial ranks that are not there any more."""
    reached_at: dict[str, float] = field(default_factory=dict)
    """For each phase after "told" the time of its end."""

    def reached(self, phase: str, now: float) -> None:
        """A phase is over."""
        self.reached_at[phase] = now

    @property
    def root(self) -> Fault | None:
        """See `root_cause`."""
        return root_cause(self.faults)

    def seconds(self) -> dict[str, float]:
        """For each phase that is over how long after the first fault happened that was.

        "detected" is when the first one was recorded; that is the beginning, too, where nobody
        knows more. Without a clock that the ranks share (a store of c10d) it is "told".
        """
        records, now = self.faults.records, self.faults.now
        detected = self.told_at - (max(now - records[0].at, 0.0) if records else 0.0)
        lead = max((records[0].at - fault.at + fault.lag for fault in records), default=0.0)
        times = {"detected": detected, "told": self.told_at, **self.reached_at}
        return {phase: times[phase] - detected + lead for phase in PHASES if phase in times}
