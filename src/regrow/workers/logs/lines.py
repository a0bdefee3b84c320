"""Prefixes lines of output (`[role0]:`), filters them, and writes them to their destinations.

A line ends at a newline, at a carriage return with a newline, or at a lone carriage return. So each
state of a progress bar is a separate line, instead of one line at the end. Bytes that are not text
pass unchanged. A line without end is cut into pieces of `MAX_LINE` bytes, which limits memory.

A write to a terminal, or to a pipe with a slow reader, may block for any time. Non-blocking mode
would limit that, but it affects all processes that hold the terminal open, including the user's
shell. So regrow does not set it, and only threads that may block write here.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from regrow.utils import ready

MAX_LINE = 256 * 1024
"""Most bytes of a line; a longer line is split."""


class Lines:
    """The lines of one stream.

    Args:
        prefix: put before each line.
        needles: only lines that contain one of these are returned; empty for all lines.
    """

    def __init__(self, prefix: str, needles: Sequence[str] = ()) -> None:
        self._prefix = prefix.encode(errors="surrogateescape")
        self._needles = [needle.encode(errors="surrogateescape") for needle in needles]
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        """Add the next bytes of the stream.

        Returns:
            The lines that are now complete, each with prefix and newline.
        """
        data = self._partial + data
        # The newline after a final carriage return may still arrive.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        self._partial = data[end:]
        out = self._format(data[:end]) if end else b""
        while len(self._partial) >= MAX_LINE:
            out += self._format(self._partial[:MAX_LINE])
            self._partial = self._partial[MAX_LINE:]
        return out

    def rest(self) -> bytes:
        """Return the last line if it has no end, and clear the buffer."""
        data, self._partial = self._partial, b""
        return self._format(data) if data else b""

    def _format(self, data: bytes) -> bytes:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        data = data.removesuffix(b"\n")
        if self._needles:
            if not any(needle in data for needle in self._needles):
                return b""  # the usual case, and much faster than line by line
            lines = data.split(b"\n")
            data = b"\n".join(
                line for line in lines if any(needle in line for needle in self._needles)
            )
            if not data:
                return b""
        return self._prefix + data.replace(b"\n", b"\n" + self._prefix) + b"\n"


class Sink:
    """A file descriptor to write lines to.

    Args:
        fd: the descriptor; if it is not open, writes are dropped.
        owned: whether the follower closes it at its end.
    """

    def __init__(self, fd: int, *, owned: bool = False) -> None:
        self._fd = fd
        self.owned = owned
        self._dead = False
        try:
            os.fstat(fd)
        except OSError:  # closed; another file may be opened under the same number
            self._dead = True

    def write(self, data: bytes) -> None:
        """Write all of `data`, however long that takes; drop it if the console is gone."""
        left = memoryview(data)
        while left and not self._dead:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process made the terminal non-blocking
                ready([self._fd], None, select.POLLOUT)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return  # a file on a full disk: the next lines may fit again
                self._dead = True

    def write_if_ready(self, text: str) -> None:
        """Write a short line unless that could block."""
        data = text.encode(errors="surrogateescape") + b"\n"
        if not self._dead and ready([self._fd], 0, select.POLLOUT):
            with suppress(OSError):
                os.write(self._fd, data[: select.PIPE_BUF])

    def close(self) -> None:
        """Close the descriptor if it is owned."""
        if self.owned and not self._dead:
            os.close(self._fd)
            self._dead = True


class StreamSink:
    """A stream that the program has assigned to sys.stdout or sys.stderr.

    Args:
        stream: any object of the program; if it raises, it gets no further output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dead = False

    def write(self, data: bytes) -> None:
        """Write all of `data`, however long that takes."""
        if self._dead or not data:
            return
        try:
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
        except BaseException:  # noqa: BLE001 - of the program; the files have the lines
            self._dead = True

    def close(self) -> None:
        """Do nothing, because the stream belongs to the program."""


Output = Sink | StreamSink
"""Destination of lines."""


def standard_output(name: str, fd: int) -> Output:
    """Return the destination of tee'd lines: the descriptor, or the program's replacement.

    Args:
        name: `stdout` or `stderr`.
        fd: the standard descriptor of this stream.
    """
    stream = getattr(sys, name)
    if stream is None:
        return Sink(fd)
    try:
        replaced = stream.fileno() != fd
    except BaseException:  # noqa: BLE001 - not a file
        replaced = True
    return StreamSink(stream) if replaced else Sink(fd)
