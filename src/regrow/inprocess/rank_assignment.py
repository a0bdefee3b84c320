"""Rank assignment: number the ranks of the next iteration, and choose the active ones.

`ShiftRanks` and `FillGaps` number the ranks. `FilterCountGroupedByKey` adds to the terminated
ranks. `RankFilter`s choose the active ranks. `Compose` calls its last part first:
`Compose(MaxActiveWorldSize(64), ShiftRanks())` numbers the ranks, and then chooses the active ones.
`Tree` does everything alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from regrow.inprocess.ranks.assignment import (
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    both_generations,
    duration,
    function,
    positional,
    with_active,
    without_active,
)
from regrow.inprocess.ranks.rank_exchange import Exchange
from regrow.inprocess.ranks.tree import Layer, LayerFlag, Tree

from . import rank_filter

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
    """Close gaps by moving ranks to the left; the living ranks keep their order.

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
    """Move the last ranks into the gaps, in order, so that as many ranks as possible do not change.

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
        if rank >= size:  # this rank moves: the first such rank fills the first gap, and so on
            gone_between = bisect_left(gone, rank) - bisect_left(gone, size)
            rank = gone[rank - size - gone_between]
        return _renumbered(ctx, rank)


class RankFilter(RankAssignment):
    """Base class of the rank assignments that choose the active ranks and do not renumber ranks."""


class ActivateAllRanks(RankFilter):
    """Make all living ranks active; this is the default if no plug-in chooses."""

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank active."""
        ctx.state = with_active(ctx.state, ctx.state.world_size)
        return ctx


class _StateFilter(RankFilter):
    """Chooses the active ranks as a filter of the first generation does."""

    _filter: rank_filter.RankFilter

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank active or in reserve."""
        ctx.state = self._filter(ctx.state)
        return ctx


class MaxActiveWorldSize(_StateFilter):
    """Limit the number of active ranks; the first ranks stay active.

    Args:
        max_active_world_size: the limit; None for no limit.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self._filter = rank_filter.MaxActiveWorldSize(max_active_world_size)
        self.max_active_world_size = max_active_world_size


class ActiveWorldSizeDivisibleBy(_StateFilter):
    """Make the number of active ranks a multiple of `divisor`; the first ranks stay active.

    Args:
        divisor: the number, at least 1.

    Raises:
        ValueError: `divisor` is below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._filter = rank_filter.ActiveWorldSizeDivisibleBy(divisor)
        self.divisor = divisor


def _living_rank(ctx: RankAssignmentCtx) -> int:
    rank = ctx.state.rank
    if rank is None or rank in ctx.terminated_ranks:
        raise RankDiscarded(
            f"initial rank {ctx.state.initial_rank} has no place in the next iteration: its rank "
            f"is {rank}, and the terminated ranks are {sorted(ctx.terminated_ranks)}"
        )
    return rank


def _renumbered(ctx: RankAssignmentCtx, rank: int) -> RankAssignmentCtx:
    """Return `ctx` with this rank's new number, the new world size and no terminated ranks."""
    fresh = ctx.state is ctx.given  # so its active ranks are still those of the last iteration
    state = without_active(ctx.state) if fresh else ctx.state
    size = state.world_size - len(ctx.terminated_ranks)
    state = replace(state, rank=rank, world_size=size)
    if state.active_world_size is not None:
        state = with_active(state, min(state.active_world_size, size))
    ctx.state, ctx.terminated_ranks = state, set()
    return ctx


class FilterCountGroupedByKey(RankAssignment):
    """Terminate the groups of ranks that do not have the right size.

        Compose(
            ShiftRanks(),
            FilterCountGroupedByKey(lambda _: socket.gethostname(), lambda count: count == 8),
        )

    continues with the hosts on which all eight ranks are healthy. This class only adds ranks to the
    terminated ranks. An assignment that removes terminated ranks must run after it.

    Args:
        key_or_fn: name of a rank's group: a string, or a function of the rank's state. A function
            with two parameters receives the rank and the world size, as in the first generation.
        condition: receives the number of healthy ranks of a group, and returns whether the group
            may continue.
        timeout: how long the ranks wait for each other. The default, 60 s, is that of
            nvidia-resiliency-ext.

    Raises:
        TypeError: `condition` is not callable, or `timeout` is not a timedelta.
        ValueError: `timeout` is negative.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[..., str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.key_or_fn = key_or_fn
        self.condition = function("condition", condition)
        self.timeout = duration("timeout", timeout)

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with the ranks of rejected groups among the terminated ranks.

        Raises:
            BarrierError: the ranks did not meet within `timeout` (the store's exception).
        """
        if ctx.state.rank not in ctx.terminated_ranks:
            exchange = Exchange(ctx, type(self).__name__, self.timeout)
            misfits = exchange.count(str(self._key(ctx)), self.condition)
            ctx.terminated_ranks = ctx.terminated_ranks | misfits
        return ctx

    def _key(self, ctx: RankAssignmentCtx) -> Any:
        if not callable(self.key_or_fn):
            return self.key_or_fn
        needed, _ = positional(self.key_or_fn)
        if needed == 2:
            return self.key_or_fn(ctx.state.rank, ctx.state.world_size)
        return self.key_or_fn(ctx.state)


class FilterGroupedByKey(FilterCountGroupedByKey):
    """First generation's name of `FilterCountGroupedByKey`."""
