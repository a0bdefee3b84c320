"""What the accounts of workers say of their steps (`regrow._accounts`), in the events of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from regrow._accounts import (
    FIRST_REPEATED_STEP,
    FIRST_STEP,
    REPEATED,
    REPEATED_PHASES,
    REPEATED_STEPS,
    STEPS,
)
from regrow.events.evidence import Record, integer, real

_PACED = (STEPS, REPEATED_STEPS)
"""The rows whose steps began at the end of another step. The first step includes the startup."""


def accounts_of(events: Iterable[Record]) -> list[Record]:
    """Return the last account of each worker in some events, which are in order of time."""
    found: dict[object, Record] = {}
    for event in events:
        by_rank = event.get("accounts")
        known = by_rank.items() if isinstance(by_rank, Mapping) else ()
        found |= {rank: account for rank, account in known if isinstance(account, Mapping)}
    return list(found.values())


def row_seconds(account: Record, rows: Iterable[str]) -> float:
    """Return the seconds of some rows of an account; 0.0 if there are none."""
    spent = account.get("seconds")
    return sum((real(spent, row) or 0.0) for row in rows) if isinstance(spent, Mapping) else 0.0


def steps_of(account: Record, rows: Iterable[str]) -> int:
    """Return the number of steps of some rows of an account."""
    counts = account.get("counts")
    return sum((integer(counts, row) or 0) for row in rows) if isinstance(counts, Mapping) else 0


def step_s(accounts: Iterable[Record]) -> float | None:
    """Return the mean seconds of a step of some workers; None if that is not recorded."""
    paces = [
        row_seconds(account, _PACED) / steps
        for account in accounts
        if (steps := steps_of(account, _PACED))
    ]
    return sum(paces) / len(paces) if paces else None


def loading_s(accounts: Iterable[Record], restarts: int) -> float | None:
    """Return how long a worker takes from an in-process restart until its next step begins.

    Args:
        accounts: the accounts of the workers of an attempt.
        restarts: number of its in-process restarts.

    Returns:
        The mean seconds of the workers that began their attempt with a new step, and repeated a
        step after each of these restarts; None if there is none, or their pace is unknown.
    """
    found = [
        max(row_seconds(account, [FIRST_REPEATED_STEP]) / restarts - pace, 0.0)
        for account in accounts
        if restarts and steps_of(account, [FIRST_REPEATED_STEP]) == restarts
        if steps_of(account, [FIRST_STEP]) and (pace := step_s([account])) is not None
    ]
    return sum(found) / len(found) if found else None


def redone_s(ended: Record) -> list[float] | None:
    """Return the seconds in which workers did steps again in an attempt, from its last event.

    The first step after a start includes the startup, so it counts as long as the mean of the
    others. Workers that did none again are left out. None if there is no account.
    """
    accounts = accounts_of([ended])
    if not accounts:
        return None
    return [
        row_seconds(account, (REPEATED_STEPS, REPEATED_PHASES))
        + (step_s([account]) or 0.0) * steps_of(account, [FIRST_REPEATED_STEP])
        for account in accounts
        if steps_of(account, REPEATED)
    ]


def highest_steps(events: Iterable[Record]) -> list[int]:
    """Return the highest step of each worker in some events."""
    found = (integer(account, "highest_step") for account in accounts_of(events))
    return [step for step in found if step is not None]
