"""The rules that choose the active ranks, as rank-filter plug-ins of the first generation.

They take and return a state. The wrapper's argument is `rank_filter`, and it calls them after
`rank_assignment`. Current filters are rank assignments (`rank_assignment.RankFilter`). Both work.
"""

from __future__ import annotations

import abc

from regrow.inprocess.ranks.assignment import whole, whole_or_none, with_active

from .state import State

__all__ = ["ActiveWorldSizeDivisibleBy", "MaxActiveWorldSize", "RankFilter", "WorldSizeDivisibleBy"]


class RankFilter(abc.ABC):
    """Base class of `rank_filter` plug-ins: choose which living ranks are active."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Set the mode and the active world size of `state`, and return it."""


class MaxActiveWorldSize(RankFilter):
    """Limit the number of active ranks; the first ranks stay active.

    Args:
        max_active_world_size: the limit; None for no limit.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = whole_or_none("max_active_world_size", max_active_world_size)

    def __call__(self, state: State) -> State:
        """Return `state` with the limit applied."""
        size = active_size(state)
        bound = self.max_active_world_size
        return with_active(state, size if bound is None else min(size, bound))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Make the number of active ranks a multiple of `divisor`; the first ranks stay active.

    Args:
        divisor: the number, at least 1.

    Raises:
        ValueError: `divisor` is below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = whole("divisor", divisor, least=1)

    def __call__(self, state: State) -> State:
        """Return `state` with the largest multiple that the active ranks allow."""
        return with_active(state, active_size(state) // self.divisor * self.divisor)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """Older name of `ActiveWorldSizeDivisibleBy`."""


def active_size(state: State) -> int:
    """Return how many ranks are active so far: all living ranks, if no filter has chosen yet."""
    chosen = state.active_world_size
    return state.world_size if chosen is None else min(chosen, state.world_size)
