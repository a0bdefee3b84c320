"""How a story is derived from the events: attempt by attempt.

See `_story` for what the figures mean.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ._describe import describe, one_line, signal_name
from ._expiries import compared, hung_too, of_failure, unexplained
from ._fields import Record, integer, real, since, text
from ._steps import Steps, last_steps, seconds_of, work_lost
from ._story import Failure, InPlace, Move, OtherFailure, Stall, Step, Story, Suspension

__all__ = ["retell"]


@dataclass(slots=True)
class _Attempt:
    """What the events say about one attempt."""

    starts: list[Record] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)
    ends: list[Record] = field(default_factory=list)
    restarts: list[Record] = field(default_factory=list)
    overs: list[Record] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)


def retell(events: Iterable[Record]) -> Story:
    """The story that the events tell."""
    return _Reader(events).story()


class _Reader:
    """Sorts the events by attempt and derives the story's parts."""

    def __init__(self, events: Iterable[Record]) -> None:
        self.events = _of_one_job(events)
        self.attempts: dict[int, _Attempt] = {}
        self.by_name: dict[str, list[Record]] = {}
        current = 0
        for event in self.events:
            name = text(event, "name") or ""
            self.by_name.setdefault(name, []).append(event)
            number = integer(event, "attempt")
            current = current if number is None else number
            self._sort(name, event, current)
        self.expired = sorted(self.by_name.get("regrow.timer.expired", []), key=_at)
        self.loose = unexplained(self.expired, self.by_name.get("regrow.worker.failed", []))
        self.numbers = sorted(self.attempts)
        self.reports_steps = any(attempt.steps for attempt in self.attempts.values())

    def _sort(self, name: str, event: Record, number: int) -> None:
        if name not in _OF_AN_ATTEMPT:
            return
        attempt = self.attempts.setdefault(number, _Attempt())
        if name == "regrow.attempt.started":
            attempt.starts.append(event)
        elif name == "regrow.worker.failed":
            attempt.failures.append(event)
        elif name == "regrow.attempt.ended":
            attempt.ends.append(event)
            attempt.steps += last_steps(event)
        elif name == "regrow.job.restarting":
            attempt.restarts.append(event)
        elif name in _OVER:
            attempt.overs.append(event)
        elif (step := integer(event, "step")) is not None:
            attempt.steps.append(
                Steps(
                    rank=integer(event, "rank"),
                    host=text(event, "host"),
                    first_step=step,
                    first_monotonic=real(event, "step_monotonic"),
                )
            )

    def story(self) -> Story:
        started = self._last("regrow.job.started")
        finished = self._last("regrow.job.finished")
        starts = [n for n in self.numbers if self.attempts[n].starts]
        failures = tuple(f for n in self.numbers if (f := self._failure(n)) is not None)
        failed = {failure.attempt for failure in failures}
        restarts = integer(finished, "restarts")
        return Story(
            events=len(self.events),
            run_id=next((i for e in reversed(self.events) if (i := text(e, "run_id"))), None),
            script=_script(started),
            workers=self._world_sizes(starts),
            nodes=self._nodes(started),
            max_restarts=integer(started, "max_restarts"),
            attempts=len(starts),
            restarts=restarts if restarts is not None else max(len(starts) - 1, 0),
            state=text(finished, "state"),
            exit_code=integer(finished, "exit_code"),
            signal=text(finished, "signal"),
            reason=text(finished, "reason"),
            duration_s=self._duration(started, finished),
            failures=failures,
            moves=tuple(self._move(n) for n in starts[:-1] if n not in failed),
            suspensions=self._suspensions(),
            expiries=tuple(e for e in self.loose if all(e not in f.hung_too for f in failures)),
            in_place=tuple(map(_in_place, sorted(self.by_name.get(_RESTARTED, []), key=_at))),
            stalls=tuple(map(_stall, sorted(self.by_name.get(_STALLED, []), key=_at))),
            reports_steps=self.reports_steps,
            events_lost=sum(
                integer(e, "lost") or 0 for e in self.by_name.get("regrow.log.gap", [])
            ),
        )

    def _last(self, name: str) -> Record:
        return self.by_name.get(name, [{}])[-1]

    def _world_sizes(self, starts: list[int]) -> tuple[int, ...]:
        sizes: list[int] = []
        for number in starts:
            size = integer(self.attempts[number].starts[0], "world_size")
            if size is not None and sizes[-1:] != [size]:
                sizes.append(size)
        return tuple(sizes)

    def _nodes(self, started: Record) -> int | None:
        rounds = self.by_name.get("regrow.rendezvous.completed", [])
        for completed in rounds:
            if (nodes := integer(completed, "group_world_size")) is not None:
                return nodes
        nodes = integer(started, "nnodes")
        if nodes is not None:
            return nodes
        return 1 if text(started, "nnodes") in ("1", "1:1") else None

    def _duration(self, started: Record, finished: Record) -> float | None:
        duration = real(finished, "duration_s")
        if duration is not None:
            return duration
        if finished or not started:
            return None
        same_clock = [e for e in self.events if text(e, "host") == text(started, "host")]
        last = max((m for e in same_clock if (m := real(e, "monotonic")) is not None), default=None)
        return since(last, real(started, "monotonic"))

    def _failure(self, number: int) -> Failure | None:
        attempt = self.attempts[number]
        root = _root_cause(attempt.failures)
        over = _cause_elsewhere(attempt.overs)
        if over is not None and root is not None:
            what = one_line(f"node {text(over, 'node') or '?'}: {text(over, 'why') or '?'}")
            root = {"told_monotonic": over.get("monotonic"), "told_host": over.get("host")}
        elif root is None:
            ended = next((e for e in attempt.ends if text(e, "state") == "FAILED"), None)
            if ended is None:
                return None
            reason = text(ended, "reason") or "the attempt failed, and no worker is known to have"
            root = {"host": ended.get("host"), "failed_monotonic": ended.get("monotonic")}
            what = one_line(reason)
        else:
            what = describe(root)
        timer = of_failure(self.expired, root)
        host, failed = text(root, "host"), real(root, "failed_monotonic")
        clock = host  # of the host by whose clock the seconds count
        elsewhere = failed is None and real(root, "told_monotonic") is not None
        if elsewhere:
            clock, failed = text(root, "told_host"), real(root, "told_monotonic")
        following = self.numbers[bisect(self.numbers, number) :]
        restarted = next((n for n in following if self.attempts[n].starts), None)
        starts = self.attempts[restarted].starts if restarted is not None else []
        start = next((e for e in starts if text(e, "host") == clock), {})
        first, first_at = self._first_step(following, clock)
        last = max((s.last_step for s in attempt.steps if s.last_step is not None), default=None)
        resumed_from = self._resumed_from(first)
        lost = work_lost(last, resumed_from)
        if last is None and attempt.ends and not attempt.steps and self.reports_steps:
            lost = 0  # the attempt ended before its first step: there was nothing to lose
        return Failure(
            attempt=number,
            what=what,
            rank=integer(root, "rank"),
            host=host,
            pid=integer(root, "pid"),
            exit_code=integer(root, "exit_code"),
            signal=signal_name(root),
            error_file=text(root, "error_file") if root.get("error_file") != _NO_FILE else None,
            detected_after_s=since(real(root, "detected_monotonic"), failed),
            restarted_after_s=since(real(start, "monotonic"), failed),
            restarted_attempt=restarted,
            restarted_workers=integer(starts[0], "world_size") if starts else None,
            backoff_s=_backoff(attempt) if restarted is not None else None,
            first_step_after_s=since(first_at, failed),
            first_step=first,
            last_step=last,
            resumed_from=resumed_from,
            work_lost=lost,
            work_lost_s=seconds_of(lost, attempt.steps),
            others=_others(attempt.failures, root),
            elsewhere=elsewhere,
            timer=timer,
            hung_too=hung_too(self.loose, number) if timer is not None else (),
            compared=compared(self.by_name.get("regrow.timer.compared", []), number),
        )

    def _first_step(
        self, following: list[int], host: str | None
    ) -> tuple[Step | None, float | None]:
        """The first step after an attempt, and when it was made by the clock of `host`."""
        for number in following:
            steps = self.attempts[number].steps
            timed = [s for s in steps if s.host == host and s.first_monotonic is not None]
            if timed:
                first = min(timed, key=lambda s: s.first_monotonic or 0.0)
                return Step(first.rank, first.first_step, number), first.first_monotonic
            if steps:
                return Step(steps[0].rank, steps[0].first_step, number), None
        return None, None

    def _resumed_from(self, first: Step | None) -> int | None:
        if first is None:
            return None
        return min(s.first_step for s in self.attempts[first.attempt].steps) - 1

    def _move(self, number: int) -> Move:
        attempt = self.attempts[number]
        told = next((e for e in (*attempt.restarts, *attempt.ends) if text(e, "reason")), {})
        following = self.numbers[bisect(self.numbers, number) :]
        nobody: list[Record] = [{}]
        starts = next((s for n in following if (s := self.attempts[n].starts)), nobody)
        start = next((e for e in starts if text(e, "host") == text(told, "host")), {})
        return Move(
            attempt=number,
            reason=one_line(text(told, "reason") or "the reason is not recorded"),
            restarted_after_s=since(real(start, "monotonic"), real(told, "monotonic")),
            restarted_workers=integer(starts[0], "world_size"),
        )

    def _suspensions(self) -> tuple[Suspension, ...]:
        resumed = sorted(self.by_name.get("regrow.worker.resumed", []), key=_at)
        found = []
        for event in sorted(self.by_name.get("regrow.worker.suspended", []), key=_at):
            at = real(event, "monotonic")
            duration = None
            for candidate in resumed:
                duration = since(real(candidate, "monotonic"), at)
                if duration is not None and _same_worker(candidate, event):
                    resumed.remove(candidate)
                    break
                duration = None
            found.append(
                Suspension(
                    attempt=integer(event, "attempt") or 0,
                    rank=integer(event, "rank"),
                    host=text(event, "host"),
                    pid=integer(event, "pid"),
                    signal=text(event, "signal") or "a signal",
                    duration_s=duration,
                )
            )
        return tuple(found)


