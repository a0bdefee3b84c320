"""The state of the rounds, and queries of it: seats, queue, lease, and status of a node.

Some readers see only the state and may have missed earlier changes: a node that was cut off, a node
that reads a document of other nodes, or a server that receives a repeated request. So every query
is a function of the state alone. `rules.py` has the rules by which the state changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated
from zlib import crc32

from msgspec import Meta, Struct, field

from regrow.rendezvous.protocol.messages import (
    FIRST_RANKS,
    JOB_STOPS,
    MOST_JOINED,
    SUCCESSORS,
    Departed,
    Judged,
    Node,
    Placed,
    RoundClosed,
    RoundEnded,
    Seated,
)

Count = Annotated[int, Meta(ge=0)]


class Round(Struct, frozen=True):
    """The state that all nodes share; begin with `Round(min_nodes, max_nodes)`."""

    min_nodes: Count
    max_nodes: Count
    number: Count = 1
    """The number of the round that is complete or forms; it only grows."""
    version: Count = 0
    """The number of changes of this state so far."""
    members: Mapping[str, Node] = field(default_factory=dict)
    """Members of the round that forms or is complete, in order of arrival."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of the members, in order; empty while the round forms."""
    digest: str = ""
    """Checksum of eight digits, by which nodes verify that they mean the same round. Empty while
    the round forms. It protects against mistakes, not against attackers."""
    queue: Mapping[str, Node] = field(default_factory=dict)
    """Nodes that wait or stand by, in order of arrival."""
    previous: Mapping[str, int] = field(default_factory=dict)
    """The ranks of the previous complete round; the next ranks follow them."""
    awaited: frozenset[str] = frozenset()
    """Members of the previous round that are not back since it ended; each has a seat reserved."""
    unheard: frozenset[str] = frozenset()
    """The nodes in `awaited` that must still send a message before the failure in `ended` gets its
    verdict."""
    evicting: bool = False
    """Whether the last call is over, so that the leases of the nodes in `awaited` are not
    renewed."""
    failures: Count = 0
    """How many worker failures the job has been charged with."""
    spent: Mapping[str, Count] = field(default_factory=dict)
    """How many of these failures each member of the complete round had without the round's end."""
    charged: bool = False
    """Whether the latest charged failure ended the previous round."""
    last_call: Count = 0
    """The current last call, named by the version at which it began; 0 if there is none."""
    ended: RoundEnded | None = None
    """How the previous round ended; None in the first round."""
    departed: Mapping[str, str] = field(default_factory=dict)
    """Members of the previous round that were lost or have left since it ended, with the reason."""
    closed: RoundClosed | None = None
    """How the job was closed; None while it runs."""
    leaving: Mapping[str, str] = field(default_factory=dict)
    """Members of the complete round that stop their workers and then leave, with the reason. The
    round is over when all of them have left."""
    gone: frozenset[str] = frozenset()
    """Members of the complete round that have left it, while it goes on: after it was closed, or
    before others in `leaving`."""
    fixed: bool = False
    """Whether every round needs exactly the members of the first round. The job is over when any of
    these members is missing."""

    @property
    def complete(self) -> bool:
        """Whether the round has its ranks."""
        return bool(self.ranks)

    @property
    def waiting(self) -> int:
        """How many queued nodes would have a seat in the next round, if it began now."""
        goes_on = self.complete and not self.closed and not self.leaving
        return min(len(self.queue), self.free) if goes_on else 0

    @property
    def first_waiting(self) -> tuple[str, ...]:
        """The ids of the first `MOST_JOINED` of them."""
        return tuple(islice(self.queue, min(self.waiting, MOST_JOINED)))

    @property
    def free(self) -> int:
        """How many seats are neither taken nor reserved."""
        return self.max_nodes - len(self.members) - len(self.awaited)


