"""Spans of the workers of one run: each second of each worker in exactly one span.

A worker is a place for a process on a node: it has a local rank, and in each attempt a rank. Its
life is a sequence of states of its node: it waits for the first round, its processes are started,
they run, they are stopped, and the next round is formed. While processes run, `split` divides their
time by their accounts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from regrow import _accounts as rows
from regrow.events import Run
from regrow.events.evidence import Record, integer, real, text
from regrow.ledger import buckets
from regrow.ledger.attempts import (
    NodeAttempt,
    account_of,
    attempts_of,
    first_step_of,
    is_first_step,
    list_of,
    reading,
)
from regrow.ledger.split import Process, ProcessEnd, Seconds, redone_steps, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a worker's time. `start` and `end` are in seconds since the epoch."""

    log: str
    host: str
    local_rank: int
    rank: int | None
    """None while the node is in no attempt."""
    attempt: int
    """-1 before the first attempt."""
    start: float
    end: float
    seconds: Seconds
    """Seconds by bucket; their sum is the length of the span."""
    session: int = 0
    """The session of the job, counted from 0. The time until the next one belongs to the first."""


@dataclass(slots=True)
class Known:
    """What the job as a whole knows, for the spans of one run."""

    steps_known: bool
    """Whether a worker of the job has reported a step."""
    reached: Mapping[int, int | None] = field(default_factory=dict)
    """Highest step of the job before each attempt of the run."""
    hung: frozenset[int] = frozenset()
    """The attempts in which ranks waited for one that hung, or for a host that was lost."""
    session: int = 0
    """The session of the run."""


@dataclass(frozen=True, slots=True)
class RunSpans:
    """How the time of a run is divided."""

    spans: list[Span]
    """The spans of all workers, each worker's in order, without a gap."""
    redone: dict[int, int]
    """For each attempt, how many steps were done again, by the worker that did most."""
    silent: int
    """Number of workers that report no steps, although others of the run do."""


def spans_of(run: Run, known: Known) -> RunSpans:
    """Divide the time of a run."""
    attempts = attempts_of(run)
    reporters = {local_rank for attempt in attempts for local_rank in attempt.reporters()}
    # If no worker of the run has reported a step, all of them may have been in their startup.
    silent = set(range(run.workers)) - reporters if reporters else set()
    builder = _Builder(run, known, silent)
    at, number = run.begin, -1
    for attempt in attempts:
        if attempt.start < at:
            continue  # a clock that has gone back: the log is not what an agent writes
        builder.between(at, attempt, number)
        builder.attempt(attempt)
        at, number = attempt.end, attempt.number
    builder.after(at, number)
    redone: dict[int, int] = {}
    for (number, _), steps in builder.redone.items():
        redone[number] = max(redone.get(number, 0), steps)
    return RunSpans(builder.spans, redone, len(silent))


