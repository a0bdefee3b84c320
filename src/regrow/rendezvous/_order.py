"""Which node gets which rank.

Ranks are stable: a node that stays keeps its rank as long as the world is big enough for it, so
what was laid out by rank (shards, rings, caches) moves as little as it can. Nodes that are new, or
whose rank has fallen off the end of a smaller world, fill the gaps: those who were there before
first, then by the node rank they asked for, then in natural order of their addresses, so that
node7 comes before node66 and 10.0.0.9 before 10.0.0.10, as people and network topologies count.

Whoever asked for node rank 0 has rank 0, whatever else happens: users give it to the host that
the others reach.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

_PIECES = re.compile("[0-9]+|[^0-9]+")


class Ranked(Protocol):
    """What the order looks at in a node."""

    @property
    def addr(self) -> str: ...

    @property
    def wanted(self) -> int | None: ...


def natural_key(text: str) -> tuple[tuple[bool, int, str], ...]:
    """A key by which runs of digits sort as the numbers they are, before other text."""
    return tuple(
        # By length, then digit by digit: the same order as int(), which refuses long numbers.
        (False, len(digits := piece.lstrip("0")), digits)
        if "0" <= piece[0] <= "9"
        else (True, 0, piece)
        for piece in _PIECES.findall(text)
    )


def assign_ranks(nodes: Mapping[str, Ranked], previous: Mapping[str, int]) -> dict[str, int]:
    """Give each node a rank.

    Args:
        nodes: the members of the round, by id.
        previous: the ranks of the round before, by id; those of nodes that left do not count.

    Returns:
        Each id's rank, in the order of the ranks: a permutation of 0 .. len(nodes) - 1.
    """
    by_rank: dict[int, str] = {}

    def newcomer(id: str) -> tuple[object, ...]:
        wanted = nodes[id].wanted
        return (wanted is None, wanted or 0, natural_key(nodes[id].addr), nodes[id].addr, id)

    first = [id for id in nodes if nodes[id].wanted == 0]
    if first:
        by_rank[0] = min(first, key=lambda id: (previous.get(id) != 0, newcomer(id)))
    for id in nodes:
        rank = previous.get(id, len(nodes))
        if rank < len(nodes) and id != by_rank.get(0):  # whoever wanted 0 has its seat
            by_rank.setdefault(rank, id)
    seated = set(by_rank.values())
    homeless = [id for id in nodes if id not in seated]
    stayed = sorted((id for id in homeless if id in previous), key=lambda id: previous[id])
    new = sorted((id for id in homeless if id not in previous), key=newcomer)
    gaps = [rank for rank in range(len(nodes)) if rank not in by_rank]
    by_rank.update(zip(gaps, stayed + new, strict=True))
    return {by_rank[rank]: rank for rank in range(len(nodes))}
