"""Story of a job: what happened and what it cost, derived from its events.

The story is a pure function of the events. The launcher prints it at the end of a job.
`regrow events` prints it again from the log, with the same figures.

How the figures are computed:
- Events are grouped by their attempt number, not by the order of the lines, because several
  hosts may have written them.
- The root cause of an attempt is the failure that its agent marked, else the earliest failure.
  If another node caused the end (it was lost, or left), that node is the root cause, and the
  local failures are consequences.
- The story names all nodes that were lost in the same attempt. Every host derives the cost in
  the same way, with or without failed workers of its own.
- All durations of a failure start when the worker failed, not when the failure was detected.
  They are differences of monotonic clocks.
- `at_s` is the time of an incident in seconds since the start of the job. With the logs of several
  hosts, the times of all hosts are on one clock (`regrow.events.clocks`). `stopped_after_s` and
  `restarted_after_s` then are those of the host that was last.
- Durations of a failure on another host start when a host with a log was notified. Figures that
  only another host's events can give stay unknown.
- The lost work is the steps of the failed attempt that a later attempt repeated: the next
  attempt that made a step. If the failed attempt's pace is known, the steps are also given as
  seconds of training.

A log may end at any line, because the launcher may be killed. It may also hold lines of other
programs or versions. So every field may be missing or have another type; it then counts as
unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.events.evidence import Record


@dataclass(frozen=True, slots=True)
class StepMark:
    """A training step that a worker reported."""

    rank: int | None
    """The worker's rank."""
    step: int
    """Number of the step, as given by the script."""
    attempt: int
    """The attempt in which the worker made the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfWorker:
    """Fields that identify a worker."""

    attempt: int
    """The worker's attempt."""
    rank: int | None
    """The worker's rank."""
    host: str | None
    """The worker's host."""
    pid: int | None
    """The worker's process id."""
    at_s: float | None = None
    """When it happened, in seconds since the start of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCost:
    """Duration and lost work of a restart."""

    at_s: float | None = None
    """Time from which the seconds count, in seconds since the start of the job."""
    stopped_after_s: float | None = None
    """Seconds until all workers of the stopped attempt had ended."""
    killed: tuple[int, ...] = ()
    """Ranks that were killed, because they had not ended in the grace after their stop signal."""
    restarted_after_s: float | None = None
    """Seconds until all workers of the next attempt were started."""
    restarted_attempt: int | None = None
    """The next attempt; None if there was none."""
    restarted_workers: int | None = None
    """Number of workers of the next attempt, over all nodes."""
    forked_workers: int = 0
    """How many of these were forked from a template (`--preload`)."""
    kept_workers: int = 0
    """How many of these went on in their processes (`Wrapper(elastic=True)`), in these logs."""
    recorded_workers: int = 0
    """Number of workers of the next attempt whose start is in these logs."""
    backoff_s: float | None = None
    """Seconds of deliberate delay within the restart time, which slow down a crash loop."""
    first_step_after_s: float | None = None
    """Seconds until training continued with the next step of any worker on the host."""
    first_step: StepMark | None = None
    """The first step after the restart."""
    first_step_s: float | None = None
    """Seconds that it took, by the mean pace of its attempt; None if that is not recorded."""
    last_step: int | None = None
    """The last step that the stopped attempt reached."""
    resumed_from: int | None = None
    """The step from which training continued: the step before its first new step."""
    work_lost: int | None = None
    """Number of repeated steps; None if the script does not report steps."""
    work_lost_s: float | None = None
    """Seconds of training that the repeated steps had taken, by the attempt's mean pace. After an
    attempt with in-process restarts: the seconds in which they were done again."""
    joined: tuple[str, ...] = ()
    """Hosts that were not in the attempt before, and take part in the next one."""

    @property
    def startup_s(self) -> float | None:
        """Seconds until the first step began; until its end if its length is not known."""
        step = self.first_step_s
        if step is None and self.work_lost:  # an older log: by the pace of the stopped attempt
            step = (self.work_lost_s or 0.0) / self.work_lost
        if self.first_step_after_s is None or not step:
            return self.first_step_after_s
        begun = self.first_step_after_s - step
        # Another host may have started its workers after the first step of this one.
        return min(max(begun, self.restarted_after_s or 0.0, 0.0), self.first_step_after_s)


@dataclass(frozen=True, slots=True)
class OtherFailure:
    """A failure of an attempt that is not its root cause."""

    rank: int | None
    """The worker's rank."""
    host: str | None
    """The worker's host."""
    pid: int | None
    """The worker's process id."""
    what: str
    """The failure in one line, for example "was killed by SIGABRT"."""
    after_s: float | None
    """Seconds after the root cause; None if this failure has an earlier time than the root cause,
    or is on another host."""
    is_consequence: bool = False
    """Whether it is an error about a connection to another worker, which had ended."""
    stopped_with: str | None = None
    """The signal with which the agent stopped the process, which had raised an exception before."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that was lost or left, so that the others continued without it."""

    node: str
    """Id of the node; starts with its address."""
    host: str
    """Name of its host; its address if the name is not known."""
    rank: int | None
    """The node's rank in its last round."""
    why: str
    """The detected fault, or the node's reason for leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry(OfWorker):
    """A countdown timer that expired, and the state of its worker."""

    # `pid` is that of the process with the timer: the worker, or a process that it started.
    helper: bool
    """Whether the worker started this process."""
    scope: str
    """The timer's scope, as named in the script."""
    after_s: float | None
    """Duration of the timer in seconds."""
    over_s: float | None
    """Seconds from the timer's deadline to the signal."""
    stood: str
    """Location of the process in its code, in one line."""
    stacks: str | None
    """The file with the stacks of all its threads."""
    compared: tuple[str, ...]
    """Groups of the host's workers in the same place, one line for each place."""
    signal: str | None
    """The signal sent to the process; None if the timer was only reported."""
    paused_by: str | None = None
    """The signal that paused the worker, if the worker failed because of the pause."""
    heartbeat: bool = False
    """Whether this is the timer that each heartbeat of the worker renews."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledProgress(OfWorker):
    """A worker that sent heartbeats but made no training steps while other workers did."""

    what: str
    """The step at which the worker stalled, and for how long, in one line."""
    stood: str
    """Location of the worker in its code, in one line."""
    stacks: str | None
    """The file with the stacks of all its threads."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A process that took the place of a worker in its running group."""

    rank: int
    """Rank of the worker, and of the process."""
    pid: int | None
    """The process; None if another host has its events."""
    ended_pid: int | None
    """The worker's process."""
    how: str
    """How the worker ended, for example "by SIGKILL"."""
    last_step: int | None
    """The worker's last step."""
    source: str
    """From what the process has started: `exec`, `template` or `standby`."""
    started_after_s: float | None
    """Seconds from the end of the worker to the start of the process."""
    restarts_left: int | None
    """Restarts that the job had left after that."""
    origin: str | None = None
    """How the worker ended and the process started, if another host has its events."""


