"""`Ledger`: what all worker-seconds of a job were spent on, and two ratios.

A worker-second is a second of one worker of the job, whether or not it has a process then: from the
start of its agent to its end, and between the runs of a requeued job. Each is in exactly one bucket
of `buckets`, or in that of a phase of the script.

- **goodput** = productive / all worker-seconds.
- **effective training time ratio** = (productive + phases) / all worker-seconds. The phases belong
  to the training; what is left are the costs of starts, failures and waits. It follows Kokolis et
  al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024), where the
  time between the runs of a job counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from regrow.events import Session, jobs_of, runs_of
from regrow.events.evidence import Record, text
from regrow.events.runs import Alive
from regrow.ledger import buckets
from regrow.ledger.attempts import NodeAttempt, attempts_of
from regrow.ledger.lost import injected_s
from regrow.ledger.spans import Known, Span, add_up, spans_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account of one job."""

    run_id: str | None
    begin: float
    """Seconds since the epoch."""
    end: float
    sessions: int
    """How often the job was scheduled."""
    runs: int
    """Number of agents, over all sessions."""
    workers: int
    """Number of workers in the last session."""
    attempts: int
    """How often workers were started, over all sessions."""
    finished: bool
    """Whether the last session has recorded its end."""
    running: bool
    """Whether the job still runs, as far as this host can see. Then the time since the last account
    of each worker is left out."""
    highest_step: int | None
    """The highest step that was reached."""
    redone_steps: int
    """Number of steps that were done again."""
    silent_workers: int
    """Number of workers of one node that report no steps, although others of the node do. Their
    time outside of phases is unknown."""
    spans: tuple[Span, ...]
    """The spans of each worker follow each other in time."""
    seconds: Mapping[str, float]
    """Worker-seconds by bucket. `productive` and `unknown` are always among them."""
    injected_faults: int | None
    """Number of faults that `--chaos` injected; None without it."""
    injected_seconds: float | None
    """How many worker-seconds of these buckets the failures cost that followed from them."""

    @property
    def total(self) -> float:
        """All worker-seconds."""
        return sum(self.seconds.values())

    @property
    def phases(self) -> float:
        """Worker-seconds in phases of the script."""
        return sum(s for bucket, s in self.seconds.items() if buckets.is_phase(bucket))

    @property
    def goodput(self) -> float | None:
        """Productive share of all worker-seconds; None if it is not known (yet)."""
        return self._share(self.seconds[buckets.PRODUCTIVE])

    @property
    def effective_training_time_ratio(self) -> float | None:
        """Share of the productive time and the phases; None if it is not known (yet)."""
        return self._share(self.seconds[buckets.PRODUCTIVE] + self.phases)

    def _share(self, seconds: float) -> float | None:
        has_no_account = self.running and self.highest_step is None
        return seconds / self.total if self.total > 0 and not has_no_account else None

    def losses(self) -> list[tuple[str, float]]:
        """Return the buckets that are neither productive nor unknown, biggest first."""
        kept = (buckets.PRODUCTIVE, buckets.UNKNOWN)
        found = [(bucket, s) for bucket, s in self.seconds.items() if bucket not in kept and s > 0]
        return sorted(found, key=lambda each: (-each[1], each[0]))

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without the spans, as JSON."""
        names = (
            "run_id",
            "begin",
            "end",
            "sessions",
            "runs",
            "workers",
            "attempts",
            "finished",
            "running",
        )
        return {name: getattr(self, name) for name in (*names, *_STEP_FIGURES)} | {
            "worker_seconds": self.total,
            "goodput": self.goodput,
            "effective_training_time_ratio": self.effective_training_time_ratio,
            "injected_faults": self.injected_faults,
            "injected_worker_seconds": self.injected_seconds,
            "buckets": dict(sorted(self.seconds.items(), key=lambda each: -each[1])),
        }


_STEP_FIGURES = ("highest_step", "redone_steps", "silent_workers")


def build_ledgers(
    logs: Mapping[str, Iterable[Record]], is_alive: Alive = lambda started: None
) -> list[Ledger]:
    """Account for all jobs whose events are in these logs.

    Args:
        logs: the events of each log, in their order, by a name of the log. Malformed events and
            events of unknown kinds are left out.
        is_alive: tells from the first event of an agent without a recorded end whether it still
            runs (`agent_is_alive`). By default that is unknown, and the job counts as over.

    Returns:
        The ledgers, in the order in which the jobs began.
    """
    runs = [run for log, events in logs.items() for run in runs_of(log, events, is_alive)]
    return [_ledger(job) for job in jobs_of(runs)]


def _ledger(job: tuple[Session, ...]) -> Ledger:
    attempts = [[(run, attempts_of(run)) for run in session.runs] for session in job]
    every = [attempt for session in attempts for _, of_run in session for attempt in of_run]
    steps_known = any(attempt.reports_steps for attempt in every)
    spans: list[Span] = []
    highest: int | None = None
    silent = redone_steps = 0
    faults, injected = _injected_faults(job), 0.0
    for n, (session, of_session, later) in enumerate(zip_longest(job, attempts, job[1:])):
        by_number: dict[int, list[NodeAttempt]] = {}
        for _, of_run in of_session:
            for attempt in of_run:
                by_number.setdefault(attempt.number, []).append(attempt)
        reached: dict[int, int | None] = {}
        for number, same in sorted(by_number.items()):
            reached[number] = highest
            steps = [each.highest_step for each in same if each.highest_step is not None]
            highest = max([*steps, *([highest] if highest is not None else [])], default=None)
        hung = frozenset(
            number for number, same in by_number.items() if any(each.hung for each in same)
        )
        own: list[Span] = []
        redone: dict[int, int] = {}  # by attempt
        for run in session.runs:
            found = spans_of(run, Known(steps_known, reached, hung, n))
            own += found.spans
            silent = max(silent, found.silent)
            for number, count in found.redone.items():
                redone[number] = max(redone.get(number, 0), count)
        own += _between(session, later, n) if later is not None else []
        redone_steps += sum(redone.values())
        injected += injected_s(of_session, own, redone) if faults is not None else 0.0
        spans += own
    seconds = {buckets.PRODUCTIVE: 0.0, buckets.UNKNOWN: 0.0} | add_up(spans)
    last = job[-1]
    return Ledger(
        run_id=last.runs[-1].run_id,
        begin=job[0].begin,
        end=max(session.end for session in job),
        sessions=len(job),
        runs=sum(len(session.runs) for session in job),
        workers=sum(run.workers for run in last.runs),
        attempts=sum(len({a.number for _, of_run in s for a in of_run}) for s in attempts),
        finished=last.ended,
        running=any(run.is_open for run in last.runs),
        highest_step=highest,
        redone_steps=redone_steps,
        silent_workers=silent,
        spans=tuple(spans),
        seconds=seconds,
        injected_faults=faults,
        injected_seconds=None if faults is None else min(injected, _losses(seconds)),
    )


def _injected_faults(job: tuple[Session, ...]) -> int | None:
    """Return how many faults `--chaos` injected; None without it."""
    events = [event for session in job for run in session.runs for event in run.events]
    faults = sum(text(event, "name") == "regrow.chaos.injected" for event in events)
    return faults if faults or any(text(event, "chaos") for event in events) else None


def _losses(seconds: Mapping[str, float]) -> float:
    """Return the worker-seconds that a fault can cost; those of a damaged log may be more."""
    kept = (buckets.PRODUCTIVE, buckets.UNKNOWN)
    return sum(s for b, s in seconds.items() if b not in kept and not buckets.is_phase(b))


def _between(before: Session, after: Session, number: int) -> list[Span]:
    """Return the spans between two sessions, of the workers of the second one.

    Args:
        before: the first session.
        after: the second session.
        number: the number of the first session, to which this time belongs.
    """
    start, end = before.end, after.begin
    bucket = buckets.WAITING_FOR_SCHEDULER if before.ended else buckets.UNKNOWN
    return [
        Span(
            log=run.log,
            host=run.host,
            local_rank=local_rank,
            rank=None,
            attempt=-1,
            start=start,
            end=end,
            session=number,
            seconds={bucket: end - start},
        )
        for run in after.runs
        for local_rank in range(run.workers)
        if end > start
    ]
