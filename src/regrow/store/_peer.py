"""One client's connection, as the server has it.

It is a small state: it opens (preamble and nonce), proves (HMAC), greets (Hello), and is
then open for requests. What arrives is read into one buffer that all connections share,
since a read is worked off before the next one starts; only the beginning of an unfinished
message is copied and kept.

Nobody may starve the others. A connection is served at most `_TURN_FRAMES` requests or
`_TURN_BYTES` of answers in a row, then the loop goes round; while a turn is unfinished, or
while its client does not read the answers, nothing more is read from it, so TCP makes the
client wait. What is sent to it all the same (answers to blocked calls) is bounded by
`Limits.outgoing_bytes`; beyond that it is cut off. A message is decoded only when all of
it is there, and a length over the limit is refused before a byte of it is stored.

A process that ends has its connections closed by its kernel, or reset where it had not read all. A
reset says as much as an end does where both sides are on this host; over a network, what stands
between them resets connections, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Final, cast

import msgspec

from regrow.store import _handshake as handshake
from regrow.store import _wire as wire
from regrow.store._errors import StoreLimitError, StoreProtocolError
from regrow.store._sockets import keep_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store._machine import Session
    from regrow.store._server import StoreServer

_TURN_FRAMES: Final = 128
_TURN_BYTES: Final = 1 << 18


class Peer(asyncio.BufferedProtocol):
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
        """Whether the other side has closed it, or its kernel for it."""

    # ------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
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
