"""The job's log of events: one JSON object a line, beside the workers' logs.

A line has the event's `name` and `source`, `time` (wall clock, seconds since
the epoch, to be read by people and joined with other logs), `monotonic` (the
host's monotonic clock, seconds: what durations are computed from) and then
the event's metadata. Metadata that would take one of these names is written
as `metadata_<name>`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.utils import BrokenLine, JsonLinesFile, read_json_lines

from ._types import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EVENTS_FILE", "EventFile", "EventLog", "as_record", "find_event_file", "read_events"]

EVENTS_FILE = "events.jsonl"
"""The log's name in a run's log directory."""


def as_record(event: object) -> dict[str, Any]:
    """The line of the log for `event`: an `Event`, or any object with fields."""
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
    """Appends each event that it is called with to the file `path`.

    It is an event sink (`log(event)`), safe to be called from any thread, and never raises: a
    full or read-only disk and a removed directory are reported once on stderr, and `lost`
    counts the events that were not written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = JsonLinesFile(path, "events")

    @property
    def path(self) -> str:
        """The file."""
        return self._file.path

    @property
    def lost(self) -> int:
        """How many events could not be written so far."""
        return self._file.lost

    def __call__(self, event: Event) -> None:
        """Append `event`."""
        self._file.append(as_record(event))

    record = __call__

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class EventFile(NamedTuple):
    """The log of events that a path stands for."""

    path: str
    """The file."""
    older: tuple[str, ...]
    """Logs of other runs in the same directory, newest first."""


def find_event_file(path: str | os.PathLike[str]) -> EventFile:
    """The log at `path`: the file itself, or that of a log directory or of its newest run.

    Raises:
        FileNotFoundError: there is none; the text says where it was looked for.
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
            f"{path}: no {EVENTS_FILE} in it or in a run's directory below it; "
            "give the directory passed as --log-dir, or a run's own"
        )
    newest, *older = (log for _, log in sorted(found, reverse=True))
    return EventFile(newest, tuple(older))


def read_events(
    path: str | os.PathLike[str], report: Callable[[str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """The events of a log, in the order in which they were written.

    Args:
        path: the log, a run's log directory, or the directory above several runs, of which
            the newest is read.
        report: is told, in a line each, of broken lines (which are left out) and of the
            choice among several runs; default: stderr.

    Raises:
        OSError: there is no log, or it cannot be read.
    """
    tell = report if report is not None else _to_stderr
    log = find_event_file(path)
    if log.older:
        tell(f"{len(log.older) + 1} runs in {os.fspath(path)}; this is the newest, {log.path}")

    def broken(line: BrokenLine) -> None:
        tell(f"{log.path}: line {line.number} left out: {line.reason}")

    return read_json_lines(log.path, broken)


def _to_stderr(text: str) -> None:
    print(f"regrow: {text}", file=sys.stderr)
