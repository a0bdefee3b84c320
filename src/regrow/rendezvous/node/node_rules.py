"""Decisions of one node about the snapshots that it receives: pure functions.

A node that waits for a round decides with each snapshot whether the wait is over (`end_wait`). A
node that has workers decides which notifications its agent gets (`notifications`). Neither function
has a clock, a lock or a thread. `handler` and `keep_alive` carry out the decisions.

Snapshots show the state and not its changes. To find a change, each function keeps only what it
needs: the previous status, and the notifications that were sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous.protocol.messages import (
    Judged,
    LeavingAnnounced,
    NodeRefused,
    NodesWaiting,
    Placed,
    RestartSpent,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous.protocol.state import departed, stopped_by
from regrow.rendezvous.settings import DEPARTED
from regrow.utils import host_of, printable

if TYPE_CHECKING:
    from regrow.rendezvous.node.driver import Snapshot
    from regrow.rendezvous.protocol.failure_detector import Bounds
    from regrow.rendezvous.protocol.messages import Departed
    from regrow.rendezvous.protocol.state import Round


class SeatRequest(NamedTuple):
    """A node's request for a seat, and its wait."""

    token: int
    """The round of the node's last seat, sent with the request."""
    timeout: float
    """Longest wait in seconds; the time on standby does not count."""
    deadline: float | None = None
    """When the wait times out, by the node's clock; None on standby, or before the first
    snapshot."""
    standby: bool = False
    """Whether the latest status was standby."""


class Rejoin(NamedTuple):
    """Outcome: the node was evicted, and has to ask again under a new id."""

    why: str


class JobStopped(NamedTuple):
    """Outcome: the job was stopped while this node stood by."""

    by: str
    """Who asked for it."""


class TimedOut(NamedTuple):
    """Outcome: the wait timed out."""


Outcome = Seated | RoundEnded | RoundClosed | Rejoin | JobStopped | TimedOut


def end_wait(
    waiting: SeatRequest, snapshot: Snapshot, now: float
) -> tuple[SeatRequest, Outcome | None]:
    """Decide whether a wait for a seat is over.

    Args:
        waiting: the request that the last call returned.
        snapshot: the latest snapshot.
        now: seconds of the node's clock.

    Returns:
        The request for the next call, and the outcome of the wait; None while the wait continues.
        `RoundEnded` means that the node had a seat without noticing. It then asks again, with that
        round's number.
    """
    if waiting.standby and (by := _stopped_by(snapshot.status)):
        return waiting, JobStopped(by)
    match snapshot.status:
        case Seated(round=round) as seated if round > waiting.token:
            return waiting, seated
        case RoundClosed() as closed:
            return waiting, closed
        case NodeRefused(why=why):
            return waiting, Rejoin(why)
        case None:
            return waiting, Rejoin("the other nodes evicted it while it waited")
        case RoundEnded(round=round) as ended if round > waiting.token:
            return waiting, ended
        case Placed(place="standby"):
            return waiting._replace(deadline=None, standby=True), None
        case _:
            if waiting.deadline is None:
                waiting = waiting._replace(deadline=now + waiting.timeout, standby=False)
            over = waiting.deadline is not None and now >= waiting.deadline
            return waiting, TimedOut() if over else None


def _stopped_by(status: object) -> str:
    match status:
        case Placed(stopped_by=by):
            return by
        case Seated(departed=nodes):
            return stopped_by(nodes)
    return ""


class Notified(NamedTuple):
    """The notifications about its round that a node with a seat has sent to its agent."""

    round: int = 0
    """The round; 0 before the first."""
    waiting: tuple[int, tuple[str, ...]] = (0, ())
    """The number of waiting nodes, and the first ones, in the latest snapshot."""
    spent: int = 0
    """The number of restarts that replaced workers of the round have spent."""
    leaving: int = 0
    """The number of members of the round that have announced to leave."""
    ended: RoundEnded | None = None
    """The end of the round. Also set if this node ended the round, and its agent needs no
    notification."""
    closed: RoundClosed | None = None
    """The end of the rendezvous."""


Notification = RoundEnded | Judged | RoundClosed | NodesWaiting | LeavingAnnounced | RestartSpent