_STALLED = "regrow.heartbeat.stalled"
_RESTARTED = "regrow.inprocess.restarted"
_NO_FILE = "<N/A>"  # what a failure has for a path where its worker left no error file
_OVER = frozenset({"regrow.round.ended", "regrow.round.judged"})
_OF_AN_ATTEMPT = _OVER | frozenset(
    {
        "regrow.attempt.started",
        "regrow.attempt.ended",
        "regrow.worker.failed",
        "regrow.worker.first_step",
        "regrow.job.restarting",
    }
)


def _of_one_job(events: Iterable[Record]) -> list[Record]:
    """The events of the job that started last, and those that do not say whose they are."""
    known = [event for event in events if isinstance(event, Mapping)]
    started = [e for e in known if text(e, "name") == "regrow.job.started"]
    job = next((i for e in reversed(started or known) if (i := text(e, "run_id"))), None)
    return [event for event in known if text(event, "run_id") in (None, job)]


def _script(started: Record) -> str | None:
    """The short name of what a command line runs: its script's, module's or program's."""
    command = started.get("command")
    if not isinstance(command, list | tuple) or not command:
        return None
    words = [str(word) for word in command if isinstance(word, str)]
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if program.startswith("python"):
        program = next((w for w in words[1:] if not w.startswith("-")), program)
    return program.rpartition("/")[2] or program


