"""One node's driver for rounds that the store server runs.

The server applies the rules (`round_service.py`); this driver holds one node's session with the
server. The node lives as long as the session: when the session is lost, the server removes the node
at once. So after a lost session the driver begins a new one. The server does not know the node in
the new session, and the node rejoins under a new id.

The session itself reconnects a broken connection, within its grace. If no process listens on the
endpoint, the server and its whole state are gone, and the call fails at once. The call also fails
at once if a server answers that does not know the life of this node's job. A silent server may
answer later, so a call waits until its own timeout.

The keys of a round have a connection of their own, which is opened when they are first used. At the
end of the round the driver closes this connection. That ends all calls that block on the keys, and
no other calls. The keys carry the name of the job's life, so a later job with the same id does
not find them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.protocol.messages import JoinRound, subject
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.settings import (
    CONNECT,
    EXPLAIN,
    FAREWELL,
    NUDGE,
    SESSION_GRACE,
    SPARE_ROUND_TRIPS,
)
from regrow.store import (
    ConnectionState,
    PrefixStore,
    ServiceClient,
    StoreAuthError,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
    connect,
    host_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.node.driver import Threads
    from regrow.rendezvous.protocol.messages import Departed, Event
    from regrow.rendezvous.server.hosting import HostedServer
    from regrow.rendezvous.settings import RendezvousSettings
    from regrow.store import Store, StoreClient, Tls

T = TypeVar("T")
_NOTHING = Snapshot(0, None, 0, None)


class Where(NamedTuple):
    """The server's address, and the credentials to reach it."""

    endpoint: str
    """"host:port", in the form that the user knows."""
    token: bytes
    tls: Tls | None = None
    addr: str | None = None
    """This host's address for the other nodes; None: the address of the connection."""


class NoAnswerError(RendezvousConnectionError):
    """The server is connected, but did not answer in time."""


