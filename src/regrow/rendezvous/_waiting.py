"""What a node makes of the views that it gets: the decisions of its handler.

Two things have to be decided whenever something is heard. A node that waits for a round asks
whether it may stop waiting (`judge`), and a node that has workers asks what of it they, or rather
their agent, must be told (`tidings`). Both are functions of what was heard, with no clock, lock or
thread in them; `_touch` and `_dynamic` do what comes out.

Views are levels, not news, so both remember the least that makes news of them: where the node
stood before, and what was said already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous._news import (
    Judged,
    NodesWaiting,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)

if TYPE_CHECKING:
    from regrow.rendezvous._driver import View
    from regrow.rendezvous._state import Round


class Waiting(NamedTuple):
    """A node that has asked for a seat."""

    token: int
    """The round in which it was last seated, as it said when it asked."""
    timeout: float
    """Seconds it is ready to wait; the time in which it stands by does not count."""
    deadline: float | None = None
    """When that is over, by the node's clock; None while it stands by, or before the first view."""
    standby: bool = False
    """Whether it stood by when it was last heard where it stands."""


class Reborn(NamedTuple):
    """This life is over: ask again as a new node."""

    why: str


class TimedOut(NamedTuple):
    """The wait was too long."""


Outcome = Seated | RoundEnded | RoundClosed | Reborn | TimedOut


def judge(waiting: Waiting, view: View, now: float) -> tuple[Waiting, Outcome | None]:
    """Decide whether a wait for a seat is over.

    Args:
        waiting: what the last call returned.
        view: what the node has to believe now.
        now: seconds of the node's clock.

    Returns:
        What to remember; and how the wait has ended, None if it has not. `RoundEnded` means that
        the node was seated without noticing: it asks again, with the number of that round.
    """
    match view.news:
        case Seated(round=round) as seated if round > waiting.token:
            return waiting, seated
        case RoundClosed() as closed:
            return waiting, closed
        case Refused(why=why):
            return waiting, Reborn(why)
        case None:
            return waiting, Reborn("it was given up while it waited")
        case RoundEnded(round=round) as ended if round > waiting.token:
            return waiting, ended
        case Placed(place="standby"):
            return waiting._replace(deadline=None, standby=True), None
        case _:
            if waiting.deadline is None:
                waiting = waiting._replace(deadline=now + waiting.timeout, standby=False)
            over = waiting.deadline is not None and now >= waiting.deadline
            return waiting, TimedOut() if over else None


class Told(NamedTuple):
    """What a node with a seat has said to its agent about its round."""

    round: int = 0
    """The round; 0 before the first."""
    waiting: int = 0
    """How many nodes it said would have a seat in the next round."""
    ended: RoundEnded | None = None
    """That it is over, and how; also when it ended by this node's doing, and nothing was said."""
    closed: RoundClosed | None = None
    """That there will be no other."""


Tidings = RoundEnded | Judged | RoundClosed | NodesWaiting


def tidings(told: Told, view: View, id: str) -> tuple[Told, tuple[Tidings, ...]]:
    """Decide what an agent must be told.

    Args:
        told: what the last call returned; `Told(round)` when the node gets a seat.
        view: what the node has to believe now.
        id: the node.

    Returns:
        What to remember, and what to say, in order.
    """
    if not told.round:
        return told, ()
    news: list[Tidings] = []
    match view.news:
        case Seated(round=told.round) if view.waiting != told.waiting:
            told = told._replace(waiting=view.waiting)
            if view.waiting:
                news.append(NodesWaiting(told.round, view.waiting))
        case RoundEnded(round=told.round) as ended if told.ended is None:
            told = told._replace(ended=ended)
            if ended.id != id:  # else it is this node's own doing
                news.append(ended)
        case RoundClosed() as closed if told.closed is None:
            told = told._replace(closed=closed)
            if closed.id != id:
                news.append(closed)
        case Refused() | None if told.ended is None:
            why = view.news.why if view.news else "the others have given it up"
            lost = RoundEnded(told.round, id, why)
            told = told._replace(ended=lost)
            news.append(lost)
    verdict = view.judged
    if (
        verdict is not None
        and told.ended is not None
        and verdict.round == told.round
        and verdict.cause != told.ended
    ):
        if told.ended.id != id:
            news.append(verdict)
        told = told._replace(ended=verdict.cause)
    return told, tuple(news)


def given_up(told: Told, view: View) -> bool:
    """Return whether the others have given up the seat that the node was told of."""
    return bool(told.round) and (view.news is None or isinstance(view.news, Refused))


def explain_timeout(state: Round, run_id: str, id: str, timeout: float) -> str:
    """Say what a node waited for in vain, how long, and who was missing."""
    waited = f"the rendezvous '{run_id}': node {id} waited {timeout:g} s for "
    members = len(state.members)
    if state.complete:
        return (
            f"{waited}a seat, and round {state.number} goes on with its {members} "
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
        gone = ", ".join(sorted(state.awaited))
        text += f"; of round {state.number - 1} nothing was heard from {gone}"
    return text
