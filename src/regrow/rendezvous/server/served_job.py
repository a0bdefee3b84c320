"""One job of a server: its rounds, the nodes that take part, and the copies of its record."""

from __future__ import annotations

from collections.abc import Container, Hashable
from itertools import islice

from regrow.rendezvous.protocol.failure_detector import Bounds, FailureDetector
from regrow.rendezvous.protocol.messages import MOST_JOINED, Event, Node, subject
from regrow.rendezvous.protocol.state import Round, nodes, place
from regrow.rendezvous.protocol.succession import Succession
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.copies import Copies
from regrow.rendezvous.server.records import JobRecord
from regrow.rendezvous.settings import FORGET_JOB


class ServedJob:
    """The state of one job: its rounds, and the nodes that take part."""

    def __init__(
        self,
        run_id: str,
        life: str,
        settings: messages.JobSettings,
        now: float,
        recovered: JobRecord | None = None,
    ) -> None:
        self.run_id = run_id
        self.life = life
        self.set_up(settings)
        succession, seq = Succession(), 0
        if recovered is not None:
            self.state, succession, seq = recovered.state, recovered.succession, recovered.seq
        self.copies = Copies(
            life,
            succession,
            seq,
            self.bounds.lease,
            settings.successors,
            settings.witness,
            now,
            lambda: messages.encode(self.record()),
        )
        self.detector = FailureDetector()
        # The nodes of an earlier server have the usual time to send their next heartbeat.
        ids = (*self.state.members, *self.state.queue, *self.state.awaited)
        self.beats = dict.fromkeys(ids, 0)
        """Answered heartbeats of each node, as the node's latest heartbeat reports them."""
        self.heard_at = dict.fromkeys(ids, now)
        """When that number last increased, or when the node joined."""
        self.renewed = dict.fromkeys(self.state.ranks, self.state.number)
        """The latest round in which a node has renewed a lease, as far as this server may know."""
        self.lives: dict[str, Hashable] = {}
        """The session of each node."""
        self.followers: dict[str, tuple[Hashable, int, bytes]] = {}
        """For each node: session and id of its parked question, and mark of its last snapshot."""
        self.check_at: float | None = now
        """Time of the next check by the failure detector; None if there is nothing to wait for."""
        self.gather_at: float | None = None
        """When to notify the members of the waiting nodes."""
        self.empty_at = None if nodes(self.state) else now
        """Time since which the job has no node."""

    def inherit(self, silence: float, now: float) -> None:
        """Count the silence of all nodes from when an old server renewed its last lease.

        Args:
            silence: how long ago that is, in seconds; negative if it may renew them for a while.
            now: the time, in seconds.
        """
        self.detector = FailureDetector(checked=now, silent=dict.fromkeys(self.beats, (0, silence)))
        self.heard_at = dict.fromkeys(self.beats, now - silence)

    def record(self) -> JobRecord:
        """Return the record of the whole state."""
        return JobRecord(
            self.run_id,
            self.life,
            self.settings,
            self.state,
            self.copies.succession,
            self.copies.seq,
        )

    def set_up(self, settings: messages.JobSettings) -> None:
        """Start with the settings of the first node."""
        self.settings = settings
        self.bounds = Bounds(
            settings.last_call, settings.keep_alive, settings.misses, grace=settings.grace
        )
        self.state = Round(settings.min_nodes, settings.max_nodes, fixed=settings.fixed)

    def check(self, settings: messages.JobSettings) -> None:
        """Refuse a node if its settings differ from those of the job.

        Raises:
            ValueError: the text names what differs.
        """
        for what, theirs, ours in (
            ("nodes", _span(settings), _span(self.settings)),
            ("--rdzv-backend", _backend(settings), _backend(self.settings)),
            ("witness =", _witness(settings), _witness(self.settings)),
            ("keep_alive_interval", settings.keep_alive, self.settings.keep_alive),
            ("keep_alive_max_attempt", settings.misses, self.settings.misses),
        ):
            if theirs != ours:
                raise ValueError(
                    f"the job {self.run_id!r} was set up by its first node with {what} {ours}, and "
                    f"this node has {theirs}; set the same on all nodes, or give another job "
                    f"another id"
                )

    def check_rank(self, node: Node) -> None:
        """Refuse a node if its fixed rank belongs to another node.

        Raises:
            ValueError: two nodes have the same rank; the text names both.
        """
        if not self.state.fixed or self.state.closed:
            return
        taken = {self.state.previous[id]: id for id in self.state.awaited}
        taken |= {other.wanted or 0: id for id, other in self.state.members.items()}
        first = taken.get(node.wanted or 0, node.id)
        if first != node.id:
            raise ValueError(
                f"node rank {node.wanted} is used twice, by node {first} and by this node, "
                f"{node.id}: start each node with a different --node-rank"
            )

    @property
    def at(self) -> float | None:
        """The latest time at which the job needs attention."""
        forget_at = None if self.empty_at is None else self.empty_at + FORGET_JOB
        times = self.check_at, self.gather_at, forget_at, self.copies.at
        return min((at for at in times if at is not None), default=None)

    def ids_of(self, voter: str) -> list[str]:
        """Return the ids of the nodes whose agent is a voter."""
        present = {**self.state.members, **self.state.queue}
        return [id for id, node in present.items() if node.voter and node.voter.id == voter]

    def unleased(self, sessions: Container[Hashable]) -> set[str]:
        """Return the nodes with an open session that hold no lease.

        These are the nodes that wait for a seat, and members that have not renewed the lease of
        their new seat. A member of an ended round may hold its old lease until it is back.
        """
        number = self.state.number
        return {
            id
            for id, session in self.lives.items()
            if session in sessions
            and id not in self.state.awaited
            and (id not in self.state.ranks or self.renewed.get(id) != number)
        }

    def knows(self, id: str) -> bool:
        """Return whether the state contains the node."""
        return place(self.state, id) != 0


def concerned(before: Round, event: Event, after: Round) -> set[str] | None:
    """Return the ids of the nodes with a possibly changed snapshot; None: all nodes.

    Changes of the waiting nodes do not count.
    """
    if _all_see(before) != _all_see(after):
        return None
    moved_up = before.queue.keys() - after.queue.keys()
    return {subject(event), *moved_up} | (_next(before) ^ _next(after))


def _all_see(state: Round) -> tuple[object, ...]:
    phase = state.number, state.complete, state.ended, not state.unheard, state.closed
    return *phase, state.failures, min(len(state.leaving), MOST_JOINED)


def _next(state: Round) -> set[str]:
    """Return the nodes in the queue that would have a seat in the next round."""
    return set(islice(state.queue, state.waiting))


def shown_waiting(state: Round) -> tuple[object, ...]:
    """Return what the members see of the waiting nodes."""
    return state.waiting, state.first_waiting


def _span(settings: messages.JobSettings) -> str:
    return f"{settings.min_nodes}:{settings.max_nodes}"


def _backend(settings: messages.JobSettings) -> str:
    return "static" if settings.fixed else "c10d"


def _witness(settings: messages.JobSettings) -> str:
    return "a directory" if settings.witness else "none"
