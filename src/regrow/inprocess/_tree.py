"""The rank assignment that knows where ranks are; its rules are those of `_topology`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from ._assignment import RankAssignment, RankAssignmentCtx, RankDiscarded
from ._exchange import Exchange
from ._generations import both_generations
from ._topology import Layer, Member, Seats, Topology, first_seats, grow, reseat
from .state import Mode

__all__ = ["Tree"]

_MEET_TIMEOUT = timedelta(seconds=60)  # as FilterCountGroupedByKey's default


class Tree(RankAssignment):
    """Numbers and activates ranks by where they are: a tree of layers, each with its own bounds.

    It does all of what the other assignments do, and is not composed with them.

        host = lambda _: socket.gethostname()
        Tree([
            Layer(min_ranks=128, max_ranks=256, key_or_fn="job", flag=LayerFlag.RESERVE),
            Layer(min_ranks=8, max_ranks=8, key_or_fn=host, flag=LayerFlag.RESERVE),
        ])

    has eight active ranks on each of up to 32 hosts. A host that loses a rank is given up, ranks in
    reserve on other hosts take the place of its eight, and the job goes on while 128 are left.

    At the first call the ranks exchange their keys. From then on each keeps the whole tree, and
    works out by itself what the loss of ranks means.

    Args:
        layers: from the root, in which all ranks are, down.
        world_size_filter: takes the number of active ranks and returns how many of them are to be,
            no more than that; the others go into reserve.

    Raises:
        ValueError: there is no layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        world_size_filter: Callable[[int], int] | None = None,
    ) -> None:
        if not layers:
            raise ValueError("Tree needs one layer or more; the first one holds all ranks")
        self.layers = tuple(layers)
        self.world_size_filter = world_size_filter
        self._tree: tuple[Topology, Seats] | None = None

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with the rank, the active rank and both world sizes set.

        Raises:
            RankDiscarded: this rank, or a branch that it is in, is given up.
            RuntimeError: the ranks have different keys at the root.
            ValueError: the filter's number is out of its bounds.
        """
        if self._tree is None or ctx.state.mode is Mode.INITIALIZED:  # a call of the wrapper begins
            topology = self._meet(ctx)
            seats = first_seats(topology)
            lost = []
        else:
            topology, seats = self._tree
            living = list(seats.living())
            lost = [living[rank] for rank in ctx.terminated_ranks]
        seats = reseat(topology, seats, lost, self.world_size_filter)
        self._tree = topology, seats
        return _seated(ctx, topology, seats)

    def _meet(self, ctx: RankAssignmentCtx) -> Topology:
        state = ctx.state
        keys = [
            str(layer.key_or_fn(state) if callable(layer.key_or_fn) else layer.key_or_fn)
            for layer in self.layers
        ]
        told = Exchange(ctx, type(self).__name__, _MEET_TIMEOUT).gather(
            [state.rank, state.initial_rank, keys]
        )
        members = sorted(Member(rank, initial, tuple(keys)) for rank, initial, keys in told)
        topology = grow(self.layers, members)
        moved = sum(leaf != member for leaf, member in zip(topology.leaves, members, strict=True))
        if moved:
            warnings.warn(
                f"the launcher's ranks are not in the order of the tree: {moved} of {len(members)} "
                "get another one, by which the ranks of a branch are next to each other",
                stacklevel=3,
            )
        return topology


def _seated(ctx: RankAssignmentCtx, topology: Topology, seats: Seats) -> RankAssignmentCtx:
    initial_ranks: list[int | None] = [leaf.initial_rank for leaf in topology.leaves]
    own = initial_ranks.index(ctx.state.initial_rank)
    if seats.modes[own] is Mode.TERMINATED:
        raise RankDiscarded(
            f"rank {ctx.state.rank} (at first {ctx.state.initial_rank}) is given up: it is one of "
            f"terminated_ranks={sorted(ctx.terminated_ranks)}, or too few ranks are left in a "
            "branch that it is in"
        )
    living = list(seats.living())
    ctx.state = replace(
        ctx.state,
        rank=living.index(own),
        world_size=len(living),
        mode=seats.modes[own],
        active_rank=seats.active_ranks[own],
        active_world_size=seats.active_world_size,
    )
    ctx.terminated_ranks = set()
    return ctx