def status_of(state: Round, id: str) -> Seated | Placed | RoundEnded | RoundClosed | None:
    """Return the status of a node; None if the state does not contain the node."""
    if id in state.ranks and id not in state.gone:
        leader, *others = [state.members[id] for id in islice(state.ranks, SUCCESSORS + 1)]
        rank, world_size = state.ranks[id], len(state.ranks)
        where = leader.addr, state.digest, leader.port
        failures = _failures_before(state)
        successors = tuple(node.addr for node in others)
        new = (other for other in state.ranks if state.previous and other not in state.previous)
        joined = tuple(islice(new, MOST_JOINED))
        gone = departed(state)
        first = tuple(islice(state.ranks, FIRST_RANKS))
        return Seated(
            id, state.number, rank, world_size, *where, failures, gone, successors, joined, first
        )
    if id in state.awaited:
        # A node stops its workers when its round is over; its next join is then refused.
        return state.closed if state.closed and state.closed.report else state.ended
    if id in state.gone:
        return state.closed
    if id in state.members:
        return state.closed or Placed(id, "forming", stopped_by(departed(state)))
    if id in state.queue:
        by = "" if state.complete else stopped_by(departed(state))
        return state.closed or Placed(id, "standby" if stands_by(state, id) else "waiting", by)
    return None


def departed(state: Round) -> tuple[Departed, ...]:
    """Return the lost and left members of the previous round, by their ranks in that round."""
    found = (Departed(id, state.previous[id], why) for id, why in state.departed.items())
    return tuple(sorted(found, key=lambda node: node.rank))


def stopped_by(departed: Iterable[Departed]) -> str:
    """Return who asked the job to stop, if a node has left for this reason; else ""."""
    whys = (node.why for node in departed if node.why.startswith(JOB_STOPS))
    return next(whys, "").removeprefix(JOB_STOPS)


def stands_by(state: Round, id: str) -> bool:
    """Return whether the node is in the queue with no free seat for it."""
    seats = state.free if state.complete else 0
    return id in state.queue and id not in islice(state.queue, seats)


def seated(state: Round, id: str, token: int) -> bool:
    """Return whether the node still owns the seat that it received in round `token`."""
    if token == state.number:
        return id in state.ranks and id not in state.gone
    return token == state.number - 1 and id in state.awaited


def holds(state: Round, id: str, token: int) -> bool:
    """Return whether the node may renew the lease of its workers in round `token`."""
    return seated(state, id, token) and not state.evicting


def judged(state: Round, round: int) -> Judged | None:
    """Return the verdict on the end of a round; None if it is not known yet, or too long ago."""
    ended = state.ended
    if ended is None or ended.round != round or state.unheard:
        return None
    return Judged(round, state.charged, _failures_before(state), ended)


def _failures_before(state: Round) -> int:
    """Return how many failures the job had been charged with when the current round began."""
    return state.failures - sum(state.spent.values())


def place(state: Round, id: str) -> int:
    """Return a number for the place of a node; it changes whenever the node gets another place.

    A member of a complete round keeps its number when the round ends and the node is awaited. The
    number is 0 for a node that the state does not contain.
    """
    if id in state.members:
        return 2 * state.number + state.complete
    if id in state.awaited:
        return 2 * (state.number - 1) + 1
    return int(id in state.queue)


def watched(state: Round) -> frozenset[str]:
    """Return the ids of all nodes that the failure detector has to check."""
    return frozenset({*state.members, *state.queue, *state.awaited}) - state.gone


def takes_part(state: Round, id: str) -> bool:
    """Return whether the node has a seat, waits for one, or is awaited."""
    return id not in state.gone and (
        id in state.members or id in state.queue or id in state.awaited
    )


def nodes(state: Round) -> int:
    """Return how many nodes take part."""
    return len(state.members) + len(state.queue) + len(state.awaited) - len(state.gone)


def digest_of(number: int, ranks: Iterable[str]) -> str:
    """Return `Round.digest` of a round with these members, in the order of their ranks."""
    text = "\n".join([str(number), *ranks])
    return f"{crc32(text.encode(errors='surrogatepass')):08x}"
