"""One redirected stream of a worker: its pipe, its log file, and its display.

No byte is ever only in the agent's memory, where a SIGKILL would lose it. The content of the
worker's pipe is moved into a second pipe, and from there into the file. `splice` moves it within
the kernel, in atomic steps. The guardian has the reading ends of both pipes, so it can continue
with them. The second pipe is needed for a file system that hangs: a pipe is locked while it is
written to a file, and a worker must not wait for that lock in a `print`.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from regrow.workers.logs.follower import Source

PIPE_SIZE = 1024 * 1024
"""Bytes that a pipe holds, so that a burst does not wait. Every user may have 1 MiB."""
PIECE = 256 * 1024
"""Bytes moved at once: few system calls, and the bytes stay in the processor's cache."""


class Stream:
    """One stream that the pump moves.

    Args:
        path: its log file.
        shown: whether stored output is also shown on the console (tee).
        console: shows it, and in any case output that cannot be stored.
        copies: write its filtered lines to further files.
    """

    def __init__(self, path: str, shown: bool, console: Source, copies: list[Source]) -> None:
        self.path = path
        self._shown = shown
        self._console = console
        self._copies = copies
        self._readers = [console, *self._copies] if shown else self._copies
        self._file = -1
        self.failing = False
        """Whether the last bytes could not be stored."""
        self._taken = 0  # bytes in the second pipe
        self.reader, self.writer = _pipe(PIPE_SIZE)
        """The agent's end of the worker's pipe, and the worker's, which the creator closes."""
        try:
            self._between = _pipe(PIECE)
        except OSError:
            os.close(self.reader)
            os.close(self.writer)
            raise
        with suppress(OSError):  # tried again, and reported, when there is output to store
            self._open()

    def _open(self) -> None:
        # Without O_APPEND, because `splice` refuses to write with it.
        mode = os.O_RDWR if self._readers else os.O_WRONLY
        file = os.open(self.path, mode | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            for source in self._readers:
                end = os.lseek(file, 0, os.SEEK_END)  # raises for a FIFO, which has no offsets
                source.follower.opened(source, os.dup(file), end)
        except OSError:
            os.close(file)
            raise
        self._file = file

    @property
    def fds(self) -> tuple[int, int, int]:
        """Return the agent's pipe ends: first the two reading ends, the older bytes first."""
        return self._between[0], self.reader, self._between[1]

    def take(self) -> int:
        """Move a piece from the worker's pipe to the second one; return its bytes, 0 at the end.

        Raises:
            BlockingIOError: the pipe is empty.
        """
        self._taken = os.splice(self.reader, self._between[1], PIECE)
        return self._taken

    def store(self, buffer: memoryview) -> tuple[memoryview, OSError | None]:
        """Append the moved bytes to the file.

        Args:
            buffer: memory of `PIECE` bytes, for bytes that the kernel cannot move into the file.

        Returns:
            the bytes that the file did not store, and the reason.
        """
        left, rest, trouble = self._taken, buffer[:0], None
        try:
            if self._file < 0:
                self._open()
            with suppress(OSError):  # not a file with an end
                os.lseek(self._file, 0, os.SEEK_END)
            while left:
                left -= os.splice(self._between[0], self._file, left)
        except OSError:
            rest = buffer[: os.readv(self._between[0], [buffer[:left]])]
            rest, trouble = self._write(rest)
        if len(rest) < self._taken and self._readers:
            # The kernel knows the offset; a count may be wrong, because the file may have been
            # truncated.
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            for source in self._readers:
                source.follower.stored(source, end)
        self._taken = 0
        return rest, trouble

    def _write(self, rest: memoryview) -> tuple[memoryview, OSError | None]:
        """Append by ordinary writes, for files that accept no data from a pipe."""
        try:
            if self._file < 0:
                self._open()
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            return rest, error
        return rest, None

    def spill(self, data: bytes) -> bool:
        """Show bytes that no file stores; return whether the console will show them."""
        for source in self._copies:
            source.follower.spill(source, data)
        return self._console.follower.spill(self._console, data)

    def note_recovery(self) -> None:
        """Note that the following output is stored again."""
        self.failing = False
        if not self._shown:  # stored output is not shown: the current line ends here
            self._console.follower.spill(self._console, b"")

    def end(self) -> None:
        """Stop reading."""
        for fd in self.fds:
            os.close(fd)
        self.reader = -1
        if self._file >= 0:
            os.close(self._file)
        for source in (self._console, *self._copies):
            source.follower.end(source)


def _pipe(size: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    # Refused when the user's pipes hold 64 MiB in all; the default of 64 KiB is enough.
    with suppress(OSError):
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, size)
    return reader, writer