class _Builder:
    def __init__(self, run: Run, known: Known, silent: set[int]) -> None:
        self.run, self.known, self.silent = run, known, silent
        self.spans: list[Span] = []
        self.redone: dict[tuple[int, int], int] = defaultdict(int)  # by attempt and local rank
        self.ranks: list[int | None] = [None] * run.workers
        self._highest: int | None = None

    def _add(
        self, local_rank: int, attempt: int, start: float, end: float, seconds: Seconds
    ) -> None:
        if end <= start:
            return
        self.spans.append(
            Span(
                log=self.run.log,
                host=self.run.host,
                local_rank=local_rank,
                rank=self.ranks[local_rank],
                attempt=attempt,
                start=start + self.run.offset,
                end=end + self.run.offset,
                session=self.known.session,
                seconds={bucket: each for bucket, each in seconds.items() if each > 0},
            )
        )

    def _all(self, attempt: int, start: float, end: float, bucket: str) -> None:
        for local_rank in range(self.run.workers):
            self._add(local_rank, attempt, start, end, {bucket: end - start})

    def between(self, start: float, following: NodeAttempt, attempt: int) -> None:
        """Add the time without workers before an attempt."""
        met, paused, end = start, start, following.start
        for event in following.before:
            at = real(event, "monotonic") or 0.0
            if text(event, "name") == "regrow.rendezvous.completed" and start <= at <= end:
                met = at
            if text(event, "name") == "regrow.job.restarting" and at <= end:
                paused = at + (real(event, "delay_s") or 0.0)
        paused, met = min(max(paused, start), met), max(met, start)
        forming = buckets.WAITING_FOR_NODES if attempt < 0 else buckets.MEETING
        self._all(attempt, start, paused, buckets.RESTART)
        self._all(attempt, paused, met, forming)
        ranks, kept = (list_of(following.started, key) for key in ("ranks", "kept"))
        for local_rank, rank in zip_longest(range(self.run.workers), ranks[: self.run.workers]):
            bucket = buckets.RESTART if rank in kept else buckets.STARTUP_PROCESSES
            self._add(local_rank, attempt, met, end, {bucket: end - met})

    def after(self, start: float, attempt: int) -> None:
        """Add the time after the last attempt."""
        run = self.run
        if run.is_open and attempt >= 0:
            return  # the next attempt shows what this time is
        bucket = buckets.FINISHING if attempt >= 0 else buckets.WAITING_FOR_NODES
        if attempt >= 0 and any(text(e, "name") == _NO_RENDEZVOUS for e in run.events):
            bucket = buckets.MEETING  # the agent searched for the other nodes
        self._all(attempt, start, run.end, bucket if run.state is not None else buckets.UNKNOWN)

    def attempt(self, attempt: NodeAttempt) -> None:
        """Add the time with workers."""
        ranks = list_of(attempt.started, "ranks")[: self.run.workers]
        for local_rank, rank in enumerate(ranks):
            self.ranks[local_rank] = rank if isinstance(rank, int) else None
        for local_rank in range(self.run.workers):
            self._worker(attempt, local_rank)
        if (highest := attempt.highest_step) is not None:
            self._highest = highest if self._highest is None else max(highest, self._highest)

    def _worker(self, attempt: NodeAttempt, local_rank: int) -> None:
        rank, number = self.ranks[local_rank], attempt.number
        final, end = self._final(attempt, rank)
        is_kept = rank in list_of(attempt.started, "kept")
        own = [e for e in attempt.events if integer(e, "local_rank") == local_rank]
        start: float | None = attempt.start
        vacant_since = attempt.start
        for event in own:
            name = text(event, "name")
            if name == "regrow.worker.vacated" and start is not None:
                at = _clamp(real(event, "ended_monotonic"), start, attempt.end)
                account = reading(event.get("account"))
                ending = ProcessEnd(failed=at, detected=at, hung=_hung(attempt, event, account))
                self._process(attempt, local_rank, start, at, account, ending, kept=is_kept)
                vacant_since, start, is_kept = at, None, False
            elif name == "regrow.worker.replaced" and start is None:
                start = _clamp(real(event, "started_monotonic"), vacant_since, attempt.end)
                self._add(
                    local_rank, number, vacant_since, start, {buckets.RESTART: start - vacant_since}
                )
            elif name == "regrow.inprocess.lost" and start is not None:
                at = _clamp(real(event, "lost_monotonic"), start, attempt.end)
                hung = _hung(attempt, event, final)
                ending = ProcessEnd(failed=min(end.failed, at), detected=at, hung=hung)
                self._process(attempt, local_rank, start, at, final, ending, kept=is_kept)
                vacant_since, start = at, None
        if start is None:
            # The others continued until the attempt failed. Without its end, they may still run.
            failed = end.failed if end.known else attempt.end
            for until, bucket in (
                (failed, buckets.LOST_RANKS),
                (max(failed, end.detected), buckets.DETECTION),
                (attempt.end, buckets.STOPPING),
            ):
                over = _clamp(until, vacant_since, attempt.end)
                self._add(local_rank, number, vacant_since, over, {bucket: over - vacant_since})
                vacant_since = over
        else:
            self._process(attempt, local_rank, start, attempt.end, final, end, kept=is_kept)

    def _process(
        self,
        attempt: NodeAttempt,
        local_rank: int,
        start: float,
        end: float,
        account: rows.Reading | None,
        ending: ProcessEnd,
        *,
        kept: bool,
    ) -> None:
        first = first_step_of(attempt.ended, self.ranks[local_rank])
        if self._highest is not None and first is not None:
            first = max(first, self._highest + 1)
        process = Process(start=start, end=end, account=account, first_new_step=first, kept=kept)
        reached = self.known.reached.get(attempt.number)
        self.redone[attempt.number, local_rank] += redone_steps(process, reached)
        steps_known = self.known.steps_known and local_rank not in self.silent
        parts = split(process, ending, steps_known=steps_known, reached=reached)
        if self.run.is_open and steps_known and not ending.known:
            parts = parts[:-1]  # the rest has no account yet
        for until, seconds in parts:
            self._add(local_rank, attempt.number, start, until, seconds)
            start = max(start, until)

    def _final(
        self, attempt: NodeAttempt, rank: int | None
    ) -> tuple[rows.Reading | None, ProcessEnd]:
        """Return the last account of a rank, and how its attempt ended."""
        if attempt.ended is not None:
            account = account_of(attempt.ended, rank)
            hung = attempt.number in self.known.hung or _stalled(attempt, rank, account)
            ending = _ending(attempt, hung=hung)
            finished = attempt.ended.get("finished")
            at = real(finished, str(rank)) if isinstance(finished, Mapping) else None
            if at is not None and at <= ending.failed:
                ending = replace(ending, succeeded=True)
            return account, ending
        known_until = attempt.start
        account = None
        for event in attempt.events:
            at = real(event, "monotonic") or attempt.start
            if text(event, "name") == "regrow.worker.accounts":
                account, known_until = account_of(event, rank) or account, at
            elif account is None and is_first_step(event) and integer(event, "rank") == rank:
                known_until = real(event, "step_monotonic") or attempt.start
        return account, ProcessEnd(failed=known_until, detected=known_until, known=False)


