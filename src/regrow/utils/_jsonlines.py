"""A file of JSON objects, one a line, that several processes append to.

The writer must never harm the job that it reports on: it takes any value, it
survives a full disk, a read-only one and a directory that was removed. What
could not be written is counted; the first loss is said on stderr, and once
there is room again a line with the number of lost ones closes the gap.

A line is one `write` to a file opened with O_APPEND, so lines of several
processes and threads do not mix. The kernel may cut a write short (disk full
in mid-line): the rest is not sent after it, since another writer may be in
between, but the next line starts on a new one. The reader gives every whole
line and reports each broken one by its number; the last line may always be
one that a killed writer never finished.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEEPEST = 16  # Levels of nesting that are kept where a value is not plain JSON.


def to_json(value: object) -> str:
    """`value` as one line of strict JSON, for any value.

    What JSON has no form for (other types, NaN and infinities, keys that are no strings,
    cycles) is written as its `str`.
    """
    try:
        return json.dumps(value, default=_text, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, _DEEPEST), allow_nan=False)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - anybody's __str__, and no event is lost for it
        return f"<{type(value).__name__} without a text>"


def _plain(value: object, levels: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        # A float would lose digits, and Python refuses to print more than some thousands.
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

    The file is opened by the first `append`, and again after a failure or where somebody
    removed it. Its directory must exist.

    Args:
        path: the file.
        what: what a line is, for the warning ("events").
    """

    def __init__(self, path: str | os.PathLike[str], what: str = "lines") -> None:
        # Imported here: a reader needs no threads.
        from threading import Lock

        self.path = os.fspath(path)
        self.lost = 0
        """How many lines could not be written so far."""
        self._what = what
        self._lock = Lock()
        self._fd: int | None = None
        self._midline = False
        self._unreported = 0
        self._warned = False

    def append(self, record: Mapping[str, object]) -> bool:
        """Write `record` as one line; False where it was lost."""
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

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        with self._lock:
            self._close()

    def _write(self, line: bytes) -> None:
        # A removed file takes writes without complaint, and keeps them from everybody.
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

        raise OSError(errno.ENOSPC, "the line was cut short, no room is left")

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError as error:  # a network file system tells of lost writes here
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        try:
            sys.stderr.write(
                f"regrow: cannot write {self._what} to {self.path}: {error.strerror} "
                f"(errno {error.errno}); the job goes on without them until it works again\n"
            )
        except (OSError, ValueError, AttributeError):
            return  # stderr is closed too: nobody is left to tell


class BrokenLine(NamedTuple):
    """A line that `read_json_lines` could not use."""

    number: int
    """Its number, from 1."""
    reason: str
    """What is wrong with it."""


def read_json_lines(
    path: str | os.PathLike[str], report: Callable[[BrokenLine], None]
) -> Iterator[dict[str, object]]:
    """The JSON objects of the file `path`, in order; `report` is told of each broken line.

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
                reason = f"no JSON ({error})" if ended else "cut short: its writer never ended it"
                report(BrokenLine(number, reason))
                continue
            if isinstance(record, dict):
                yield record
            else:
                report(BrokenLine(number, f"no JSON object but {type(record).__name__}"))
