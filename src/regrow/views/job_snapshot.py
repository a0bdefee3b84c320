"""What the views show of a job: a pure function of its events and of samples of the page of steps.

`snapshot` derives a `Snapshot` from the logs of a job, one `Source` for each agent. The state of
nodes and ranks follows from the events in the order of each log. Failures, restarts and their costs
are those of the story (`regrow.events.story`).

Times are seconds since the epoch, by the clock of the host that wrote the event. Durations are
differences of one host's monotonic clock. A field of an event may be missing or have another type;
it then counts as unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from regrow._accounts import FIRST_STEP, STEPS
from regrow.events import Story, story
from regrow.events.evidence import Record, integer, one_line, real, stopped_with, text
from regrow.utils import host_of
from regrow.views.pages import StepSample
from regrow.views.restarts import (
    Evidence,
    RepeatedSteps,
    Restart,
    mapping,
    repeated_steps,
    restarts_of,
)
from regrow.views.runs import OPEN_S

PACE_S = 5.0
"""Seconds over which the pace of a rank is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The log of one agent, and what else is known of it."""

    name: str
    """Name of the run's directory."""
    events: Sequence[Record]
    alive: bool | None
    """Whether the agent runs; None if unknown."""
    now: float | None
    """Current time of the agent's monotonic clock in seconds; None if unknown."""
    answered_s: float | None = None
    """Seconds since the agent answered this view; None if the view does not ask it."""
    samples: Mapping[int, StepSample] = field(default_factory=dict)
    """What the workers of the current attempt have reported, by local rank."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """Steps per second of late, by local rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A worker of the latest attempt on its node."""

    rank: int
    node: int
    """Index of its node in `Snapshot.nodes`."""
    local_rank: int
    pid: int | None
    state: str = "running"
    """running, suspended, hung, stalled, replacing, lost, failed, stopped, succeeded or unknown."""
    what: str = ""
    """What happened to it, in one line."""
    replaced: int = 0
    """How many processes took its place in this attempt."""
    step: int | None = None
    """Its last step; None if it has reported none."""
    step_is_minimum: bool = False
    """Whether it may have made further steps, because its page is out of reach."""
    step_at: float | None = None
    """Time of its last step on the node's monotonic clock, in seconds; None if unknown."""
    step_age_s: float | None = None
    """Seconds since its last step; None if it does not run, or the clock is unknown."""
    heartbeat_age_s: float | None = None
    """Seconds since its last exchange of heartbeats succeeded; None if it sends no heartbeats."""
    pace: float | None = None
    """Steps per second of late, or over the attempt.

    0 if the rank is late: its last step is older than `PACE_S` and than two steps at its pace.
    """
    phase: str = ""
    """The phase of the script in which it is (`regrow.phase`); "" outside of phases."""
    behind: int = 0
    """How many steps it is behind the rank that is first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An agent."""

    name: str
    """Name of the run's directory."""
    host: str
    state: str
    """waiting, starting, running, restarting, stopping, killed, unknown, succeeded, failed, ...

    It is unknown if another agent has reported the end of the job, and this log just ends.
    """
    attempt: int
    round: int
    node_rank: int | None
    started: float | None
    """Time at which the agent started."""
    last: float | None
    """Time of its last event."""
    alive: bool | None
    """Whether the agent runs; None if unknown."""
    answered_s: float | None = None
    """Seconds since the agent answered this view; None if the view does not ask it."""
    incident: str = ""
    """The latest incident, in one line."""
    incident_at: float | None = None
    """Time of that incident; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the workers of a node."""

    number: int
    node: int
    """Index of its node in `Snapshot.nodes`."""
    started: float
    ended: float | None
    """None: it runs, or its end is unknown."""
    state: str
    ranks: tuple[int, ...]
    """Global ranks, by local rank."""
    world_size: int | None
    kept: int
    """How many workers went on in their processes."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job at one moment."""

    run_id: str | None
    script: str | None
    command: str
    state: str
    """running, waiting, starting, restarting, stopping, killed, unknown, succeeded, failed, ..."""
    is_over: bool
    """Whether the job runs no more, as far as is known."""
    started: float | None
    duration_s: float | None
    attempt: int | None
    world_size: int | None
    max_restarts: int | None
    restarts_left: int | None
    reason: str
    """Why the job ended."""
    step: int | None
    """The highest last step of a rank in the latest attempt."""
    step_is_minimum: bool
    """Whether a rank may have made further steps, because its page is out of reach."""
    pace: float | None
    """Steps per second of the slowest rank; 0 if a rank is late."""
    step_age_s: float | None
    """Seconds since the last step of any running rank; None if unknown."""
    lost_steps: int
    """Steps that were done again, over all restarts, as far as is known."""
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    """By rank."""
    attempts: tuple[Attempt, ...]
    restarts: tuple[Restart, ...]
    """In the order of their times, failures that ended the job too."""
    story: str
    """The story of the job as text."""
    events: int
    """Number of events."""

    def to_json(self) -> dict[str, Any]:
        """Convert the snapshot to plain types; the keys are the field names."""
        return asdict(self)


