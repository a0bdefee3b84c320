"""The server's end of a client connection: checks the token, limits message sizes, decodes.

A connection passes through stages: it opens (preamble and nonce), proves the token (HMAC), greets
(Hello), and then accepts requests. All connections read into one shared buffer, because the server
processes each read before the next one starts. Only the start of an unfinished message is copied
and kept.

No client may starve the others. The server processes at most `TURN_FRAMES` requests or `TURN_BYTES`
of answers of one connection in a row, and then serves the others. It reads nothing more from a
connection with an unfinished turn, or from a client that does not read its answers. So TCP makes
the client wait. Such a client still gets the answers to its blocked calls. `Limits.outgoing_bytes`
bounds these; above the limit, the server disconnects the client. A message is decoded only when it
is complete. A length over the limit is refused before a byte of the message is stored.

When a process ends, its kernel closes its connections, or resets a connection with unread data. If
both sides are on this host, a reset proves as much as an end. Over a network, devices between the
two sides also reset connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, cast

import msgspec

from regrow.store.errors import StoreLimitError, StoreProtocolError
from regrow.store.limits import TURN_BYTES, TURN_FRAMES
from regrow.store.protocol import wire
from regrow.store.protocol.sockets import keep_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store.server.machine import ServerSession
    from regrow.store.server.server import StoreServer


class Peer(asyncio.BufferedProtocol):
    """The server's end of one client connection."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._limit = server.limits.frame_bytes
        self._stage: Callable[[memoryview], int] = self._open
        self._rest = bytearray()
        self.unsent = bytearray()
        """Bytes that the next `flush` sends."""
        self._choked = False
        self._closing = False
        self._nonces = (b"", b"")
        self._farewell: asyncio.TimerHandle | None = None
        self.session: ServerSession | None = None
        self.closed = False
        """Whether the client, or its kernel, has closed the connection."""

    # ------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        self._here = sock.family == socket.AF_UNIX
        if not self._here:
            keep_alive(sock)
            near, far = (transport.get_extra_info(f"{end}name") for end in ("sock", "peer"))
            self._here = bool(near and far) and near[0] == far[0]
        self._server.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._here and isinstance(exc, ConnectionResetError | BrokenPipeError):
            self.closed = True
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
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._choked = False
        asyncio.get_running_loop().call_soon(self._resume)

    # ------------------------------------------------------------ called by the server

    def flush(self) -> None:
        """Send the queued bytes; disconnect a client with too many unread bytes."""
        if self._closing or not self.unsent:
            return
        unsent, self.unsent = self.unsent, bytearray()
        most, waiting = self._server.limits.outgoing_bytes, len(unsent)
        if waiting <= most:
            self.transport.write(unsent)
            waiting = self.transport.get_write_buffer_size()
        if waiting > most:
            self._report("disconnected", f"it did not read {waiting} bytes of answers")
            self.drop()
        elif self.session is not None and self.session.ended:
            # The client has ended its session and closes the connection when it has read the
            # answer.
            self.session.link = None
            self.session = None
            self._stage = len
            seconds = self._server.limits.handshake_seconds
            self._farewell = asyncio.get_running_loop().call_later(seconds, self.drop)

    def drop(self) -> None:
        """Close the connection at once."""
        self._closing = True
        self.transport.abort()

    def refuse(self, reason: str) -> None:
        """Log the reason for a refusal, send it if the client proved the token, and close."""
        self._report("refused", reason)
        self._server.settled(self)
        session = self.session
        if session is not None:
            self.unsent += wire.frame(wire.Failed(0, "protocol", reason))
            self.flush()
            why = "it broke the protocol of the store"
            self._server.send(self._server.machine.end(session, why, closed=False))
        self._closing = True
        self.transport.close()

    # --------------------------------------------------------------- the stages

    def _work(self) -> None:
        """Process the bytes that were kept before."""
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
        self.transport.resume_reading()
        if self._rest:
            self._work()

    def _open(self, data: memoryview) -> int:
        head = bytes(data[: wire.OPENING])
        if wire.is_stranger(head):
            self.refuse(wire.describe_client(head))
            return len(data)
        if len(head) < wire.OPENING:
            return 0
        self._nonces = (head[len(wire.PREAMBLE) :], os.urandom(wire.NONCE))
        self.transport.write(wire.PREAMBLE + self._nonces[1])
        return self._next(self._prove, data, wire.OPENING)

    def _prove(self, data: memoryview) -> int:
        """Check the client's proof that it holds the token."""
        if len(data) < wire.PROOF:
            return 0
        token, proof = self._server.token, bytes(data[: wire.PROOF])
        if not wire.proves(proof, token, "client", *self._nonces):
            self.transport.write(wire.REFUSED + bytes(wire.PROOF))
            self.refuse("it does not hold this job's token")
            return len(data)
        answer = wire.prove(token, "server", *self._nonces)
        self.transport.write(wire.ACCEPTED + answer)
        return self._next(self._greet, data, wire.PROOF)

    def _greet(self, data: memoryview) -> int:
        end = self._frame_end(data, 0)
        if not end:
            return 0
        try:
            hello = wire.decode_hello(data[wire.HEADER : end])
            self.session = self._server.greet(self, hello)
        except (msgspec.MsgspecError, StoreLimitError) as error:
            self.transport.write(wire.frame(wire.Failed(0, "limit", str(error))))
            self.refuse(str(error))
            return len(data)
        self._server.settled(self)
        return self._next(self._serve, data, end)

    def _serve(self, data: memoryview) -> int:
        session, server = self.session, self._server
        assert session is not None
        pos, turn = 0, TURN_FRAMES
        while not self._closing and not session.ended:
            end = self._frame_end(data, pos)
            if not end:
                break
            if self._choked or turn == 0 or len(self.unsent) > TURN_BYTES:
                self.transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._resume)
                break
            turn -= 1
            try:
                request = wire.decode_request(data[pos + wire.HEADER : end])
                server.send(server.machine.handle(session, request))
            except (msgspec.MsgspecError, StoreProtocolError) as error:
                self.refuse(str(error))
                break
            pos = end
        return pos

    def _next(self, stage: Callable[[memoryview], int], data: memoryview, used: int) -> int:
        self._stage = stage
        return used + stage(data[used:]) if used < len(data) else used

    def _frame_end(self, data: memoryview, pos: int) -> int:
        """Return where the message that starts at `pos` ends, or 0 if it is incomplete.

        A message longer than the limit is refused.
        """
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

    def _report(self, verb: str, reason: str) -> None:
        peer = self.transport.get_extra_info("peername")
        address, name = "local clients", "a local client"
        if isinstance(peer, tuple):
            address, name = str(peer[0]), f"{peer[0]}:{peer[1]}"
        if self.session is not None and self.session.client:
            name = f"{name} ({self.session.client})"
        self._server.report_refusal(address, f"{verb} {name}: {reason}")
