"""Tree of ranks: choose the active ranks by location, and replace ranks that are lost.

Ranks are leaves. Ranks that share their keys from the root down to a layer form a *branch* of that
layer. The `Layer` holds the rules for its branches. Leaves are numbered depth first, so every
branch is a range of leaf numbers. There are no tree objects. The same order also numbers the living
ranks.

At the beginning, leaves become active in their order, while all branches above them allow more
active ranks. After a loss:

1. A branch with fewer healthy leaves than its minimum leaves the job. Lower branches come before
   higher ones.
2. A leaf in reserve replaces a lost active leaf. It comes from the nearest branch above the lost
   leaf, then from the next branch above, as long as the branches are flagged RESERVE. If there are
   several, the leaf that went into reserve last is used. The number of active leaves in its branch
   does not matter: `max_ranks` limits only the beginning.
3. A lost active leaf without a replacement leaves a gap. The search goes up from the gap, as long
   as the branches are flagged BACKFILL. In the highest such branch, the active leaf with the
   largest rank moves into the gap. Its own place becomes empty.
4. The active ranks above an empty place move down.
5. A filter may request fewer active ranks; the last ones go into reserve.

The result depends only on the keys and the lost ranks, so every rank computes it independently.
"""

from __future__ import annotations

import enum
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from regrow.inprocess.ranks.assignment import (
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    both_generations,
)
from regrow.inprocess.ranks.rank_exchange import Exchange
from regrow.inprocess.state import Mode, State
from regrow.utils import repr_of


class LayerFlag(enum.Flag):
    """Permitted replacements within a branch of a layer.

    Attributes:
        RESERVE: a rank in reserve of the same branch may replace a lost active rank.
        BACKFILL: the active rank with the largest index in the branch may fill a gap.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass(unsafe_hash=True)
class Layer:
    """Rules for each branch of a layer; mutable until a `Tree` with this layer is called.

    Attributes:
        min_ranks: minimum number of healthy ranks; a branch with fewer leaves the job.
        max_ranks: maximum number of active ranks at the beginning; None for no limit. The other
            ranks are in reserve.
        key_or_fn: name of a rank's branch: a string, or a function of the rank's state that each
            rank calls.
        flag: where a replacement may come from.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], str] = ""
    flag: LayerFlag | None = None

    def allows(self, flag: LayerFlag) -> bool:
        """Return whether the layer has `flag`."""
        return self.flag is not None and flag in self.flag


def _check_layer(layer: Layer) -> None:
    if not isinstance(layer, Layer):
        raise TypeError(f"a layer of a Tree must be a Layer, got {repr_of(layer)}")
    for name, least in (("min_ranks", 0), ("max_ranks", 1)):
        limit = getattr(layer, name)
        if limit is None and name == "max_ranks":
            continue
        if not isinstance(limit, int):
            raise TypeError(f"{name} of a Layer must be an int, got {repr_of(limit)}")
        if limit < least:
            raise ValueError(f"{name} of a Layer must be at least {least}, got {limit}")
    if not (isinstance(layer.key_or_fn, str) or callable(layer.key_or_fn)):
        raise TypeError(
            f"key_or_fn of a Layer must be a str or a function, got {repr_of(layer.key_or_fn)}"
        )
    if not isinstance(layer.flag, LayerFlag | None):
        raise TypeError(f"flag of a Layer must be a LayerFlag or None, got {repr_of(layer.flag)}")


class TreeMember(NamedTuple):
    """A rank before it has a place in the tree."""

    rank: int
    """Rank in the launcher's numbering."""
    initial_rank: int
    """The same, or the rank when the wrapper was called."""
    keys: tuple[str, ...]
    """Keys of the rank's branches, from the root down."""


class Branch(NamedTuple):
    """Leaves that share their keys down to a layer: `range(first, end)`."""

    layer: Layer
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Shape of the tree: its leaves and branches."""

    leaves: tuple[TreeMember, ...]
    """In depth-first order."""
    branches: tuple[Branch, ...]
    """Each branch before the branch that contains it."""
    above: tuple[tuple[Branch, ...], ...]
    """For each leaf, the branches that contain it, the nearest first."""


@dataclass(slots=True)
class Seats:
    """Roles and active ranks; the lists are indexed by leaf."""

    modes: list[Mode]
    """Active, inactive or terminated."""
    active_ranks: list[int | None]
    """None for leaves that are not active."""
    reserve: list[int]
    """The inactive leaves, in the order in which they became inactive."""
    active_world_size: int
    """Number of active leaves, or the filter's number if that is smaller."""

    def living(self) -> Iterator[int]:
        """Iterate over the leaves that are not terminated; a leaf's rank is its index here."""
        return (leaf for leaf, mode in enumerate(self.modes) if mode is not Mode.TERMINATED)

    def rank(self, leaf: int) -> int:
        """Return the rank of an active leaf."""
        rank = self.active_ranks[leaf]
        assert rank is not None  # callers pass active leaves only
        return rank


