"""`Explanation`: what is known of one failure, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RUNGS = {
    1: "the function was called again in the same processes",
    2: "one new process took the place of the lost one",
    3: "all workers were started again",
    4: "the job went on with a changed set of hosts",
    5: "the scheduler started the job again",
}
"""What happened on the rung of the ladder that recovered from a failure."""
RUNG_NAMES = {
    1: "same process",
    2: "one new process",
    3: "new worker group",
    4: "other hosts",
    5: "the scheduler",
}
"""Names of the rungs, as in the README."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A piece of evidence."""

    label: str
    """What it is, for example "exit" or "traceback"."""
    text: str
    """One line; empty if `lines` say all."""
    lines: tuple[str, ...] = ()
    """Further lines, for example of a traceback."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time from the failure until training went on."""

    name: str
    """silent, ending, reaction, stopping, pause, rendezvous, processes, startup, redoing, ..."""
    start_s: float
    """Seconds since the begin of the incident."""
    end_s: float
    """Seconds since the begin of the incident."""
    meaning: str
    """What happened in it, in a few words."""

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a rung below the one that was used could not recover from the failure."""

    rung: int
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """A setting, or the lack of one, that decided how long a part took."""

    setting: str
    """The flag or argument, for example `--restart-timeout`."""
    value: str
    """Its value in this job, for example "5 s"."""
    seconds: float
    """Seconds of the part."""
    text: str
    """What it did, and what to change, in one or two sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a failure cost; None where it is unknown."""

    seconds: float | None
    """Seconds from the failure until training went on and the lost steps were done again."""
    steps: int | None
    """Steps that were done again."""
    redone_s: float | None
    """Seconds of `seconds` in which these steps were done again."""
    worker_seconds: float | None
    """Seconds of the workers together: `before_s`, and those from the failure on."""
    before_s: float = 0.0
    """Seconds of `worker_seconds` before the failure: of the steps that it cut off."""
    workers: int | None = None
    """Number of workers whose seconds these are: those whose time is recorded."""
    all_workers: int | None = None
    """Number of workers of the job then."""
    which: str = ""
    """Which workers these are, if some left or joined meanwhile; a clause."""
    has_unfinished_steps: bool = True
    """Whether `worker_seconds` includes the steps that the failure cut off."""
    buckets: Mapping[str, float] = field(default_factory=dict)
    """The worker-seconds by bucket of the ledger, biggest first; empty if only the sum is known."""
    why_unknown: str = ""
    """Why a figure is not known."""
    restarts: int | None = None
    """Restarts of `--max-restarts` that it spent."""
    restarts_left: int | None = None
    """Restarts that were left after it."""

    @property
    def worker_hours(self) -> float | None:
        """`worker_seconds` in hours."""
        return None if self.worker_seconds is None else self.worker_seconds / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One failure of a job, in-process restart, change of membership, or end of the job."""

    number: int = 0
    """Counted from 1, in order of time over all runs of the job."""
    story_number: int | None = None
    """Number of this failure in the story of its run (`regrow events`); None: it is none there."""
    run_id: str | None = None
    """The job."""
    script: str | None = None
    run: int = 1
    """The run of a requeued job, counted from 1."""
    attempt: int | None
    iteration: int | None = None
    """Number of the call that an in-process restart started."""
    title: str
    """What failed first, in one line."""
    cause: str
    """exception, exit, signal, hang, heartbeat, node, membership, server, stop or unknown."""
    is_planned: bool = False
    """Whether it is a change of the hosts without a failure: some joined, or left with notice."""
    rung: int | None
    """Rung of the ladder that recovered from it; None if none did."""
    outcome: str
    """What became of the job, in one line."""
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    at_s: float | None = None
    """When it began, in seconds since the start of the run."""
    noticed_s: float | None = None
    """When regrow could notice it, if that was much later: the end of a silence or of a process."""
    begun: str = ""
    """What began at `at_s`, as a clause, where the cause does not say it."""
    noticed: str = ""
    """What happened then, as a clause, where the cause does not say it."""
    time: float | None = None
    """`at_s` in seconds since the epoch."""
    injected: str | None = None
    """The fault of `--chaos` that caused it."""
    evidence: tuple[Fact, ...] = ()
    """What shows the cause, the most important first."""
    peers: tuple[str, ...] = ()
    """What the other ranks were doing, one line each."""
    action: tuple[str, ...] = ()
    """What regrow did, one line each."""
    refusals: tuple[Refusal, ...] = ()
    """Why no lower rung was used, from rung 1 upwards."""
    timeline: tuple[Phase, ...] = ()
    """The phases in order, each starts where the one before ended."""
    cost: Cost
    long: tuple[Held, ...] = ()
    """What decided how long it took, biggest first; empty if no setting did."""

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as a JSON object; the keys are the field names."""
        found = asdict(self)
        found["cost"]["worker_hours"] = self.cost.worker_hours
        return found
