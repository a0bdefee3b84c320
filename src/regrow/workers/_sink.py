"""Writing to a descriptor that others use, too: a terminal, a pipe to who knows whom, a file.

A write to it may block for as long as the user likes. Non-blocking mode would bound that, but it
belongs to all who hold the terminal open, the user's shell among them; so it is left alone, and
only threads that may block write here.
"""

from __future__ import annotations

import errno
import os
import select
from contextlib import suppress


class Sink:
    """A file descriptor to write lines to.

    Args:
        fd: the descriptor; what is written to one that is not open is dropped.
        owned: whether the follower closes it at its end.
    """

    __slots__ = ("_dead", "_fd", "owned")

    def __init__(self, fd: int, *, owned: bool = False) -> None:
        self._fd = fd
        self.owned = owned
        self._dead = False
        try:
            os.fstat(fd)
        except OSError:  # closed; somebody may open another file under the same number
            self._dead = True

    def write(self, data: bytes) -> None:
        """Write all of it, for as long as that takes; a console that is gone hears nothing."""
        left = memoryview(data)
        while left and not self._dead:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # somebody else made the terminal non-blocking
                self._room().poll()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return  # a file on a full disk: the next lines may fit again
                self._dead = True

    def write_if_ready(self, text: str) -> None:
        """Write a short line unless that could block."""
        data = text.encode(errors="surrogateescape") + b"\n"
        if not self._dead and self._room().poll(0):
            with suppress(OSError):
                os.write(self._fd, data[: select.PIPE_BUF])

    def _room(self) -> select.poll:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return poll

    def close(self) -> None:
        """Close the descriptor if it is owned."""
        if self.owned and not self._dead:
            os.close(self._fd)
            self._dead = True
