"""The job's event log: one JSON object a line, beside the workers' logs.

A line starts with the event's `name` and `source`. Then come two times, in seconds:
- `time`: wall clock since the epoch, for people, and for joins with other logs.
- `monotonic`: the host's monotonic clock; durations are computed from it.

The event's metadata follows. A metadata key that equals one of these names is written as
`metadata_<name>`.

The last event of a job decides how the job is reported. Without it the job counts as
UNFINISHED, and the disk may be full by then. So regrow allocates a small file beside the log
when the job starts. If the log cannot store the last event, the event overwrites the blocks of
that file, which needs no free space. If the log contains the last event, the job removes the file.
A killed job leaves the file, filled with zeros only. File systems that always write to new
blocks (ZFS, btrfs with compression) may still refuse the write.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.events.recording import Event
from regrow.utils import BackgroundWriter, BrokenLine, JsonLinesFile, read_json_lines, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

JOB_STARTED, JOB_FINISHED = "regrow.job.started", "regrow.job.finished"
NO_ID = "none"
"""The id of a job without `--rdzv-id` (torchrun's default); it is not shown."""
EVENTS_FILE = "events.jsonl"
"""File name of the event log in a run's log directory."""
WAITING_EVENTS = 10_000
"""Most events that may wait for a file system that hangs."""
CLOSE_S = 5.0
"""Seconds within which the last events must be written."""


def as_record(event: object) -> dict[str, Any]:
    """Convert `event`, an `Event` or any object with fields, to a line of the log."""
    if not isinstance(event, Event):
        return {"time": time.time(), "monotonic": time.monotonic(), **vars(event)}
    record: dict[str, Any] = {
        "name": event.name,
        "source": event.source,
        "time": event.timestamp / 1000 if event.timestamp else time.time(),
    }
    metadata = event.metadata
    record["monotonic"] = metadata.get("monotonic", time.monotonic())
    for key, value in metadata.items():
        if key not in record:
            record[key] = value
        elif key != "monotonic":
            record[f"metadata_{key}"] = value
    return record


class EventLog:
    """Event sink that appends each event to the file `path`.

    Any thread may call the sink (`log(event)`). It never raises: it reports a full disk, a
    read-only disk or a removed directory once on stderr. `lost` counts the events that were not
    written. Space for the end of the job is reserved, so it can be written to a full disk.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = JsonLinesFile(path, "events")
        self._end = _EndFile(self._file.path)

    @property
    def path(self) -> str:
        """Path of the log file."""
        return self._file.path

    @property
    def lost(self) -> int:
        """Number of events that could not be written so far."""
        return self._file.lost

    def __call__(self, event: Event) -> None:
        """Append `event`."""
        self._append(as_record(event))

    def write(self, records: Sequence[Mapping[str, Any]], lost: int) -> None:
        """Append records of events, and count the events that were lost after them."""
        for record in records:
            self._append(record)
        self._file.skip(lost)

    def _append(self, record: Mapping[str, Any]) -> None:
        stored = self._file.append(record)
        if record.get("name") == JOB_STARTED:
            self._end.hold()
        elif record.get("name") == JOB_FINISHED and stored:
            self._end.release()
        elif record.get("name") == JOB_FINISHED:
            self._end.keep([{"name": "regrow.log.gap", "lost": self._file.gap - 1}, record])

    record = __call__

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class QueuedEventLog:
    """Event sink that appends each event to the file `path` from a thread of its own.

    A file system that hangs, such as that of a file server out of reach, delays no caller.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._log = EventLog(path)
        self._writer = BackgroundWriter(self._log.write, "regrow-events", WAITING_EVENTS)

    def __call__(self, event: Event) -> None:
        """Queue `event`."""
        self._writer.add(as_record(event))

    def close(self) -> None:
        """Write the queued events and close the file, unless that takes longer than `CLOSE_S`.

        A later event opens the file again.
        """
        if self._writer.close(CLOSE_S):
            self._log.close()
        else:
            _to_stderr(f"{self._log.path} takes no more events; the end of the job is not in it")


class EventFile(NamedTuple):
    """Result of the search for an event log."""

    path: str
    """Path of the log file."""
    older: tuple[str, ...]
    """Logs of other runs in the same directory, newest first."""


def find_event_file(path: str | os.PathLike[str]) -> EventFile:
    """Find the event log: `path` itself, the log in a log directory, or the log of its newest run.

    Raises:
        FileNotFoundError: there is no log; the text lists the searched places.
    """
    from pathlib import Path

    path = os.fspath(path)
    if os.path.isfile(path):
        return EventFile(path, ())
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: no such file or directory")
    direct = os.path.join(path, EVENTS_FILE)
    if os.path.isfile(direct):
        return EventFile(direct, ())
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            log = os.path.join(entry.path, EVENTS_FILE)
            if os.path.isfile(log):
                found.append((Path(log).stat().st_mtime_ns, log))
    if not found:
        raise FileNotFoundError(
            f"{path}: no {EVENTS_FILE} in it or in the directories of its runs; "
            "give the directory passed as --log-dir, or a run's own"
        )
    newest, *older = (log for _, log in sorted(found, reverse=True))
    return EventFile(newest, tuple(older))


def read_events(
    path: str | os.PathLike[str], report: Callable[[str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Read the events of a log, in the order in which they were written.

    Args:
        path: the log, a run's log directory, or the directory above several runs. Of several
            runs, the newest is read.
        report: receives one line for each broken line, which is left out, and one line for the
            choice among several runs; default: stderr.

    Raises:
        OSError: there is no log, or it cannot be read.
    """
    warn = report if report is not None else _to_stderr
    log = find_event_file(path)
    if log.older:
        warn(f"{len(log.older) + 1} runs in {os.fspath(path)}; this is the newest, {log.path}")

    def broken(line: BrokenLine) -> None:
        warn(f"{log.path}: line {line.number} left out: {line.reason}")

    return _with_end(log.path, broken)


def _with_end(path: str, broken: Callable[[BrokenLine], None]) -> Iterator[dict[str, Any]]:
    yield from read_json_lines(path, broken)
    end = _end_file(path)
    if os.path.exists(end):  # the log could not store the end of the job, or lacks it
        yield from read_json_lines(end, lambda line: None)


def _to_stderr(text: str) -> None:
    print(f"regrow: {text}", file=sys.stderr)


# --- the reserved file for the end of the job

_END_SIZES = (16 << 10, 4 << 10)
_CUTS = (_END_SIZES[0], 1000, 100, 30)
"""Text lengths to try in turn, in characters, for lines that do not fit."""


class _EndFile:
    """Reserved file for the end of the job with the event log `log`; never raises."""

    def __init__(self, log: str) -> None:
        self._path = _end_file(log)

    def hold(self) -> None:
        """Allocate the file, smaller if the disk is nearly full; skip it if that fails too."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o666)
        except OSError:
            return
        try:
            for size in _END_SIZES:
                with suppress(OSError):
                    os.posix_fallocate(fd, 0, size)
                    return
            self.release()
        finally:
            os.close(fd)

    def keep(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write these records into the file, if it exists."""
        records = list(records)
        with suppress(OSError):  # the log has already warned about the disk
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                data = next(
                    (d for cut in _CUTS if len(d := _short_lines(records, cut)) <= size), b""
                )
                os.pwrite(fd, data, 0)
                os.ftruncate(fd, len(data))
            finally:
                os.close(fd)

    def release(self) -> None:
        """Remove the file, because the log contains the end of the job."""
        with suppress(OSError):
            os.unlink(self._path)


def _end_file(log: str) -> str:
    """Return the path of the reserved file that belongs to an event log."""
    folder, name = os.path.split(log)
    return os.path.join(folder, f".{name}.end")


def _short_lines(records: list[Mapping[str, Any]], most: int) -> bytes:
    cut = [
        {k: v[:most] if isinstance(v, str) else v for k, v in record.items()} for record in records
    ]
    return "".join(to_json(record) + "\n" for record in cut).encode()
