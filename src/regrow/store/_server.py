"""The store server: connections and timers around the `Machine`, in one asyncio event loop.

A `Peer` is a connection; it says when it was made, greeted and lost, and what was asked over
it. Here it is matched with a session, which may have had another connection before, and what
the machine answers is put on its way: queued while a turn lasts, then sent in one write for
each connection.

The server's own pause is nobody's fault. If it was stopped, or its host was, clients that
came back meanwhile are still in the queue of the kernel when the timers run out. So a
session whose grace is over much too late gets as much of it again, and services learn that
a deadline has passed only when what had arrived by then was read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from regrow.store import _wire as wire
from regrow.store._limits import DEFAULT_LIMITS, Limits
from regrow.store._log import Log
from regrow.store._machine import Machine, Outgoing, Session
from regrow.store._peer import Peer
from regrow.store._service import Switchboard
from regrow.store._sockets import BACKLOG, endpoint_of, endpoint_of_socket
from regrow.store._token import check_token

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    import msgspec

    from regrow.store._service import Service
    from regrow.store._tls import Tls

_BUFFER: Final = 1 << 16
_LATE: Final = 0.05
"""Seconds; a timer that is later shows that the server itself was stopped or busy."""


class StoreServer:
    """A store served on a port or a unix socket, inside a running event loop.

    Args:
        token: the secret that clients must prove to hold.
        limits: what the store refuses to exceed.
        tls: certificates; without them the connection is not encrypted.
        log: takes one line for every client refused or cut off; default stderr.
        services: what clients can ask besides keys, by name.
        on_sessions: told how many sessions are open, whenever that has changed.
    """

    def __init__(
        self,
        token: bytes,
        limits: Limits = DEFAULT_LIMITS,
        tls: Tls | None = None,
        log: Callable[[str], None] | None = None,
        services: Mapping[str, Service] = MappingProxyType({}),
        on_sessions: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.token = check_token(token)
        self.limits = limits
        self.log = log or Log()
        self.board = Switchboard(services, limits, time.monotonic, self.log)
        self._has_services = bool(services)
        self.machine = Machine(lambda: os.urandom(16), limits, self.board)
        self.buffer = memoryview(bytearray(_BUFFER))
        self.opening: OrderedDict[Peer, asyncio.TimerHandle] = OrderedDict()
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls["ssl"] = tls.server_context()
            self._tls["ssl_handshake_timeout"] = limits.handshake_seconds
        self._connections: dict[Peer, None] = {}
        self._graces: dict[Session, asyncio.TimerHandle] = {}
        self._dirty: list[Peer] = []
        self._on_sessions = on_sessions
        self._count = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None
        self._path: str | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen on a TCP port (0: a free one) and return the endpoint, "host:port"."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Peer(self), host, port, backlog=BACKLOG, **self._tls
        )
        return endpoint_of(host, self._listener.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> str:
        """Listen on a unix socket and return the endpoint, "unix:path"."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(
            lambda: Peer(self), path, backlog=BACKLOG, **self._tls
        )
        self._path = path
        return f"unix:{path}"

    async def listen_on(self, listener: socket.socket) -> str:
        """Serve a socket that listens already, TCP or unix, and return its endpoint."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Peer(self), sock=listener, backlog=BACKLOG, **self._tls
        )
        return endpoint_of_socket(listener)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.drop()
        for timer in self._graces.values():
            timer.cancel()
        self._graces.clear()
        if self._alarm is not None:
            self._alarm.cancel()
        if self._path is not None and os.path.exists(self._path):
            os.unlink(self._path)
        await asyncio.sleep(0)

    # -------------------------------------------------- what connections report

    def connected(self, connection: Peer) -> None:
        """A connection was accepted: it has a short time to prove the token."""
        self._connections[connection] = None
        if len(self.opening) >= self.limits.handshakes:
            oldest = next(iter(self.opening))
            oldest.refuse("too many connections are in their handshake (Limits.handshakes)")
        seconds = self.limits.handshake_seconds
        self.opening[connection] = asyncio.get_running_loop().call_later(
            seconds, connection.refuse, f"it did not prove the token within {seconds:g} s"
        )

    def settled(self, connection: Peer) -> None:
        """A connection's handshake ended, well or not."""
        timer = self.opening.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def greet(self, connection: Peer, hello: wire.Hello) -> Session:
        """Give a connection its session, taking it from an older connection if need be."""
        session, welcome = self.machine.open(hello)
        older = cast("Peer | None", session.link)
        if older is not None:
            older.session = None
            older.drop()
            self.send(self.machine.suspend(session))
        timer = self._graces.pop(session, None)
        if timer is not None:
            timer.cancel()
        session.link = connection
        self._queue(connection, welcome)
        self.send(self.machine.resume(session))
        return session

    def lost(self, connection: Peer) -> None:
        """A connection is gone: its session has a grace to come back."""
        self._connections.pop(connection, None)
        self.settled(connection)
        session = connection.session
        if session is None:
            return
        connection.session = None
        session.link = None
        if session.ended:
            return
        self.send(self.machine.suspend(session))
        self._start_grace(session, session.grace, connection.closed)
        self.flush()

    def handle(self, session: Session, request: wire.Request) -> None:
        """Carry out a request and put the answers on their way."""
        self.send(self.machine.handle(session, request))

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Queue messages; `flush` sends what was queued in this turn."""
        for session, message in outgoing:
            connection = cast("Peer | None", session.link)
            if connection is not None:
                self._queue(connection, message)
        if self._has_services:
            self._set_alarm()
        if len(self.machine.sessions) != self._count:
            self._count = len(self.machine.sessions)
            self._on_sessions(self._count)

    def _queue(self, connection: Peer, message: msgspec.Struct) -> None:
        if not connection.queued:
            self._dirty.append(connection)
        connection.push(wire.frame(message))

    def flush(self) -> None:
        """Send what was queued, one write for each connection."""
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()

    def end(self, session: Session) -> None:
        """End a session whose client broke the protocol."""
        self.send(self.machine.end(session, "it broke the protocol of the store", closed=False))

    def _start_grace(self, session: Session, seconds: float, closed: bool) -> None:
        loop = asyncio.get_running_loop()
        self._graces[session] = loop.call_later(
            seconds, self._grace_over, session, loop.time() + seconds, closed
        )

    def _grace_over(self, session: Session, due: float, closed: bool) -> None:
        late = asyncio.get_running_loop().time() - due
        if late > _LATE:
            self._start_grace(session, min(late, session.grace), closed)
            return
        del self._graces[session]
        self.send(self.machine.end(session, "its connection broke", closed))
        self.flush()

    def _set_alarm(self) -> None:
        """Have the services called when the first of their deadlines has passed."""
        at = self.board.deadline
        if at is None:
            return
        if self._alarm is not None:
            if self._alarm.when() <= at:  # then it looks again
                return
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        # A handle that is called soon runs before what the next look at the sockets brings, and
        # one called soon from there after it.
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._alarm = None
        loop.call_soon(loop.call_soon, self._due, now)

    def _due(self, now: float) -> None:
        self.send(self.board.due(now))
        self.flush()
