"""The guardian's end of the socket to its agent: frames in, with file descriptors; frames out.

The agent may be slow, suspended or dead; nothing here ever waits for it.
"""

from __future__ import annotations

import _socket  # `socket` would add enums and selectors: more than all the rest together

from ._frames import Decoder, encode


class Wire:
    """A non-blocking socket and what is under way on it."""

    __slots__ = ("_decoder", "_out", "_socket", "closed", "fds", "number")

    def __init__(self, number: int) -> None:
        self._socket = _socket.socket(fileno=number)
        self._socket.setblocking(False)
        self._decoder = Decoder()
        self._out = bytearray()
        self.number = number  # the descriptor, to wait on
        self.closed = False  # the other end is
        self.fds: list[int] = []  # received, in order, not yet claimed by a message

    def hear(self) -> list[list[bytes]] | None:
        """The messages that one read completes; None: there is nothing to read (any more)."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                1 << 18, 4096, _socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data, ancillary, flags = b"", [], 0
        for _, kind, payload in ancillary:
            if kind == _socket.SCM_RIGHTS:
                view = memoryview(payload)
                self.fds.extend(view[: len(view) // 4 * 4].cast("i"))
        if flags & _socket.MSG_CTRUNC:
            raise RuntimeError("file descriptors were lost: RLIMIT_NOFILE is too low for the job")
        if not data:
            self.closed = True
            return None
        return list(self._decoder.feed(data))

    def tell(self, *fields: bytes | int) -> None:
        """Send a frame, or as much of it as the socket takes; `flush` sends the rest."""
        self._out += encode(fields)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes of what is left."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    @property
    def pending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._out)
