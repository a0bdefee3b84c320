"""The output of a job's workers: which files there are, and what is new in one of them.

A file is named by the index of its run, its attempt, its local rank and its stream. A path is made
of these numbers alone, so no request leads out of a run's directory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

STREAMS = ("stdout", "stderr")
FIRST_BYTES = 64 << 10
"""Bytes at the end of a file with which its reading begins."""
MOST_BYTES = 256 << 10
"""Most bytes that are read at once."""
MOST_FILES = 20_000
_ATTEMPT = re.compile(r"attempt_(\d{1,9})")


class LogName(NamedTuple):
    """Name of a file with output."""

    run: int
    """Index of the agent's run in its job."""
    attempt: int
    local_rank: int
    stream: str
    """`stdout` or `stderr`."""


def log_files(directories: list[str]) -> list[tuple[LogName, int]]:
    """Return the files with output in the directories of runs, and their sizes in bytes."""
    found = [
        (LogName(run, attempt, int(local_rank), stream), size)
        for run, directory in enumerate(directories)
        for attempt, folder in _attempts(directory)
        for local_rank in _names(folder)
        if local_rank.isascii() and local_rank.isdecimal() and len(local_rank) < 6
        for stream in STREAMS
        if (size := _size(os.path.join(folder, local_rank, f"{stream}.log"))) is not None
    ]
    return sorted(found)[-MOST_FILES:]


def _attempts(directory: str) -> Iterator[tuple[int, str]]:
    for name in _names(directory):
        if match := _ATTEMPT.fullmatch(name):
            yield int(match[1]), os.path.join(directory, name)


def _names(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _size(path: str) -> int | None:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


class LogReader:
    """Reads a file with output from near its end, as it grows.

    Args:
        directory: the directory of its run.
        name: the file; `run` is not used.
    """

    def __init__(self, directory: str, name: LogName) -> None:
        if name.stream not in STREAMS:
            raise FileNotFoundError(name.stream)
        folder = f"attempt_{int(name.attempt)}"
        self._path = os.path.join(
            directory, folder, str(int(name.local_rank)), f"{name.stream}.log"
        )
        self._position: int | None = None

    def read(self) -> bytes:
        """Return what is new, at most `MOST_BYTES`; empty if nothing is.

        Raises:
            OSError: there is no such file.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._path, flags)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(self._path)
            if self._position is None or status.st_size < self._position:
                self._position = max(status.st_size - FIRST_BYTES, 0)
                data = os.pread(fd, MOST_BYTES, self._position)
                self._position += len(data)
                # The first line is not whole, unless the file starts here.
                return data if self._position == len(data) else data.partition(b"\n")[2]
            data = os.pread(fd, MOST_BYTES, self._position)
            self._position += len(data)
            return data
        finally:
            os.close(fd)
