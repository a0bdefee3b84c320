"""`NodeAttempt`: one start of a node's workers, as its events and accounts describe it.

Any field of an event may be missing or have another type. Such a field counts as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrow import _accounts as rows
from regrow.events import Run
from regrow.events.evidence import Record, integer, real, text


@dataclass(frozen=True, slots=True)
class NodeAttempt:
    """One start of a node's workers; times are in monotonic seconds."""

    number: int
    started: Record
    start: float
    end: float
    """When the workers were gone; the end of the run if that is not known."""
    ended: Record | None
    events: Sequence[Record]
    """What happened in between."""
    before: Sequence[Record]
    """What happened between the start of the attempt before and this one."""

    @property
    def highest_step(self) -> int | None:
        """Highest step of the accounts."""
        known = [a.highest_step for a in self.accounts() if a.highest_step is not None]
        return max(known, default=None)

    @property
    def reports_steps(self) -> bool:
        """Whether a worker has reported a step."""
        return any(map(is_first_step, self.events)) or any(
            account.counts.keys() & _STEPS for account in self.accounts()
        )

    @property
    def hung(self) -> bool:
        """Whether ranks waited in vain: a timer or a heartbeat has expired, or a host was lost."""
        return any(
            text(e, "name") in _HANGS or (text(e, "name") in _OVER and e.get("lost") is True)
            for e in self.events
        )

    def reporters(self) -> set[int]:
        """Return the local ranks that have reported a step."""
        ranks = list_of(self.started, "ranks")
        found = set()
        for event in (*self.events, self.ended or {}):
            local_rank = integer(event, "local_rank")
            account = reading(event.get("account"))
            if is_first_step(event) or (account is not None and account.counts.keys() & _STEPS):
                found |= {local_rank} if local_rank is not None else set()
            for local_rank, rank in enumerate(ranks):
                account = account_of(event, rank)
                if account is not None and account.counts.keys() & _STEPS:
                    found.add(local_rank)
        return found

    def accounts(self) -> Iterator[rows.Reading]:
        """Yield the accounts of all processes."""
        for event in (*self.events, *([self.ended] if self.ended is not None else [])):
            if (account := reading(event.get("account"))) is not None:
                yield account
            by_rank = event.get("accounts")
            for value in by_rank.values() if isinstance(by_rank, Mapping) else ():
                if (account := reading(value)) is not None:
                    yield account


_STEPS = {rows.STEPS, rows.REPEATED_STEPS, rows.FIRST_STEP, rows.FIRST_REPEATED_STEP}
_HANGS = {"regrow.timer.expired", "regrow.heartbeat.failed", "regrow.lease.over"}
_OVER = {"regrow.round.ended", "regrow.round.judged"}


def reading(value: object) -> rows.Reading | None:
    """Return the account in an event; None if there is none, or it is malformed."""
    if not isinstance(value, Mapping):
        return None
    opened, since = real(value, "opened_monotonic"), real(value, "since_monotonic")
    seconds, counts = value.get("seconds"), value.get("counts")
    if opened is None or since is None or not isinstance(seconds, Mapping):
        return None
    spent = {str(row): real(seconds, row) or 0.0 for row in seconds}
    return rows.Reading(
        highest_step=integer(value, "highest_step"),
        starting=value.get("starting") is True,
        opened_monotonic=opened,
        since_monotonic=max(since, opened),
        open=text(value, "open") or rows.PENDING,
        seconds={row: each for row, each in spent.items() if each > 0},
        counts={str(row): integer(counts, row) or 0 for row in counts}
        if isinstance(counts, Mapping)
        else {},
    )


def attempts_of(run: Run) -> list[NodeAttempt]:
    """Return the attempts of a run."""
    found, opened, before = [], None, 0
    for i, event in enumerate(run.events):
        name, at = text(event, "name"), real(event, "monotonic") or 0.0
        if name == "regrow.attempt.started":
            if opened is not None:
                found.append(_attempt(run, before, opened, i, at, None))
                before = opened
            opened = i
        elif name == "regrow.attempt.ended" and opened is not None:
            found.append(_attempt(run, before, opened, i, at, event))
            before, opened = opened, None
    if opened is not None:
        found.append(_attempt(run, before, opened, len(run.events), run.end, None))
    return found


def _attempt(
    run: Run, before: int, first: int, last: int, end: float, ended: Record | None
) -> NodeAttempt:
    started = run.events[first]
    start = min(max(real(started, "monotonic") or run.begin, run.begin), run.end)
    return NodeAttempt(
        number=integer(started, "attempt") or 0,
        started=started,
        start=start,
        end=min(max(end, start), run.end),
        ended=ended,
        events=run.events[first + 1 : last],
        before=run.events[before:first],
    )


def is_first_step(event: Record) -> bool:
    return text(event, "name") == "regrow.worker.first_step"


def account_of(event: Record, rank: int | None) -> rows.Reading | None:
    accounts = event.get("accounts")
    return reading(accounts.get(str(rank))) if isinstance(accounts, Mapping) else None


def first_step_of(ended: Record | None, rank: int | None) -> int | None:
    steps = ended.get("last_steps") if ended is not None else None
    own = steps.get(str(rank)) if isinstance(steps, Mapping) else None
    return integer(own, "first_step") if isinstance(own, Mapping) else None


def list_of(event: Record, key: str) -> list[Any]:
    value = event.get(key)
    return value if isinstance(value, list) else []
