"""The interface between one node and the place that keeps the rounds.

The rules of the rounds (`protocol.rules`) run in one of two places: in the store server
(`server_driver`), or in the nodes themselves, over any backend with compare-and-set
(`peer_driver`). The node (`handler`) does not see which. It submits its events, and receives
`Snapshot`s.

A snapshot shows the state and not its changes. A node that misses one learns everything from the
next, so a driver may coalesce, reconnect and repeat. `follow` compares with the snapshot that the
caller has seen, so it never loses a change between two calls.

No call may delay another. A node sends heartbeats while its `submit` waits for an answer and while
its `follow` sleeps, so each runs in its own thread.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from regrow.rendezvous.errors import RendezvousConnectionError
from regrow.rendezvous.protocol.messages import MOST_JOINED
from regrow.rendezvous.protocol.state import judged, nodes, status_of, takes_part

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from regrow.rendezvous.protocol.messages import (
        Departed,
        Event,
        Judged,
        NodeRefused,
        Placed,
        RoundClosed,
        RoundEnded,
        Seated,
        ServerRestarted,
        ServersChanged,
        Voter,
    )
    from regrow.rendezvous.protocol.rules import Refusal
    from regrow.rendezvous.protocol.state import Round
    from regrow.rendezvous.server.hosting import HostedServer
    from regrow.store import Store

    Report = Callable[[ServerRestarted | ServersChanged], None]


class NoAnswerError(RendezvousConnectionError):
    """The place that keeps the rounds is connected, but did not answer in time."""


class Snapshot(NamedTuple):
    """The state of the rounds, as one node sees it."""

    version: int
    """The version of the state."""
    status: Seated | Placed | RoundEnded | RoundClosed | NodeRefused | None
    """The status of the node. NodeRefused answers a call with a stale token. None: the state does
    not contain the node."""
    waiting: int
    """The number of waiting nodes that would have a seat in the next round."""
    judged: Judged | None
    """The verdict on the end of the previous round; None before the verdict."""
    closed: bool = False
    """Whether no further round will form; a node that has its seat may continue."""
    others: int = 0
    """The number of other nodes that take part; set only in the answer to a node that does not."""
    failures: int = 0
    """How many worker failures the job has been charged with so far."""
    leaving: tuple[tuple[str, str], ...] = ()
    """The first members, at most `MOST_JOINED`, that have announced to leave, with the reason."""
    first_waiting: tuple[str, ...] = ()
    """The ids of the first waiting nodes, at most `MOST_JOINED`."""


def snapshot(state: Round, id: str) -> Snapshot:
    """Return the snapshot of the state for a node."""
    verdict = judged(state, state.number - 1)
    return Snapshot(
        state.version,
        status_of(state, id),
        state.waiting,
        verdict,
        state.closed is not None,
        failures=state.failures,
        leaving=tuple(islice(state.leaving.items(), MOST_JOINED)),
        first_waiting=state.first_waiting,
    )


def answer(state: Round, id: str, refusal: Refusal | None) -> Snapshot:
    """Return the answer to a node's call.

    Args:
        state: the state after the call.
        id: the node.
        refusal: the refusal of the call, which the state does not always show.
    """
    result = snapshot(state, id)
    if not takes_part(state, id):
        result = result._replace(others=nodes(state))
    return result if refusal is None else result._replace(status=refusal)


def differs(now: Snapshot, seen: Snapshot | None) -> bool:
    """Return whether a snapshot differs from another one in more than the version."""
    return seen is None or now[1:] != seen[1:]


class Driver(Protocol):
    """One node's access to the rounds of a job.

    All methods may be called from any thread. The methods with a timeout (seconds) raise
    RendezvousConnectionError if the place that keeps the rounds cannot be reached in that time.
    """

    @property
    def server(self) -> HostedServer | None:
        """The server of the rendezvous while this node hosts it; None on other nodes."""
        ...

    @property
    def serves(self) -> bool:
        """Whether this node hosts the server that runs the rounds."""
        ...

    @property
    def local_addr(self) -> str:
        """This host's address on the route to the rendezvous, found without a name service."""
        ...

    def report_to(self, report: Report) -> None:
        """Call `report` from now on when the server changes, or another host may serve."""

    def new_life(self) -> None:
        """Take note that the node, which the others have evicted, begins another life."""

    @property
    def voter(self) -> Voter | None:
        """The voter that this node's agent can be (`protocol/succession.py`); None: it cannot."""
        ...

    def is_served_by(self, addr: str) -> bool:
        """Return whether the host with this address serves the rendezvous."""
        ...

    def submit(self, event: Event, timeout: float) -> Snapshot:
        """Apply an event of this driver's node, and return the snapshot of the event's node."""
        ...

    def follow(self, id: str, seen: Snapshot | None, timeout: float) -> Snapshot | None:
        """Block until the node's snapshot differs from `seen` in more than the version.

        Returns:
            The latest snapshot; None if the timeout was over first.
        """
        ...

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """Send a heartbeat of the node.

        Returns:
            Whether the node still holds the seat that it had in round `token`
            (`protocol.state.holds`). If so, its workers may run for the time of a lease, counted
            from the start of this call.
        """
        ...

    def round_store(self, round: int) -> Store:
        """Return the key-value store of one round."""
        ...

    def end_round_store(self) -> None:
        """End the latest store from `round_store`; calls blocked in it raise StoreClosedError.

        Does nothing if that store has already ended, or if there was none.
        """

    def peek(self, id: str) -> Snapshot:
        """Return the latest received snapshot, without a call."""
        ...

    def explain_timeout(self, id: str, timeout: float) -> tuple[str, tuple[Departed, ...]]:
        """Explain why a wait of `timeout` seconds timed out.

        Returns:
            The error text, which names the missing nodes; and the nodes that are lost from the
            previous round or have left it, at most `DEPARTED`.
        """
        ...

    def interrupt(self) -> None:
        """End all blocked calls, and all later ones, with RendezvousGracefulExitError."""

    def close(self, linger: bool) -> None:
        """Release everything; a second call does nothing.

        Args:
            linger: whether the job has ended well, so that the other nodes may read what they still
                need.
        """


class Threads(Protocol):
    """The part of the module `threading` that a node uses, passed in like the clocks.

    A simulation passes its own version, in which a blocked thread resumes at its virtual time.
    """

    @property
    def current_thread(self) -> Callable[[], threading.Thread]: ...

    @property
    def Thread(self) -> Callable[..., threading.Thread]: ...

    @property
    def Event(self) -> Callable[[], threading.Event]: ...

    @property
    def RLock(self) -> Callable[[], AbstractContextManager[Any]]: ...

    @property
    def Lock(self) -> Callable[[], AbstractContextManager[Any]]: ...

    @property
    def Condition(self) -> Callable[[], threading.Condition]: ...
