"""Decides by one process's clock which silent node is lost, and when a last call is over.

The rules of the round (`rules.py`) contain no time. A driver calls `FailureDetector.check` with the
heartbeats that it has received and with its own monotonic clock. The check returns the events that
are due and the time of the next check. Clocks of other hosts play no part. A heartbeat is a number
that changes, and only the time at which the driver *saw* the change counts.

Silence is evidence only while the driver listens. A driver can be stopped for a minute, alone or
with its host. It then finds a clock that has jumped, and no heartbeats from the time in between. So
one check adds at most one keep-alive interval of silence, even if the last check was long ago. The
driver may also have been stopped between receiving heartbeats and checking them. So a late check
reports only nodes whose silence had reached the limit at the previous check. The next check decides
about the others, with the heartbeats that have arrived by then.

A silent node may still run its workers until its lease expires and the guardian kills them. The
lease starts, by the node's own clock, when the node sends a heartbeat that is answered. It lasts
`Bounds.lease` seconds. A node counts as lost after `Bounds.lease + Bounds.kill` seconds of silence,
so its workers are dead by then. If a driver knows that a node has ended, because its connection was
closed, it reports the loss at once, without a check.

**Overload.** If many nodes are silent at once, the likely cause is a lack of processor time, not
the loss of so many hosts. An evicted node would join again, which costs more processor time, so the
round might never form. So while many are silent, a connected node without a lease keeps its place
for `Bounds.patience`. No workers can run there that must be dead before another node takes the
place. If that node is lost after all, a round that forms with it fails once. The kernel closes the
connection of a lost host earlier. Nodes that may hold a lease are evicted as always.

The last call ends a number of seconds after the driver first saw it. Its end removes no member at
once: the leases of the missing members are not renewed any more, so these members have one more
lease to come back.

If the nodes run the rounds themselves, each node checks only the peers that follow it in the order
of ranks (`PeerDetector`). So the data that a node reads every second does not grow with the job.
When these peers are silent, the node checks more peers: as many as are silent or were found lost.
So the number of checked peers doubles repeatedly. If a thousand nodes die at once, the last one is
detected soon after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from regrow.rendezvous.protocol.messages import LastCallOver, NodeLost
from regrow.rendezvous.protocol.state import Round, place, watched

PEERS = 3
"""Number of peers that each node checks while none is silent. If two peers fail together, both are
detected at once."""
LATE = 2
"""Heartbeat intervals of silence after which a node counts as late."""
MANY_LATE = 3, 0.25
"""Overload: the fewest late nodes, and their least share of all checked nodes."""
PATIENCE = 10
"""How many times as long as usual such a node may be silent under overload."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The time limits of a rendezvous, in seconds unless a field names another unit."""

    last_call: float = 30.0
    """How long a round with enough nodes waits for more nodes."""
    keep_alive: float = 1.0
    """Interval between two heartbeats of a node."""
    misses: int = 3
    """Number of missed heartbeats after which the node's lease expires."""
    kill: float = 1.0
    """How long a node may take to kill its workers after its lease has expired."""
    grace: float = 0.0
    """How long a node may take to stop its workers after a round has ended."""

    @property
    def lease(self) -> float:
        """How long a node may run its workers after it *sent* its last answered heartbeat."""
        return self.keep_alive * self.misses

    @property
    def silence(self) -> float:
        """How long a node may be silent before it counts as lost."""
        return self.lease + self.kill

    @property
    def patience(self) -> float:
        """The same under overload, for a connected node without a lease."""
        return self.silence * PATIENCE

    @property
    def comeback(self) -> float:
        """How long the next round waits for the members of an ended round.

        The wait is never shorter than `grace + kill`. A shorter wait would cut off workers that
        save a checkpoint in their grace.
        """
        return max(self.last_call, self.grace + self.kill)