def story_of(sources: Sequence[Source]) -> Story:
    """Derive the story of a job from the logs of all its agents."""
    return story(_in_order(sources))


def snapshot(sources: Sequence[Source], of_job: Story | None = None) -> Snapshot:
    """Derive what the views show of a job.

    Args:
        sources: the logs of its agents, at least one, in the order in which they started.
        of_job: their story, if the caller has it already.
    """
    of_job = of_job or story_of(sources)
    logs = [_read(i, source) for i, source in enumerate(sources)]
    silences = _longest_silences(of_job, logs, sources)
    for log, source, longest_s in zip(logs, sources, silences, strict=True):
        log.end(source, longest_s)
    number = max((log.attempt for log in logs), default=-1)
    ranks = _with_behind([rank for log in logs if log.attempt == number for rank in log.ranks])
    nodes = tuple(log.node(source) for log, source in zip(logs, sources, strict=True))
    started = min((n.started for n in nodes if n.started is not None), default=None)
    state = _state(of_job, nodes)
    running = [rank for rank in ranks if rank.state not in _ENDED]
    restarts = restarts_of(of_job, [log.evidence for log in logs])
    return Snapshot(
        run_id=of_job.run_id,
        script=of_job.script,
        command=logs[0].command,
        state=state,
        is_over=all(node.state in _OVER for node in nodes),
        started=started,
        duration_s=_duration(of_job, nodes, logs, sources),
        attempt=number if number >= 0 else None,
        world_size=next((log.world_size for log in logs if log.attempt == number), None),
        max_restarts=of_job.max_restarts,
        restarts_left=min(
            (log.restarts_left for log in logs if log.restarts_left is not None),
            default=of_job.max_restarts,
        ),
        reason=one_line(of_job.reason or ""),
        step=max((rank.step for rank in ranks if rank.step is not None), default=None),
        step_is_minimum=any(rank.step_is_minimum for rank in ranks),
        pace=min((rank.pace for rank in running if rank.pace is not None), default=None),
        step_age_s=min(
            (rank.step_age_s for rank in running if rank.step_age_s is not None), default=None
        ),
        lost_steps=sum(restart.lost_steps or 0 for restart in restarts)
        + repeated_steps([log.repeated for log in logs]),
        nodes=nodes,
        ranks=ranks,
        attempts=tuple(attempt for log in logs for attempt in log.attempts),
        restarts=restarts,
        story=of_job.render(is_running=any(n.alive and n.state not in _OVER for n in nodes)),
        events=of_job.events,
    )


_ENDED = frozenset({"failed", "stopped", "succeeded", "lost", "unknown"})
_OVER = frozenset({"killed", "unknown", "succeeded", "failed", "signaled", "stopped", "error"})
_ENDS_ALL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
"""Ends that an agent reports when the job ends on all nodes."""
_ENDS_ONE = frozenset({"signaled", "error"})
"""States of an agent that ended; it may have left alone."""
_LEASE = "workers of a host that is cut off are killed"
"""Name of the bound of a lease, as the job records it."""
_TO_BLAME = ("failed", "error", "killed", "signaled", "stopped", "succeeded")


def _in_order(sources: Sequence[Source]) -> list[Record]:
    """Merge the events of all agents; those of one agent stay in the order of its log."""
    if len(sources) == 1:
        return list(sources[0].events)
    timed = []
    for source in sources:
        time = 0.0
        for event in source.events:
            time = max(time, real(event, "time") or 0.0)
            timed.append((time, event))
    return [event for _, event in sorted(timed, key=lambda each: each[0])]


# --- the log of one agent


