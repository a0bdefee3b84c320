"""Find the runs in log directories, and group them into jobs.

A *run* is one agent's part of a job: a directory with an `events.jsonl`. On a shared file system
one log directory holds the runs of all hosts. A *job* of the views is a session of
`regrow.events.jobs_of`, so a requeued job is a job of its own. The node ids are those at both ends
of each log. A log without an end counts as running for `OPEN_S` after its last event.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.events import EVENTS_FILE, jobs_of
from regrow.events import Run as RecordedRun
from regrow.events.evidence import Record, integer, real, strings, text
from regrow.utils import start_ticks

if TYPE_CHECKING:
    from regrow.views.remote_job import RemoteJob

ELSEWHERE = "/dev/null"
"""The directory of runs without a log directory that this process can read; it holds no file."""
ANSWERS_S = 10.0
"""Seconds after its latest answer in which an agent on another host counts as running."""
OPEN_S = 60.0
"""Seconds after its last event in which a log without an end may still overlap with another one."""
MOST_RUNS = 2_000
"""Most runs that are listed, the newest ones."""
MOST_OF_A_NAME = 2_000
"""Most events of one name that are kept in memory, the latest ones."""
LONGEST_LINE = 1 << 20
"""Longest line of a log, in bytes."""
_ROUND_FORMED = "regrow.rendezvous.completed"
_HEAD, _TAIL = 1 << 16, 1 << 15  # bytes that are read for the list of jobs


@dataclass(frozen=True, slots=True)
class Run:
    """One agent's part of a job, as its log's first and last events show it."""

    directory: str
    run_id: str
    """Id of the job (`--rdzv-id`)."""
    host: str
    started: float
    """Time of the first event, seconds since the epoch."""
    last: float
    """Time of the last event, seconds since the epoch."""
    finished: str | None
    """State at the end of the job; None if the log has no end."""
    agent: tuple[int, int] | None
    """Process id of the agent and its start in clock ticks since the boot."""
    script: str
    """The command of a worker."""
    nodes: frozenset[str] = frozenset()
    """Node ids in its rounds, as far as the ends of its log have them."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process has no log of it, and knows it by the answers of its agent only."""
        return self.directory.startswith(ELSEWHERE)

    def is_alive(self) -> bool | None:
        """Return whether the agent runs; None if it is on another host, or unknown."""
        if self.finished is not None:
            return False
        if self.agent is None or self.host != os.uname().nodename:
            return None
        return start_ticks(self.agent[0]) == self.agent[1]


@dataclass(frozen=True, slots=True)
class Job:
    """Runs that are one job."""

    key: str
    """Name of the job in addresses, from the directory of its first run."""
    run_id: str
    runs: tuple[Run, ...]
    """At least one; the one that started first comes first."""


class Library:
    """The jobs below some directories; not thread-safe.

    Args:
        roots: log directories, directories of runs, or event logs.
        remote: a running job that is asked at its endpoint.
    """

    def __init__(self, roots: Sequence[str], remote: RemoteJob | None = None) -> None:
        self._roots = tuple(roots)
        self.remote = remote
        self._known: dict[str, tuple[tuple[int, int], Run | None]] = {}

    def jobs(self) -> list[Job]:
        """Return the jobs; the one that started last comes first."""
        logs = sorted(_logs(self._roots), key=lambda log: log[1].st_mtime_ns, reverse=True)
        runs = [run for log, status in logs[:MOST_RUNS] if (run := self._run(log, status))]
        if self.remote is not None:
            known = {(run.host, run.agent) for run in runs}
            found = self.remote.runs()
            runs += [run for run in found if (run.host, run.agent) not in known]
        return grouped(runs)

    def another(self) -> Library:
        """Return a library of the same directories, for another thread."""
        library = Library(self._roots, self.remote)
        library._known = dict(self._known)
        return library

    def job(self, key: str) -> Job | None:
        """Return the job with this key, also if it has become part of a job with an earlier run."""
        jobs = self.jobs()
        if (found := next((job for job in jobs if job.key == key), None)) is not None:
            return found
        return next((job for job in jobs if key in (_key(run.directory) for run in job.runs)), None)

    def is_alive(self, run: Run) -> bool | None:
        """Return whether an agent runs; None if it is on another host, and does not answer."""
        alive = run.is_alive()
        if alive is None and self.remote is not None:
            node = self.remote.node(run)
            if node is not None and node.silent_s() < ANSWERS_S:
                return True
        return alive

    def _run(self, log: str, status: os.stat_result) -> Run | None:
        """Return the run with this log; what is known of an unchanged log is not read again."""
        stamp = status.st_mtime_ns, status.st_size
        if (known := self._known.get(log)) is None or known[0] != stamp:
            try:
                known = stamp, _read_run(log, known[1] if known else None)
            except OSError:
                known = stamp, None
            self._known[log] = known
        return known[1]


def grouped(runs: Sequence[Run]) -> list[Job]:
    """Group runs into jobs as `jobs_of` does; the job that started last comes first."""
    by_directory = {run.directory: run for run in runs}
    jobs = []
    for session in (each for job in jobs_of(map(_recorded, runs)) for each in job):
        own = [by_directory[run.log] for run in session.runs]
        own.sort(key=lambda run: (run.started, run.directory))
        jobs.append(Job(_key(own[0].directory), own[0].run_id, tuple(own)))
    return sorted(jobs, key=lambda job: job.runs[0].started, reverse=True)