def grow(layers: Sequence[Layer], members: Iterable[TreeMember]) -> Topology:
    """Build the tree; branches are in the order of their first members.

    Args:
        layers: the layers, from the root down.
        members: the ranks.

    Raises:
        RuntimeError: the members have different keys at the root.
    """
    members = list(members)
    roots = sorted({member.keys[0] for member in members})
    if len(roots) > 1:
        raise RuntimeError(
            f"the ranks have different keys at the root of the tree ({', '.join(roots[:8])}): the "
            "first layer's key_or_fn must return the same key for all ranks"
        )
    leaves: list[TreeMember] = []
    branches: list[Branch] = []

    def branch(inside: list[TreeMember], depth: int) -> None:
        first = len(leaves)
        if depth + 1 == len(layers):
            leaves.extend(inside)
        else:
            parts: dict[str, list[TreeMember]] = {}
            for member in inside:
                parts.setdefault(member.keys[depth + 1], []).append(member)
            for part in parts.values():
                branch(part, depth + 1)
        branches.append(Branch(layers[depth], first, len(leaves)))

    branch(members, 0)
    above: list[list[Branch]] = [[] for _ in leaves]
    for each in branches:
        for leaf in range(each.first, each.end):
            above[leaf].append(each)
    return Topology(tuple(leaves), tuple(branches), tuple(map(tuple, above)))


def first_seats(topology: Topology) -> Seats:
    """Return the roles before any loss."""
    counts: Counter[int] = Counter()  # active leaves, by the branch's identity
    seats = Seats([], [], [], 0)
    for leaf, above in enumerate(topology.above):
        fits = all(
            branch.layer.max_ranks is None or counts[id(branch)] < branch.layer.max_ranks
            for branch in above
        )
        seats.modes.append(Mode.ACTIVE if fits else Mode.INACTIVE)
        seats.active_ranks.append(seats.active_world_size if fits else None)
        if fits:
            seats.active_world_size += 1
            counts.update(map(id, above))
        else:
            seats.reserve.append(leaf)
    return seats


def reseat(
    topology: Topology,
    seats: Seats,
    lost: Iterable[int],
    world_size_filter: Callable[[int], int] | None = None,
) -> Seats:
    """Return the roles after the leaves `lost` were lost.

    Args:
        topology: the tree.
        seats: the roles before the loss.
        lost: the lost leaves.
        world_size_filter: receives the number of active ranks, and returns how many stay active.

    Raises:
        ValueError: the filter returned more active ranks than there are, or a negative number.
    """
    seats = deepcopy(seats)
    vacated = _terminate(seats, _given_up(topology, seats, lost))
    gaps = [(leaf, rank) for leaf, rank in vacated if not _replace(topology, seats, leaf, rank)]
    _close(topology, seats, gaps)
    if world_size_filter is not None:
        _shrink(seats, world_size_filter(seats.active_world_size))
    return seats


def _given_up(topology: Topology, seats: Seats, lost: Iterable[int]) -> set[int]:
    healthy = set(seats.living()).difference(lost)
    for branch in topology.branches:
        inside = [leaf for leaf in range(branch.first, branch.end) if leaf in healthy]
        if len(inside) < branch.layer.min_ranks:
            healthy.difference_update(inside)
    return set(seats.living()) - healthy


def _terminate(seats: Seats, leaves: set[int]) -> list[tuple[int, int]]:
    """Terminate `leaves`; return the ones that were active, each with its former rank."""
    vacated = []
    for leaf in sorted(leaves):
        rank, seats.active_ranks[leaf] = seats.active_ranks[leaf], None
        seats.modes[leaf] = Mode.TERMINATED
        if rank is not None:
            vacated.append((leaf, rank))
    seats.reserve = [leaf for leaf in seats.reserve if leaf not in leaves]
    return vacated


def _replace(topology: Topology, seats: Seats, leaf: int, rank: int) -> bool:
    """Give the rank of a lost leaf to a leaf in reserve; return whether there was one."""
    for branch in topology.above[leaf]:
        if not branch.layer.allows(LayerFlag.RESERVE):
            return False
        for spare in reversed(seats.reserve):
            if branch.first <= spare < branch.end:
                seats.reserve.remove(spare)
                seats.modes[spare], seats.active_ranks[spare] = Mode.ACTIVE, rank
                return True
    return False