def _ending(attempt: NodeAttempt, *, hung: bool) -> ProcessEnd:
    """Return when an attempt failed or was stopped, from the events of its node."""
    failed, detected = attempt.end, attempt.end
    for event in attempt.events:
        name, at = text(event, "name"), real(event, "monotonic")
        known = at
        if name == "regrow.worker.failed":
            notified = real(event, "told_monotonic")  # of a worker on another node
            at = real(event, "failed_monotonic") if notified is None else notified
            known = real(event, "detected_monotonic") if notified is None else notified
        elif name == "regrow.lease.over":
            at = known = real(event, "lapsed_monotonic")
        elif name not in _STOPS:
            continue
        if at is not None and at < failed:
            failed = at
        if known is not None and known < detected:
            detected = known
    state = None if attempt.ended is None else text(attempt.ended, "state")
    return ProcessEnd(
        failed=failed,
        detected=max(failed, detected),
        succeeded=state == "SUCCEEDED",
        hung=hung,
    )


def _hung(attempt: NodeAttempt, ended: Record, account: rows.Reading | None) -> bool:
    """Return whether a process that ended in an attempt had hung, and has had no mark since.

    Args:
        attempt: the attempt.
        ended: the event of its end.
        account: its account.
    """
    since = attempt.start if account is None else account.since_monotonic
    return any(
        text(event, "name") in (_EXPIRED, _STALLED)
        and integer(event, "pid") == integer(ended, "pid")
        and (real(event, "monotonic") or 0.0) >= since
        for event in attempt.events
    )


def _stalled(attempt: NodeAttempt, rank: int | None, account: rows.Reading | None) -> bool:
    """Return whether a worker was reported to stay at one step, and has had no mark since."""
    since = attempt.start if account is None else account.since_monotonic
    return any(
        text(event, "name") == _STALLED
        and integer(event, "rank") == rank
        and (real(event, "monotonic") or 0.0) >= since
        for event in attempt.events
    )


_NO_RENDEZVOUS, _STALLED = "regrow.rendezvous.lost", "regrow.heartbeat.stalled"
_EXPIRED = "regrow.timer.expired"
_STOPS = {"regrow.job.stopping", "regrow.round.ended", "regrow.job.restarting"}


def _clamp(at: float | None, low: float, high: float) -> float:
    return high if at is None else min(max(at, low), high)


def add_up(spans: Iterable[Span]) -> dict[str, float]:
    """Return the worker-seconds by bucket."""
    total: dict[str, float] = defaultdict(float)
    for span in spans:
        for bucket, seconds in span.seconds.items():
            total[bucket] += seconds
    return dict(total)
