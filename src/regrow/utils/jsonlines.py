"""A file of JSON objects, one a line, that several processes append to.

The writer must never harm the job that it reports on. It accepts any value, and survives a full
disk, a read-only disk and a removed directory. It counts the lines that it could not write. It
reports the first loss on stderr. When the disk has space again, the writer adds a line with the
number of lost lines.

A line is one `write` to a file opened with O_APPEND, so lines of several processes and threads do
not mix. The kernel may shorten a write if the disk becomes full within a line. The writer does not
send the rest, because another writer may have written in between; it starts the next record on a
new line. The reader returns every whole line and reports each broken line by its number. The last
line may be incomplete, if its writer was killed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from regrow.utils.stamps import stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEEPEST = 16  # Levels of nesting that are kept in a value that is not plain JSON.


def to_json(value: object) -> str:
    """Convert any `value` to one line of strict JSON.

    Values that JSON cannot express (other types, NaN and infinities, keys that are not strings,
    cycles) are written as their `str`.
    """
    try:
        return json.dumps(value, default=_text, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, _DEEPEST), allow_nan=False)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a user's __str__ must not lose an event
        return f"<{type(value).__name__} without a text>"


def _plain(value: object, levels: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        # A float would lose digits, and Python refuses to print more than some thousands of digits.
        return int(value) if abs(value) < 1 << 1024 else _text(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else _text(value)
    if levels and isinstance(value, dict):
        return {_text(key): _plain(item, levels - 1) for key, item in value.items()}
    if levels and isinstance(value, list | tuple):
        return [_plain(item, levels - 1) for item in value]
    return _text(value)


class JsonLinesFile:
    """Appends JSON objects to the file `path`, one a line; thread-safe, never raises.

    The first `append` opens the file. A later one opens it again after a failure, or if the file
    was removed. The directory must exist.

    Args:
        path: the file.
        what: what a line stands for, as named in the warning ("events").
    """

    def __init__(self, path: str | os.PathLike[str], what: str = "lines") -> None:
        # The import is here, because a reader needs no threads.
        from threading import Lock

        self.path = os.fspath(path)
        self.lost = 0
        """Number of lines that could not be written so far."""
        self._what = what
        self._lock = Lock()
        self._fd: int | None = None
        self._midline = False
        self._unreported = 0
        self._warned = False

    def append(self, record: Mapping[str, object]) -> bool:
        """Write `record` as one line; return False if it was lost."""
        line = to_json(record).encode() + b"\n"
        with self._lock:
            try:
                self._write(line)
            except OSError as error:
                self.lost += 1
                self._unreported += 1
                self._close()
                self._warn(error)
                return False
            return True

    @property
    def gap(self) -> int:
        """Return the number of lines lost since the last written line."""
        return self._unreported

    def skip(self, lines: int) -> None:
        """Count lines that the caller lost before it could append them."""
        with self._lock:
            self.lost += lines
            self._unreported += lines

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        with self._lock:
            self._close()

    def _write(self, line: bytes) -> None:
        # Writes to a removed file succeed, but no reader finds the lines.
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
            self._close()
        if self._fd is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o666)
            size = os.fstat(self._fd).st_size
            self._midline = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        if self._unreported:
            gap = to_json({"name": "regrow.log.gap", "lost": self._unreported})
            self._write_whole(gap.encode() + b"\n")
            self._unreported = 0
        self._write_whole(line)

    def _write_whole(self, line: bytes) -> None:
        assert self._fd is not None
        if self._midline:
            line = b"\n" + line
        written = os.write(self._fd, line)
        if written == len(line):
            self._midline = False
            return
        self._midline = self._midline or written > 0
        import errno

        raise OSError(errno.ENOSPC, "the disk is full, so only a part of the line was written")

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError as error:  # a network file system reports lost writes here
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        try:
            sys.stderr.write(
                stamped(
                    f"regrow: cannot write {self._what} to {self.path}: {error.strerror} "
                    f"(errno {error.errno}); the job continues; {self._what} are lost until a "
                    "write succeeds\n"
                )
            )
        except (OSError, ValueError, AttributeError):
            return  # stderr is closed too: the loss cannot be reported


class BrokenLine(NamedTuple):
    """A line that `read_json_lines` could not use."""

    number: int
    """Number of the line, counted from 1."""
    reason: str
    """The defect of the line."""


def read_json_lines(
    path: str | os.PathLike[str], report: Callable[[BrokenLine], None]
) -> Iterator[dict[str, object]]:
    """Read the JSON objects of the file `path`, in order; call `report` for each broken line.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                ended = line.endswith(b"\n")
                reason = f"not JSON ({error})" if ended else "incomplete: the line has no end"
                report(BrokenLine(number, reason))
                continue
            if isinstance(record, dict):
                yield record
            else:
                report(BrokenLine(number, f"not a JSON object but {type(record).__name__}"))
