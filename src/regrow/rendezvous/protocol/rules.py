"""The rules of the rendezvous: the members of a round, how it ends, which failures are charged.

A round collects nodes until it is full, or until the last call is over after there were enough
nodes. It then gives every node its rank. A complete round lasts until a member leaves, is lost or
asks for the next round. Then all members are notified at once, with the node and the reason, and
the next round forms. It keeps a seat for every member that has not reported back yet. This module
contains the rules only: no clock, no store, no thread. `step` takes the state (`state.py`) and an
event, and returns the new state, or the reason why it refuses the event.

The rules run in two places. In the store server, a join is one message in each direction. In the
nodes of a job, each node applies its own event and publishes the state by compare-and-set. Such
nodes see only the state, so the state alone answers all questions: `status_of` returns the status
of a node, even if the node has missed changes.

**No time.** The rules contain no time because many hosts read the state, and their clocks cannot be
compared. Time comes in as two events, `LastCallOver` and `NodeLost`. A driver reports them after it
has waited by its own monotonic clock (`failure_detector.py`). Each event names its last call or its
seat. An event that arrives after that call or seat is over changes nothing.

**Token.** A node that was paused or cut off does not know that it was evicted. The number of the
round in which a node was last seated is its fencing token, and the node sends it with every call.
The first call with a stale token is refused, with the reason. The node may then rejoin under a new
id. An id is valid for one life, so late messages of the old life cannot harm the new one. A call
that is repeated because its answer was lost changes nothing. The rules require two properties of a
driver: the calls of one life take effect in order, and no call takes effect after the eviction. A
session of the store server is such a life. A node that compares and sets the state itself makes one
call after the other, and knows which calls took effect.

**Queue.** Nodes that arrive too late queue in order of arrival. The running round may have free
seats. The first queued nodes, one for each free seat, are *waiting*. The members are notified, so
that they can make room by starting the next round. The other queued nodes *stand by*: they cost the
job nothing, and move up when a seat becomes free. The state does not store which nodes wait and
which stand by, because this follows from the numbers.

**Last call.** The last call ends early when every member of the previous round is back, has left or
is lost. A member must come back within the last call, or within the grace that its workers have to
stop, if that is longer. Otherwise the member is *evicted*: its lease is not renewed any more
(`holds`), which kills its workers. The other nodes then wait for the length of one lease before
they take its seat. So no two rounds ever have workers at the same time. If the member comes back in
that time, it keeps its seat, because a node that joins has stopped its workers.

**Verdict.** When a host is lost, the workers of the other hosts also fail, in a collective without
the lost workers. Such a failure may be reported first. So `WorkersFailed` ends the round at once,
but the cause is not known yet. It is known when every other member has sent a message after the
failure, which takes one message in each direction. If a member is lost or leaving by then, that
member is the cause, and the job is not charged with a failure. This also holds for the member that
reported the failure: when a host is shut down, its workers die before its agent. All nodes count
the same failures, so the job has one budget of restarts.

**Leaving with notice.** A host may leave a job whose workers can go on in the next round, in their
processes. If it announces this (`NodeLeaving.until_left`), the round goes on while the host stops
its own workers: a round that is over has to be left by all workers within one lease, and the grace
of the leaving ones is longer. The round ends when all that have announced to leave are gone. No
queued node is let in before. If too few nodes would be left for the next round, the round ends at
once: the other workers then need the time to save. The end of the leaving workers makes others
fail, so such a failure is not charged.

**Fixed members.** If the members are fixed, no other node can take the seat of a member that is
lost or leaves for good. So the round ends as usual. The other members are refused the next round,
with the name of the missing node.

**Closing.** Closing is final, so only a member of the round may close it. A node without a seat
(refused, evicted, or from an earlier run) cannot end the job of the other nodes. A complete round
that is closed continues until its members have left. A member that fails, is leaving or is lost
still ends the closed round for the other members, since they may wait for that member. A failure in
a closed round is final, because no further round can recover from it. If the job is closed because
it has failed, no node continues.
"""

from __future__ import annotations

from itertools import islice

from msgspec.structs import replace

from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    LastCallOver,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    RoundClosed,
    RoundEnded,
    SpendRestart,
    WorkersFailed,
)
from regrow.rendezvous.protocol.ranks import assign_ranks
from regrow.rendezvous.protocol.state import Round, digest_of, place, seated
from regrow.utils import host_of, printable

Refusal = NodeRefused | RoundClosed
Step = tuple[Round, Refusal | None]


