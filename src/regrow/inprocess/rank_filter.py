"""The first generation's choice of active ranks: a plug-in family of its own.

Its plug-ins take and return a state, and are the wrapper's `rank_filter`, called after its
`rank_assignment`. Today's filters are rank assignments (`rank_assignment.RankFilter`); both work.
"""

from __future__ import annotations

import abc

from ._assignment import with_active
from .state import State

__all__ = ["ActiveWorldSizeDivisibleBy", "MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Base of the wrapper's `rank_filter`: chooses which of the living ranks are active."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Return `state` with its mode and the active world size set."""


class MaxActiveWorldSize(RankFilter):
    """At most so many ranks are active: the first ones.

    Args:
        max_active_world_size: the bound; None for none.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        """Return `state` within the bound."""
        size = active_size(state)
        bound = self.max_active_world_size
        return with_active(state, size if bound is None else min(size, bound))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is a multiple of a number: as many of the first ones.

    Args:
        divisor: the number, at least 1.

    Raises:
        ValueError: it is less.
    """

    def __init__(self, divisor: int = 1) -> None:
        if divisor < 1:
            raise ValueError(f"{divisor=}: the active world size is divided by it; give 1 or more")
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        """Return `state` with the largest multiple that there are active ranks for."""
        return with_active(state, active_size(state) // self.divisor * self.divisor)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """The older name of `ActiveWorldSizeDivisibleBy`."""


def active_size(state: State) -> int:
    """How many ranks are active as things stand: all living ones, if nobody has chosen yet."""
    chosen = state.active_world_size
    return state.world_size if chosen is None else min(chosen, state.world_size)
