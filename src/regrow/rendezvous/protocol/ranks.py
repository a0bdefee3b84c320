"""Assignment of ranks to the nodes of a round.

Ranks are stable: a node that stays keeps its rank as long as the world is big enough for it. So
data that is laid out by rank (shards, rings, caches) moves as little as possible. Two kinds of node
fill the gaps: new nodes, and nodes with a rank beyond the end of a smaller world. The gaps are
filled in this order:

1. nodes of the previous round;
2. new nodes by the node rank that they asked for;
3. other new nodes in the natural order of their addresses: node7 comes before node66, and 10.0.0.9
   before 10.0.0.10. People and network topologies count in this order.

A node that asked for node rank 0 always has rank 0. Users give rank 0 to the host that the other
hosts can reach.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from regrow.rendezvous.protocol.messages import Node

_PIECES = re.compile("[0-9]+|[^0-9]+")


def natural_key(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key that compares runs of digits as numbers, before other text."""
    return tuple(
        # Compare by length, then digit by digit: the order of int(), which refuses long numbers.
        (False, len(digits := piece.lstrip("0")), digits)
        if "0" <= piece[0] <= "9"
        else (True, 0, piece)
        for piece in _PIECES.findall(text)
    )


def assign_ranks(nodes: Mapping[str, Node], previous: Mapping[str, int]) -> dict[str, int]:
    """Assign a rank to each node.

    Args:
        nodes: the members of the round, by id.
        previous: the ranks of the previous round, by id; nodes that have left do not count.

    Returns:
        The rank of each id, in the order of the ranks: a permutation of 0 .. len(nodes) - 1.
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
        if rank < len(nodes) and id != by_rank.get(0):  # the holder of rank 0 has its seat
            by_rank.setdefault(rank, id)
    seated = set(by_rank.values())
    homeless = [id for id in nodes if id not in seated]
    stayed = sorted((id for id in homeless if id in previous), key=lambda id: previous[id])
    new = sorted((id for id in homeless if id not in previous), key=newcomer)
    gaps = [rank for rank in range(len(nodes)) if rank not in by_rank]
    by_rank.update(zip(gaps, stayed + new, strict=True))
    return {by_rank[rank]: rank for rank in range(len(nodes))}
