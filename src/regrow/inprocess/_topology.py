"""Who is active in a tree of ranks, and who takes whose place when some are lost.

Ranks are leaves. Those that share their keys from the root down to some layer are a *branch* of
that layer, and its `Layer` says what holds in it. Leaves are numbered depth first, so every branch
is a span of them, and what is said about a branch is said about a range of numbers. There is no
tree of objects, and no order but this one: living ranks are numbered by it, too.

At the beginning, leaves become active in their order while all branches above them allow more. On
a loss:

1. A branch with fewer healthy leaves than it needs is given up, lower ones before higher ones.
2. An active leaf that is gone is replaced by one in reserve: of the nearest branch above it, then
   of the one above that, as long as they are flagged RESERVE. Of several the one that came into
   reserve last is taken. How many are active in the branch that it comes from is not looked at:
   `max_ranks` bounds the beginning only.
3. What is left are gaps. Within the highest branch above a gap up to which all are flagged
   BACKFILL, the active leaf of the largest rank moves there, and leaves its own place empty.
4. The active ranks above an empty place move down.
5. A filter may ask for fewer active ranks; the last ones go into reserve.

All of it follows from the keys and from who was lost, so every rank works it out for itself.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .state import Mode, State

__all__ = ["Layer", "LayerFlag", "Member", "Seats", "Topology", "first_seats", "grow", "reseat"]


class LayerFlag(enum.Flag):
    """What may happen across the branches of a layer.

    Attributes:
        RESERVE: a lost active rank may be replaced by one in reserve of the same branch.
        BACKFILL: a gap may be filled by the active rank of the branch with the largest index.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass(frozen=True)
class Layer:
    """What holds in each branch of a layer.

    Attributes:
        min_ranks: healthy ranks that a branch needs; with fewer it is given up.
        max_ranks: ranks that a branch has active at the beginning; None for all. What is more is
            in reserve.
        key_or_fn: names the branch that a rank belongs to: a string, or a function of the rank's
            state that is called on each rank.
        flag: where a replacement may come from.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], str] = ""
    flag: LayerFlag | None = None

    def allows(self, flag: LayerFlag) -> bool:
        """Whether the layer has `flag`."""
        return self.flag is not None and flag in self.flag


class Member(NamedTuple):
    """A rank before it has a place in the tree."""

    rank: int
    """As the launcher numbered it."""
    initial_rank: int
    """The same, or what it was when the wrapper was called."""
    keys: tuple[str, ...]
    """Of the branches that it is in, from the root down."""


class Branch(NamedTuple):
    """Leaves that share their keys down to a layer: `range(first, end)`."""

    layer: Layer
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The tree."""

    leaves: tuple[Member, ...]
    """Depth first."""
    branches: tuple[Branch, ...]
    """Each before the one that it is part of."""
    above: tuple[tuple[Branch, ...], ...]
    """For each leaf the branches that it is in, the nearest first."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Who does what; the sequences are indexed by leaf."""

    modes: tuple[Mode, ...]
    """Active, inactive or terminated."""
    active_ranks: tuple[int | None, ...]
    """None for those that are not active."""
    reserve: tuple[int, ...]
    """The inactive leaves, in the order in which they became so."""
    active_world_size: int
    """How many are active, or how many the filter asked for if that is less."""

    def living(self) -> Iterator[int]:
        """The leaves that are not terminated; a leaf's rank is its place among them."""
        return (leaf for leaf, mode in enumerate(self.modes) if mode is not Mode.TERMINATED)


def grow(layers: Sequence[Layer], members: Iterable[Member]) -> Topology:
    """The tree of `members`; branches stand in the order of their first members.

    Raises:
        RuntimeError: the members have different keys at the root.
    """
    members = list(members)
    roots = sorted({member.keys[0] for member in members})
    if len(roots) > 1:
        raise RuntimeError(
            f"the ranks have different keys at the root of the tree ({', '.join(roots[:8])}): the "
            "first layer's key_or_fn has to give all of them the same one"
        )
    leaves: list[Member] = []
    branches: list[Branch] = []

    def branch(inside: list[Member], depth: int) -> None:
        first = len(leaves)
        if depth + 1 == len(layers):
            leaves.extend(inside)
        else:
            parts: dict[str, list[Member]] = {}
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
    """Everybody's part before anybody was lost."""
    counts: Counter[tuple[int, int]] = Counter()  # of active leaves; a branch's height, first leaf
    modes: list[Mode] = []
    active_ranks: list[int | None] = []
    size = 0
    for above in topology.above:
        branches = [(height, branch.first) for height, branch in enumerate(above)]
        fits = all(
            branch.layer.max_ranks is None or counts[at] < branch.layer.max_ranks
            for at, branch in zip(branches, above, strict=True)
        )
        modes.append(Mode.ACTIVE if fits else Mode.INACTIVE)
        active_ranks.append(size if fits else None)
        if fits:
            size += 1
            counts.update(branches)
    reserve = tuple(leaf for leaf, mode in enumerate(modes) if mode is Mode.INACTIVE)
    return Seats(tuple(modes), tuple(active_ranks), reserve, size)


