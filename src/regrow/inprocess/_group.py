"""A group as the store server sees it; its rules are in `_iteration`.

Sets of ranks are integers, bit by rank: a set of a thousand is as cheap as a string of 128 bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from regrow.inprocess._link import Fault, Met, Timeouts
from regrow.inprocess._messages import Failed


class Phase(Enum):
    """What the living ranks are waited for to do."""

    JOINING = "joined"
    ENTERING = "entered"
    RUNNING = "done"
    LAST_CALL = "heard"
    ENDING = "ready"
    OVER = "over"


class Place(NamedTuple):
    """What one rank entered with."""

    rank: int
    """The initial rank."""
    place: int
    """Its rank in the world of the iteration."""
    world_size: int
    """How many places it takes that world to have."""


class End(NamedTuple):
    """How a rank ended."""

    fault: Fault
    own: bool
    """By its own word; else it was counted out."""
    iteration: int
    """In which."""
    root: Fault
    """What had failed first in that iteration."""


class Group(NamedTuple):
    """A group; sets of initial ranks are integers, bit by rank."""

    size: int
    """How many ranks have to join."""
    timeouts: Timeouts
    phase: Phase = Phase.JOINING
    iteration: int = 0
    living: int = 0
    """Ranks that have joined and not ended."""
    here: int = 0
    """Ranks that have done what this phase waits for; of those that joined, also the lost."""
    since: float | None = None
    """When the first of them did, or when the last call began; seconds."""
    world: int = 0
    """Ranks that this iteration's world was to be made of; in the first one all."""
    discarded: int = 0
    """Those among them that left because their assignment had no place for them."""
    places: tuple[Place, ...] = ()
    """Of the ranks that entered this iteration, also of those that have ended since."""
    entered: int = 0
    """These ranks."""
    ready: int = 0
    """Ranks that are ready; some may be so before the last call is over."""
    completed: bool = False
    """Whether a rank's function has returned in this iteration."""
    faults: tuple[Fault, ...] = ()
    """Of this iteration."""
    reported: frozenset[tuple[int, int, int]] = frozenset()
    """Iteration, rank and number of the reports of this iteration and the one before."""
    before: Met | None = None
    """How the iteration before ended."""
    ends: tuple[End, ...] = ()
    """Of all ranks that have ended."""
    failure: Failed | None = None
    """Why no rank can go on, if so."""

    @property
    def finished(self) -> bool:
        """Whether nothing can happen any more."""
        joined = self.phase is not Phase.JOINING
        over = self.phase is Phase.OVER or self.failure is not None
        return over or (joined and not self.living)

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due, in seconds; None if nobody waits for anybody."""
        if self.since is None or self.finished:
            return None
        return self.since + self.allowed

    def end_of(self, rank: int) -> End | None:
        """Return how a rank ended, if it did."""
        return next((end for end in self.ends if end.fault.rank == rank), None)

    @property
    def allowed(self) -> float:
        """Seconds for which this phase waits for the missing, from the first that came on."""
        if self.phase is Phase.RUNNING:
            return self.timeouts.completion
        return self.timeouts.last_call if self.phase is Phase.LAST_CALL else self.timeouts.barrier


def bit(rank: int) -> int:
    """Return the set of one rank."""
    return 1 << rank


def ranks_of(ranks: int) -> tuple[int, ...]:
    """Return the ranks of a set, ascending."""
    return tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