@dataclass(frozen=True, slots=True)
class FailureDetector:
    """The state that a driver keeps between two checks."""

    checked: float = 0.0
    """Time of the last check, in seconds of the driver's clock."""
    call: int = 0
    """The last call that the driver has seen begin; 0: none."""
    since: float = 0.0
    """When the driver first saw this last call."""
    silent: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """For each node: its latest heartbeat, and the seconds of silence since, counted only while the
    driver listened."""
    overload_until: float = 0.0
    """Time at which the overload is over, unless many nodes are late again."""

    def check(
        self,
        state: Round,
        beats: Mapping[str, int] | None,
        bounds: Bounds,
        now: float,
        me: str = "",
        peers: Set[str] | None = None,
        unleased: Set[str] = frozenset(),
    ) -> tuple[FailureDetector, tuple[LastCallOver | NodeLost, ...], float | None]:
        """Return the events that are due.

        Args:
            state: the current state of the rounds.
            beats: the latest heartbeat of each node; the caller must first read everything that has
                arrived. A node without a heartbeat is checked like any other node. With None, the
                driver detects lost nodes in another way, and this method checks none.
            bounds: the time limits.
            now: seconds of the driver's monotonic clock.
            me: the driver's own node, which is not checked; empty if it has none.
            peers: the nodes to check; None: all.
            unleased: connected nodes without a lease; they keep their places under overload.

        Returns:
            The detector for the next check; the events that are due, each for `rules.step`; and the
            latest time of the next check. The time is None if no event can become due by waiting
            alone.
        """
        due: list[LastCallOver | NodeLost] = []
        again: list[float] = []
        passed = max(now - self.checked, 0.0)
        listened = min(passed, bounds.keep_alive)
        ids = watched(state) - {me} if beats is not None else frozenset()
        silent: dict[str, tuple[int, float]] = {}
        for id in sorted(ids if peers is None else ids & peers):
            received = (beats or {}).get(id, 0)
            beat, before = self.silent.get(id, (received, -listened))
            silent[id] = (received, 0.0 if received != beat else before + listened)
        overload_until = self.overload_until
        if are_many_late([silence for _, silence in silent.values()], bounds):
            overload_until = now + bounds.silence
        patient = bounds.patience if now < overload_until else bounds.silence
        for id, (_, silence) in silent.items():
            before = self.silent.get(id, (0, 0.0))[1]
            limit = patient if id in unleased else bounds.silence
            if silence < limit:
                again.append(now + min(limit - silence, bounds.keep_alive))
            elif before < limit and passed > bounds.keep_alive:
                again.append(now)
            else:
                due.append(
                    NodeLost(
                        id, f"no heartbeat arrived for {round(silence, 2):g} s", place(state, id)
                    )
                )
        since = self.since if state.last_call == self.call else now
        if state.last_call:
            awaiting = bounds.comeback if state.awaited else bounds.last_call
            wait = bounds.silence if state.evicting else awaiting
            if now - since >= wait:
                due.append(LastCallOver(state.last_call))
            else:
                again.append(since + wait)
        detector = FailureDetector(now, state.last_call, since, silent, overload_until)
        return detector, tuple(due), min(again, default=None)


def are_many_late(silences: Sequence[float], bounds: Bounds) -> bool:
    """Return whether so many nodes are late at once that the machines must be overloaded.

    Args:
        silences: the silence of each checked node, in seconds.
        bounds: the time limits.
    """
    fewest, share = MANY_LATE
    late = sum(silence >= LATE * bounds.keep_alive for silence in silences)
    return late >= max(fewest, share * len(silences))


@dataclass(frozen=True, slots=True)
class PeerDetector:
    """The state of the peers that one node keeps between two checks."""

    detector: FailureDetector = field(default_factory=FailureDetector)
    lost: int = 0
    """Number of peers that the node has found lost since it last saw a heartbeat of a peer."""

    def peers(self, state: Round, id: str, bounds: Bounds) -> Sequence[str] | None:
        """Return the nodes that node `id` checks; None if the node itself does not take part."""
        silences = self.detector.silent.items()
        silent = frozenset(id for id, (_, s) in silences if s >= bounds.keep_alive)
        return choose_peers(state, id, silent, self.lost)

    def check(
        self,
        state: Round,
        id: str,
        peers: Sequence[str],
        beats: Mapping[str, int],
        bounds: Bounds,
        now: float,
    ) -> tuple[PeerDetector, tuple[LastCallOver | NodeLost, ...], float | None]:
        """Return the events that are due; see `FailureDetector.check`.

        Args:
            state: the state of the rounds.
            id: the node that checks.
            peers: the return value of `peers`.
            beats: the latest heartbeat of each peer.
            bounds: the time limits.
            now: seconds of the node's monotonic clock.
        """
        before = self.detector.silent
        alive = any(peer in before and before[peer][0] != beats.get(peer, 0) for peer in peers)
        detector, due, again = self.detector.check(state, beats, bounds, now, id, {*peers})
        lost = sum(isinstance(event, NodeLost) for event in due)
        return PeerDetector(detector, lost if alive else self.lost + lost), due, again


def choose_peers(
    state: Round, id: str, silent: frozenset[str], lost: int = 0
) -> Sequence[str] | None:
    """Return the nodes that a node checks; None if the node itself does not take part.

    Args:
        state: the state of the rounds.
        id: the node that checks.
        silent: the peers with late heartbeats.
        lost: number of peers that the node has found lost since it last received a heartbeat of a
            peer.
    """
    order = [*state.ranks] if state.complete else [*state.members]
    ring = [*order, *sorted(state.awaited), *state.queue]
    known = watched(state)
    ring = [other for other in ring if other in known]
    if id not in ring:
        return None
    at = ring.index(id)
    after = [*ring[at + 1 :], *ring[:at]]
    wanted = max(PEERS, lost + sum(other in silent for other in after))
    chosen: list[str] = []
    alive = 0
    for other in after:
        if alive == wanted:
            break
        chosen.append(other)
        alive += other not in silent
    return chosen