def reseat(
    topology: Topology,
    seats: Seats,
    lost: Iterable[int],
    world_size_filter: Callable[[int], int] | None = None,
) -> Seats:
    """Everybody's part after the leaves `lost` were lost.

    Raises:
        ValueError: the filter asks for more active ranks than there are, or for less than none.
    """
    table = _Table(topology, seats)
    vacated = table.terminate(_given_up(topology, seats, lost))
    gaps = [(leaf, rank) for leaf, rank in vacated if not table.replace(leaf, rank)]
    table.close(gaps)
    if world_size_filter is not None:
        table.shrink(world_size_filter(table.size))
    return Seats(tuple(table.modes), tuple(table.active), tuple(table.reserve), table.size)


def _given_up(topology: Topology, seats: Seats, lost: Iterable[int]) -> set[int]:
    healthy = set(seats.living()).difference(lost)
    for branch in topology.branches:
        inside = [leaf for leaf in range(branch.first, branch.end) if leaf in healthy]
        if len(inside) < branch.layer.min_ranks:
            healthy.difference_update(inside)
    return set(seats.living()) - healthy


class _Table:
    """The seats while they are being changed."""

    def __init__(self, topology: Topology, seats: Seats) -> None:
        self._above = topology.above
        self.modes = list(seats.modes)
        self.active = list(seats.active_ranks)
        self.reserve = list(seats.reserve)
        self.size = seats.active_world_size

    def terminate(self, leaves: set[int]) -> list[tuple[int, int]]:
        """Take `leaves` out; return those that were active, each with the rank that it had."""
        vacated = []
        for leaf in sorted(leaves):
            rank, self.active[leaf] = self.active[leaf], None
            self.modes[leaf] = Mode.TERMINATED
            if rank is not None:
                vacated.append((leaf, rank))
        self.reserve = [leaf for leaf in self.reserve if leaf not in leaves]
        return vacated

    def replace(self, leaf: int, rank: int) -> bool:
        """Give the rank of a lost leaf to one in reserve; return whether there was one."""
        for branch in self._above[leaf]:
            if not branch.layer.allows(LayerFlag.RESERVE):
                return False
            for spare in reversed(self.reserve):
                if branch.first <= spare < branch.end:
                    self.reserve.remove(spare)
                    self.modes[spare], self.active[spare] = Mode.ACTIVE, rank
                    return True
        return False

    def close(self, gaps: list[tuple[int, int]]) -> None:
        """Fill the gaps where that may be, and have the ranks above an empty place move down."""
        empty = []
        by_domain: dict[tuple[int, int] | None, list[int]] = {}
        for leaf, rank in gaps:
            by_domain.setdefault(self._domain(leaf), []).append(rank)
        for domain, ranks in by_domain.items():
            movers = [] if domain is None else self._last_active(*domain, len(ranks))
            for leaf, rank in zip(movers, ranks, strict=False):
                empty.append(self._rank(leaf))
                self.active[leaf] = rank
            empty += ranks[len(movers) :]
        empty.sort()
        self.active = [
            None if rank is None else rank - bisect_left(empty, rank) for rank in self.active
        ]
        self.size -= len(gaps)

    def shrink(self, size: int) -> None:
        """Have the first `size` ranks active, the others in reserve."""
        if not 0 <= size <= self.size:
            raise ValueError(
                f"world_size_filter({self.size}) returned {size}: it has to be between 0 and its "
                "argument, the number of active ranks"
            )
        self.size = size
        for leaf, rank in enumerate(self.active):
            if rank is not None and rank >= size:
                self.modes[leaf], self.active[leaf] = Mode.INACTIVE, None
                self.reserve.append(leaf)

    def _domain(self, leaf: int) -> tuple[int, int] | None:
        domain = None
        for branch in self._above[leaf]:
            if not branch.layer.allows(LayerFlag.BACKFILL):
                break
            domain = branch.first, branch.end
        return domain

    def _last_active(self, first: int, end: int, count: int) -> list[int]:
        active = [leaf for leaf in range(first, end) if self.active[leaf] is not None]
        return sorted(active, key=self._rank)[-count:]

    def _rank(self, leaf: int) -> int:
        rank = self.active[leaf]
        assert rank is not None  # asked of active leaves only
        return rank