def notifications(
    notified: Notified, snapshot: Snapshot, id: str
) -> tuple[Notified, tuple[Notification, ...]]:
    """Return the notifications that a node has to send to its agent.

    Args:
        notified: the state that the last call returned; `Notified(round)` when the node gets a
            seat.
        snapshot: the latest snapshot.
        id: the node.

    Returns:
        The state for the next call, and the notifications in order.
    """
    if not notified.round:
        return notified, ()
    due: list[Notification] = []
    match snapshot.status:
        case Seated(round=notified.round, failures=before):
            first = snapshot.first_waiting
            if snapshot.waiting and (snapshot.waiting, first) != notified.waiting:
                due.append(NodesWaiting(notified.round, snapshot.waiting, first))
            if snapshot.failures - before > notified.spent:
                due.append(RestartSpent(notified.round, snapshot.failures))
            for leaver, why in snapshot.leaving[notified.leaving :]:
                if leaver != id:
                    due.append(LeavingAnnounced(notified.round, leaver, why))
            notified = notified._replace(
                waiting=(snapshot.waiting, first),
                spent=max(notified.spent, snapshot.failures - before),
                leaving=max(notified.leaving, len(snapshot.leaving)),
            )
        case RoundEnded(round=notified.round) as ended if notified.ended is None:
            notified = notified._replace(ended=ended)
            if ended.id != id:  # else this node ended the round itself
                due.append(ended)
        case RoundClosed() as closed if notified.closed is None:
            notified = notified._replace(closed=closed)
            if closed.id != id:
                due.append(closed)
        case NodeRefused() | None if notified.ended is None:
            why = snapshot.status.why if snapshot.status else "the other nodes evicted it"
            lost = RoundEnded(notified.round, id, why, lost=True)
            notified = notified._replace(ended=lost)
            due.append(lost)
    verdict = snapshot.judged
    if (
        verdict is not None
        and notified.ended is not None
        and verdict.round == notified.round
        and verdict.cause != notified.ended
    ):
        if notified.ended.id != id:
            due.append(verdict)
        notified = notified._replace(ended=verdict.cause)
    return notified, tuple(due)


def is_evicted(notified: Notified, snapshot: Snapshot) -> bool:
    """Return whether the others have evicted the node from its seat."""
    return bool(notified.round) and (
        snapshot.status is None or isinstance(snapshot.status, NodeRefused)
    )


def beat_pause(bounds: Bounds, took: float, *, answered: bool, leased: bool) -> float:
    """Return the seconds from the start of one heartbeat to the start of the next.

    A node that holds a lease keeps it: it tries again soon. A node without a lease loses nothing by
    a late heartbeat, and heartbeats are part of the load if answers are slow. So it rests for as
    long as its last heartbeat took.

    Args:
        bounds: the time limits.
        took: seconds until the last heartbeat was answered, or had failed.
        answered: whether it was answered.
        leased: whether the node holds a lease.
    """
    if leased:
        return bounds.keep_alive if answered else bounds.keep_alive / 4
    return min(max(bounds.keep_alive, 2 * took), bounds.lease)


def explain_timeout(
    state: Round, run_id: str, id: str, timeout: float
) -> tuple[str, tuple[Departed, ...]]:
    """Explain why a wait timed out; see `Driver.explain_timeout`."""
    text = _timeout_text(state, run_id, id, timeout)
    return text, () if state.complete else departed(state)[:DEPARTED]


def _timeout_text(state: Round, run_id: str, id: str, timeout: float) -> str:
    """Return the error text of a timed-out wait: its purpose, its length, and the missing nodes."""
    waited = f"the rendezvous '{run_id}': host {host_of(id)} waited {timeout:g} s for "
    members = len(state.members)
    if state.complete:
        return (
            f"{waited}a seat, and round {state.number} continues with its {members} "
            f"node{'s' if members != 1 else ''}: {', '.join(state.ranks)}"
        )
    if state.fixed:
        here = {node.wanted for node in state.members.values()}
        away = [str(rank) for rank in range(state.max_nodes) if rank not in here]
        return f"{waited}all {state.max_nodes} nodes; missing: node rank {', '.join(away)}"
    text = (
        f"{waited}round {state.number}, which has {members} of at least {state.min_nodes} "
        f"nodes: {', '.join(state.members)}"
    )
    if state.awaited:
        gone = ", ".join(str(host_of(id)) for id in sorted(state.awaited))
        text += f"; not back from round {state.number - 1}: {gone}"
    if state.departed:
        gone = ", ".join(f"{host_of(node.id)} ({printable(node.why)})" for node in departed(state))
        text += f"; lost from round {state.number - 1}: {gone}"
    return text
