"""The ranks of the next iteration: who is numbered how, and who is active.

What numbers ranks: `ShiftRanks` and `FillGaps`. What adds to the ranks that are out:
`FilterCountGroupedByKey`. What chooses the active ones: the `RankFilter`s. They are chained, in the
opposite order, as in `Compose(MaxActiveWorldSize(64), ShiftRanks())`. `Tree` does everything alone.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from . import rank_filter
from ._assignment import (
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    with_active,
    without_active,
)
from ._generations import both_generations
from ._grouped import FilterCountGroupedByKey, FilterGroupedByKey
from ._topology import Layer, LayerFlag
from ._tree import Tree

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]


class ShiftRanks(RankAssignment):
    """Closes gaps to the left: the living ranks keep their order.

    0 x 2 3 x x 6 7     ranks, x terminated
    0   1 2     3 4     new ranks
    """

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with the new rank and world size.

        Raises:
            RankDiscarded: this rank is terminated.
        """
        rank, gone = _living_rank(ctx), sorted(ctx.terminated_ranks)
        return _renumbered(ctx, rank - bisect_left(gone, rank))


class FillGaps(RankAssignment):
    """Moves the last ranks into the gaps, in order: as many ranks as possible keep theirs.

    0 x 2 3 x x 6 7     ranks, x terminated
    0   2 3     1 4     new ranks
    """

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with the new rank and world size.

        Raises:
            RankDiscarded: this rank is terminated.
        """
        rank, gone = _living_rank(ctx), sorted(ctx.terminated_ranks)
        size = ctx.state.world_size - len(gone)
        if rank >= size:  # it moves: the first such rank into the first gap, and so on
            gone_between = bisect_left(gone, rank) - bisect_left(gone, size)
            rank = gone[rank - size - gone_between]
        return _renumbered(ctx, rank)


class RankFilter(RankAssignment):
    """Base of the rank assignments that choose the active ranks, and leave the numbers alone."""


class ActivateAllRanks(RankFilter):
    """All living ranks are active; what is chosen if nothing else chooses."""

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank active."""
        ctx.state = with_active(ctx.state, ctx.state.world_size)
        return ctx


class MaxActiveWorldSize(RankFilter):
    """At most so many ranks are active: the first ones.

    Args:
        max_active_world_size: the bound; None for none.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = max_active_world_size

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank active or in reserve."""
        ctx.state = rank_filter.MaxActiveWorldSize(self.max_active_world_size)(ctx.state)
        return ctx


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is a multiple of a number: as many of the first ones.

    Args:
        divisor: the number, at least 1.

    Raises:
        ValueError: it is less.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._filter = rank_filter.ActiveWorldSizeDivisibleBy(divisor)
        self.divisor = divisor

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank active or in reserve."""
        ctx.state = self._filter(ctx.state)
        return ctx


def _living_rank(ctx: RankAssignmentCtx) -> int:
    rank = ctx.state.rank
    if rank is None or rank in ctx.terminated_ranks:
        raise RankDiscarded(
            f"rank {rank} (at first {ctx.state.initial_rank}) is one of "
            f"terminated_ranks={sorted(ctx.terminated_ranks)}, and has no place among the living"
        )
    return rank


def _renumbered(ctx: RankAssignmentCtx, rank: int) -> RankAssignmentCtx:
    """`ctx` with this rank's new number, and none terminated any more."""
    fresh = ctx.state is ctx.given  # then what it says of active ranks is of the last iteration
    state = without_active(ctx.state) if fresh else ctx.state
    size = state.world_size - len(ctx.terminated_ranks)
    state = replace(state, rank=rank, world_size=size)
    if state.active_world_size is not None:
        state = with_active(state, min(state.active_world_size, size))
    ctx.state, ctx.terminated_ranks = state, set()
    return ctx
