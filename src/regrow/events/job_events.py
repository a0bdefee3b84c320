"""The events of one job, by name and by attempt: what all parts of its story are derived from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from regrow.events import accounts, evidence
from regrow.events.clocks import on_one_clock
from regrow.events.evidence import Record, Steps, integer, real, strings, text

ACCOUNTS, COMPARED = "regrow.worker.accounts", "regrow.timer.compared"
DEPARTED, FIRST_STEP = "regrow.round.departed", "regrow.worker.first_step"
ENDED, FAILED = "regrow.attempt.ended", "regrow.worker.failed"
IN_PROCESS, LEASE_OVER = "regrow.inprocess.restarted", "regrow.lease.over"
JOB_FINISHED, JOB_STARTED = "regrow.job.finished", "regrow.job.started"
NO_RENDEZVOUS, RESTARTING = "regrow.rendezvous.lost", "regrow.job.restarting"
RESUMED, SUSPENDED = "regrow.worker.resumed", "regrow.worker.suspended"
ROUND_ENDED, ROUND_JUDGED = "regrow.round.ended", "regrow.round.judged"
STARTED, STOPPING = "regrow.attempt.started", "regrow.job.stopping"
VACATED = "regrow.worker.vacated"
ASKED = tuple(f"regrow.{name}" for name in evidence.STOP_EVENTS)

_INDEXED = frozenset(
    {
        *(STOPPING, *ASKED, ACCOUNTS, SUSPENDED, RESUMED, COMPARED, IN_PROCESS, VACATED),
        *(LEASE_OVER, NO_RENDEZVOUS),
    }
)
_OF_AN_ATTEMPT = frozenset(
    {STARTED, ENDED, FAILED, RESTARTING, ROUND_ENDED, ROUND_JUDGED, DEPARTED, FIRST_STEP}
)


@dataclass(slots=True)
class Attempt:
    """Events of one attempt."""

    named: dict[str, list[Record]]
    """The attempt's events, keyed by event name."""
    steps: list[Steps]
    """Progress of the attempt's workers."""


class JobEvents:
    """The events of the job that started last, on one clock.

    Args:
        events: events, in any order; those without a job id belong to every job.
    """

    def __init__(self, events: Iterable[Record]) -> None:
        self.all, self.started_at = on_one_clock(_of_one_job(events))
        self.hosts = evidence.Hosts(self.all)
        self.attempts: dict[int, Attempt] = {}
        self.by_name: dict[str, list[Record]] = defaultdict(list)
        self.by_attempt: dict[tuple[str, int | None], list[Record]] = defaultdict(list)
        current = 0
        for event in self.all:
            name = text(event, "name") or ""
            self.by_name[name].append(event)
            number = integer(event, "attempt")
            current = current if number is None else number
            if name in _INDEXED:
                self.by_attempt[name, number].append(event)
            if name in _OF_AN_ATTEMPT:
                attempt = self.attempts.setdefault(current, Attempt(defaultdict(list), []))
                attempt.named[name].append(event)
                if name in (ENDED, FIRST_STEP):
                    attempt.steps += evidence.steps(event)
        self.joined: dict[int | None, list[str]] = defaultdict(list)  # ids of hosts, by attempt
        for event in self.by_name["regrow.rendezvous.completed"]:
            self.joined[integer(event, "attempt")] += strings(event, "joined")
        self.numbers = sorted(self.attempts)
        self.with_steps = [number for number in self.numbers if self.attempts[number].steps]

    def sorted(self, name: str) -> list[Record]:
        """Return the events with this name, sorted by the time at which they happened."""
        return sorted(self.by_name[name], key=time_of)

    def last(self, name: str) -> Record:
        """Return the last event with this name, of the host that recorded it last."""
        return max(self.by_name[name], key=lambda e: real(e, "monotonic") or 0.0, default={})

    def starts(self, number: int) -> list[Record]:
        """Return the starts of an attempt, one of each host."""
        return self.attempts[number].named[STARTED]

    def accounts(self, number: int) -> list[Record]:
        """Return the last account of each worker of an attempt."""
        ended = self.attempts[number].named[ENDED]
        return accounts.accounts_of((*self.by_attempt[ACCOUNTS, number], *ended))

    def reached(self, number: int) -> int:
        """Return the last step of an attempt; -1 if it is not recorded."""
        steps = (s.last_step for s in self.attempts[number].steps)
        return max((step for step in steps if step is not None), default=-1)


def time_of(event: Record) -> float:
    """Return the time of an event; infinity if it is unknown."""
    at = real(event, "monotonic")
    return math.inf if at is None else at


def same_worker(one: Record, other: Record) -> bool:
    """Return whether two events are about the same process of a worker."""
    return all(one.get(key) == other.get(key) for key in ("host", "attempt", "rank", "pid"))


def _of_one_job(events: Iterable[Record]) -> list[Record]:
    """Return the events of the job that started last, and the events without a job id."""
    known = [event for event in events if isinstance(event, Mapping)]
    started = [e for e in known if text(e, "name") == "regrow.job.started"]
    job = next((i for e in reversed(started or known) if (i := text(e, "run_id"))), None)
    return [event for event in known if text(event, "run_id") in (None, job)]
