"""Split the life of one worker process into buckets: a pure function of its account.

The account (`regrow._accounts`) says how long each of its rows was open, until the worker's last
mark. The events say when the process started, when something failed, when the agent detected it,
and when the process was gone. Four cases need a rule:

- **The first step of a process** has the startup before it: imports, compilation, the first batch.
  It counts as long as the mean of the other steps of the process. The rest is startup.
- **The time after the last step** is `finishing` if the attempt succeeded, or the process had ended
  with exit code 0 before; else it is `unfinished`. If a timer or a heartbeat has expired, or a host
  was lost, the worker hung or waited: what exceeds one mean step is `detection`. So it is if the
  worker was reported to stay at its last step. A phase that a failure or a stop cut off is treated
  like a step.
- **A mark after the failure**: a worker that continues, because it has not noticed the failure yet,
  does not wait for the detection. So its account counts up to its last mark.
- **Steps that an agent could not know of** (a requeued job, a host that joined late) are split by
  their numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from regrow import _accounts as rows
from regrow.ledger import buckets

Seconds: TypeAlias = Mapping[str, float]
"""Seconds by bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How the life of a process ended; times are in monotonic seconds of its host."""

    failed: float
    """When the failure or the stop began. Until then the process worked."""
    detected: float
    """When the agent acted on it."""
    succeeded: bool = False
    """Whether the time after the last step belongs to the work."""
    hung: bool = False
    """Whether the worker hung, or waited for one that did or for a host that was lost."""
    known: bool = True
    """Whether the account is complete up to `failed`; False if the agent was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a worker."""

    start: float
    end: float
    account: rows.Reading | None
    """None if it had no mark."""
    first_new_step: int | None = None
    """The lowest step that the account takes for a new one."""
    kept: bool = False
    """Whether the process is that of the attempt before."""


def split(
    process: Process, end: ProcessEnd, *, steps_known: bool, reached: int | None
) -> list[tuple[float, Seconds]]:
    """Split the life of a process.

    Args:
        process: the process.
        end: how it ended.
        steps_known: whether the script reports steps; if not, its time outside of phases is
            unknown.
        reached: highest step that any rank of the job reached before; None if there is none.

    Returns:
        Consecutive parts from `process.start` to `process.end`: the end of each, and its seconds
        by bucket, whose sum is its length.
    """

    def within(at: float) -> float:
        return min(max(at, process.start), process.end)

    account = process.account
    startup = buckets.RESTART if process.kept else buckets.STARTUP_SCRIPT
    startup = startup if steps_known else buckets.UNKNOWN
    if account is None:
        worked = within(end.failed)
        parts: list[tuple[float, Seconds]] = [(worked, {startup: worked - process.start})]
    else:
        begun, marked = within(account.opened_monotonic), within(account.since_monotonic)
        worked = max(within(end.failed), marked)
        is_cut_off = end.known and not end.succeeded and buckets.is_phase(account.open)
        still_open = rows.PENDING if is_cut_off else account.open
        spent = _rows(account, marked - begun, still_open, worked - marked)
        pace = _pace(account)
        before, inside = _first_steps(account, spent, begun - process.start, pace)
        before[startup] = before.pop(buckets.STARTUP_SCRIPT)
        inside |= _copied(spent)
        pending = spent[rows.PENDING]
        if not steps_known:
            inside[buckets.UNKNOWN] += pending
        elif account.starting:
            inside[buckets.STARTUP_FIRST_STEP] += pending
        elif not end.known:
            inside[buckets.UNKNOWN] += pending
        elif end.succeeded:
            inside[buckets.FINISHING] += pending
        else:
            cut_off = min(pending, pace) if end.hung and pace else pending
            inside[buckets.UNFINISHED] += cut_off
            inside[buckets.DETECTION] += pending - cut_off
        share = _known_share(account, process.first_new_step, reached)
        for each in (before, inside):
            each[buckets.REDONE] += each[buckets.PRODUCTIVE] * share
            each[buckets.PRODUCTIVE] *= 1 - share
        parts = [(begun, before), (worked, inside)]
    detected = max(within(end.detected), worked)
    parts += [(detected, {buckets.DETECTION: detected - worked})]
    after = buckets.STOPPING if end.known else buckets.UNKNOWN
    return [*parts, (process.end, {after: process.end - detected})]


def redone_steps(process: Process, reached: int | None) -> int:
    """Return how many of a process's steps were done before; see `split` for the arguments."""
    if (account := process.account) is None:
        return 0
    counts = [account.counts.get(row, 0) for row in _NEW_STEPS]
    again = [account.counts.get(row, 0) for row in rows.REPEATED]
    share = _known_share(account, process.first_new_step, reached)
    return sum(again) + round(share * sum(counts))


