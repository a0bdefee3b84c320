"""One redirected stream of a worker: its pipe, its log file, and who shows what is in it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from regrow.workers._console import Follower, Source

PIPE_SIZE = 1024 * 1024
"""Bytes a pipe holds, so that a burst does not wait for us. 1 MiB is what any user may have."""


class Stream:
    """What the pump moves.

    Args:
        path: its log file.
        shown: whether what is stored is shown on the console, too (tee).
        console: who shows it, and what cannot be stored in any case.
        sieve: who keeps the file of its filtered lines, if anyone does.
    """

    __slots__ = ("_console", "_file", "_readers", "_shown", "failing", "path", "reader", "writer")

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
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        # Refused once the user's pipes hold 64 MiB in all; the default of 64 KiB does, too.
        with suppress(OSError):
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        with suppress(OSError):  # tried again, and reported, when there is something to store
            self._open()

    def _open(self) -> None:
        mode = os.O_RDWR if self._readers else os.O_WRONLY
        file = os.open(self.path, mode | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            for follower, source in self._readers:
                follower.opened(source, os.dup(file), os.lseek(file, 0, os.SEEK_END))
        except OSError:
            os.close(file)
            raise
        self._file = file

    def store(self, data: memoryview) -> tuple[int, OSError | None]:
        """Append to the file as much as it takes: how many bytes, and why not all."""
        done, trouble = 0, None
        try:
            if self._file < 0:
                self._open()
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            trouble = error
        if done and self._readers:
            # Asked of the kernel, not counted: somebody may have emptied the file.
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            for follower, source in self._readers:
                follower.stored(source, end)
        return done, trouble

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
        os.close(self.reader)
        self.reader = -1
        if self._file >= 0:
            os.close(self._file)
        for follower, source in [self._console, *self._readers[self._shown :]]:
            follower.end(source)
