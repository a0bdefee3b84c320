"""Bytes in, whole lines with a prefix out: pure, so that it can be tested to the last byte.

A line ends at a newline, at a carriage return with a newline, or at a lone carriage return, so
that each state of a progress bar is a line of its own rather than held back until the bar is
full. What is not text passes unchanged. A line without end is cut into pieces of `MAX_LINE`
bytes: memory is bounded, whatever a worker prints.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_LINE = 256 * 1024
"""Bytes; a longer line comes out as several."""


class Lines:
    """The lines of one stream.

    Args:
        prefix: put before each line.
        needles: only lines that contain one of these come out; none for all lines.
    """

    __slots__ = ("_needles", "_partial", "_prefix")

    def __init__(self, prefix: str, needles: Sequence[str] = ()) -> None:
        self._prefix = prefix.encode(errors="surrogateescape")
        self._needles = [needle.encode(errors="surrogateescape") for needle in needles]
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream.

        Returns:
            The lines that are complete by now, each with prefix and newline.
        """
        data = self._partial + data
        # A carriage return at the very end may have its newline still to come.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        self._partial = data[end:]
        out = self._dress(data[:end]) if end else b""
        while len(self._partial) >= MAX_LINE:
            out += self._dress(self._partial[:MAX_LINE])
            self._partial = self._partial[MAX_LINE:]
        return out

    def rest(self) -> bytes:
        """The last line, if it has no end of its own; nothing is kept."""
        data, self._partial = self._partial, b""
        return self._dress(data) if data else b""

    def _dress(self, data: bytes) -> bytes:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        data = data.removesuffix(b"\n")
        if self._needles:
            if not any(needle in data for needle in self._needles):
                return b""  # nearly always, and much faster than line by line
            lines = data.split(b"\n")
            data = b"\n".join(
                line for line in lines if any(needle in line for needle in self._needles)
            )
            if not data:
                return b""
        return self._prefix + data.replace(b"\n", b"\n" + self._prefix) + b"\n"