class ServerDriver:
    """The rounds of one job, as one node reaches them; a `Driver`.

    Args:
        where: how to reach the server.
        settings: the settings of the job.
        timeout: connect at once, within this time in seconds (see `reach`); None: the caller calls
            `reach` before any other method.
        server: the server's process, if this node started it; the driver closes it.
        fixed: whether no node of the job may be replaced (`Round.fixed`).
        clock: returns the seconds of this node's monotonic clock.
        threads: the module that provides the locks.
        connect: opens a session; `regrow.store.connect`.

    Raises:
        RendezvousError: see `reach`.
    """

    def __init__(
        self,
        where: Where,
        settings: RendezvousSettings,
        timeout: float | None,
        server: HostedServer | None = None,
        *,
        fixed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
        connect: Callable[..., StoreClient] = connect,
    ) -> None:
        bounds = settings.bounds
        self._where = where
        self._run_id = settings.run_id
        self._settings = messages.JobSettings(
            settings.min_nodes,
            settings.max_nodes,
            bounds.keep_alive,
            bounds.misses,
            bounds.last_call,
            bounds.grace,
            fixed,
        )
        self.server = server
        """The server's process, if this node hosts it and has not closed it."""
        self._clock = clock
        self._connect = connect
        self._new_client = partial(
            ServiceClient, messages.NAME, clock=clock, new_lock=cast("Any", threads.Lock)
        )
        self._lock = threads.Lock()
        self.life = ""
        """The name of the job's life; empty before the first seat."""
        self._beats = 0
        self._latest: tuple[str, Snapshot] = ("", _NOTHING)
        self.reached = False
        """Whether the server has been reached."""
        self._client = self._new_client(self._begin)
        self._round: ServiceClient | None = None
        self._local_addr = where.addr or ""
        self._rounds_at = where
        if timeout is not None:
            self.reach(timeout)

    def reach(self, timeout: float) -> None:
        """Connect to the server, which may not run yet.

        Args:
            timeout: in seconds.

        Raises:
            RendezvousConnectionError: the server was not reached within `timeout` seconds.
            RendezvousGracefulExitError: `interrupt` was called.
            RendezvousError: the server refused this node.
        """
        try:
            client = self._client.connect(timeout)
        except StoreAuthError as error:  # a retry would fail in the same way
            raise RendezvousError(self._unreachable(error)) from error
        except StoreError as error:
            self._check()
            raise RendezvousConnectionError(self._unreachable(error)) from error
        self.reached = True
        self._local_addr = self._where.addr or client.local_host
        self._rounds_at = _reached(self._where, client.server)

    @property
    def local_addr(self) -> str:
        """See `Driver`."""
        return self._local_addr

    def is_served_by(self, addr: str) -> bool:
        """See `Driver`."""
        return addr in {host_of(self._where.endpoint), host_of(self._rounds_at.endpoint)}

    def submit(self, event: Event, timeout: float) -> Snapshot:
        """See `Driver`."""
        question = messages.submit(self._run_id, self._settings, event)
        reply = self._ask(question, messages.SnapshotReply, timeout, NUDGE)
        return self._snapshot(subject(event), reply, isinstance(event, JoinRound))

    def follow(self, id: str, seen: Snapshot | None, timeout: float) -> Snapshot | None:
        """See `Driver`."""
        question = messages.FollowRequest(self._run_id, self._settings, id, messages.mark(seen))
        try:
            reply = self._ask(messages.encode(question), messages.SnapshotReply, timeout)
        except NoAnswerError:
            return None
        return self._snapshot(id, reply)

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """See `Driver`."""
        question = messages.BeatRequest(self._run_id, id, token, self._beats)
        reply = self._ask(messages.encode(question), messages.BeatReply, timeout, NUDGE)
        self._beats += 1
        self.check_life(reply.life)
        return reply.holds

    def round_store(self, round: int) -> Store:
        """See `Driver`."""
        self.end_round_store()
        client = self._new_client(partial(self._open, self._rounds_at))
        with self._lock:
            self._check()
            self._round = client
        return PrefixStore(f"rounds/{self.life}", cast("Store", _OnFirstUse(client)))

    def end_round_store(self) -> None:
        """See `Driver`."""
        with self._lock:
            client, self._round = self._round, None
        if client is not None:
            client.close(0.0)

    def peek(self, id: str) -> Snapshot:
        """See `Driver`."""
        of, snapshot = self._latest
        return snapshot if of == id else _NOTHING

    def explain_timeout(self, id: str, timeout: float) -> tuple[str, tuple[Departed, ...]]:
        """See `Driver`."""
        question = messages.ExplainRequest(self._run_id, id, timeout)
        try:
            reply = self._ask(messages.encode(question), messages.ExplainReply, EXPLAIN)
        except RendezvousError as error:
            text = f"node {id} waited {timeout:g} s for other nodes, and cannot name them: {error}"
            return text, ()
        return reply.text, reply.departed

    def interrupt(self) -> None:
        """See `Driver`."""
        self._client.close(0.0)
        self.end_round_store()

    def close(self, linger: bool) -> None:
        """See `Driver`; the host of the server waits for the other nodes, or leaves it to them."""
        self.interrupt()
        with self._lock:
            server, self.server = self.server, None
        if server is not None:
            server.close(wait=FAREWELL if linger else 0.0)

    # ------------------------------------------------------------------ helpers

    def _begin(self, timeout: float, stop: int) -> StoreClient:
        """Begin a session; the server may be missing only the first time."""
        try:
            return self._open(self._where, timeout, stop, wait_for_server=not self.reached)
        except StoreProtocolError as error:
            if not self.reached:
                raise
            # Another program listens on the server's port now.
            raise StoreConnectionError(str(error)) from error

    def _open(
        self, where: Where, timeout: float, stop: int, *, wait_for_server: bool = False
    ) -> StoreClient:
        return self._connect(
            where.endpoint,
            token=where.token,
            tls=where.tls,
            timeout=timeout,
            session_grace=SESSION_GRACE,
            spare_round_trips=SPARE_ROUND_TRIPS,
            refusal_is_final=not wait_for_server,
            stop=stop,
        )

    def _ask(self, body: bytes, kind: type[T], timeout: float, nudge: float | None = None) -> T:
        """Ask the service; return the answer, which must be a `kind`."""
        try:
            answer = messages.decode_answer(self._client.ask(body, timeout, nudge=nudge))
        except StoreError as error:
            if isinstance(error, StoreClosedError):
                self._check()
            if isinstance(error, StoreTimeout) and self._client.state is ConnectionState.CONNECTED:
                raise NoAnswerError(self._unreachable(error)) from error
            if isinstance(error, StoreConnectionError | StoreTimeout):
                raise RendezvousConnectionError(self._unreachable(error)) from error
            raise self._misunderstood(str(error)) from error
        except msgspec.MsgspecError as error:
            raise self._misunderstood(str(error)) from error
        if isinstance(answer, messages.RefusedReply):
            raise RendezvousError(answer.text)
        if not isinstance(answer, kind):
            raise self._misunderstood(f"the server answered with {answer!r:.200}")
        return answer

    def _snapshot(self, id: str, reply: messages.SnapshotReply, joins: bool = False) -> Snapshot:
        self.check_life(reply.life)
        try:
            snapshot = messages.read_snapshot(reply)
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._misunderstood(str(error)) from error
        if joins and snapshot.status is not None:
            self.life = reply.life
        of, last = self._latest
        if of != id or snapshot.version >= last.version:  # answers may arrive out of order
            self._latest = id, snapshot
        return snapshot

    def check_life(self, life: str) -> None:
        """Raise RendezvousConnectionError if an answer is from another life of the job."""
        if self.life and life != self.life:
            raise RendezvousConnectionError(
                f"the server at {self._where.endpoint} does not know the job {self._run_id!r} any "
                f"more: the server was restarted, or it deleted a job without nodes. Start the job "
                f"again; it continues from its last checkpoint"
            )

    def _check(self) -> None:
        if self._client.closed:
            raise RendezvousGracefulExitError(
                f"this node's wait for the rendezvous {self._run_id!r} was interrupted"
            )

    def _unreachable(self, why: object) -> str:
        where = self._where.endpoint
        return f"the rendezvous {self._run_id!r} cannot be reached at {where}: {why}"

    def _misunderstood(self, why: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"this node does not understand the server at {self._where.endpoint}: {why}. "
            f"Run the same release of regrow on all nodes"
        )


class _OnFirstUse:
    """Proxy for a session with the server; the first call begins the session.

    If the session is lost because the server was replaced, the next call begins another session. A
    call in progress is not repeated, because its awaited key may be lost with the session.
    """

    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        session = self._client.connect(CONNECT)
        if session.state is ConnectionState.SUSPENDED:
            try:
                session.num_keys()  # waits until the session is resumed, or lost
            except StoreSessionLost:
                session = self._client.connect(CONNECT)
        return getattr(session, name)


def _reached(where: Where, server: str) -> Where:
    """Return the same server by its address, so that later rounds need no name service."""
    tls = where.tls
    if tls is not None and tls.server_hostname is None:
        tls = replace(tls, server_hostname=host_of(where.endpoint))
    return where._replace(endpoint=server, tls=tls)