@dataclass(slots=True)
class _Log:
    """State of an agent after the events that were read so far."""

    index: int
    last_start: Record | None = None
    """Start of its latest attempt; only this one has `ranks`, because there may be thousands."""
    last_accounts: Record | None = None
    """The latest accounts of its workers."""
    host: str = "?"
    command: str = ""
    state: str = "waiting"
    attempt: int = -1
    round: int = -1
    node_rank: int | None = None
    world_size: int | None = None
    restarts_left: int | None = None
    started: float | None = None
    started_monotonic: float | None = None
    last: float | None = None
    last_monotonic: float | None = None
    incident: str = ""
    incident_at: float | None = None
    ranks: list[Rank] = field(default_factory=list)
    early: dict[int | None, int | None] = field(default_factory=dict)
    """First steps, by rank, that the log has before the start of their attempt."""
    attempts: list[Attempt] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)
    repeated: defaultdict[int, RepeatedSteps] = field(
        default_factory=lambda: defaultdict(RepeatedSteps)
    )
    """By attempt."""

    def change(self, event: Record, **fields: Any) -> None:
        """Change the rank of an event."""
        number = integer(event, "rank")
        self.ranks = [replace(r, **fields) if r.rank == number else r for r in self.ranks]

    def report(self, event: Record, incident: str) -> None:
        """Keep an event as the latest incident."""
        self.incident, self.incident_at = incident, real(event, "time")

    def silent_s(self, source: Source) -> float:
        """Return the seconds since the last event; infinity if the present is unknown."""
        if source.now is None or self.last_monotonic is None:
            return inf
        return source.now - self.last_monotonic

    def end(self, source: Source, longest_s: float | None) -> None:
        """Complete the states of the agent, whose log may have no end, and of its ranks.

        Args:
            source: the log.
            longest_s: seconds without an event after which the agent runs no more; None: unlimited.
        """
        is_silent = longest_s is not None and self.silent_s(source) >= longest_s
        if self.state not in _OVER and source.alive is False:
            self.state = "killed"
        elif self.state not in _OVER and source.alive is None and is_silent:
            self.state = "unknown"
        runs = self.state not in _OVER
        self.ranks = [_with_steps(rank, source, runs=runs) for rank in self.ranks]

    def node(self, source: Source) -> Node:
        return Node(
            name=source.name,
            host=self.host,
            state=self.state,
            attempt=self.attempt,
            round=self.round,
            node_rank=self.node_rank,
            started=self.started,
            last=self.last,
            alive=source.alive,
            answered_s=source.answered_s,
            incident=self.incident,
            incident_at=self.incident_at,
        )


def _read(index: int, source: Source) -> _Log:
    log = _Log(index)
    log.last_start = _last(source.events, "regrow.attempt.started")
    log.last_accounts = _last(source.events, "regrow.worker.accounts")
    for event in source.events:
        log.last = real(event, "time") or log.last
        log.last_monotonic = real(event, "monotonic") or log.last_monotonic
        log.round = max(log.round, integer(event, "round") or -1)
        _apply(log, text(event, "name") or "", event)
    return log


def _last(events: Sequence[Record], name: str) -> Record | None:
    return next((event for event in reversed(events) if event.get("name") == name), None)