_NEW_STEPS = (rows.STEPS, rows.FIRST_STEP)


def _rows(
    account: rows.Reading, until_mark: float, still_open: str, since_mark: float
) -> dict[str, float]:
    """Return the seconds of the rows, which fill the time from the first mark to the end.

    An account that a kill has torn, or that the worker has filled with anything, has too many
    seconds or too few.
    """
    total = sum(account.seconds.values())
    scale = min(1.0, until_mark / total) if total > 0 else 0.0
    spent = defaultdict(float, {row: each * scale for row, each in account.seconds.items()})
    spent[buckets.UNKNOWN] += max(until_mark - total, 0.0)
    spent[still_open] += since_mark
    return spent


def _pace(account: rows.Reading) -> float:
    """Return the mean seconds of a step that is not a first one; 0.0 if there is none."""
    both = (rows.STEPS, rows.REPEATED_STEPS)
    count = sum(account.counts.get(row, 0) for row in both)
    return sum(account.seconds.get(row, 0.0) for row in both) / count if count else 0.0


def _first_steps(
    account: rows.Reading, spent: Seconds, script: float, pace: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Split the first steps into the time of a step and the startup.

    Args:
        account: the account.
        spent: seconds of its rows.
        script: seconds before the first mark, which of most scripts is the first step.
        pace: seconds of a step.

    Returns:
        The seconds by bucket before the first mark, and after it.
    """
    before: dict[str, float] = defaultdict(float, {buckets.STARTUP_SCRIPT: script})
    inside: dict[str, float] = defaultdict(float)
    for row, bucket in (
        (rows.FIRST_STEP, buckets.PRODUCTIVE),
        (rows.FIRST_REPEATED_STEP, buckets.REDONE),
    ):
        took = spent.get(row, 0.0)
        step = pace * account.counts.get(row, 0)
        earlier = min(max(step - took, 0.0), before[buckets.STARTUP_SCRIPT])
        before[buckets.STARTUP_SCRIPT] -= earlier
        before[bucket] += earlier
        inside[bucket] += min(step, took)
        inside[buckets.STARTUP_FIRST_STEP] += took - min(step, took)
    inside[buckets.PRODUCTIVE] += spent.get(rows.STEPS, 0.0)
    inside[buckets.REDONE] += spent.get(rows.REPEATED_STEPS, 0.0)
    inside[buckets.REDONE] += spent.get(rows.REPEATED_PHASES, 0.0)
    inside[buckets.STARTUP_FIRST_STEP] += spent.get(rows.STARTUP, 0.0)
    return before, inside


_COPIED = {
    rows.UNFINISHED: buckets.UNFINISHED,
    rows.DETECTION: buckets.DETECTION,
    rows.STOPPING: buckets.STOPPING,
    rows.MEETING: buckets.MEETING,
    rows.RESTART: buckets.RESTART,
    buckets.UNKNOWN: buckets.UNKNOWN,
}


def _copied(spent: Seconds) -> dict[str, float]:
    """Return the rows that are buckets."""
    return {
        _COPIED.get(row, row): seconds
        for row, seconds in spent.items()
        if row in _COPIED or buckets.is_phase(row)
    }


def _known_share(account: rows.Reading, first_new: int | None, reached: int | None) -> float:
    """Return the share of the steps booked as new that another process had done before."""
    last = account.highest_step
    if first_new is None or reached is None or last is None or last < first_new:
        return 0.0
    return min(max(reached - first_new + 1, 0) / (last - first_new + 1), 1.0)
