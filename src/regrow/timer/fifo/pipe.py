"""The named pipe of a file timer's server.

The server opens the pipe for reading and writing, so the pipe never ends: the reader does not
notice when a client opens or closes it. Its mode carries a mark (`KEPT_OPEN`). The mark shows
regrow's clients that they may keep the pipe open. With torch's server they may not: it blocks, past
all deadlines, while any process has its pipe open and writes nothing. An existing pipe at the path
is removed only if no process reads it, because then a killed server left it. Any other object may
be a file of the user, or a server in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import struct
import termios
from contextlib import suppress

from regrow.timer.fifo.request import KEPT_OPEN
from regrow.utils import ready

SIZE = 1024 * 1024
"""Bytes that the pipe holds, so that a burst does not wait. Every user may have 1 MiB."""
ADVICE = "give the timer server another path (TORCHELASTIC_TIMER_FILE)"
PIECE = 32 * 1024
"""Bytes read at once: about two hundred requests, between which no deadline is checked."""


class Pipe:
    """The reading end of the pipe.

    Args:
        path: path of the new pipe.

    Raises:
        FileExistsError: the path exists, and is not an unused pipe of this user.
        OSError: the pipe cannot be created there.
    """

    __slots__ = ("_identity", "fd", "path")

    def __init__(self, path: str) -> None:
        self.fd = -1
        _make_room(path)
        try:
            os.mkfifo(path, 0o600)
        except OSError as error:  # the error does not name the path
            raise OSError(
                error.errno,
                f"the timer server cannot create its pipe: {error.strerror}; {ADVICE}",
                path,
            ) from error
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(self.fd)
        self._identity = status.st_dev, status.st_ino
        os.fchmod(self.fd, 0o600 | KEPT_OPEN)
        # Refused when the user's pipes hold 64 MiB in all; the default of 64 KiB is enough.
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, SIZE)

    def read(self) -> bytes:
        """Return the next bytes, at most `PIECE`; empty: the pipe is empty."""
        try:
            return os.read(self.fd, PIECE)
        except BlockingIOError:
            return b""

    def waiting(self) -> int:
        """Return the number of bytes in the pipe."""
        size: int = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))[0]
        return size

    def full(self) -> bool:
        """Return whether the pipe accepts no more bytes."""
        return not ready([self.fd], 0, select.POLLOUT)

    def remove(self) -> None:
        """Remove the pipe from the file system, unless another object has taken its place."""
        with suppress(FileNotFoundError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)

    def close(self) -> None:
        """Stop reading: a client that writes then gets an error."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _make_room(path: str) -> None:
    """Remove a pipe that a killed server has left."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        raise FileExistsError(
            errno.EEXIST, f"the path exists and is not a pipe of this user; {ADVICE}", path
        )
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ENXIO:  # no process reads it
            os.unlink(path)
            return
        raise
    raise FileExistsError(
        errno.EEXIST, f"another process reads this pipe; stop that process or {ADVICE}", path
    )
