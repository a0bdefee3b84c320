"""The client's end of one connection: one socket, its framing, and its state.

Only `readable` blocks, so a caller may hold a lock around all other methods. One thread may send
while another thread receives.

The background thread of the session sleeps in an epoll that contains the socket. `watch` sets the
events that wake this thread: a hang-up of the server always, received bytes if no call reads, and
free space in the socket if unsent bytes remain. The socket is armed for one event at a time, so the
activity of another thread never wakes the background thread.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from regrow.store.errors import StoreProtocolError
from regrow.store.limits import CHUNK
from regrow.store.protocol import wire

if TYPE_CHECKING:
    from regrow.store.protocol.tls import TlsSocket

REPLY_ROOM: Final = 1 << 20
"""Bytes by which a reply may be longer than the longest request."""
LONGEST_POLL_S: Final = 1e6
"""Longest wait of one `poll`, in seconds; the kernel takes no more than 24 days."""


class Transport:
    """A connection to a store server.

    Args:
        sock: a connected, non-blocking socket; in plain text or under TLS.
    """

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self.fd = sock.fileno()
        self._sock = sock
        self.unsent = bytearray()
        """Bytes that `flush` sends later."""
        self.received = bytearray()
        """Bytes that have arrived and are not a complete message yet."""
        self.longest = 0
        """Length of the longest message that the server may send."""
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._epoll: select.epoll | None = None
        self._reads = False

    # ------------------------------------------------------------------- bytes

    def send(self, data: bytes) -> None:
        """Send data; the socket may not accept all bytes, and `flush` sends the rest later."""
        try:
            sent = 0 if self.unsent else self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return
        self.unsent += memoryview(data)[sent:]
        self.watch(read=self._reads)

    def flush(self) -> None:
        """Send unsent bytes, as many as the socket accepts."""
        try:
            while self.unsent:
                sent = self._sock.send(self.unsent)
                del self.unsent[:sent]
        except BlockingIOError:
            return

    def recv(self) -> bytes:
        """Return the bytes that have arrived.

        Raises:
            BlockingIOError: no bytes have arrived.
            ConnectionResetError: the other side closed the connection.
        """
        data = self._sock.recv(CHUNK)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def readable(self, seconds: float) -> bool:
        """Wait for received bytes; return whether there are any."""
        return bool(self._poll.poll(min(max(seconds, 0.0), LONGEST_POLL_S) * 1000))

    # ---------------------------------------------------------------- messages

    def receive(self) -> list[wire.Reply]:
        """Return the messages that have arrived; calls `recv` at most once.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: the connection is lost.
            msgspec.MsgspecError, StoreProtocolError: the received bytes are not a message.
        """
        self.received += self.recv()
        pos, messages = 0, []
        with memoryview(self.received) as view:
            while len(view) - pos >= wire.HEADER:
                start = pos + wire.HEADER
                length = int.from_bytes(view[pos:start], "big")
                if length > self.longest:
                    raise StoreProtocolError(f"the server announced a message of {length} bytes")
                if start + length > len(view):
                    break
                pos = start + length
                messages.append(wire.decode_reply(view[start:pos]))
        del self.received[:pos]
        return messages

    # ------------------------------------------------------ the background thread

    def register(self, epoll: select.epoll) -> None:
        """Register the socket with the epoll of the background thread."""
        epoll.register(self.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
        self._epoll = epoll

    def watch(self, *, read: bool) -> None:
        """Wake the background thread for the next event; with `read`, also for received bytes."""
        if self._epoll is None:
            return
        self._reads = read
        events = select.EPOLLRDHUP | select.EPOLLONESHOT
        if read:
            events |= select.EPOLLIN
        if self.unsent:
            events |= select.EPOLLOUT
        self._epoll.modify(self.fd, events)

    def claim(self) -> None:
        """Stop waking the background thread for received bytes, because the caller reads them."""
        if self._reads:
            self.watch(read=False)

    # ------------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """End the connection in both directions; this wakes a thread that waits in `readable`."""
        with suppress(OSError):  # the socket is no longer connected
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; no thread may be using it."""
        if self._epoll is not None:
            self._epoll.unregister(self.fd)
        self.forget()

    def forget(self) -> None:
        """Close the socket without changing the epoll, which a parent process may share."""
        self._sock.close()