def _root_cause(failures: list[Record]) -> Record | None:
    marked = [event for event in failures if event.get("root_cause") is True]
    return min(marked or failures, key=_failed_at, default=None)


def _cause_elsewhere(overs: list[Record]) -> Record | None:
    """How a round ended for which no worker is to blame, as it was judged in the end."""
    judged = [e for e in overs if text(e, "name") == "regrow.round.judged"]
    if judged:
        return judged[-1] if judged[-1].get("charged") is False else None
    return next((e for e in overs if e.get("failed") is False), None)


def _failed_at(event: Record) -> float:
    at = real(event, "failed_monotonic")
    return math.inf if at is None else at


def _at(event: Record) -> float:
    at = real(event, "monotonic")
    return math.inf if at is None else at


def _others(failures: list[Record], root: Record) -> tuple[OtherFailure, ...]:
    def after(event: Record) -> float | None:
        if text(event, "host") != text(root, "host") or text(root, "host") is None:
            return None
        return since(real(event, "failed_monotonic"), real(root, "failed_monotonic"))

    return tuple(
        OtherFailure(
            rank=integer(event, "rank"),
            host=text(event, "host"),
            pid=integer(event, "pid"),
            what=describe(event),
            after_s=after(event),
        )
        for event in sorted(failures, key=_failed_at)
        if event is not root
    )


def _stall(event: Record) -> Stall:
    return Stall(
        attempt=integer(event, "attempt") or 0,
        rank=integer(event, "rank"),
        host=text(event, "host"),
        pid=integer(event, "pid"),
        what=one_line(text(event, "message") or "it stood still"),
        stood=one_line(text(event, "stood") or "unknown"),
        stacks=text(event, "stacks"),
    )


def _in_place(event: Record) -> InPlace:
    lost, seconds = event.get("lost"), event.get("seconds")
    ranks = [each for each in lost if isinstance(each, int)] if isinstance(lost, list) else []
    known = seconds if isinstance(seconds, Mapping) else {}
    phases = ((str(phase), real(known, phase)) for phase in known)
    kind = text(event, "kind") or "an unknown fault"
    message = text(event, "message")
    return InPlace(
        attempt=integer(event, "attempt") or 0,
        iteration=integer(event, "iteration") or 0,
        world_size=integer(event, "world_size"),
        rank=integer(event, "rank"),
        what=one_line(f"{kind}: {message}" if message else kind),
        lost=tuple(ranks),
        lost_count=integer(event, "lost_count") or len(ranks),
        phases=tuple((phase, after) for phase, after in phases if after is not None),
    )


def _backoff(attempt: _Attempt) -> float | None:
    delays = [real(event, "delay_s") for event in attempt.restarts]
    return next((delay for delay in delays if delay is not None and delay > 0), None)


def _same_worker(one: Record, other: Record) -> bool:
    return all(one.get(key) == other.get(key) for key in ("host", "attempt", "rank", "pid"))
