"""One redirected stream of a worker: its pipe, its log file, and who shows what is in it.

No byte of it is ever only in our memory, where a SIGKILL would lose it. What the worker's pipe
holds is moved (`splice`: in the kernel, in steps that either happened or did not) into a second
pipe, and from there into the file; the guardian has the reading ends of both and goes on with
the same two. The second pipe is there for a file system that hangs: a pipe is locked while it
is written to a file, and a worker must not wait for that lock in a `print`.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from regrow.workers._console import Follower, Source

PIPE_SIZE = 1024 * 1024
"""Bytes a pipe holds, so that a burst does not wait for us. 1 MiB is what any user may have."""
PIECE = 256 * 1024
"""Bytes moved at once: few system calls, and they stay in the processor's cache."""


class Stream:
    """What the pump moves.

    Args:
        path: its log file.
        shown: whether what is stored is shown on the console, too (tee).
        console: who shows it, and what cannot be stored in any case.
        sieve: who keeps the file of its filtered lines, if anyone does.
    """

    __slots__ = (
        "_between",
        "_console",
        "_file",
        "_readers",
        "_shown",
        "_taken",
        "failing",
        "path",
        "reader",
        "writer",
    )

    def __init__(
        self,
        path: str,
        shown: bool,
        console: tuple[Follower, Source],
        sieve: tuple[Follower, Source] | None,
    ) -> None:
        self.path = path
        self._shown = shown
        self._console = console
        self._readers = [console] if shown else []
        if sieve is not None:
            self._readers.append(sieve)
        self._file = -1
        self.failing = False
        """Whether the last bytes could not be stored."""
        self._taken = 0  # bytes in the pipe between
        self.reader, self.writer = _pipe(PIPE_SIZE)
        try:
            self._between = _pipe(PIECE)
        except OSError:
            os.close(self.reader)
            os.close(self.writer)
            raise
        with suppress(OSError):  # tried again, and reported, when there is something to store
            self._open()

    def _open(self) -> None:
        # Without O_APPEND, to which `splice` refuses to write.
        mode = os.O_RDWR if self._readers else os.O_WRONLY
        file = os.open(self.path, mode | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            for follower, source in self._readers:
                follower.opened(source, os.dup(file), os.lseek(file, 0, os.SEEK_END))
        except OSError:
            os.close(file)
            raise
        self._file = file

    @property
    def fds(self) -> tuple[int, int, int]:
        """Our ends of the pipes, those that are read first, in the order of what they hold."""
        return self._between[0], self.reader, self._between[1]

    def take(self) -> int:
        """Move what the worker's pipe holds, or a piece, between; how many bytes, 0 at the end.

        Raises:
            BlockingIOError: the pipe is empty.
        """
        self._taken = os.splice(self.reader, self._between[1], PIECE)
        return self._taken

    def store(self, buffer: memoryview) -> tuple[memoryview, OSError | None]:
        """Append what was taken to the file.

        Args:
            buffer: for what cannot be moved within the kernel, `PIECE` bytes.

        Returns:
            what the file did not take, and why.
        """
        left, rest, trouble = self._taken, buffer[:0], None
        try:
            if self._file < 0:
                self._open()
            with suppress(OSError):  # not a file that has an end
                os.lseek(self._file, 0, os.SEEK_END)
            while left:
                left -= os.splice(self._between[0], self._file, left)
        except OSError:
            rest = buffer[: os.readv(self._between[0], [buffer[:left]])]
            rest, trouble = self._write(rest)
        if len(rest) < self._taken and self._readers:
            # Asked of the kernel, not counted: somebody may have emptied the file.
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            for follower, source in self._readers:
                follower.stored(source, end)
        self._taken = 0
        return rest, trouble

    def _write(self, rest: memoryview) -> tuple[memoryview, OSError | None]:
        """Append in the ordinary way, for files that take nothing from a pipe."""
        try:
            if self._file < 0:
                self._open()
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            return rest, error
        return rest, None

    def spill(self, data: bytes) -> bool:
        """Show bytes that no file takes; whether the console will."""
        for follower, source in self._readers[self._shown :]:
            follower.spill(source, data)
        return self._console[0].spill(self._console[1], data)

    def mended(self) -> None:
        """What comes now is stored again."""
        self.failing = False
        if not self._shown:  # and so it is not shown: what is left of a line is the last of it
            self._console[0].spill(self._console[1], b"")

    def close_writer(self) -> None:
        """Close our copy of the worker's end."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def end(self) -> None:
        """Read no more."""
        for fd in self.fds:
            os.close(fd)
        self.reader = -1
        if self._file >= 0:
            os.close(self._file)
        for follower, source in [self._console, *self._readers[self._shown :]]:
            follower.end(source)


def _pipe(size: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    # Refused once the user's pipes hold 64 MiB in all; the default of 64 KiB does, too.
    with suppress(OSError):
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, size)
    return reader, writer
