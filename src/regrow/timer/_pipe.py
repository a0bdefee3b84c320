"""The named pipe of a file timer's server: made, kept, and removed.

It is opened for reading and writing, so that it never ends: no client, the first client and the
last one make no difference to whoever waits at it. In the file system it is marked (`KEPT_OPEN`),
which tells our clients that they may keep it open: torch's server waits, blind to all deadlines,
for as long as anybody has its pipe open and writes nothing.

What stands at the path already is removed only if it is a pipe that nobody reads, left by a server
that was killed. Anything else may be somebody's file, or a server that is needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress

KEPT_OPEN = stat.S_ISVTX
"""Mode bit of a pipe that clients may keep open; without a meaning for anything but directories."""
SIZE = 1024 * 1024
"""Bytes the pipe holds, so that a burst does not wait. 1 MiB is what any user may have."""
ADVICE = "give the timer server another path (TORCHELASTIC_TIMER_FILE)"


class Pipe:
    """The reading end.

    Args:
        path: where to make it.

    Raises:
        FileExistsError: something is there that is not ours to remove.
        OSError: it cannot be made there.
    """

    __slots__ = ("_identity", "fd", "path")

    def __init__(self, path: str) -> None:
        self.fd = -1
        _make_room(path)
        try:
            os.mkfifo(path, 0o600)
        except OSError as error:  # which does not say where
            raise OSError(
                error.errno,
                f"no pipe can be made for the timer server: {error.strerror}; {ADVICE}",
                path,
            ) from error
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(self.fd)
        self._identity = status.st_dev, status.st_ino
        os.fchmod(self.fd, 0o600 | KEPT_OPEN)
        # Refused once the user's pipes hold 64 MiB in all; the default of 64 KiB does, too.
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, SIZE)

    def remove(self) -> None:
        """Remove it from the file system, unless something else has taken its place."""
        with suppress(FileNotFoundError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)

    def close(self) -> None:
        """Read no more: clients are told that nobody does."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _make_room(path: str) -> None:
    """Remove a pipe that a server before us has left."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        raise FileExistsError(
            errno.EEXIST, f"there is something that is no pipe of this user; {ADVICE}", path
        )
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ENXIO:  # nobody reads it
            os.unlink(path)
            return
        raise
    raise FileExistsError(
        errno.EEXIST, f"there is a pipe that another process reads; stop that one or {ADVICE}", path
    )
