"""`Run`: what one agent recorded from its start to its end, and how runs form a job.

A job may have several runs at a time, one on each node, and several in succession, when a scheduler
requeues it. Runs with the same `--rdzv-id` belong together. Those whose rounds have a node in
common form a *session*; node ids are unique, also when a scheduler starts the job again. A run
without node ids (one node, or no round) belongs to the session that it overlaps by the time of day.
A later session continues the job, unless the one before has succeeded: then the id was used again.
The default id "none" continues no job, because all jobs without an id have it.

Within a run all times are of the host's monotonic clock. The offset to the wall clock is that of
the first event. `jobs_of` corrects the offsets of the runs of a session by the rounds that they
have in common, because the wall clocks of hosts may differ. Runs without a common round are
compared by their own wall clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_high
from typing import TypeAlias

from regrow.events.evidence import Record, integer, real, strings, text
from regrow.events.log import NO_ID

_ROUND_FORMED = "regrow.rendezvous.completed"
_ROUND_ENDED, _ROUND_JUDGED = "regrow.round.ended", "regrow.round.judged"
MOST_WORKERS = 4096  # of one agent; a larger number in a log is taken for an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The events of one agent, from its start to its end or to its last event."""

    log: str
    """The log that has the events."""
    events: Sequence[Record]
    run_id: str | None
    host: str
    workers: int
    """Number of workers of the node."""
    begin: float
    """Monotonic seconds of the start."""
    end: float
    """Monotonic seconds of the end, or of the last event if the end is not recorded."""
    offset: float
    """What is added to monotonic seconds for the wall clock. `jobs_of` corrects it, so that the
    hosts of a round have one wall clock."""
    state: str | None
    """How it ended; None if it was killed, or still runs."""
    is_open: bool | None
    """Whether its agent still runs. None: unknown, for example because it is on another host;
    `jobs_of` then takes it for open if another run of its session is."""


Alive: TypeAlias = Callable[[Record], bool | None]
"""Tells from an agent's first event whether it still runs; None: unknown."""


def _unknown(started: Record) -> None:
    return None


def runs_of(log: str, events: Iterable[Record], is_alive: Alive = _unknown) -> list[Run]:
    """Return the runs whose events are in a log; `is_alive` is asked for those without an end."""
    known = [
        event
        for event in events
        if isinstance(event, Mapping) and real(event, "monotonic") is not None
    ]
    starts = [i for i, event in enumerate(known) if text(event, "name") == "regrow.job.started"]
    found = (_run(log, known[i:j], is_alive) for i, j in pairwise([*starts, len(known)]))
    return [run for run in found if run is not None]


def _run(log: str, events: Sequence[Record], is_alive: Alive) -> Run | None:
    started = events[0]
    begin, workers = real(started, "monotonic"), integer(started, "nproc_per_node")
    wall = real(started, "time")
    if begin is None or wall is None or workers is None or not 0 < workers <= MOST_WORKERS:
        return None
    finished = next((e for e in events if text(e, "name") == "regrow.job.finished"), None)
    last = [finished] if finished is not None else events
    times = [at for event in last if (at := real(event, "monotonic")) is not None]
    return Run(
        log=log,
        events=events,
        run_id=text(started, "run_id"),
        host=text(started, "host") or "?",
        workers=workers,
        begin=begin,
        end=max([begin, *times]),
        offset=wall - begin,
        state=None if finished is None else text(finished, "state") or "?",
        is_open=is_alive(started) if finished is None else False,
    )


@dataclass(frozen=True, slots=True)
class Session:
    """The runs of a job at one time, on all its nodes; `begin` and `end` on its wall clock."""

    runs: tuple[Run, ...]

    @property
    def begin(self) -> float:
        """When its first run began."""
        return min(run.begin + run.offset for run in self.runs)

    @property
    def end(self) -> float:
        """When its last run ended."""
        return max(run.end + run.offset for run in self.runs)

    @property
    def ended(self) -> bool:
        """Whether a run has recorded its end."""
        return any(run.state is not None for run in self.runs)

    @property
    def succeeded(self) -> bool:
        """Whether the job was done then."""
        return any(run.state == "SUCCEEDED" for run in self.runs)