@dataclass(frozen=True, slots=True)
class SentState:
    """The state of a training that a rank has sent to others (`regrow.State`)."""

    step: int | None
    """The step of the state."""
    rank: int | None
    """The rank that had it."""
    targets: tuple[int, ...]
    """The ranks that received it; only some if there are many."""
    size: int
    """Number of bytes sent."""
    duration_s: float | None
    """Seconds that it took, with the time in which the ranks met."""


@dataclass(frozen=True, slots=True)
class InProcessRestart:
    """A restart of the workers' function in the same processes."""

    attempt: int
    """The attempt in which the restart happened; the attempt continued."""
    iteration: int
    """Number of the function call that started with this restart."""
    world_size: int | None
    """Number of ranks that continued."""
    rank: int | None
    """The faulty rank, numbered as at the start of the workers."""
    what: str
    """The fault, in one line."""
    cause: str
    """Its kind: exception, exit, signal, hang, heartbeat or unknown."""
    did: str
    """What the faulty rank did, as a predicate: "was killed by SIGKILL"."""
    lost: tuple[int, ...]
    """Lost ranks, without which the others continued; only some if there are many."""
    lost_count: int
    """Number of lost ranks."""
    phases: tuple[tuple[str, float], ...]
    """Phases of the restart in order: name, and seconds from `at_s` to the end of the phase, as the
    new rank 0 recorded it."""
    replaced: tuple[Replacement, ...] = ()
    """Processes that took the places of ranks that had ended."""
    not_replaced: tuple[str, ...] = ()
    """Why no process took the place of a lost rank, in one line each."""
    states: tuple[SentState, ...] = ()
    """The states that ranks sent to others after the restart."""
    at_s: float | None = None
    """Time of the fault, in seconds since the start of the job."""
    host: str | None = None
    """Host of the process of the faulty rank."""
    pid: int | None = None
    """Its process id."""
    exit_code: int | None = None
    """Its exit code; a negative one is the number of a signal."""
    timer: Expiry | None = None
    """The timer that made the agent kill the process."""
    silent_s: float = 0.0
    """Seconds before `at_s` without a sign of life of a rank that hung."""
    loading_s: float | None = None
    """Seconds from the call of the function until the next step began, by the mean of the workers
    and restarts of the attempt; None if that is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(RestartCost):
    """The first failure of an attempt, and its cost."""

    attempt: int
    """The attempt that failed, counted from 0."""
    what: str
    """The failure in one line, for example "was killed by SIGKILL"."""
    cause: str = "unknown"
    """Its kind: exception, exit, signal, hang, heartbeat, node or unknown."""
    rank: int | None = None
    """The worker's rank; None if no worker is known to have failed."""
    host: str | None = None
    """The worker's host."""
    pid: int | None = None
    """The worker's process id."""
    exit_code: int | None = None
    """The worker's exit code; a negative one is the number of the signal that killed the worker."""
    signal: str | None = None
    """Name of the signal that killed the worker."""
    error_file: str | None = None
    """The file with the whole traceback."""
    detected_after_s: float | None = None
    """Seconds until the launcher detected the failure."""
    others: tuple[OtherFailure, ...] = ()
    """Later failures in the same attempt, in order."""
    is_host_lost: bool = False
    """Whether the cause is a node that was lost or left; that spends no restart."""
    has_left: bool = False
    """Whether this node left with notice: a change of membership, which is no failure."""
    elsewhere: bool = False
    """The failure happened on another host; the seconds count from this host's notification."""
    notified: str | None = None
    """The host from whose notification the seconds count, if the failure happened elsewhere."""
    silent_s: float = 0.0
    """Seconds before `at_s` without a sign of life of the worker that hung, or without a step since
    a host or the rendezvous was lost; those since the signal to the agent of a host that left."""
    searched_s: float | None = None
    """Seconds in which the agent of a host whose lease was over searched for the other hosts,
    before it ended."""
    noticed_late: bool = False
    """The guardian was suspended when the worker failed.

    The failure may have happened before its detection, and the seconds count from the detection.
    """
    timer: Expiry | None = None
    """The timer that made the agent kill the worker."""
    hung_too: tuple[Expiry, ...] = ()
    """Timers of other workers that expired in the same attempt, when it was about to end."""
    compared: tuple[str, ...] = ()
    """Groups of workers on several hosts in the same place, one line for each place.

    Empty if no worker hung, or if all compared workers are on one host.
    """
    gave_up: str | None = None
    """Why no in-process restart followed (`RestartAbort`): `initialize` of a wrapper ended it.

    The failure is then the fault after which the wrapper gave up.
    """
    restarts_left: int | None = None
    """Restarts of `max_restarts` that were left after this failure; None if it spent none."""
    lost_nodes: tuple[LostNode, ...] = ()
    """Nodes that were lost or left in the attempt, except the node that is its root cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRestart(RestartCost):
    """A restart without a failure; its seconds count from the launcher's notification."""

    attempt: int
    """The attempt that was stopped."""
    reason: str
    """The launcher's reason for the restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension(OfWorker):
    """A worker that was suspended by a signal."""

    signal: str
    """The signal that suspended the worker."""
    duration_s: float | None
    """Seconds until the worker was resumed; None if it never was."""


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """The end of the store server's process, through which the nodes of the job communicate."""

    host: str | None
    """The server's host."""
    pid: int | None
    """The server's process id."""
    how: str
    """The end of the process in one line, for example "was killed by SIGKILL"."""
    restarted_after_s: float | None
    """Seconds until another server took over; None if no server did."""
    reason: str | None
    """Reason why no other server took over, in one line."""
    at_s: float | None = None
    """Time of the end, in seconds since the start of the job."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Seconds of the job in which no new step was made because of restarts."""

    total_s: float
    """Sum of the other fields that are known."""
    detecting_s: float
    """From the failures, or the last signs of life before them, to their detection."""
    pausing_s: float
    """Deliberate delays before restarts, which slow down a crash loop."""
    stopping_s: float
    """From the detection until all workers had ended; after a failure that ended the job, until the
    end of its agent."""
    starting_s: float
    """From the end of the stop, without the delays before restarts, until the first step begins;
    without reported steps, until the workers have started. After an in-process restart: from the
    call of the function."""
    redoing_s: float | None
    """Steps that were made again; None if the workers were restarted, and the script does not
    report steps."""
    in_process_s: float
    """In-process restarts, from the fault until the function is called again."""
    searching_s: float = 0.0
    """Search of a host whose lease was over for the other hosts, if it found none."""


