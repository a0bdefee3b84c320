"""The rules of the rendezvous: who is in the round, and what each node is told.

A round collects nodes until it is full, or until the last call is over after it became big
enough, and then hands every node its rank. A complete round lasts until a member leaves, is lost
or asks for the next one; then everyone is told at once who and why, and the next round forms,
with a seat kept for every member that has not been heard of. This file holds the rules and
nothing else: no clock, no store, no thread. `step` takes the state (`_state`) and what happened,
and returns the new state and whom to tell what.

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
has left or is lost. A member that is there but does not come back within the last call, or within
the grace that its workers have to stop, if that is longer, is *evicted*: its lease is not renewed
any more (`holds`), which kills its workers, and the others wait once more, for as long as a lease
lasts, before they take its seat. So no two rounds ever have workers. If it comes back by then, it
is welcome: whoever joins has stopped its workers.

Why a failure is judged: when a host is lost, the workers of the others fail as well, in the
collective that the lost ones no longer take part in, and such a failure may be reported first. So
`Failed` ends the round at once, but whose fault it was is known only when every other member has
been heard of after it, which takes one message each way. If any member is lost or leaving by then
(the one that reported, too: the workers of a host that is shut down die before its agent), that was
the cause, and the job is not charged with a failure. All nodes count the same failures, so the job
has one budget of restarts.

Where the members are fixed, nobody can take the seat of one that is lost or leaves for good. So the
round ends as ever, and the others are refused the next one, with the name of who is missing.

Closing is final. A complete round that is closed goes on until its members have left, and these
leave in peace; but one that fails, is leaving or is lost ends it for the others all the same, since
they may be waiting for it. If the job is closed because it has failed, nobody goes on.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from regrow.rendezvous._growing import Dwindling, Growing
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
from regrow.rendezvous._state import (
    Round,
    digest_of,
    holds,
    judged,
    place,
    seated,
    standing,
    stands_by,
    watched,
)

__all__ = [
    "Round",
    "holds",
    "judged",
    "place",
    "seated",
    "standing",
    "stands_by",
    "step",
    "watched",
]

Step = tuple[Round, tuple[Effect, ...]]


def step(state: Round, event: Event) -> Step:
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
        case Lost(id, why, where) if where in (0, place(state, id)):
            return _remove(state, id, why)
        case Lost():
            return state, ()
        case LastCallOver(call) if call and call == state.last_call:
            return _last_call_over(state)
        case LastCallOver():
            return state, ()
        case Close(id, why, report):
            return _close(state, id, why, report)


def _join(state: Round, event: Join) -> Step:
    id, token = event.node.id, event.token
    if state.closed and (id not in state.ranks or id in state.gone or token == state.number):
        return state, (state.closed,)
    if token > state.number or (token == state.number and id not in state.ranks):
        why = f"the rendezvous has not got beyond round {state.number}"
        return state, (Refused(id, token, f"its round {token} never was: {why}"),)
    if token and not _known(state, id):
        return state, (_stale(state, id, token),)
    if id in state.awaited:
        if token == state.number - 1:
            return _admit(state, event.node)
        # It was seated after it made this call; whether its workers run, only it knows.
        assert state.ended is not None
        return state, (state.ended,)
    if id in state.ranks and token == state.number:
        after, effects = _admit(_end(state, id, event.why), event.node)
        return after, (RoundEnded(token, id, event.why), *effects)
    news = standing(state, id)  # it has not heard yet, or repeats itself
    return (state, (news,)) if news else _admit(state, event.node)


def _known(state: Round, id: str) -> bool:
    return id in state.members or id in state.queue or id in state.awaited


def _stale(state: Round, id: str, token: int) -> Refused:
    how = f"; {state.ended}" if state.ended and state.ended.round == token else ""
    went_on = f"round {token} went on without it"
    return Refused(id, token, f"{went_on}, and round {state.number} is the current one{how}")


def _admit(state: Round, node: Node) -> Step:
    """Give a node a seat in the round that forms, or a place in the queue."""
    state, told = _hear(state, node.id)
    awaited = state.awaited - {node.id}
    state = replace(state, awaited=awaited, version=state.version + 1)
    if not state.complete and state.free > 0:
        members = state.members if isinstance(state.members, Growing) else Growing(state.members)
        state = replace(state, members=members.plus(node.id, node))
        after, effects = _settle(state)
        placed = () if after.complete else (Placed(node.id, "forming"),)
        return after, (*told, *placed, *effects)
    before = state.waiting
    state = replace(state, queue={**state.queue, node.id: node})
    if state.waiting > before:
        return state, (Placed(node.id, "waiting"), NodesWaiting(state.number, state.waiting))
    return state, (Placed(node.id, "standby"),)


def _failed(state: Round, id: str, token: int, report: str) -> Step:
    if not seated(state, id, token):
        return state, (state.closed or _stale(state, id, token),)
    if token == state.number:
        over, told = _go_on(_end(state, id, "its workers failed", report))
        return _judge(replace(over, unheard=over.awaited - {id}), told)
    after, told = _hear(state, id)
    news = after.closed or judged(after, token)
    return after, told or ((news,) if news else ())


def _heard(state: Round, id: str, token: int) -> Step:
    return _hear(state, id) if seated(state, id, token) else (state, ())


def _hear(state: Round, id: str) -> Step:
    if id not in state.unheard:
        return state, ()
    heard = replace(state, unheard=state.unheard - {id}, version=state.version + 1)
    return _judge(heard, ())


def _judge(state: Round, told: tuple[Effect, ...]) -> Step:
    """Charge the job with the failure, if everyone has been heard of."""
    if state.unheard:
        return state, told
    state = replace(state, failures=state.failures + 1, charged=True)
    assert state.ended is not None
    return state, (*told, Judged(state.ended.round, True, state.failures, state.ended))


def _forgive(state: Round, id: str, why: str) -> Step:
    """Take what became of a node as the cause of a failure that is not judged yet."""
    if not state.unheard or id not in state.previous:
        return state, ()
    cause = RoundEnded(state.number - 1, id, why)
    state = replace(state, unheard=frozenset(), ended=cause, version=state.version + 1)
    return state, (Judged(cause.round, False, state.failures, cause),)


def _leaving(state: Round, id: str, token: int, why: str) -> Step:
    if not seated(state, id, token):
        return state, ()
    if token == state.number:
        return _go_on(_end(state, id, why))
    return _forgive(state, id, why)


def _leave(state: Round, event: Leave) -> Step:
    seated_in = state.number if event.id in state.ranks else state.number - 1
    if event.token and event.token != seated_in:
        return state, (_stale(state, event.id, event.token),)
    if state.closed and event.id in state.ranks:
        if event.id in state.gone:
            return state, ()
        gone = state.gone | {event.id}
        return replace(state, gone=gone, version=state.version + 1), ()
    return _remove(state, event.id, event.why)


def _remove(state: Round, id: str, why: str) -> Step:
    """Take a node out, wherever it is."""
    if not _known(state, id) or id in state.gone:
        return state, ()
    if state.fixed and not state.closed and (state.complete or state.previous):
        irreplaceable = RoundClosed(id, why, lost=True)
        state = replace(state, closed=irreplaceable, last_call=0, evicting=False)
    if state.complete and id in state.members:
        over = _end(state, id, why)
        return _go_on(replace(over, awaited=over.awaited - {id}))
    before = state.waiting
    state, told = _forgive(state, id, why)
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


def _end(state: Round, id: str, why: str, report: str = "") -> Round:
    """End the complete round by the doing of one node; nobody is in the next one yet."""
    return replace(
        state,
        number=state.number + 1,
        version=state.version + 1,
        members={},
        ranks={},
        digest="",
        previous=state.ranks,
        awaited=Dwindling({id: None for id in state.members if id not in state.gone}),
        ended=RoundEnded(state.number, id, why, report),
        charged=False,
        gone=frozenset(),
    )


def _go_on(over: Round) -> Step:
    """Begin the next round after one that has just ended, and tell its members."""
    assert over.ended is not None
    after, effects = _settle(over)
    return after, (over.ended, *effects)


def _last_call_over(state: Round) -> Step:
    if not state.awaited or state.evicting:
        return _settle(replace(state, awaited=frozenset()), last_call_over=True)
    call = state.version + 1
    state = replace(state, evicting=True, last_call=call, version=call)
    silent = next((id for id in state.previous if id in state.unheard), "")
    after, told = _forgive(state, silent, "nothing was heard of it within the last call")
    return after, (LastCall(call), *told)


def _settle(state: Round, last_call_over: bool = False) -> Step:
    """Bring the round that forms where the rules lead: seats filled, last call, complete."""
    if state.complete or state.closed:
        return state, ()
    up = dict(islice(state.queue.items(), state.free))
    if up:
        queue = {k: v for k, v in state.queue.items() if k not in up}
        state = replace(state, members={**state.members, **up}, queue=queue)
    enough = len(state.members) >= state.min_nodes
    nobody_to_wait_for = bool(state.previous) and not state.awaited
    full = len(state.members) == state.max_nodes
    if full or (enough and (nobody_to_wait_for or last_call_over)):
        return _complete(state)
    effects: tuple[Effect, ...] = tuple(Placed(id, "forming") for id in up)
    if enough and not state.last_call:
        state = replace(state, last_call=state.version)
        effects = (*effects, LastCall(state.last_call))
    elif not enough and state.last_call:
        state = replace(state, last_call=0, evicting=False)
    return state, effects


def _complete(state: Round) -> Step:
    ranks = assign_ranks(state.members, state.previous)
    state = replace(
        state,
        version=state.version + 1,
        ranks=ranks,
        digest=digest_of(state.number, ranks),
        last_call=0,
        evicting=False,
    )
    return state, tuple(_seat(state, id) for id in ranks)


def _seat(state: Round, id: str) -> Seated:
    news = standing(state, id)
    assert isinstance(news, Seated)
    return news


def _close(state: Round, id: str, why: str, report: str) -> Step:
    if state.closed:
        return state, ()
    told: tuple[Effect, ...] = ()
    if report and state.complete:  # nobody shall work on what has failed for good
        state = _end(state, id, why, report)
        told = (RoundEnded(state.number - 1, id, why, report),)
    closed = RoundClosed(id, why, report)
    over = replace(state, closed=closed, last_call=0, evicting=False, version=state.version + 1)
    return over, (*told, closed)
