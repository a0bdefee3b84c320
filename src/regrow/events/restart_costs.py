"""What the end of an attempt cost: how long until training went on, and which work was lost."""

from __future__ import annotations

from bisect import bisect
from typing import Any

from regrow.events import accounts, evidence
from regrow.events.evidence import integer, integers, real, since
from regrow.events.job_events import ENDED, IN_PROCESS, RESTARTING, Attempt, JobEvents
from regrow.events.story_types import StepMark


class RestartCosts:
    """Computes the fields of `RestartCost` from the events of a job."""

    def __init__(self, job: JobEvents) -> None:
        self._job = job

    def of(self, number: int, clock: str | None, begun: float | None) -> dict[str, Any]:
        """Compute the cost of an attempt's end: fields of both `Failure` and `PlannedRestart`.

        Args:
            number: the attempt.
            clock: the host with the monotonic clock that measures the seconds.
            begun: time on that clock from which the seconds count.
        """
        attempt = self._job.attempts[number]
        following = self._job.numbers[bisect(self._job.numbers, number) :]
        restarted = next((n for n in following if self._job.starts(n)), None)
        starts = self._job.starts(restarted) if restarted is not None else []
        begun_at = [at for e in starts if (at := real(e, "monotonic")) is not None]
        ended = [at for e in attempt.named[ENDED] if (at := real(e, "monotonic")) is not None]
        first, first_at = self._first_step(number, clock)
        last = max((s.last_step for s in attempt.steps if s.last_step is not None), default=None)
        resumed_from = self._resumed_from(first)
        lost = evidence.work_lost(last, resumed_from)
        if last is None and attempt.named[ENDED] and not attempt.steps and self._job.with_steps:
            lost = 0  # the attempt ended before its first step: no work was lost
        return {
            "at_s": begun,
            "joined": self._joined(restarted),
            "stopped_after_s": since(max(ended, default=None), begun),
            "killed": tuple(
                sorted({rank for e in attempt.named[ENDED] for rank in integers(e, "killed")})
            ),
            "restarted_after_s": since(max(begun_at, default=None), begun),
            "restarted_attempt": restarted,
            "restarted_workers": integer(starts[0], "world_size") if starts else None,
            "forked_workers": sum(_length(start.get("forked")) for start in starts),
            "kept_workers": sum(_length(start.get("kept")) for start in starts),
            "recorded_workers": sum(_length(start.get("ranks")) for start in starts),
            "backoff_s": _backoff(attempt) if restarted is not None else None,
            "first_step_after_s": since(first_at, begun),
            "first_step": first,
            "first_step_s": accounts.step_s(self._job.accounts(first.attempt)) if first else None,
            "last_step": last,
            "resumed_from": resumed_from,
            "work_lost": lost,
            "work_lost_s": self._lost_s(number, lost, first.attempt if first else None),
        }

    def _lost_s(self, number: int, lost: int | None, later: int | None) -> float | None:
        """Return the seconds of training in the steps that the end of an attempt lost.

        The pace of an attempt with in-process restarts is too slow: its time includes them, and
        steps that were done twice. Then the seconds count in which these steps were done again.

        Args:
            number: the attempt.
            lost: how many steps.
            later: the attempt that did them again.
        """
        by_pace = evidence.seconds_of(lost, self._job.attempts[number].steps)
        if not by_pace or later is None or not self._job.by_attempt[IN_PROCESS, number]:
            return by_pace
        if self._job.reached(later) < self._job.reached(number):
            return by_pace  # the later attempt has not done all of them again
        return min(self._redone_in(later) or by_pace, by_pace)

    def redone_s(self) -> float | None:
        """Return the seconds in which steps were done again; None if an account is missing."""
        found = [self._redone_in(number) for number in self._job.numbers]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None

    def _redone_in(self, number: int) -> float | None:
        """Return the mean seconds in which a worker did steps again in an attempt."""
        found = [accounts.redone_s(event) for event in self._job.attempts[number].named[ENDED]]
        redone = [seconds for event in found for seconds in event or ()]
        if not found or None in found:
            return None
        return sum(redone) / len(redone) if redone else 0.0

    def _joined(self, number: int | None) -> tuple[str, ...]:
        """Return the hosts that joined in the round of an attempt."""
        return tuple(dict.fromkeys(map(self._job.hosts.name, self._job.joined.get(number, ()))))

    def _first_step(self, ended: int, host: str | None) -> tuple[StepMark | None, float | None]:
        """Return the first step after an attempt, and its time on the clock of `host`."""
        later = bisect(self._job.with_steps, ended)
        if later == len(self._job.with_steps):
            return None, None
        number = self._job.with_steps[later]
        steps = self._job.attempts[number].steps
        timed = [s for s in steps if s.host == host and s.first_monotonic is not None]
        first = min(timed, key=lambda s: s.first_monotonic or 0.0, default=steps[0])
        at = first.first_monotonic if timed else None
        return StepMark(first.rank, first.first_step, number), at

    def _resumed_from(self, first: StepMark | None) -> int | None:
        if first is None:
            return None
        return min(s.first_step for s in self._job.attempts[first.attempt].steps) - 1


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _backoff(attempt: Attempt) -> float | None:
    delays = [real(event, "delay_s") for event in attempt.named[RESTARTING]]
    return next((delay for delay in delays if delay is not None and delay > 0), None)
