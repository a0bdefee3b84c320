"""Countdown timers that ran out, and the failures that they explain.

An agent that kills a worker for its timer gives the failure the timer's own words. So a failure is
a timer's if both events are of one process and say the same; that a worker which was sent a signal
that it survives fails of something else later is another matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._describe import one_line
from ._fields import Record, integer, real, text
from ._story import Expiry

__all__ = ["compared", "hung_too", "of_failure", "unexplained"]


def of_failure(expired: Iterable[Record], failure: Record) -> Expiry | None:
    """The timer for which a worker failed; None where it failed of something else."""
    return next((_expiry(event) for event in expired if _explains(event, failure)), None)


def unexplained(expired: Iterable[Record], failures: Iterable[Record]) -> tuple[Expiry, ...]:
    """The timers for which no worker failed."""
    told = list(failures)
    return tuple(
        _expiry(event) for event in expired if not any(_explains(event, each) for each in told)
    )


def hung_too(loose: Iterable[Expiry], attempt: int) -> tuple[Expiry, ...]:
    """Those of some timers that belong to workers which were about to be killed in an attempt."""
    return tuple(e for e in loose if e.attempt == attempt and e.signal and not e.helper)


def compared(events: Iterable[Record], attempt: int) -> tuple[str, ...]:
    """Where the workers of an attempt stood, by the comparison of the most hosts."""
    of_attempt = [event for event in events if integer(event, "attempt") == attempt]
    return _lines(max(of_attempt, key=_ranks)) if of_attempt else ()


def _ranks(event: Record) -> int:
    told = event.get("ranks")
    return len(told) if isinstance(told, Sequence) else 0


def _explains(event: Record, failure: Record) -> bool:
    same = ("host", "attempt", "pid", "message")
    return text(event, "message") is not None and all(event.get(k) == failure.get(k) for k in same)


def _expiry(event: Record) -> Expiry:
    pid, worker = integer(event, "pid"), integer(event, "worker_pid")
    return Expiry(
        attempt=integer(event, "attempt") or 0,
        rank=integer(event, "rank"),
        host=text(event, "host"),
        pid=pid,
        helper=worker is not None and worker != pid,
        scope=one_line(text(event, "scope") or "?"),
        after_s=real(event, "after_s"),
        over_s=real(event, "over_s"),
        stood=one_line(text(event, "stood") or "unknown"),
        stacks=text(event, "stacks"),
        compared=_lines(event),
        signal=text(event, "signal"),
        heartbeat=event.get("heartbeat") is True,
    )


def _lines(event: Record) -> tuple[str, ...]:
    told = event.get("compared")
    lines = told if isinstance(told, Sequence) and not isinstance(told, str) else ()
    return tuple(one_line(line) for line in lines if isinstance(line, str))
