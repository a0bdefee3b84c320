"""The rules of the rendezvous: who is in the round, and what each node is told.

A round collects nodes until it is full, or until the last call is over after it became big
enough, and then hands every node its rank. A complete round lasts until a member leaves, is lost
or asks for the next one; then everyone is told at once who and why, and the next round forms,
with a seat kept for every member that has not been heard of. This file holds the rules and
nothing else: no clock, no store, no thread. `step` takes the state and what happened, and returns
the new state and whom to tell what.

Three places run it: the threads of one process (`LocalRounds`); the store server, to which a join
is one message each way; and the nodes of a job themselves, each of which applies its own event
and publishes the state by compare-and-set. The last is why a state also answers for itself:
`standing` says what a node has to believe that sees the state and nothing else, whatever it
missed before. The effects of `step` are the same news, without anybody having to look for them.

Why there is no time in it: the state is read on many hosts, and no two of their clocks can be
compared. Time comes in as two events. `LastCallOver` and `Lost` are the judgement of somebody who
waited, by its own monotonic clock (`_patience`), and each names what it is a judgement of, so that
one that comes late is seen to be about something that is over, and changes nothing.

Why the token: a node that was paused or cut off does not know that it was given up. The number of
the round in which a node was last seated is its fencing token, and it shows it with every call. A
token that does not fit is refused, and says so, on the first call. The node may then come back as
a new one, under a new id: ids are for one life, so that what is still said about the old life
cannot harm the new one. A call that is repeated because its answer was lost changes nothing.
What the rules need of whoever drives them: the calls of one life take effect in their order, and
none after that life was given up. A session of the store server is such a life; a node that
compares and sets the state for itself makes one call after the other, and knows which of them took
effect.

Why one queue: whoever arrives too late queues in order of arrival. As many of them as there are
free seats in the running round are *waiting*, and the members are told, so that they can make room
by starting the next round. The rest *stand by*: they cost the job nothing, and move up when a seat
is free. Which is which follows from the numbers, so it is not written down anywhere.

The last call ends early when nobody is left to wait for: every member of the round before is back,
has left or is lost. A member that is there but does not come back within the last call is *evicted*:
it is refused from then on, so that it cannot renew its lease (`holds`), and the others wait once
more, for as long as a lease lasts, before they take its seat. So no two rounds ever have workers.

Why a failure is judged: when a host is lost, the workers of the others fail as well, in the
collective that the lost ones no longer take part in, and such a failure may be reported first. So
`Failed` ends the round at once, but whose fault it was is known only when every other member has
been heard of after it, which takes one message each way, or is lost or leaving: then that was the
cause, and the job is not charged with a failure. All nodes count the same failures, so the job has
one budget of restarts.

Closing is final. A complete round that is closed goes on until its members have left, and these
leave in peace; but one that is lost is still reported, since the others may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

from regrow.rendezvous._news import (
    Close,
    Effect,
    Event,
    Failed,
    Heard,
    Join,
    Judged,
    LastCall,
    LastCallOver,
    Leave,
    Leaving,
    Lost,
    Node,
    NodesWaiting,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._order import assign_ranks


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
    queue: Mapping[str, Node] = field(default_factory=dict)
    """Waiting or standing by, in order of arrival."""
    previous: Mapping[str, int] = field(default_factory=dict)
    """The ranks of the last complete round, which ranks to come follow."""
    awaited: frozenset[str] = frozenset()
    """Members of the round before, not back since it ended, each with a seat kept."""
    unheard: frozenset[str] = frozenset()
    """Those of `awaited` that must be heard of before the failure in `ended` is judged."""
    evicting: bool = False
    """The last call is over, and those of `awaited` are refused until their leases are over."""
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

    @property
    def complete(self) -> bool:
        """Whether the round has its ranks."""
        return bool(self.ranks)

    @property
    def waiting(self) -> int:
        """How many of the queue would have a seat in the next round."""
        return min(len(self.queue), self._free) if self.complete and not self.closed else 0

    @property
    def _free(self) -> int:
        return self.max_nodes - len(self.members) - len(self.awaited)


def standing(state: Round, id: str) -> Seated | Placed | RoundEnded | RoundClosed | None:
    """Return the latest news for a node; None if the state does not know it (any more)."""
    if id in state.ranks and id not in state.gone:
        return _seated(state, id, digest(state))
    if id in state.awaited:
        return None if state.evicting else state.closed or state.ended
    if id in state.members:
        return state.closed or Placed(id, "forming")
    if id in state.queue:
        return state.closed or Placed(id, "standby" if stands_by(state, id) else "waiting")
    return None


def stands_by(state: Round, id: str) -> bool:
    """Return whether the node is in the queue with no free seat for it."""
    if id not in state.queue:
        return False
    return id not in list(state.queue)[: state._free if state.complete else 0]


def holds(state: Round, id: str, token: int) -> bool:
    """Return whether the workers that the node started in round `token` may go on running."""
    if token == state.number:
        return id in state.ranks and id not in state.gone
    return token == state.number - 1 and id in state.awaited and not state.evicting


def judged(state: Round, round: int) -> Judged | None:
    """Return how a round ended; None while that is not judged, or when it is too long ago."""
    ended = state.ended
    if ended is None or ended.round != round or state.unheard:
        return None
    return Judged(round, state.charged, state.failures, ended)


def watched(state: Round) -> frozenset[str]:
    """Return the ids of all nodes whose loss would matter."""
    return frozenset({*state.members, *state.queue, *state.awaited}) - state.gone


def digest(state: Round) -> str:
    """Return eight digits that two nodes compare to see whether they mean the same round.

    It guards against mistakes, not against enemies.
    """
    text = "\n".join([str(state.number), *state.ranks])
    return f"{crc32(text.encode(errors='surrogatepass')):08x}"


# --- the rules


def step(state: Round, event: Event) -> tuple[Round, tuple[Effect, ...]]:
    """Apply what happened.

    Returns:
        The new state (the same object if nothing changed), and whom to tell what.
    """
    match event:
        case Join():
            return _join(state, event)
        case Failed(id, token, report):
            return _failed(state, id, token, report)
        case Heard(id, token):
            return _heard(state, id, token)
        case Leaving(id, token, why):
            return _leaving(state, id, token, why)
        case Leave():
            return _leave(state, event)
        case Lost(id, why):
            return _remove(state, id, why)
        case LastCallOver(call) if call and call == state.last_call:
            return _last_call_over(state)
        case LastCallOver():
            return state, ()
        case Close(id, why, report):
            return _close(state, id, why, report)


def _join(state: Round, event: Join) -> tuple[Round, tuple[Effect, ...]]:
    id, token = event.node.id, event.token
    if state.closed and (id not in state.ranks or id in state.gone or token == state.number):
        return state, (state.closed,)
    known = id in state.members or id in state.queue or id in state.awaited
    if state.evicting and id in state.awaited:
        return state, (Refused(id, token, "it did not come back within the last call"),)
    if token > state.number or (token == state.number and id not in state.ranks):
        why = f"the rendezvous has not got beyond round {state.number}"
        return state, (Refused(id, token, f"its round {token} never was: {why}"),)
    if token and not known:
        return state, (Refused(id, token, _why_stale(state, token)),)
    if id in state.ranks:
        if token < state.number:  # it has not heard yet, or repeats itself
            return state, (_seated(state, id, digest(state)),)
        over, told = _end(state, id, event.why)
        after, effects = _admit(over, event.node)
        return after, (*told, *effects)
    if id in state.members or id in state.queue:
        news = standing(state, id)
        assert news is not None
        return state, (news,)
    if id in state.awaited and token != state.number - 1:
        # It was seated after it made this call; whether its workers run, only it knows.
        assert state.ended is not None
        return state, (state.ended,)
    return _admit(state, event.node)


def _why_stale(state: Round, token: int) -> str:
    how = f"; {state.ended}" if state.ended and state.ended.round == token else ""
    return f"round {token} went on without it, and round {state.number} is the current one{how}"


def _admit(state: Round, node: Node) -> tuple[Round, tuple[Effect, ...]]:
    """Give a node that is nowhere yet a seat in the round that forms, or a place in the queue."""
    state, told = _hear(state, node.id)
    awaited = state.awaited - {node.id}
    state = replace(state, awaited=awaited, version=state.version + 1)
    if not state.complete and state._free > 0:
        state = replace(state, members={**state.members, node.id: node})
        after, effects = _settle(state)
        placed = () if after.complete else (Placed(node.id, "forming"),)
        return after, (*told, *placed, *effects)
    before = state.waiting
    state = replace(state, queue={**state.queue, node.id: node})
    if state.waiting > before:
        return state, (Placed(node.id, "waiting"), NodesWaiting(state.number, state.waiting))
    return state, (Placed(node.id, "standby"),)


def _failed(state: Round, id: str, token: int, report: str) -> tuple[Round, tuple[Effect, ...]]:
    if state.closed:
        return state, (state.closed,)
    if token == state.number and id in state.ranks:
        over, told = _end(state, id, "its workers failed", report)
        return _judge(replace(over, unheard=over.awaited - {id}), told)
    if not holds(state, id, token):
        return state, (Refused(id, token, _why_stale(state, token)),)
    after, told = _heard(state, id, token)
    verdict = judged(after, token)
    return after, told or ((verdict,) if verdict else ())


def _heard(state: Round, id: str, token: int) -> tuple[Round, tuple[Effect, ...]]:
    return _hear(state, id) if holds(state, id, token) else (state, ())


def _hear(state: Round, id: str) -> tuple[Round, tuple[Effect, ...]]:
    if id not in state.unheard:
        return state, ()
    heard = replace(state, unheard=state.unheard - {id}, version=state.version + 1)
    return _judge(heard, ())


def _judge(state: Round, told: tuple[Effect, ...]) -> tuple[Round, tuple[Effect, ...]]:
    """Charge the job with the failure, if everyone has been heard of."""
    if state.unheard:
        return state, told
    state = replace(state, failures=state.failures + 1, charged=True)
    assert state.ended is not None
    return state, (*told, Judged(state.ended.round, True, state.failures, state.ended))


def _forgive(state: Round, id: str, why: str) -> tuple[Round, tuple[Effect, ...]]:
    """Take a member that had not been heard of as the cause of the failure in the others."""
    if id not in state.unheard:
        return state, ()
    cause = RoundEnded(state.number - 1, id, why)
    state = replace(state, unheard=frozenset(), ended=cause, version=state.version + 1)
    return state, (Judged(cause.round, False, state.failures, cause),)


def _leaving(state: Round, id: str, token: int, why: str) -> tuple[Round, tuple[Effect, ...]]:
    if state.closed or not holds(state, id, token):
        return state, ()
    if token == state.number:
        return _end(state, id, why)
    return _forgive(state, id, why)


def _leave(state: Round, event: Leave) -> tuple[Round, tuple[Effect, ...]]:
    seated_in = state.number if event.id in state.ranks else state.number - 1
    if event.token and event.token != seated_in:
        return state, (Refused(event.id, event.token, _why_stale(state, event.token)),)
    if state.closed and event.id in state.ranks:
        if event.id in state.gone:
            return state, ()
        gone = state.gone | {event.id}
        return replace(state, gone=gone, version=state.version + 1), ()
    return _remove(state, event.id, event.why)


def _remove(state: Round, id: str, why: str) -> tuple[Round, tuple[Effect, ...]]:
    """Take a node out, wherever it is."""
    if id in state.gone:
        return state, ()
    if id in state.ranks:
        over, told = _end(state, id, why)
        after, effects = _settle(replace(over, awaited=over.awaited - {id}))
        return after, (*told, *effects)
    state, told = _forgive(state, id, why)
    if id not in state.members and id not in state.queue and id not in state.awaited:
        return state, ()
    before = state.waiting
    state = replace(
        state,
        members={k: v for k, v in state.members.items() if k != id},
        queue={k: v for k, v in state.queue.items() if k != id},
        awaited=state.awaited - {id},
        version=state.version + 1,
    )
    if state.complete:
        fewer = state.waiting != before
        return state, (NodesWaiting(state.number, state.waiting),) if fewer else ()
    after, effects = _settle(state)
    return after, (*told, *effects)


def _end(state: Round, id: str, why: str, report: str = "") -> tuple[Round, tuple[Effect, ...]]:
    """End the complete round by the doing of one node; nobody is in the next one yet."""
    ended = RoundEnded(state.number, id, why, report)
    over = replace(
        state,
        number=state.number + 1,
        version=state.version + 1,
        members={},
        ranks={},
        previous=state.ranks,
        awaited=frozenset(state.members) - state.gone,
        ended=ended,
        charged=False,
        gone=frozenset(),
    )
    return over, (ended,)


def _last_call_over(state: Round) -> tuple[Round, tuple[Effect, ...]]:
    if state.awaited and not state.evicting:
        call = state.version + 1
        state = replace(state, evicting=True, last_call=call, version=call)
        return state, (LastCall(call),)
    told: tuple[Effect, ...] = ()
    if state.unheard:  # they were there, and have nothing to say
        state, told = _judge(replace(state, unheard=frozenset()), ())
    after, effects = _settle(replace(state, awaited=frozenset()), last_call_over=True)
    return after, (*told, *effects)


def _settle(state: Round, last_call_over: bool = False) -> tuple[Round, tuple[Effect, ...]]:
    """Bring the round that forms where the rules lead: seats filled, last call, complete."""
    if state.complete or state.closed:
        return state, ()
    up = list(state.queue.items())[: state._free]
    if up:
        moved = dict(up)
        queue = {k: v for k, v in state.queue.items() if k not in moved}
        state = replace(state, members={**state.members, **moved}, queue=queue)
    enough = len(state.members) >= state.min_nodes
    nobody_to_wait_for = bool(state.previous) and not state.awaited
    full = len(state.members) == state.max_nodes
    if full or (enough and (nobody_to_wait_for or last_call_over)):
        return _complete(state)
    effects: tuple[Effect, ...] = tuple(Placed(id, "forming") for id, _ in up)
    if enough and not state.last_call:
        state = replace(state, last_call=state.version)
        effects = (*effects, LastCall(state.last_call))
    elif not enough and state.last_call:
        state = replace(state, last_call=0)
    return state, effects


def _complete(state: Round) -> tuple[Round, tuple[Effect, ...]]:
    state = replace(
        state,
        version=state.version + 1,
        ranks=assign_ranks(state.members, state.previous),
        last_call=0,
        evicting=False,
    )
    same = digest(state)
    return state, tuple(_seated(state, id, same) for id in state.ranks)


def _seated(state: Round, id: str, same: str) -> Seated:
    leader = state.members[next(iter(state.ranks))]
    rank, world_size = state.ranks[id], len(state.ranks)
    where = leader.addr, same, leader.port
    return Seated(id, state.number, rank, world_size, *where, state.failures)


def _close(state: Round, id: str, why: str, report: str) -> tuple[Round, tuple[Effect, ...]]:
    if state.closed:
        return state, ()
    closed = RoundClosed(id, why, report)
    after = replace(state, closed=closed, last_call=0, version=state.version + 1)
    return after, (closed,)
