"""What happened in a job and what it cost, worked out from its events.

A pure function of the events: the launcher prints it at the end of a job, and
`regrow events` prints it again from the log, with the same figures.

How the figures are made. Everything hangs on the attempt number that each
event carries, not on the order of the lines, since several hosts may have
written them. Of an attempt's failures the root cause is the one its agent
marked as such, else the earliest; where another node is to blame (it was lost,
or left), that is the cause, and the failures here only followed. All durations
of a failure start when the worker failed, not when somebody noticed, and are
differences of one host's monotonic clock: of a failure on another host they
start when this one was told, and figures for which only another host has an
event stay unknown. The work lost is what the failed attempt had reached and the next
attempt that made a step had to do again; where that attempt's pace is known,
the steps are also given as seconds of training.

A log may end anywhere (the launcher was killed) and may hold lines of other
programs or of other versions: every field may be missing or of another type,
and counts as unknown then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ._fields import Record

__all__ = [
    "Expiry",
    "Failure",
    "InPlace",
    "Move",
    "OtherFailure",
    "Stall",
    "Step",
    "Story",
    "Suspension",
    "story",
]


@dataclass(frozen=True, slots=True)
class Step:
    """A training step that a worker reported."""

    rank: int | None
    """The worker's rank."""
    step: int
    """The number that the script gave the step."""
    attempt: int
    """The attempt in which it was made."""


@dataclass(frozen=True, slots=True)
class OtherFailure:
    """A failure that followed the first one of its attempt."""

    rank: int | None
    """The worker's rank."""
    host: str | None
    """Its host."""
    pid: int | None
    """Its process id."""
    what: str
    """What happened, in one line: "was killed by SIGABRT"."""
    after_s: float | None
    """Seconds after the first failure."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """A countdown timer that ran out, and what its worker was doing."""

    attempt: int
    """The attempt that the worker belongs to."""
    rank: int | None
    """Its rank."""
    host: str | None
    """Its host."""
    pid: int | None
    """The process that the timer was set for: the worker's, or one that it had started."""
    helper: bool
    """Whether it is one that the worker had started."""
    scope: str
    """What the timer was set for."""
    after_s: float | None
    """Seconds that it was set to."""
    over_s: float | None
    """Seconds by which it was over when the process was signalled."""
    stood: str
    """Where the process stood, in one line."""
    stacks: str | None
    """The file with the stacks of all its threads."""
    compared: tuple[str, ...]
    """Which of the host's workers stood in the same place, a line for each place."""
    signal: str | None
    """What the process was sent; None: the timer was to be reported only."""
    heartbeat: bool = False
    """Whether it was the timer of the worker's heartbeat, which each beat sets anew."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A worker that beat, but whose training stood still while that of others did not."""

    attempt: int
    """The attempt that it belongs to."""
    rank: int | None
    """Its rank."""
    host: str | None
    """Its host."""
    pid: int | None
    """Its process id."""
    what: str
    """At which step it stood, and for how long, in one line."""
    stood: str
    """Where it stood, in one line."""
    stacks: str | None
    """The file with the stacks of all its threads."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """A restart of the workers' function in the same processes."""

    attempt: int
    """The attempt that it belongs to, and did not end."""
    iteration: int
    """The number of the call of the function that it began."""
    world_size: int | None
    """How many ranks went on."""
    rank: int | None
    """Whose fault it was, by the rank that the worker was started with."""
    what: str
    """What happened, in one line."""
    lost: tuple[int, ...]
    """Ranks that the others went on without, some of them where they are many."""
    lost_count: int
    """How many these are."""
    phases: tuple[tuple[str, float], ...]
    """What the new rank 0 saw happen, in order, and how many seconds after the fault it had."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of an attempt, and what it cost."""

    attempt: int
    """The attempt that it ended, from 0."""
    what: str
    """What happened, in one line: "was killed by SIGKILL"."""
    rank: int | None = None
    """The worker's rank; None where no worker is known to have failed."""
    host: str | None = None
    """Its host."""
    pid: int | None = None
    """Its process id."""
    exit_code: int | None = None
    """Its exit code; a negative one is the number of the signal that killed it."""
    signal: str | None = None
    """That signal's name."""
    error_file: str | None = None
    """The file with the whole traceback."""
    detected_after_s: float | None = None
    """Seconds until the launcher knew."""
    restarted_after_s: float | None = None
    """Seconds until all workers of the next attempt were started."""
    restarted_attempt: int | None = None
    """The next attempt; None where there was none."""
    restarted_workers: int | None = None
    """How many workers that attempt has, over all nodes."""
    backoff_s: float | None = None
    """Seconds of that time that were spent on purpose, so that a crash loop does not spin."""
    first_step_after_s: float | None = None
    """Seconds until training went on: until the next step of any worker on the host."""
    first_step: Step | None = None
    """That step."""
    last_step: int | None = None
    """The last step that the failed attempt reached."""
    resumed_from: int | None = None
    """The step that training went on from: the one before its first new step."""
    work_lost: int | None = None
    """Steps that were made again; None where the script does not report steps."""
    work_lost_s: float | None = None
    """The seconds of training that those steps had taken, by the attempt's mean pace."""
    others: tuple[OtherFailure, ...] = ()
    """What failed after it in the same attempt, in order."""
    elsewhere: bool = False
    """It happened on another host, so the seconds count from when this one was told."""
    timer: Expiry | None = None
    """The timer for which the worker was killed."""
    hung_too: tuple[Expiry, ...] = ()
    """Timers of other workers that ran out in the same attempt, when it was about to end anyway."""
    compared: tuple[str, ...] = ()
    """Which workers of several hosts stood in the same place, a line for each place; empty where
    no worker hung, or all that were asked are of one host."""