def _apply(log: _Log, name: str, event: Record) -> None:
    """Apply an event to the state of its agent; other events change nothing."""
    match name.removeprefix("regrow."):
        case "job.started":
            log.host = text(event, "host") or "?"
            log.started, log.started_monotonic = real(event, "time"), real(event, "monotonic")
            command = event.get("command")
            log.command = " ".join(map(str, command)) if isinstance(command, list) else ""
        case "rendezvous.completed":
            log.state, log.node_rank = "starting", integer(event, "group_rank")
        case "attempt.started":
            _start(log, event)
        case "attempt.ended":
            _end(log, event)
        case "job.restarting":
            log.state = "restarting"
            log.restarts_left = integer(event, "restarts_left")
            log.evidence.ended.setdefault(log.attempt, real(event, "time") or 0.0)
        case "job.stopping":
            log.state = "stopping"
            log.report(event, f"received {text(event, 'signal')}")
        case "job.finished":
            log.state = (text(event, "state") or "finished").lower()
            log.restarts_left = integer(event, "restarts_left")
        case "worker.failed" if real(event, "told_monotonic") is None:
            signal = None if stopped_with(event) else text(event, "signal")
            what = one_line(signal or text(event, "message") or "failed")
            log.evidence.failed[integer(event, "attempt") or 0, integer(event, "rank")] = event
            log.report(event, f"rank {integer(event, 'rank')}: {what}")
            log.change(event, state="failed", what=what)
        case "worker.suspended":
            log.change(event, state="suspended", what=f"stopped by {text(event, 'signal')}")
        case "worker.resumed":
            log.change(event, state="running", what="")
        case "timer.expired" if text(event, "signal"):
            log.change(event, state="hung", what=one_line(text(event, "stood") or "timer expired"))
        case "heartbeat.stalled":
            log.change(event, state="stalled", what=one_line(text(event, "message") or ""))
        case "inprocess.lost":
            log.change(event, state="lost", what="the others continue without it")
        case "worker.vacated":
            log.repeated[log.attempt].end_process(str(integer(event, "rank")), event.get("account"))
            what = one_line(f"ended {text(event, 'how') or ''}")
            log.change(event, state="replacing", what=what, step=integer(event, "last_step"))
        case "worker.replaced":
            count = integer(event, "incarnation") or 1
            log.restarts_left = integer(event, "restarts_left")
            log.change(event, state="running", what="", pid=integer(event, "pid"), replaced=count)
        case "inprocess.restarted":
            key = integer(event, "attempt") or 0, integer(event, "iteration") or 0
            log.evidence.in_process[key] = real(event, "time") or 0.0
            log.repeated[log.attempt].restart(log.attempt, integer(event, "repeated_steps"))
            kind = one_line(text(event, "kind") or "a fault")
            log.report(event, f"in-process restart after {kind}")
            for rank in _numbers(event.get("replaced")):
                log.change({"rank": rank}, state="running", what="")
        case "worker.first_step":
            step = integer(event, "step")
            if (integer(event, "attempt") or 0) > log.attempt:
                log.early[integer(event, "rank")] = step
            else:
                log.change(event, step=step, step_is_minimum=True)
        case "worker.accounts" if event is log.last_accounts:
            accounts = mapping(event.get("accounts"))
            log.ranks = [_with_account(rank, accounts.get(str(rank.rank))) for rank in log.ranks]
            log.repeated[log.attempt].book(accounts)
        case "round.ended" | "rendezvous.lost":
            if why := text(event, "why"):
                node = text(event, "node")
                log.report(event, one_line(f"host {host_of(node).name}: {why}" if node else why))
            log.evidence.ended.setdefault(log.attempt, real(event, "time") or 0.0)


def _start(log: _Log, event: Record) -> None:
    log.state, log.attempt = "running", integer(event, "attempt") or 0
    log.world_size = integer(event, "world_size")
    pids = mapping(event.get("pids"))
    numbers = _numbers(event.get("ranks"))
    log.ranks = [
        Rank(rank=rank, node=log.index, local_rank=local, pid=integer(pids, str(rank)))
        for local, rank in enumerate(numbers if event is log.last_start else ())
    ]
    for number, step in log.early.items():
        log.change({"rank": number}, step=step, step_is_minimum=True)
    log.early.clear()
    log.attempts.append(
        Attempt(
            number=log.attempt,
            node=log.index,
            started=real(event, "time") or 0.0,
            ended=None,
            state="running",
            ranks=tuple(numbers),
            world_size=log.world_size,
            kept=len(_numbers(event.get("kept"))),
        )
    )


def _end(log: _Log, event: Record) -> None:
    time, state = real(event, "time") or 0.0, (text(event, "state") or "ended").lower()
    if log.state in ("starting", "running"):  # an agent that restarts says so before the end
        log.state = "stopping"
    log.evidence.ended[log.attempt] = min(time, log.evidence.ended.get(log.attempt, time))
    if log.attempts and log.attempts[-1].number == log.attempt:
        reason = one_line(text(event, "reason") or "")
        log.attempts[-1] = replace(log.attempts[-1], ended=time, state=state, reason=reason)
    accounts, steps = mapping(event.get("accounts")), mapping(event.get("last_steps"))
    log.repeated[log.attempt].book(accounts)
    after = "succeeded" if state == "succeeded" else "stopped"
    ranks = []
    for rank in log.ranks:
        mark = steps.get(str(rank.rank))
        if isinstance(mark, Mapping):
            sample = _sample(mark)
            step = integer(mark, "last_step")
            rank = replace(rank, step=step, step_is_minimum=False, pace=_mean_pace(sample))
        if rank.state not in ("failed", "lost", "hung"):
            rank = replace(rank, state=after)
        ranks.append(rank)
    log.ranks = ranks


def _with_account(rank: Rank, account: object) -> Rank:
    """Add the last step that the rank was the first of the job to reach."""
    highest, counts = integer(mapping(account), "highest_step"), mapping(account).get("counts")
    # Without a new step of its own, the highest step is one of an earlier attempt.
    if highest is None or not {FIRST_STEP, STEPS} & set(mapping(counts)):
        return rank
    return replace(rank, step=max(highest, rank.step or highest), step_is_minimum=True)


