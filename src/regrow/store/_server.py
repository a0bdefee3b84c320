"""The store server: sockets and timers around the `Machine`, in one asyncio event loop.

A connection is a small state: it opens (preamble and nonce), proves (HMAC), greets
(Hello), and is then open for requests. What arrives is read into one buffer that all
connections share, since a read is worked off before the next one starts; only the
beginning of an unfinished message is copied and kept.

Nobody may starve the others. A connection is served at most `_TURN_FRAMES` requests or
`_TURN_BYTES` of answers in a row, then the loop goes round; while a turn is unfinished, or
while its client does not read the answers, nothing more is read from it, so TCP makes the
client wait. What is sent to it all the same (answers to blocked calls) is bounded by
`Limits.outgoing_bytes`; beyond that it is cut off. A message is decoded only when all of
it is there, and a length over the limit is refused before a byte of it is stored.

The server's own pause is nobody's fault. If it was stopped, or its host was, clients that
came back meanwhile are still in the queue of the kernel when the timers run out. So a
session whose grace is over much too late gets as much of it again, and services learn that
a deadline has passed only when what had arrived by then was read.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from regrow.store import _handshake as handshake
from regrow.store import _wire as wire
from regrow.store._errors import StoreLimitError, StoreProtocolError
from regrow.store._limits import DEFAULT_LIMITS, Limits
from regrow.store._log import Log
from regrow.store._machine import Machine, Outgoing, Session
from regrow.store._service import Switchboard
from regrow.store._sockets import keep_alive
from regrow.store._token import check_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regrow.store._service import Service
    from regrow.store._tls import Tls

_BUFFER: Final = 1 << 16
_TURN_FRAMES: Final = 128
_TURN_BYTES: Final = 1 << 18
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
        self.opening: OrderedDict[_Connection, asyncio.TimerHandle] = OrderedDict()
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls["ssl"] = tls.server_context()
            self._tls["ssl_handshake_timeout"] = limits.handshake_seconds
        self._connections: dict[_Connection, None] = {}
        self._graces: dict[Session, asyncio.TimerHandle] = {}
        self._dirty: list[_Connection] = []
        self._on_sessions = on_sessions
        self._count = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None
        self._path: str | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen on a TCP port (0: a free one) and return the endpoint, "host:port"."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: _Connection(self), host, port, backlog=4096, **self._tls
        )
        number = self._listener.sockets[0].getsockname()[1]
        return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"

    async def listen_unix(self, path: str) -> str:
        """Listen on a unix socket and return the endpoint, "unix:path"."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(
            lambda: _Connection(self), path, backlog=4096, **self._tls
        )
        self._path = path
        return f"unix:{path}"

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

    def connected(self, connection: _Connection) -> None:
        """A connection was accepted: it has a short time to prove the token."""
        self._connections[connection] = None
        if len(self.opening) >= self.limits.handshakes:
            oldest = next(iter(self.opening))
            oldest.refuse("too many connections are in their handshake (Limits.handshakes)")
        seconds = self.limits.handshake_seconds
        self.opening[connection] = asyncio.get_running_loop().call_later(
            seconds, connection.refuse, f"it did not prove the token within {seconds:g} s"
        )

    def settled(self, connection: _Connection) -> None:
        """A connection's handshake ended, well or not."""
        timer = self.opening.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def greet(self, connection: _Connection, hello: wire.Hello) -> Session:
        """Give a connection its session, taking it from an older connection if need be."""
        session, welcome = self.machine.open(hello)
        older = cast("_Connection | None", session.link)
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

    def lost(self, connection: _Connection) -> None:
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
            connection = cast("_Connection | None", session.link)
            if connection is not None:
                self._queue(connection, message)
        if self._has_services:
            self._set_alarm()
        if len(self.machine.sessions) != self._count:
            self._count = len(self.machine.sessions)
            self._on_sessions(self._count)

    def _queue(self, connection: _Connection, message: msgspec.Struct) -> None:
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