def _recorded(run: Run) -> RecordedRun:
    """Convert a run for `jobs_of`, which takes the node ids from an event."""
    return RecordedRun(
        log=run.directory,
        events=[{"name": _ROUND_FORMED, "joined": [*run.nodes]}],
        run_id=run.run_id,
        host=run.host,
        workers=1,
        begin=run.started,
        end=run.last if run.finished is not None else run.last + OPEN_S,
        offset=0.0,
        state=run.finished,
        is_open=None,
    )


def _key(directory: str) -> str:
    return sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:16]


def _logs(roots: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each event log below the directories, once."""
    found: set[tuple[int, int]] = set()
    for root in roots:
        folder = os.path.dirname(root) if os.path.basename(root) == EVENTS_FILE else root
        folders = [folder]
        with suppress(OSError), os.scandir(folder) as entries:
            folders += [entry.path for entry in entries if entry.is_dir()]
        for each in folders:
            log = os.path.join(each, EVENTS_FILE)
            with suppress(OSError):
                status = Path(log).stat()
                if (identity := (status.st_dev, status.st_ino)) not in found:
                    found.add(identity)
                    yield log, status


def _read_run(log: str, before: Run | None) -> Run | None:
    """Read the ends of a log; None if it holds no start of a job."""
    with open(log, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = [] if before else _records(file.read(_HEAD).split(b"\n"))
        file.seek(max(size - _TAIL, 0))
        tail = _records(file.read(_TAIL).split(b"\n"))
    run = before or _from_start(os.path.dirname(os.path.abspath(log)), head)
    return None if run is None else _with_end(run, head, tail + _end_of(run.directory))


def run_of(directory: str, events: Sequence[dict[str, Any]]) -> Run | None:
    """Return the run with these events; None if no start of a job is among them."""
    run = _from_start(directory, events)
    return None if run is None else _with_end(run, (), events)


def _with_end(run: Run, head: Sequence[Record], tail: Sequence[Record]) -> Run:
    finished = next((e for e in tail if text(e, "name") == "regrow.job.finished"), {})
    times = [time for event in tail if (time := real(event, "time")) is not None]
    rounds = [e for e in (*head, *tail) if text(e, "name") == _ROUND_FORMED]
    nodes = [id for e in rounds for id in (*strings(e, "joined"), *strings(e, "first_ranks"))]
    last, state = max([run.last, *times]), text(finished, "state")
    return replace(run, last=last, finished=state, nodes=run.nodes.union(nodes))


def _from_start(directory: str, head: Sequence[dict[str, Any]]) -> Run | None:
    started = next((e for e in head if text(e, "name") == "regrow.job.started"), None)
    if started is None:
        return None
    found = started.get("agent")
    agent = found if isinstance(found, dict) else {}
    pid, ticks = integer(agent, "pid"), integer(agent, "start_ticks")
    command = started.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    time = real(started, "time") or 0.0
    return Run(
        directory=directory,
        run_id=text(started, "run_id") or "?",
        host=text(started, "host") or "?",
        started=time,
        last=time,
        finished=None,
        agent=None if pid is None or ticks is None else (pid, ticks),
        script=" ".join(words),
    )


def _end_of(directory: str) -> list[dict[str, Any]]:
    """Return the events of the file that holds the end of a job if the disk was full."""
    try:
        with open(os.path.join(directory, f".{EVENTS_FILE}.end"), "rb") as file:
            return _records(file.read(_TAIL).rstrip(b"\0").split(b"\n"))
    except OSError:
        return []


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the events on these lines; lines of another kind are left out."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            if line and isinstance(record := json.loads(line), dict):
                found.append(record)
    return found


class LatestEvents:
    """Events in the order of their log; of one name the latest `MOST_OF_A_NAME`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Add the next events."""
        for record in records:
            name = str(record.get("name"))
            self.events.append(record)
            count = self._counts[name] = self._counts.get(name, 0) + 1
            if count >= 2 * MOST_OF_A_NAME:
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove the older half of the events of this name."""
        left = MOST_OF_A_NAME
        kept = []
        for record in self.events:
            if left and record.get("name") == name:
                left -= 1
            else:
                kept.append(record)
        self.events = kept
        self._counts[name] -= MOST_OF_A_NAME


class EventReader:
    """Reads the event log of a run as it grows.

    Args:
        directory: the directory of the run.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._position = 0
        self._has_end = False
        self._unread = b""
        self._kept = LatestEvents()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events, in the order of the log; of one name the latest `MOST_OF_A_NAME`."""
        return self._kept.events

    def read(self) -> bool:
        """Read what is new; return whether there is something new.

        Raises:
            OSError: the log cannot be read.
        """
        before = len(self.events), self._position
        with open(os.path.join(self._directory, EVENTS_FILE), "rb") as file:
            if os.fstat(file.fileno()).st_size < self._position:  # it was replaced
                self._kept = LatestEvents()
                self._position, self._unread = 0, b""
            file.seek(self._position)
            while data := file.read(1 << 20):
                self._position += len(data)
                *lines, rest = (self._unread + data).split(b"\n")
                # The end of a line that is too long is no JSON, and is dropped too.
                self._unread = rest if len(rest) <= LONGEST_LINE else b"\0"
                self._kept.add(_records(lines))
        if not self._has_end and (end := _end_of(self._directory)):
            self._has_end = True
            self._kept.add(end)
        return (len(self.events), self._position) != before