def _sample(mark: Record) -> StepSample | None:
    first, last = integer(mark, "first_step"), integer(mark, "last_step")
    first_at, last_at = real(mark, "first_monotonic"), real(mark, "last_monotonic")
    if first is None or last is None or first_at is None or last_at is None:
        return None
    return StepSample(first, first_at, last, last_at)


def _mean_pace(sample: StepSample | None) -> float | None:
    """Return the steps per second from the first to the last step."""
    if sample is None or sample.last_at <= sample.first_at or sample.last <= sample.first:
        return None
    return (sample.last - sample.first) / (sample.last_at - sample.first_at)


def _with_steps(rank: Rank, source: Source, *, runs: bool) -> Rank:
    """Add the worker's page to a rank; an agent that has ended leaves no running rank."""
    sample = source.samples.get(rank.local_rank)
    if sample is not None:
        pace = source.paces.get(rank.local_rank) or _mean_pace(sample)
        step, at = sample.last, sample.last_at
        rank = replace(rank, step=step, step_is_minimum=False, step_at=at, pace=pace)
    if rank.state in _ENDED:
        return rank
    if sample is not None:
        rank = replace(rank, phase=sample.phase)
    if not runs:
        return replace(rank, state="unknown")
    if sample is not None and sample.heartbeat_at > 0 and source.now is not None:
        rank = replace(rank, heartbeat_age_s=max(source.now - sample.heartbeat_at, 0.0))
    if rank.step_at is None or source.now is None:
        return rank
    age = max(source.now - rank.step_at, 0.0)
    is_late = rank.pace and age > max(PACE_S, 2 / rank.pace)
    return replace(rank, step_age_s=age, pace=0.0 if is_late else rank.pace)


def _with_behind(ranks: list[Rank]) -> tuple[Rank, ...]:
    exact = {r.rank: r.step for r in ranks if r.step is not None and not r.step_is_minimum}
    first = max(exact.values(), default=0)
    found = [replace(r, behind=first - exact.get(r.rank, first)) for r in ranks]
    return tuple(sorted(found, key=lambda rank: rank.rank))


def _numbers(value: object) -> list[int]:
    found = value if isinstance(value, list) else []
    return [each for each in found if isinstance(each, int) and not isinstance(each, bool)]


# --- the whole job


def _longest_silences(
    of_job: Story, logs: Sequence[_Log], sources: Sequence[Source]
) -> list[float | None]:
    """Return after how many seconds without an event each agent runs no more; None: unlimited.

    The agents of a job report its end one after the other. After a signal or an error of one agent
    the others may go on in a later round. They stop their workers before that round.
    """
    if of_job.state in _ENDS_ALL or of_job.asked_by is not None:
        return [OPEN_S] * len(logs)
    ended = [i for i, log in enumerate(logs) if log.state in _ENDS_ONE]
    last_round = max((logs[i].round for i in ended), default=-1)
    longest_s = _stop_s(sources[ended[0]]) if ended else None
    if longest_s is None or min(logs[i].silent_s(sources[i]) for i in ended) < longest_s:
        return [None] * len(logs)
    return [longest_s if log.round <= last_round else None for log in logs]


def _stop_s(source: Source) -> float | None:
    """Return the most seconds in which all nodes stop after the end of one; None: unknown."""
    started = next((e for e in source.events if text(e, "name") == "regrow.job.started"), {})
    lease = real(mapping(started.get("bounds")), _LEASE)
    grace = real(mapping(started.get("settings")), "shutdown_timeout")
    is_fixed = integer(started, "nnodes") is not None
    if not is_fixed and (lease is None or grace is None):
        return None
    return max(OPEN_S, (lease or 0.0) + (grace or 0.0))


def _state(of_job: Story, nodes: Sequence[Node]) -> str:
    """Return the state of the job: of its running nodes, else of its end."""
    running = [node.state for node in nodes if node.state not in _OVER]
    if running:
        return next((state for state in running if state == "running"), running[0])
    if of_job.state:
        return of_job.state.lower()
    return next((s for s in _TO_BLAME for node in nodes if node.state == s), "unknown")


def _duration(
    of_job: Story, nodes: Sequence[Node], logs: Sequence[_Log], sources: Sequence[Source]
) -> float | None:
    for node, log, source in zip(nodes, logs, sources, strict=True):
        if node.state not in _OVER and log.started_monotonic is not None:
            at = source.now if source.now is not None else log.last_monotonic
            return None if at is None else max(at - log.started_monotonic, 0.0)
    return of_job.duration_s