@dataclass(frozen=True, slots=True)
class Move:
    """A restart that no failure caused."""

    attempt: int
    """The attempt that was stopped."""
    reason: str
    """Why, as the launcher said."""
    restarted_after_s: float | None = None
    """Seconds from when the launcher knew until the workers of the next attempt were started."""
    restarted_workers: int | None = None
    """How many workers that attempt has, over all nodes."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A worker that a signal held for a while."""

    attempt: int
    """The attempt that it belongs to."""
    rank: int | None
    """Its rank."""
    host: str | None
    """Its host."""
    pid: int | None
    """Its process id."""
    signal: str
    """What held it."""
    duration_s: float | None
    """Seconds until it went on; None where it never did."""


@dataclass(frozen=True, slots=True)
class Story:
    """What happened in a job."""

    events: int = 0
    """How many events it was made of."""
    run_id: str | None = None
    """The job."""
    script: str | None = None
    """What it ran, by its short name."""
    workers: tuple[int, ...] = ()
    """The world sizes that it had, in order, without repetitions in a row."""
    nodes: int | None = None
    """How many nodes it had in its first round."""
    max_restarts: int | None = None
    """How many failures it was allowed to survive."""
    attempts: int = 0
    """How often all its workers were started."""
    restarts: int = 0
    """How often they were started again."""
    state: str | None = None
    """SUCCEEDED, FAILED, SIGNALED, ERROR; None where its end is not recorded."""
    exit_code: int | None = None
    """The launcher's exit code."""
    signal: str | None = None
    """The signal that stopped the launcher."""
    reason: str | None = None
    """Why it ended, as the launcher said."""
    duration_s: float | None = None
    """Seconds it took; where its end is not recorded, seconds up to the last event."""
    failures: tuple[Failure, ...] = ()
    """The failures, one an attempt, in order."""
    moves: tuple[Move, ...] = ()
    """The restarts that no failure caused, in order."""
    suspensions: tuple[Suspension, ...] = ()
    """The workers that were held, in order."""
    expiries: tuple[Expiry, ...] = ()
    """The other timers that ran out, in order: those that no failure tells of."""
    stalls: tuple[Stall, ...] = ()
    """The workers whose training stood still, in order."""
    in_place: tuple[InPlace, ...] = ()
    """The restarts that no process was started for, in order."""
    reports_steps: bool = False
    """Whether any worker ever reported a training step."""
    events_lost: int = 0
    """How many events could not be written to the log."""

    def render(self, width: int = 100) -> str:
        """The story as plain ASCII text, in lines of at most `width` characters where it can."""
        from ._story_text import render

        return render(self, width)

    def to_json(self) -> dict[str, Any]:
        """The story as a JSON object of plain types; the keys are the fields' names."""
        return asdict(self)


def story(events: Iterable[Record]) -> Story:
    """Work out what happened from a job's events, in any order; never raises for their content.

    Where the events are of several jobs, the story is that of the last one.
    """
    from ._retell import retell

    return retell(events)
