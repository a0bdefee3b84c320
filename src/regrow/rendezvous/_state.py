"""The state of the rendezvous, and what can be read off it.

Whoever sees the state and nothing else has to know what to believe, whatever it missed before: a
node that was cut off, one that reads a document which others write, a server that is asked again.
So every question about the rounds is a function of the state alone. How it comes to change is in
`_round`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

from regrow.rendezvous._news import Judged, Node, Placed, RoundClosed, RoundEnded, Seated


@dataclass(frozen=True, slots=True)
class Round:
    """The state that all nodes share; begin with `Round(min_nodes, max_nodes)`."""

    min_nodes: int
    max_nodes: int
    number: int = 1
    """Of the round that is complete or forms; only grows."""
    version: int = 0
    """Counts the changes of this state."""
    members: Mapping[str, Node] = field(default_factory=dict)
    """In the round that forms or is complete, in order of arrival."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of the members, in order; empty while the round forms."""
    digest: str = ""
    """Eight digits that nodes compare to see whether they mean the same round; empty while it
    forms. It guards against mistakes, not against enemies."""
    queue: Mapping[str, Node] = field(default_factory=dict)
    """Waiting or standing by, in order of arrival."""
    previous: Mapping[str, int] = field(default_factory=dict)
    """The ranks of the last complete round, which ranks to come follow."""
    awaited: Set[str] = frozenset()
    """Members of the round before, not back since it ended, each with a seat kept."""
    unheard: Set[str] = frozenset()
    """Those of `awaited` that must be heard of before the failure in `ended` is judged."""
    evicting: bool = False
    """The last call is over: the leases of those in `awaited` are no longer renewed."""
    failures: int = 0
    """How many failures of workers the job has been charged with."""
    charged: bool = False
    """Whether the round before ended by the last of them."""
    last_call: int = 0
    """Names the last call that runs, by the version at which it began; 0 when none does."""
    ended: RoundEnded | None = None
    """How the round before ended."""
    closed: RoundClosed | None = None
    """Who ended the job; None while it runs."""
    gone: frozenset[str] = frozenset()
    """Members of the complete round that left after it was closed."""
    fixed: bool = False
    """Whether the first round's members are those of all: the job is over without any of them."""

    @property
    def complete(self) -> bool:
        """Whether the round has its ranks."""
        return bool(self.ranks)

    @property
    def waiting(self) -> int:
        """How many of the queue would have a seat in the next round."""
        return min(len(self.queue), self.free) if self.complete and not self.closed else 0

    @property
    def free(self) -> int:
        """How many seats are neither taken nor kept."""
        return self.max_nodes - len(self.members) - len(self.awaited)


def standing(state: Round, id: str) -> Seated | Placed | RoundEnded | RoundClosed | None:
    """Return the latest news for a node; None if the state does not know it (any more)."""
    if id in state.ranks and id not in state.gone:
        leader = state.members[next(iter(state.ranks))]
        rank, world_size = state.ranks[id], len(state.ranks)
        where = leader.addr, state.digest, leader.port
        return Seated(id, state.number, rank, world_size, *where, state.failures)
    if id in state.awaited:
        # Who is told that another is lost stops its workers first, and is refused the next round.
        return state.ended if state.closed is None or state.closed.lost else state.closed
    if id in state.members:
        return state.closed or Placed(id, "forming")
    if id in state.queue:
        return state.closed or Placed(id, "standby" if stands_by(state, id) else "waiting")
    return None


def stands_by(state: Round, id: str) -> bool:
    """Return whether the node is in the queue with no free seat for it."""
    seats = state.free if state.complete else 0
    return id in state.queue and id not in islice(state.queue, seats)


def seated(state: Round, id: str, token: int) -> bool:
    """Return whether the seat that the node was given in round `token` is still its own."""
    if token == state.number:
        return id in state.ranks and id not in state.gone
    return token == state.number - 1 and id in state.awaited


def holds(state: Round, id: str, token: int) -> bool:
    """Return whether the lease may be renewed of the workers that the node has in round `token`."""
    return seated(state, id, token) and not state.evicting


def judged(state: Round, round: int) -> Judged | None:
    """Return how a round ended; None while that is not judged, or when it is too long ago."""
    ended = state.ended
    if ended is None or ended.round != round or state.unheard:
        return None
    return Judged(round, state.charged, state.failures, ended)


def place(state: Round, id: str) -> int:
    """Return a number that is another one whenever the node has come to stand elsewhere.

    It is the same for a member of a round that is complete and, when that is over, for one that is
    awaited; and 0 for a node that is not known.
    """
    if id in state.members:
        return 2 * state.number + state.complete
    if id in state.awaited:
        return 2 * (state.number - 1) + 1
    return int(id in state.queue)


def watched(state: Round) -> frozenset[str]:
    """Return the ids of all nodes whose loss would matter."""
    return frozenset({*state.members, *state.queue, *state.awaited}) - state.gone


def digest_of(number: int, ranks: Iterable[str]) -> str:
    """Return `Round.digest` of a round with these members, in the order of their ranks."""
    text = "\n".join([str(number), *ranks])
    return f"{crc32(text.encode(errors='surrogatepass')):08x}"