class _Connection(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._limit = server.limits.frame_bytes
        self._stage: Callable[[memoryview], int] = self._open
        self._rest = bytearray()
        self._out: list[bytes] = []
        self._choked = False
        self._closing = False
        self._nonces = (b"", b"")
        self._farewell: asyncio.TimerHandle | None = None
        self.queued = 0
        """Bytes of `_out`."""
        self.session: Session | None = None
        self.closed = False
        """Whether the other side has closed it."""

    # ------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            keep_alive(sock)
        self._server.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._rest.clear()
        if self._farewell is not None:
            self._farewell.cancel()
        self._server.lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        data = self._server.buffer[:nbytes]
        if self._rest:
            self._rest += data
            self._work()
            return
        used = self._stage(data)
        if used < nbytes and not self._closing:
            self._rest += data[used:]
        self._server.flush()

    def eof_received(self) -> None:
        self.closed = True

    def pause_writing(self) -> None:
        self._choked = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._choked = False
        asyncio.get_running_loop().call_soon(self._resume)

    # ------------------------------------------------------------ called by the server

    def push(self, data: bytes) -> None:
        """Queue bytes for the client."""
        self._out.append(data)
        self.queued += len(data)

    def flush(self) -> None:
        """Send what is queued; cut off a client that lets too much pile up."""
        if self._closing or not self._out:
            return
        out, self._out, self.queued = self._out, [], 0
        transport = self._transport
        transport.write(out[0] if len(out) == 1 else b"".join(out))
        waiting = transport.get_write_buffer_size()
        if waiting > self._server.limits.outgoing_bytes:
            self._server.log(
                f"cut off {self._name()}: it does not read its answers, {waiting} bytes wait for it"
            )
            self.drop()
        elif self.session is not None and self.session.ended:
            # The client said goodbye and closes when it has read the answer.
            self.session.link = None
            self.session = None
            self._stage = len
            seconds = self._server.limits.handshake_seconds
            self._farewell = asyncio.get_running_loop().call_later(seconds, self.drop)

    def drop(self) -> None:
        """Close the connection at once."""
        self._closing = True
        self._transport.abort()

    def refuse(self, reason: str) -> None:
        """Log why the client is not served, tell it if it proved the token, and close."""
        self._server.log(f"refused {self._name()}: {reason}")
        self._server.settled(self)
        session = self.session
        if session is not None:
            self.push(wire.frame(wire.Failed(0, "protocol", reason)))
            self.flush()
            self._server.end(session)
        self._closing = True
        self._transport.close()

    # --------------------------------------------------------------- the stages

    def _work(self) -> None:
        """Go on with the bytes kept from before."""
        view = memoryview(self._rest)
        used = self._stage(view)
        if self._closing:
            self._rest = bytearray()
        elif used:
            self._rest = bytearray(view[used:])
        self._server.flush()

    def _resume(self) -> None:
        if self._closing or self._choked:
            return
        self._transport.resume_reading()
        if self._rest:
            self._work()

    def _open(self, data: memoryview) -> int:
        head = bytes(data[: handshake.OPENING])
        if handshake.is_stranger(head):
            self.refuse(handshake.describe_client(head))
            return len(data)
        if len(head) < handshake.OPENING:
            return 0
        self._nonces = (head[len(handshake.PREAMBLE) :], os.urandom(handshake.NONCE))
        self._transport.write(handshake.PREAMBLE + self._nonces[1])
        return self._next(self._prove, data, handshake.OPENING)

    def _prove(self, data: memoryview) -> int:
        if len(data) < handshake.PROOF:
            return 0
        token, proof = self._server.token, bytes(data[: handshake.PROOF])
        if not handshake.proves(proof, token, "client", *self._nonces):
            self._transport.write(handshake.REFUSED + bytes(handshake.PROOF))
            self.refuse("it does not hold this job's token")
            return len(data)
        answer = handshake.prove(token, "server", *self._nonces)
        self._transport.write(handshake.ACCEPTED + answer)
        return self._next(self._greet, data, handshake.PROOF)

    def _greet(self, data: memoryview) -> int:
        end = self._frame_end(data, 0)
        if not end:
            return 0
        try:
            hello = wire.decode_hello(data[wire.HEADER : end])
            self.session = self._server.greet(self, hello)
        except (msgspec.MsgspecError, StoreLimitError) as error:
            self._transport.write(wire.frame(wire.Failed(0, "limit", str(error))))
            self.refuse(str(error))
            return len(data)
        self._server.settled(self)
        return self._next(self._serve, data, end)

    def _serve(self, data: memoryview) -> int:
        session, server = self.session, self._server
        assert session is not None
        pos, turn = 0, _TURN_FRAMES
        while not self._closing and not session.ended:
            end = self._frame_end(data, pos)
            if not end:
                break
            if self._choked or turn == 0 or self.queued > _TURN_BYTES:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._resume)
                break
            turn -= 1
            try:
                server.handle(session, wire.decode_request(data[pos + wire.HEADER : end]))
            except (msgspec.MsgspecError, StoreProtocolError) as error:
                self.refuse(str(error))
                break
            pos = end
        return pos

    def _next(self, stage: Callable[[memoryview], int], data: memoryview, used: int) -> int:
        self._stage = stage
        return used + stage(data[used:]) if used < len(data) else used

    def _frame_end(self, data: memoryview, pos: int) -> int:
        """Return where the message that starts at `pos` ends, or 0 if it is not all there."""
        start = pos + wire.HEADER
        if start > len(data):
            return 0
        length = int.from_bytes(data[pos:start], "big")
        if length > self._limit:
            self.refuse(
                f"it announced a message of {length} bytes, and {self._limit} are allowed "
                f"(Limits.frame_bytes)"
            )
            return 0
        end = start + length
        return end if end <= len(data) else 0

    def _name(self) -> str:
        peer = self._transport.get_extra_info("peername")
        where = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a local client"
        client = self.session.client if self.session is not None else ""
        return f"{where} ({client})" if client else where
