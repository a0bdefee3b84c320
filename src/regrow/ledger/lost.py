"""What a fault cost: the worker-seconds of the end of an attempt, and of all injected faults.

`lost_time` adds up what the end of an attempt and the start of the next one cost. `regrow explain`
calls it for each failure, and `injected_s` for those that `--chaos` caused.

A failure follows from an injected fault if its event has the field `injected`. The loss of a host
follows from a fault of its link (`cut`, `delay`) that ended at most `_AFTER_S` before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from operator import itemgetter
from typing import NamedTuple

from regrow.events.evidence import Record, integer, real, text
from regrow.events.in_process import by_fields, end_of, nearest, silent_s
from regrow.events.runs import Run
from regrow.ledger import buckets
from regrow.ledger.attempts import NodeAttempt
from regrow.ledger.spans import Span

SURVIVED = ("inprocess.restarted", "worker.replaced")
"""Events of faults that an attempt survived: the end of the attempt does not cost their seconds."""


class LostTime(NamedTuple):
    """What the end of an attempt cost."""

    seconds: Mapping[str, float]
    """Worker-seconds by bucket of the ledger, biggest first."""
    before_s: float
    """How many of them were before the failure."""
    workers: int
    """Number of workers whose time is recorded."""
    all_workers: int
    """Number of workers of the job then."""
    redone_s: float | None
    """Seconds in which a worker did steps again, on average; None if that is not recorded."""

    @property
    def total(self) -> float | None:
        """All of these worker-seconds; None if none are recorded."""
        return sum(self.seconds.values()) if self.seconds else None


def lost_time(
    spans: Mapping[int, Sequence[Span]],
    attempt: int,
    following: int | None,
    begin: float | None,
    *,
    world_size: int,
    unfinished: bool,
    most_redone_s: float = math.inf,
) -> LostTime:
    """Return the worker-seconds that the end of an attempt cost.

    Args:
        spans: the spans of one run of the job by attempt; -1 until its next run.
        attempt: the attempt that ended. The time between two attempts belongs to the first.
        following: the next attempt, whose startup and redone steps count; None if none began.
        begin: when the failure began, on the clock of the spans.
        world_size: number of workers in the attempt; 0 if it is not known.
        unfinished: whether the time before it counts too, since the last step of each worker.
        most_redone_s: most seconds in which a worker did steps again because of this end.
    """
    if following is None:
        parts = [(attempt, _OF_AN_END | _OF_A_JOB_END), (-1, _BETWEEN_RUNS)]
    else:
        parts = [(attempt, _OF_AN_END), (following, _OF_A_START)]
    before = {(span.log, span.local_rank) for span in spans.get(attempt, ())}
    before_s = 0.0
    found: dict[str, float] = {}
    workers: dict[int, set[tuple[str, int]]] = {number: set() for number, _ in parts}
    redone: dict[tuple[str, int], float] = {}  # by worker of the next attempt
    for number, wanted in parts:
        for span in spans.get(number, ()):
            worker: tuple[str, int] = (span.log, span.local_rank)
            more: set[str] = set()
            if number == following:
                if worker not in redone:
                    more = _OF_A_KEPT_START if worker in before else _OF_A_JOIN
                left = most_redone_s - redone.setdefault(worker, 0.0)
            own = {b: s for b, s in span.seconds.items() if s > 0 and b in wanted | more}
            if number == following and buckets.REDONE in own:
                own[buckets.REDONE] = min(own[buckets.REDONE], left)
                redone[worker] += own[buckets.REDONE]
            if not sum(own.values()) > 0:
                continue
            workers[number].add(worker)
            lost = sum(own.values())  # the last part of the span
            after = lost if begin is None else min(max(span.end - begin, 0.0), lost)
            counted = lost if unfinished else after
            before_s += counted - after
            for bucket, s in own.items():
                found[bucket] = found.get(bucket, 0.0) + s * counted / lost
    again = [s for s in redone.values() if s > 0]
    known = len(workers[attempt])
    workers_known = known if 0 < known < world_size else len(set().union(*workers.values()))
    return LostTime(
        seconds=dict(sorted(found.items(), key=lambda each: -each[1])),
        before_s=before_s,
        workers=workers_known,
        all_workers=max(workers_known, world_size),
        redone_s=sum(again) / len(again) if again else None,
    )


_OF_AN_END = {
    *(buckets.UNFINISHED, buckets.DETECTION, buckets.STOPPING),
    *(buckets.MEETING, buckets.RESTART, buckets.STARTUP_PROCESSES),
}
_OF_A_JOB_END = {buckets.FINISHING}
_OF_A_START = {buckets.STARTUP_SCRIPT, buckets.STARTUP_FIRST_STEP, buckets.REDONE}
_OF_A_JOIN = {buckets.STARTUP_PROCESSES}  # the first span of a worker of a host that joins
_OF_A_KEPT_START = {buckets.RESTART}  # the first span of a process that goes on from the last one
_BETWEEN_RUNS = {buckets.WAITING_FOR_SCHEDULER}


# --- injected faults


def injected_s(
    nodes: Iterable[tuple[Run, Sequence[NodeAttempt]]],
    spans: Iterable[Span],
    redone_steps: Mapping[int, int],
) -> float:
    """Return the worker-seconds that injected faults cost in one run of a job.

    The end of an attempt costs what `lost_time` returns. An in-process restart costs each worker
    its length, and the steps that were done again until the next restart.

    Args:
        nodes: the attempts of each node.
        spans: the spans of all workers; those of attempt -1 until the next run.
        redone_steps: how many steps were done again, by attempt.
    """
    by_number: dict[int, _Attempt] = defaultdict(_Attempt)
    for run, attempts in nodes:
        for each in attempts:
            by_number[each.number].nodes.append((run, each))
    by_attempt: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_attempt[span.attempt].append(span)
    for number, attempt in by_number.items():
        attempt.spans = by_attempt[number]
        attempt.redone_steps = redone_steps.get(number, 0)
    found = 0.0
    numbers = sorted(by_number)
    for number, following in zip_longest(numbers, numbers[1:]):
        attempt = by_number[number]
        found += attempt.in_process_s()
        if (begin := attempt.injected_at()) is not None:
            later = by_number[following] if following is not None else _Attempt()
            lost = lost_time(
                by_attempt,
                number,
                following,
                begin,
                world_size=attempt.world_size,
                unfinished=not attempt.survived,
                most_redone_s=later.first_redone_s,
            )
            found += lost.total or 0.0
    return found


_INJECTED, _FAILED = "regrow.chaos.injected", "regrow.worker.failed"
_RESTARTED, _RAISED = "regrow.inprocess.restarted", "regrow.inprocess.raised"
_ENDS = ("regrow.inprocess.lost", "regrow.worker.vacated")
"""Events of the processes whose end an in-process restart handles, on the hosts of their ranks."""
_OVER = ("regrow.round.ended", "regrow.round.judged")
_OF_THE_LINK = ("cut", "delay")
_AFTER_S = 60.0  # as in the agent, which marks the failures of workers


@dataclass(slots=True)
class _Attempt:
    """One attempt on all its nodes."""

    nodes: list[tuple[Run, NodeAttempt]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    redone_steps: int = 0

    def events(self, *names: str, at: str = "monotonic") -> Iterator[tuple[float, Record]]:
        """Yield the events with these names, with the time in field `at` on the spans' clock."""
        for run, attempt in self.nodes:
            for event in attempt.events:
                if text(event, "name") in names:
                    time = real(event, at)
                    yield (attempt.end if time is None else time) + run.offset, event

    def _on_one_clock(self, *names: str) -> Iterator[Record]:
        return ({**event, "monotonic": at} for at, event in self.events(*names))

    @property
    def world_size(self) -> int:
        """Number of workers; 0 if it is not known."""
        return max((integer(each.started, "world_size") or 0 for _, each in self.nodes), default=0)

    @property
    def survived(self) -> bool:
        """Whether it survived a fault."""
        return any(self.events(*(f"regrow.{name}" for name in SURVIVED)))

    @property
    def step_s(self) -> float:
        """Worker-seconds of a step that was done again, of all workers."""
        redone = sum(span.seconds.get(buckets.REDONE, 0.0) for span in self.spans)
        return redone / self.redone_steps if self.redone_steps else 0.0

    @property
    def first_redone_s(self) -> float:
        """Most seconds in which a worker did steps again before the first in-process restart."""
        _, first = min(self.events(_RESTARTED), key=itemgetter(0), default=(0.0, None))
        if first is None:
            return math.inf
        workers = {(s.log, s.local_rank) for s in self.spans if buckets.REDONE in s.seconds}
        steps = max(integer(first, "repeated_steps") or 0, 0)
        return steps * self.step_s / max(len(workers), 1)

    def injected_at(self) -> float | None:
        """Return when the fault was injected that ended the attempt; None if none did."""
        faults = [*self.events(_INJECTED)]
        failed, root = min(
            self.events(_FAILED, at="failed_monotonic"), key=_as_a_cause, default=(0.0, {})
        )
        if text(root, "injected"):
            rank = integer(root, "rank")
            own = [at for at, e in faults if integer(e, "rank") == rank and at <= failed]
            return max(own, default=failed)
        for at, over in self.events(*_OVER):
            for begun, fault in faults if over.get("lost") is True else ():
                until = begun + (real(fault, "for_s") or 0.0) + _AFTER_S
                if text(fault, "fault") in _OF_THE_LINK and begun <= at <= until:
                    return begun
        return None

    def in_process_s(self) -> float:
        """Return what the in-process restarts cost that followed from injected faults.

        A fault belongs to the restart after its call, or nearest to the end of its process. The
        order of the times does not decide, because the clocks of two hosts differ.
        """
        raised = by_fields(("rank", "iteration"), self._on_one_clock(_RAISED))
        ends = by_fields(("rank",), self._on_one_clock(*_ENDS))
        restarts: list[tuple[Record, bool]] = []
        for at, event in sorted(self.events(_RESTARTED), key=itemgetter(0)):
            rank, before = integer(event, "rank"), (integer(event, "iteration") or 0) - 1
            begin = at - _phases_s(event)
            ended = end_of(text(event, "kind"), begin, ends.get((rank,), ()))
            causes = event, ended, nearest(begin, raised.get((rank, before), ()))
            restarts.append((event, any(text(each, "injected") for each in causes)))
        found, step_s, end = 0.0, self.step_s, {"repeated_steps": self.redone_steps}
        for (event, follows), (later, _) in pairwise([*restarts, (end, False)]):
            if follows:
                until, since = (integer(e, "repeated_steps") or 0 for e in (later, event))
                workers = integer(event, "world_size") or self.world_size
                found += _length_s(event) * workers + max(until - since, 0) * step_s
        return found


def _as_a_cause(failure: tuple[float, Record]) -> tuple[bool, bool, float]:
    """Return a sort key of a failure at a time: the root cause of an attempt is the smallest."""
    at, event = failure
    is_unknown = real(event, "failed_monotonic") is None  # another host reported the failure
    return event.get("root_cause") is not True, is_unknown, at


def _length_s(restart: Record) -> float:
    """Return how long an in-process restart lasted, with the silence before a time-out."""
    return silent_s(restart) + _phases_s(restart)


def _phases_s(restart: Record) -> float:
    """Return how long the phases of an in-process restart lasted."""
    seconds = restart.get("seconds")
    known = seconds if isinstance(seconds, Mapping) else {}
    return max([0.0, *(real(known, phase) or 0.0 for phase in known)])