def jobs_of(runs: Iterable[Run]) -> list[tuple[Session, ...]]:
    """Group runs into jobs, and the runs of a job into sessions, in the order of their starts.

    It corrects the offsets of runs that have a round in common, so that they have one wall clock.
    """
    jobs: list[list[Session]] = []
    latest: dict[str | None, tuple[list[Session], bool]] = {}  # and whether it has node ids
    for session, has_nodes in _by_nodes(runs):
        run_id = session.runs[0].run_id
        job, had_nodes = latest.get(run_id, ([], False))
        if job and session.begin < job[-1].end and not (has_nodes and had_nodes):
            job[-1] = Session((*job[-1].runs, *session.runs))
            has_nodes |= had_nodes
        elif job and run_id not in (None, NO_ID) and not job[-1].succeeded:
            job.append(session)
        else:
            jobs.append(job := [session])
        latest[run_id] = job, has_nodes
    return [tuple(Session(_until_lost(session.runs)) for session in job) for job in jobs]


def _by_nodes(runs: Iterable[Run]) -> list[tuple[Session, bool]]:
    """Return the runs whose rounds have a node in common, and each run without node ids alone.

    Returns:
        Sessions in the order of their starts, and whether each has node ids.
    """
    found: list[tuple[set[tuple[str | None, str]], list[Run]]] = []
    for run in runs:
        nodes = {
            (run.run_id, node)
            for event in run.events
            if text(event, "name") == _ROUND_FORMED
            for node in (*strings(event, "joined"), *strings(event, "first_ranks"))
        }
        own: list[Run] = []
        for each in [each for each in found if each[0] & nodes]:
            found.remove(each)
            nodes |= each[0]
            own += each[1]
        found.append((nodes, [*own, run]))
    sessions = [(Session(_on_one_clock(own)), bool(nodes)) for nodes, own in found]
    return sorted(sessions, key=lambda each: each[0].begin)


def _on_one_clock(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Correct the offsets of the runs of a session by the rounds that they have in common.

    All hosts of a round record its formation at nearly the same time. The common clock is the
    median of their wall clocks; of two clocks, it is the one that is behind. So all sessions of the
    same hosts have the same clock. A run without a common round keeps its own clock.

    Returns:
        The runs in the order of their starts.
    """
    clocks: list[tuple[dict[int, float], list[tuple[Run, float]]]] = []
    known = [(run, _rounds_of(run)) for run in runs]
    # In the order of their first rounds, each run has a round in common with an earlier one.
    for run, own in sorted(known, key=lambda each: min(each[1], default=math.inf)):
        clock = next((each for each in clocks if each[0].keys() & own.keys()), None)
        if clock is None:
            clocks.append(clock := ({}, []))
        rounds, members = clock
        common = [rounds[number] - own[number] for number in own.keys() & rounds.keys()]
        offset = median(common) if common else run.offset
        members.append((run, offset))
        for number, at in own.items():
            rounds.setdefault(number, at + offset)
    found: list[Run] = []
    for _, members in clocks:
        ahead_s = median_high(offset - run.offset for run, offset in members)
        found += [replace(run, offset=offset - ahead_s) for run, offset in members]
    return tuple(sorted(found, key=lambda run: run.begin + run.offset))


def _rounds_of(run: Run) -> dict[int, float]:
    """Return the monotonic time at which each round of a run was formed, by its attempt."""
    found: dict[int, float] = {}
    for event in run.events:
        number, at = integer(event, "attempt"), real(event, "monotonic")
        if text(event, "name") == _ROUND_FORMED and number is not None and at is not None:
            found.setdefault(number, at)
    return found


def _until_lost(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Extend each run without an end until another host recorded that its round has lost a node.

    The last event of a killed agent may be much older than its end. A host that recorded the end
    of the round itself was not lost with it. The clocks of two hosts do not decide this.
    """
    is_open = any(run.is_open for run in runs)
    lost: dict[int | None, float] = {}
    for run in runs:
        for event in run.events:
            at = real(event, "monotonic")
            if text(event, "name") == _ROUND_ENDED and event.get("lost") is True and at is not None:
                lost.setdefault(integer(event, "attempt"), at + run.offset)
    return tuple(
        replace(run, end=max(run.end, lost[number] - run.offset), is_open=False)
        if run.state is None and (number := _last_attempt(run)) is not None and number in lost
        else replace(run, is_open=is_open if run.is_open is None else run.is_open)
        for run in runs
    )


def _last_attempt(run: Run) -> int | None:
    """Return the last attempt of a run; None if the run has recorded the end of its round."""
    for event in reversed(run.events):
        name = text(event, "name")
        if name == "regrow.attempt.started":
            return integer(event, "attempt")
        if name in (_ROUND_ENDED, _ROUND_JUDGED):
            return None
    return None
