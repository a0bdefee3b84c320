"""Ranks that are given up together when their group has lost some."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ._assignment import RankAssignment, RankAssignmentCtx
from ._exchange import Exchange
from ._generations import both_generations, positional

__all__ = ["FilterCountGroupedByKey", "FilterGroupedByKey"]


class FilterCountGroupedByKey(RankAssignment):
    """Terminates the groups of ranks whose size does not fit.

        Compose(
            ShiftRanks(),
            FilterCountGroupedByKey(lambda _: socket.gethostname(), lambda count: count == 8),
        )

    goes on with the hosts on which all eight ranks are healthy. The ranks are only added to those
    that are terminated: an assignment that takes these out has to follow.

    Args:
        key_or_fn: names a rank's group: a string, or a function of the rank's state, or, as in the
            first generation, of its rank and the world size.
        condition: takes the number of healthy ranks of a group, and says whether it may go on.
        timeout: how long the ranks wait for each other. 60 s is nvidia-resiliency-ext's default.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[..., str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with the ranks of misfit groups among the terminated ones.

        Raises:
            BarrierError: the store's: the ranks did not come together in `timeout`.
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
    """The first generation's name of `FilterCountGroupedByKey`."""