def step(state: Round, event: Event) -> Step:
    """Apply an event to the state.

    Returns:
        The new state (the same object if nothing changed), and the refusal of the event; None if
        the event was accepted, or changes nothing.
    """
    match event:
        case JoinRound(node, token, why):
            return _join(state, node, token, why)
        case WorkersFailed(id, token, report):
            return _failed(state, id, token, report)
        case SpendRestart(id, token, number):
            return _spend(state, id, token, number)
        case EndConfirmed(id, token) if seated(state, id, token):
            return _confirmed(state, id), None
        case NodeLeaving(id, token) if seated(state, id, token):
            return _leaving(state, event), None
        case LeaveRound():
            return _leave(state, event)
        case NodeLost(id, why, where) if where in (0, place(state, id)):
            return _remove(state, id, why), None
        case LastCallOver(call) if call and call == state.last_call:
            return _last_call_over(state), None
        case CloseRendezvous(id, why, report):
            return _close(state, id, why, report)
        case _:
            return state, None


def _join(state: Round, node: Node, token: int, why: str) -> Step:
    id = node.id
    if state.closed and (id not in state.ranks or id in state.gone or token == state.number):
        return state, state.closed
    if id in state.gone:
        return state, NodeRefused(id, f"it has left round {state.number}")
    if token > state.number or (token == state.number and id not in state.ranks):
        beyond = f"the current round is {state.number}"
        return state, NodeRefused(id, f"it names round {token}, and {beyond}")
    if token and not place(state, id):
        return state, _refuse_stale(state, id, token)
    if id in state.ranks and token == state.number:
        return _admit(_end(state, id, why), node), None
    if not place(state, id) or (id in state.awaited and token == state.number - 1):
        return _admit(state, node), None
    # The node repeats the call, or it was seated after it made the call. In the second case, only
    # the node knows whether its workers run.
    return state, None


def _refuse_stale(state: Round, id: str, token: int) -> NodeRefused:
    how = f"; {state.ended}" if state.ended and state.ended.round == token else ""
    went_on = f"round {token} continued without it"
    return NodeRefused(id, f"{went_on}, and round {state.number} is the current one{how}")


def _admit(state: Round, node: Node) -> Round:
    """Give a node a seat in the round that forms, or a place in the queue."""
    state = _confirmed(state, node.id)
    state = replace(state, awaited=state.awaited - {node.id}, version=state.version + 1)
    if not state.complete and state.free > 0:
        return _settle(replace(state, members={**state.members, node.id: node}))
    return replace(state, queue={**state.queue, node.id: node})


def _failed(state: Round, id: str, token: int, report: str) -> Step:
    if not seated(state, id, token):
        return state, state.closed or _refuse_stale(state, id, token)
    if token == state.number and state.closed and report:
        by = f"host {host_of(state.closed.id)}: {printable(state.closed.why)}"
        return _close(state, id, f"its workers failed; no round follows, because {by}", report)
    if token == state.number and state.leaving:  # their workers end, so those of others may fail
        return _settle(_end_now(state)), None
    if token == state.number:
        over = _settle(_end(state, id, "its workers failed", report))
        return _give_verdict(replace(over, unheard=over.awaited - {id})), None
    after = _confirmed(state, id)
    return after, after.closed


def _spend(state: Round, id: str, token: int, number: int) -> Step:
    if token != state.number or not seated(state, id, token):
        return state, state.closed or _refuse_stale(state, id, token)
    before = state.spent.get(id, 0)
    if state.closed or number <= before:
        return state, state.closed
    return replace(
        state,
        failures=state.failures + number - before,
        spent={**state.spent, id: number},
        version=state.version + 1,
    ), None


def _confirmed(state: Round, id: str) -> Round:
    """Record that a node has sent a message after the failure."""
    if id not in state.unheard:
        return state
    return _give_verdict(replace(state, unheard=state.unheard - {id}, version=state.version + 1))


def _give_verdict(state: Round) -> Round:
    """Charge the job with the failure if every other member has sent a message after it."""
    if state.unheard:
        return state
    return replace(state, failures=state.failures + 1, charged=True)


def _forgive(state: Round, id: str, why: str, lost: bool) -> Round:
    """Record a lost or leaving node as the cause of a failure that has no verdict yet."""
    if not state.unheard or id not in state.previous:
        return state
    cause = RoundEnded(state.number - 1, id, why, lost=lost)
    return replace(state, unheard=frozenset(), ended=cause, version=state.version + 1)


def _leaving(state: Round, event: NodeLeaving) -> Round:
    id, why = event.id, event.why
    if event.token != state.number:
        return _forgive(state, id, why, lost=False)
    if id in state.leaving:  # the node repeats the call
        return state
    if event.until_left and not (state.closed or state.fixed):
        leaving = replace(state, leaving={**state.leaving, id: why}, version=state.version + 1)
        if _enough_stay(leaving):
            return leaving
    return _settle(_end(state, id, why, full_grace=event.full_grace, keep=event.keep))


def _enough_stay(state: Round) -> bool:
    """Return whether the nodes that are not leaving are enough for the next round."""
    staying = state.members.keys() - state.leaving.keys()
    return len(staying) + len(state.queue) >= state.min_nodes


def _end_now(state: Round) -> Round:
    """End the round at once, though nodes that have announced to leave are still in it."""
    leaver = next(id for id in state.leaving if id not in state.gone)
    return _end(state, leaver, state.leaving[leaver], full_grace=True)