def _close(topology: Topology, seats: Seats, gaps: list[tuple[int, int]]) -> None:
    """Fill the gaps where this is permitted, and move down the ranks above an empty place."""
    empty = []
    by_domain: dict[range, list[int]] = {}
    for leaf, rank in gaps:
        by_domain.setdefault(_domain(topology, leaf), []).append(rank)
    for domain, ranks in by_domain.items():
        active = [leaf for leaf in domain if seats.active_ranks[leaf] is not None]
        movers = sorted(active, key=seats.rank)[-len(ranks) :]
        for leaf, rank in zip(movers, ranks, strict=False):
            empty.append(seats.rank(leaf))
            seats.active_ranks[leaf] = rank
        empty += ranks[len(movers) :]
    empty.sort()
    seats.active_ranks = [
        None if rank is None else rank - bisect_left(empty, rank) for rank in seats.active_ranks
    ]
    seats.active_world_size -= len(gaps)


def _domain(topology: Topology, leaf: int) -> range:
    """Return the leaves that may move into a gap; empty if none may."""
    domain = range(0)
    for branch in topology.above[leaf]:
        if not branch.layer.allows(LayerFlag.BACKFILL):
            break
        domain = range(branch.first, branch.end)
    return domain


def _shrink(seats: Seats, size: int) -> None:
    """Keep the first `size` ranks active, and put the others in reserve."""
    if not 0 <= size <= seats.active_world_size:
        raise ValueError(
            f"world_size_filter({seats.active_world_size}) returned {size}: it has to be between 0 "
            "and its argument, the number of active ranks"
        )
    seats.active_world_size = size
    for leaf, rank in enumerate(seats.active_ranks):
        if rank is not None and rank >= size:
            seats.modes[leaf], seats.active_ranks[leaf] = Mode.INACTIVE, None
            seats.reserve.append(leaf)


_MEET_TIMEOUT = timedelta(seconds=60)  # the default of FilterCountGroupedByKey


class Tree(RankAssignment):
    """Number and activate ranks by their location: a tree of layers, each with its own limits.

    It does the work of all other assignments, and is not composed with them.

        host = lambda _: socket.gethostname()
        Tree([
            Layer(min_ranks=128, max_ranks=256, key_or_fn="job", flag=LayerFlag.RESERVE),
            Layer(min_ranks=8, max_ranks=8, key_or_fn=host, flag=LayerFlag.RESERVE),
        ])

    has eight active ranks on each of up to 32 hosts. A host that loses a rank leaves the job. Ranks
    in reserve on other hosts replace its eight ranks, and the job continues while 128 ranks are
    left.

    At the first call the ranks exchange their keys. From then on each rank keeps the whole tree,
    and computes the consequences of a loss by itself.

    Args:
        layers: from the root, which contains all ranks, down.
        world_size_filter: receives the number of active ranks, and returns how many stay active, at
            most that number; the others go into reserve.

    Raises:
        ValueError: `layers` is empty, or a limit of a layer is out of range.
        TypeError: a layer, or a value in it, has the wrong type.
    """

    keeps_state = True

    def __init__(
        self,
        layers: Sequence[Layer],
        world_size_filter: Callable[[int], int] | None = None,
    ) -> None:
        if not layers:
            raise ValueError("Tree needs one layer or more; the first one holds all ranks")
        for layer in layers:
            _check_layer(layer)
        self.layers = tuple(layers)
        self.world_size_filter = world_size_filter
        self._tree: tuple[Topology, Seats] | None = None

    @both_generations
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with the rank, the active rank and both world sizes set.

        Raises:
            RankDiscarded: this rank, or a branch that contains it, leaves the job.
            RuntimeError: the ranks have different keys at the root.
            ValueError: the filter's number is out of bounds.
        """
        if self._tree is None or ctx.state.mode is Mode.INITIALIZED:  # a call of the wrapper starts
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
        gathered = Exchange(ctx, type(self).__name__, _MEET_TIMEOUT).gather(
            [state.rank, state.initial_rank, keys]
        )
        members = sorted(TreeMember(rank, initial, tuple(keys)) for rank, initial, keys in gathered)
        topology = grow(self.layers, members)
        moved = sum(leaf != member for leaf, member in zip(topology.leaves, members, strict=True))
        if moved:
            warnings.warn(
                f"the launcher's ranks are not in the order of the tree: {moved} of {len(members)} "
                "get another number, so that the ranks of a branch are next to each other",
                stacklevel=3,
            )
        return topology


def _seated(ctx: RankAssignmentCtx, topology: Topology, seats: Seats) -> RankAssignmentCtx:
    initial_ranks: list[int | None] = [leaf.initial_rank for leaf in topology.leaves]
    own = initial_ranks.index(ctx.state.initial_rank)
    if seats.modes[own] is Mode.TERMINATED:
        ended = ctx.state.rank in ctx.terminated_ranks
        raise RankDiscarded(
            f"rank {ctx.state.rank} (initial rank {ctx.state.initial_rank}) leaves the job: "
            + ("it has ended" if ended else "too few ranks are left in a branch that contains it")
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
