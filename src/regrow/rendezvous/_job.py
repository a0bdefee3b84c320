"""One job as the store server keeps it, and whom of its nodes an event concerns.

To compare the views of all nodes after every event would make N joins cost N squared. While a
round forms, a join changes the standing of that node and of nobody else, so only the nodes that
the effects name are looked at, and those whose place in the queue moved. When the round becomes
complete, is over, is judged, or the job is closed, everyone is. How many nodes wait changes with
every arrival and concerns the members alone; the service gathers that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice

from regrow.rendezvous._news import Effect, Event, Node, Placed, subject
from regrow.rendezvous._patience import Bounds, Patience
from regrow.rendezvous._questions import Settings
from regrow.rendezvous._round import Round

FORGET = 60.0
"""Seconds after which a job without nodes is forgotten."""


class Job:
    """One job: its rounds, and who takes part in them."""

    __slots__ = (
        "beats",
        "bounds",
        "empty_at",
        "followers",
        "gather_at",
        "heard_at",
        "life",
        "lives",
        "look_at",
        "patience",
        "run_id",
        "settings",
        "state",
    )

    def __init__(self, run_id: str, life: str, settings: Settings, now: float) -> None:
        self.run_id = run_id
        self.life = life
        self.set_up(settings)
        self.patience = Patience()
        self.beats: dict[str, int] = {}
        """How many of each node's beats were answered, as it said last."""
        self.heard_at: dict[str, float] = {}
        """When that grew, or the node joined."""
        self.lives: dict[str, Hashable] = {}
        """The session of each node."""
        self.followers: dict[str, tuple[Hashable, int, bytes]] = {}
        """By node: session and id of the parked question, mark of what it has seen."""
        self.look_at: float | None = None
        """When to judge what is due; None while there is nothing to wait for."""
        self.gather_at: float | None = None
        """When to tell the members how many nodes wait."""
        self.empty_at: float | None = now
        """Since when it has had no node."""

    def set_up(self, settings: Settings) -> None:
        """Begin with the settings of the first node."""
        self.settings = settings
        self.bounds = Bounds(
            settings.last_call, settings.keep_alive, settings.misses, grace=settings.grace
        )
        self.state = Round(settings.min_nodes, settings.max_nodes, fixed=settings.fixed)

    def check_rank(self, node: Node) -> None:
        """Refuse a node whose rank is another's, where ranks are fixed.

        Raises:
            ValueError: names both.
        """
        if not self.state.fixed or self.state.closed:
            return
        taken = {self.state.previous[id]: id for id in self.state.awaited}
        taken |= {other.wanted or 0: id for id, other in self.state.members.items()}
        first = taken.get(node.wanted or 0, node.id)
        if first != node.id:
            raise ValueError(
                f"two nodes were given node rank {node.wanted}: {first}, and this one, {node.id}; "
                f"give every node a --node-rank of its own"
            )

    @property
    def begun(self) -> bool:
        """Whether any round has been complete, so that nodes may have workers."""
        return self.state.complete or self.state.number > 1

    @property
    def at(self) -> float | None:
        """When something is to be done at the latest."""
        forget_at = None if self.empty_at is None else self.empty_at + FORGET
        times = [at for at in (self.look_at, self.gather_at, forget_at) if at is not None]
        return min(times, default=None)

    def knows(self, id: str) -> bool:
        """Whether the node is somewhere in the state."""
        state = self.state
        return id in state.members or id in state.queue or id in state.awaited


def is_empty(state: Round) -> bool:
    """Return whether nobody is left whose loss would matter."""
    return not state.queue and not state.awaited and len(state.members) == len(state.gone)


def concerned(
    before: Round, event: Event, after: Round, effects: Iterable[Effect]
) -> set[str] | None:
    """Return the nodes whose view may have changed, but for how many nodes wait; None: all."""
    if _all_see(before) != _all_see(after):
        return None
    placed = {effect.id for effect in effects if isinstance(effect, Placed)}
    return placed | (_next(before) ^ _next(after)) | {subject(event)}


def _all_see(state: Round) -> tuple[object, ...]:
    return state.number, state.complete, state.ended, not state.unheard, state.closed


def _next(state: Round) -> set[str]:
    """Return the nodes in the queue that would have a seat in the next round."""
    return set(islice(state.queue, state.waiting))
