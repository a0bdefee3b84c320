"""The client's end of a connection: send without blocking, receive what is there.

`send` takes everything and keeps what the kernel does not take yet; `flush` tries again
once the socket is writable. Neither ever blocks, so a lock may be held around them. One
thread may send while another receives.
"""

from __future__ import annotations

import socket
from typing import Final

_CHUNK: Final = 1 << 16


class Channel:
    """A connection in plain text."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on."""
        return self._sock.fileno()

    def send(self, data: bytes) -> bool:
        """Send; return False if something is left that `flush` must send."""
        if self._unsent:
            self._unsent += data
            return False
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return True
        self._unsent += memoryview(data)[sent:]
        return False

    def flush(self) -> bool:
        """Send what is left; return False if there is still something."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
        return True

    def recv(self) -> bytes:
        """Return what has arrived.

        Raises:
            BlockingIOError: nothing has.
            ConnectionResetError: the other side closed the connection.
        """
        data = self._sock.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def shutdown(self) -> None:
        """End the connection in both directions, waking whoever waits on it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It is not connected any more, which is what was wanted.
            return

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()
