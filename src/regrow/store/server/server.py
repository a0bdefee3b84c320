"""The store server: connections and timers around the `Machine`, in one asyncio event loop.

A `Peer` is a connection. It reports when it was opened, greeted and lost, and passes on its
requests. The server matches it with a session, which may have had another connection before. The
server queues the machine's answers while a turn lasts, and then sends them in one write for each
connection.

A pause of the server ends no session. The server or its host may be stopped for a while. Clients
that reconnect in this time are still in the queue of the kernel when the timers expire. So a
session with a timer that is far too late gets its grace a second time. Services learn of a passed
deadline only after the server has read all data that had arrived by then.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from regrow.store.limits import BACKLOG, CHUNK, DEFAULT_LIMITS, LATE_S, REFUSALS_S, Limits
from regrow.store.protocol import wire
from regrow.store.protocol.sockets import endpoint_of_socket, listen_at, listen_unix
from regrow.store.protocol.token import check_token_length
from regrow.store.server.connection import Peer
from regrow.store.server.log import Refusals, write_log
from regrow.store.server.machine import Machine, Outgoing, ServerSession
from regrow.store.server.services import Switchboard
from regrow.utils import BackgroundWriter

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    import msgspec

    from regrow.store.protocol.tls import Tls
    from regrow.store.server.services import Service
    from regrow.store.server.tls_listener import TlsListener

_TOO_MANY: Final = "too many connections are in their handshake (Limits.handshakes)"


class StoreServer:
    """A store server on a port or a unix socket, inside a running event loop.

    Args:
        token: the secret that clients must prove.
        limits: limits that the store refuses to exceed.
        tls: certificates; without them the connections are not encrypted.
        log: receives the lines about clients that were refused or disconnected; default stderr.
        services: services besides keys, by name.
        on_demand: more services, as "module:function"; each is loaded at its first question.
        on_sessions: called with the number of open sessions after every change, without those of
            clients that only visit.
    """

    def __init__(
        self,
        token: bytes,
        limits: Limits = DEFAULT_LIMITS,
        tls: Tls | None = None,
        log: Callable[[str], None] | None = None,
        services: Mapping[str, Service] = MappingProxyType({}),
        on_demand: Mapping[str, str] = MappingProxyType({}),
        on_sessions: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.token = check_token_length(token)
        self.limits = limits
        self.log = log or BackgroundWriter(write_log, "regrow-log").add
        self.board = Switchboard(services, limits, time.monotonic, self.log, on_demand)
        self.machine = Machine(lambda: os.urandom(16), limits, self.board)
        self.buffer = memoryview(bytearray(CHUNK))
        self.opening: OrderedDict[Peer, asyncio.TimerHandle] = OrderedDict()
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls["ssl"] = tls.server_context()
            self._tls["ssl_handshake_timeout"] = limits.handshake_seconds
        self.connections: dict[Peer, None] = {}
        self._graces: dict[ServerSession, asyncio.TimerHandle] = {}
        self._dirty: list[Peer] = []
        self._on_sessions = on_sessions
        self._count = 0
        self.alarm: asyncio.TimerHandle | None = None
        self._refusals = Refusals()
        self._minute: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None
        self._agreeing: TlsListener | None = None
        self._path: str | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen on a TCP port (0: a free port) and return the endpoint, "host:port"."""
        return await self.listen_on(listen_at(host, port))

    async def listen_unix(self, path: str) -> str:
        """Listen on a unix socket and return the endpoint, "unix:path"."""
        return await self.listen_on(listen_unix(path), path)

    async def listen_on(self, listener: socket.socket, path: str | None = None) -> str:
        """Serve a listening socket, and return its endpoint.

        Args:
            listener: the socket, TCP or unix.
            path: the file of a unix socket, if `close` must remove it.
        """
        self._path = path
        if self._tls:
            from regrow.store.server.tls_listener import TlsListener

            listener = self._agreeing = TlsListener(
                listener, self.limits.handshakes, self._end_handshake
            )
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Peer(self), sock=listener, backlog=BACKLOG, **self._tls
        )
        return endpoint_of_socket(listener)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.drop()
        for grace in self._graces.values():
            grace.cancel()
        self._graces.clear()
        for timer in (self.alarm, self._minute):
            if timer is not None:
                timer.cancel()
        for line in self._refusals.end_minute():
            self.log(line)
        if self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        await asyncio.sleep(0)

    # -------------------------------------------------- what connections report

    def connected(self, connection: Peer) -> None:
        """Handle a new connection: it must prove the token within a short time."""
        if self._agreeing is not None:
            self._agreeing.agreed(connection.transport.get_extra_info("socket").fileno())
        self.connections[connection] = None
        if len(self.opening) >= self.limits.handshakes:
            oldest = next(iter(self.opening))
            oldest.refuse(_TOO_MANY)
        seconds = self.limits.handshake_seconds
        self.opening[connection] = asyncio.get_running_loop().call_later(
            seconds, connection.refuse, f"it did not prove the token within {seconds:g} s"
        )

    def _end_handshake(self, address: object) -> None:
        """Log that a connection was closed before it has agreed on TLS."""
        host = str(address[0]) if isinstance(address, tuple) else "local clients"
        self.report_refusal(host, f"refused {host}: {_TOO_MANY}")

    def settled(self, connection: Peer) -> None:
        """Handle the end of a connection's handshake, successful or not."""
        timer = self.opening.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def report_refusal(self, address: str, line: str) -> None:
        """Log that a client was refused or disconnected, at most once a minute for each address."""
        first = self._refusals.add(address, line)
        if first is not None:
            self.log(first)
        if self._minute is None:
            self._start_minute()

    def _start_minute(self) -> None:
        self._minute = asyncio.get_running_loop().call_later(REFUSALS_S, self._end_minute)

    def _end_minute(self) -> None:
        lines, self._minute = self._refusals.end_minute(), None
        for line in lines:
            self.log(line)
        if lines:
            self._start_minute()

    def greet(self, connection: Peer, hello: wire.Hello) -> ServerSession:
        """Give a connection its session, which may move from an older connection."""
        session, welcome = self.machine.open(hello)
        older = session.link
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
        """Handle the loss of a connection: its session may resume within its grace."""
        self.connections.pop(connection, None)
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

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Queue messages; `flush` sends the messages that were queued in this turn."""
        for session, message in outgoing:
            if session.link is not None:
                self._queue(session.link, message)
        if self.board.services:
            self._set_alarm()
        count = len(self.machine.sessions) - self.machine.visitors
        if count != self._count:
            self._count = count
            self._on_sessions(self._count)

    def _queue(self, connection: Peer, message: msgspec.Struct) -> None:
        if not connection.unsent:
            self._dirty.append(connection)
        if len(connection.unsent) <= self.limits.outgoing_bytes:  # above it, `flush` disconnects
            connection.unsent += wire.frame(message)

    def flush(self) -> None:
        """Send the queued messages, in one write for each connection."""
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()

    def _start_grace(self, session: ServerSession, seconds: float, closed: bool) -> None:
        loop = asyncio.get_running_loop()
        self._graces[session] = loop.call_later(
            seconds, self._grace_over, session, loop.time() + seconds, closed
        )

    def _grace_over(self, session: ServerSession, due: float, closed: bool) -> None:
        late = asyncio.get_running_loop().time() - due
        if late > LATE_S:
            self._start_grace(session, min(late, session.grace), closed)
            return
        del self._graces[session]
        self.send(self.machine.end(session, "its connection broke", closed))
        self.flush()

    def _set_alarm(self) -> None:
        """Set the timer that calls the services at the first of their deadlines."""
        at = self.board.deadline
        if at is None:
            return
        if self.alarm is not None:
            if self.alarm.when() <= at:  # the earlier timer checks the deadline again
                return
            self.alarm.cancel()
        self.alarm = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        # `call_soon` runs before the next poll of the sockets. A second `call_soon` from there runs
        # after the data of that poll.
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.alarm = None
        loop.call_soon(loop.call_soon, self._due, now)

    def _due(self, now: float) -> None:
        self.send(self.board.due(now))
        self.flush()