def _leave(state: Round, event: LeaveRound) -> Step:
    seated_in = state.number if event.id in state.ranks else state.number - 1
    if event.token and event.token != seated_in:
        return state, _refuse_stale(state, event.id, event.token)
    if state.closed and event.id in state.ranks and event.id not in state.gone:
        gone = state.gone | {event.id}
        return replace(state, gone=gone, version=state.version + 1), None
    return _remove(state, event.id, event.why), None


def _remove(state: Round, id: str, why: str) -> Round:
    """Remove a lost or leaving node from any place; a complete round ends with it."""
    if not place(state, id) or id in state.gone:
        return state
    if state.fixed and not state.closed and (state.complete or state.previous):
        irreplaceable = RoundClosed(id, why, lost=True)
        state = replace(state, closed=irreplaceable, last_call=0, evicting=False)
    elif state.closed and state.closed.lost and id in state.awaited:
        both = f"{state.closed.why}; host {host_of(id)}: {why}"
        state = replace(state, closed=state.closed._replace(why=both))
    if state.complete and id in state.members:
        return _remove_member(state, id, why)
    state = _forgive(state, id, why, lost=True)
    was_member = not state.complete and id in state.previous
    state = replace(
        state,
        members={k: v for k, v in state.members.items() if k != id},
        queue={k: v for k, v in state.queue.items() if k != id},
        awaited=state.awaited - {id},
        departed={**state.departed, id: why} if was_member else state.departed,
        version=state.version + 1,
    )
    return _settle(_end_now(state) if state.leaving and not _enough_stay(state) else state)


def _remove_member(state: Round, id: str, why: str) -> Round:
    """Remove a member of the complete round, which ends unless others have announced to leave."""
    announced = id in state.leaving
    if announced and state.leaving.keys() - state.gone != {id}:
        return replace(state, gone=state.gone | {id}, version=state.version + 1)
    why = state.leaving[id] if announced else why
    over = _end(state, id, why, full_grace=announced, lost=not announced, keep=announced)
    departed = {**over.departed, id: why}
    return _settle(replace(over, awaited=over.awaited - {id}, departed=departed))


def _end(
    state: Round,
    id: str,
    why: str,
    report: str = "",
    *,
    full_grace: bool = False,
    lost: bool = False,
    keep: bool = False,
) -> Round:
    """End the complete round because of one node; the next round has no members yet."""
    return replace(
        state,
        number=state.number + 1,
        version=state.version + 1,
        members={},
        ranks={},
        digest="",
        previous=state.ranks,
        awaited=frozenset(id for id in state.members if id not in state.gone),
        ended=RoundEnded(state.number, id, why, report, full_grace, lost, keep),
        departed={id: why for id, why in state.leaving.items() if id in state.gone},
        spent={},
        charged=False,
        leaving={},
        gone=frozenset(),
    )


def _last_call_over(state: Round) -> Round:
    if not state.awaited or state.evicting:
        late = dict.fromkeys(sorted(state.awaited), "it did not come back within the last call")
        over = replace(state, awaited=frozenset(), departed={**state.departed, **late})
        return _settle(over, last_call_over=True)
    call = state.version + 1
    state = replace(state, evicting=True, last_call=call, version=call)
    silent = next((id for id in state.previous if id in state.unheard), "")
    return _forgive(state, silent, "it sent no message within the last call", lost=True)


def _settle(state: Round, last_call_over: bool = False) -> Round:
    """Fill the seats of the round that forms, begin or end its last call, and complete it."""
    if state.complete or state.closed:
        return state
    up = dict(islice(state.queue.items(), state.free))
    if up:
        queue = {k: v for k, v in state.queue.items() if k not in up}
        state = replace(state, members={**state.members, **up}, queue=queue)
    enough = len(state.members) >= state.min_nodes
    all_are_back = bool(state.previous) and not state.awaited
    full = len(state.members) == state.max_nodes
    if full or (enough and (all_are_back or last_call_over)):
        ranks = assign_ranks(state.members, state.previous)
        return replace(
            state,
            version=state.version + 1,
            ranks=ranks,
            digest=digest_of(state.number, ranks),
            last_call=0,
            evicting=False,
        )
    if enough and not state.last_call:
        return replace(state, last_call=state.version)
    if not enough and state.last_call:
        return replace(state, last_call=0, evicting=False)
    return state


def _close(state: Round, id: str, why: str, report: str) -> Step:
    if state.closed and not (report and seated(state, id, state.number)):
        return state, None
    if id not in state.members and id not in state.awaited:
        why = f"it has no seat in round {state.number}, and only a member can close the rendezvous"
        return state, NodeRefused(id, why)
    if report and state.complete:  # no node may continue with a job that has failed
        state = _end(state, id, why, report, full_grace=True)
    elif state.leaving:
        state = _end_now(state)
    closed = RoundClosed(id, why, report)
    over = replace(state, closed=closed, last_call=0, evicting=False, version=state.version + 1)
    return over, None