@dataclass(frozen=True, slots=True)
class Story:
    """What happened in a job."""

    events: int = 0
    """Number of events from which the story was derived."""
    run_id: str | None = None
    """Id of the job."""
    script: str | None = None
    """Short name of the script, module or program."""
    workers: tuple[int, ...] = ()
    """World sizes of the job in order, without consecutive repetitions."""
    nodes: tuple[int, ...] = ()
    """Numbers of nodes of the rounds in order, without consecutive repetitions."""
    max_restarts: int | None = None
    """Number of failures that the job was allowed to survive."""
    restarts_left: int | None = None
    """Number of further failures that the job could have survived at its end."""
    closed: str | None = None
    """The node that closed the rendezvous and so prevented restarts, with its reason."""
    started_at: float | None = None
    """Time of day of the start of the job, in seconds since the epoch; for display."""
    attempts: int = 0
    """Number of starts of all workers."""
    restarts: int = 0
    """Number of restarts of all workers."""
    membership_changes: int = 0
    """How many of these were for nodes that joined, left or were lost; they cost no restart of
    `max_restarts`."""
    last_step: int | None = None
    """The last step of the last attempt that reported steps; if the end of that attempt is not
    recorded, the highest recorded step of it."""
    common_step: int | None = None
    """The last step of the last attempt, if all ranks that reported steps ended at the same one."""
    state: str | None = None
    """SUCCEEDED, FAILED, SIGNALED or ERROR; None if the log lacks the end of the job."""
    exit_code: int | None = None
    """The launcher's exit code."""
    signal: str | None = None
    """The signal that stopped the launcher."""
    asked_by: str | None = None
    """Who asked the whole job to stop, if the agents agreed on that."""
    reason: str | None = None
    """The launcher's reason for the end."""
    duration_s: float | None = None
    """Seconds until the end of the job, or until the last event if the log lacks the end."""
    failures: tuple[Failure, ...] = ()
    """The failures in order, one for each failed attempt."""
    moves: tuple[PlannedRestart, ...] = ()
    """The restarts without a failure, in order."""
    suspensions: tuple[Suspension, ...] = ()
    """The suspended workers, in order."""
    expiries: tuple[Expiry, ...] = ()
    """Expired timers that belong to no failure, in order."""
    stalls: tuple[StalledProgress, ...] = ()
    """The workers with stalled training, in order."""
    servers: tuple[str, ...] = ()
    """Addresses of the hosts that have served the rendezvous, in order; empty if no host can take
    over from another one."""
    server_ends: tuple[ServerEnd, ...] = ()
    """The ends of store server processes, in order."""
    in_place: tuple[InProcessRestart, ...] = ()
    """The in-process restarts, in order, without those of which a wrapper gave up."""
    cut_short: tuple[InProcessRestart, ...] = ()
    """In-process restarts whose attempt failed before the new process had joined the others."""
    losses: Losses | None = None
    """Seconds lost by restarts, or by the loss of the rendezvous; None if there was none."""
    addresses: tuple[tuple[str, str], ...] = ()
    """Names and addresses of the hosts that are named in the story and have one address."""
    helpers: tuple[str, ...] = ()
    """The templates and standbys, why there were none, and injected faults; in one line each."""
    reports_steps: bool = False
    """Whether any worker reported a training step."""
    events_lost: int = 0
    """Number of events that could not be written to the log."""

    @property
    def numbered(self) -> tuple[tuple[int | None, Failure], ...]:
        """The failures with their numbers in the text; a host that left with notice has none."""
        numbers = count(1)
        return tuple((None if f.has_left else next(numbers), f) for f in self.failures)

    def render(self, width: int = 100, *, is_running: bool = False) -> str:
        """Render the story as ASCII text, in lines of at most `width` characters if possible.

        Args:
            width: in characters.
            is_running: whether the job is known to run; its events cannot show that.
        """
        from regrow.events.story_text import render

        return render(self, width, is_running=is_running)

    def to_json(self) -> dict[str, Any]:
        """Convert the story to a JSON object of plain types; the keys are the field names."""
        return asdict(self)


def story(events: Iterable[Record]) -> Story:
    """Derive the story of a job from its events, in any order; never raises for their content.

    If the events belong to several jobs, the story covers the last job.
    """
    from regrow.events.build_story import build_story

    return build_story(events)
