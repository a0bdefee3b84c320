"""The recoveries of a job as the views show them: cause, rung of the ladder, phases, cost.

They are the failures, planned restarts and in-process restarts of the story. The story has no times
of day, so these come from the events of the agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regrow._accounts import REPEATED
from regrow.events import Failure, PlannedRestart, Story
from regrow.events.evidence import Record, integer, real


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A recovery: what caused it, on which rung of the ladder it was healed, how long it took."""

    rung: int
    """1 to 4, of `regrow.explain.RUNG_NAMES`."""
    cause: str
    """exception, exit, signal, hang, heartbeat, node, membership or unknown."""
    attempt: int
    time: float | None
    """When it began; None if unknown."""
    rank: int | None
    what: str
    """The cause in one line."""
    phases: tuple[tuple[str, float], ...]
    """Phases in order, and the seconds from the fault to the end of each."""
    lost_steps: int | None
    """Steps that were done again; None if unknown, as for in-process restarts."""
    restarted: bool = True
    """Whether the job went on."""


@dataclass(slots=True)
class Evidence:
    """What the log of one agent adds to the story."""

    failed: dict[tuple[int, int | None], Record] = field(default_factory=dict)
    """Failures of this agent's workers, by attempt and rank."""
    ended: dict[int, float] = field(default_factory=dict)
    """Time at which each attempt ended or began to end."""
    in_process: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time of each in-process restart, by attempt and iteration."""


@dataclass(slots=True)
class RepeatedSteps:
    """The counts of steps done again in one attempt, in the log of one agent.

    The accounts of the workers have them. Rank 0 reports an in-process restart to its own agent.
    """

    before: int | None = None
    """The count at the first in-process restart: an earlier attempt lost these. None: none yet."""
    most: int = 0
    """The count of the worker with most."""
    _ended: dict[str, int] = field(default_factory=dict)
    """The counts of processes that were replaced, by rank."""
    _booked: dict[str, int] = field(default_factory=dict)
    """The counts of the other processes, by rank."""

    def restart(self, attempt: int, repeated: int | None) -> None:
        """Add an in-process restart; `repeated` is the count that its event has."""
        self.most = max(self.most, repeated or 0)
        if self.before is None:
            # The function runs again when the agent reads the count, so it may be too large.
            self.before = 0 if attempt == 0 else self.most

    def book(self, accounts: Record) -> None:
        """Add the accounts of the workers, by rank."""
        self._booked |= {rank: _repeated(account) for rank, account in accounts.items()}
        self._count()

    def end_process(self, rank: str, account: object) -> None:
        """Add the account of a process that is replaced."""
        count = max(_repeated(account), self._booked.pop(rank, 0))
        self._ended[rank] = self._ended.get(rank, 0) + count
        self._count()

    def _count(self) -> None:
        found = Counter(self._ended)
        found.update(self._booked)
        self.most = max([self.most, *found.values()])


def repeated_steps(logs: Sequence[Mapping[int, RepeatedSteps]]) -> int:
    """Return how many steps were done again because of in-process restarts.

    As in the ledger, the worker with most counts in each attempt, on any host. The hosts are not
    added up, because all of them do the same steps again.

    Args:
        logs: the counts of each agent, by attempt.
    """
    total = 0
    for attempt in {number for log in logs for number in log}:
        counts = [log[attempt] for log in logs if attempt in log]
        # The hosts of rank 0 report restarts one after the other; the first count is the lowest.
        before = [each.before for each in counts if each.before is not None]
        if before:
            total += max(each.most for each in counts) - min(before)
    return total


def _repeated(account: object) -> int:
    """Return how many steps a process has done again."""
    counts = mapping(mapping(account).get("counts"))
    return sum(integer(counts, row) or 0 for row in REPEATED)


def mapping(value: object) -> Record:
    """Return a JSON object of an event; an empty one if the value has another type."""
    return value if isinstance(value, Mapping) else {}


def restarts_of(of_job: Story, logs: Sequence[Evidence]) -> tuple[Restart, ...]:
    """Return the recoveries of a job, and the failure that ended it, in the order of their times.

    Args:
        of_job: the story of the job.
        logs: the evidence of each agent.
    """
    found = [_of_failure(failure, logs) for failure in of_job.failures]
    for move in of_job.moves:
        found.append(
            Restart(
                rung=4,
                cause="membership",
                attempt=move.attempt,
                time=_ended(logs, move.attempt),
                rank=None,
                what=move.reason,
                phases=_phases(move),
                lost_steps=move.work_lost,
            )
        )
    for each in of_job.in_place:
        key = each.attempt, each.iteration
        times = [log.in_process[key] for log in logs if key in log.in_process]
        # As on the other rungs, the recovery from a hang begins with the last sign of life.
        phases = tuple((name, each.silent_s + after) for name, after in each.phases)
        lasted = max((after for _, after in phases), default=0.0)
        found.append(
            Restart(
                rung=2 if each.replaced else 1,
                cause=each.cause,
                attempt=each.attempt,
                time=min(times) - lasted if times else None,
                rank=each.rank,
                what=each.what,
                phases=phases,
                lost_steps=None,
            )
        )
    return tuple(sorted(found, key=lambda restart: restart.time or 0.0))


def _of_failure(failure: Failure, logs: Sequence[Evidence]) -> Restart:
    event = next((e for log in logs if (e := log.failed.get((failure.attempt, failure.rank)))), {})
    noticed = _failed_at(event) or _ended(logs, failure.attempt)
    return Restart(
        rung=4 if failure.is_host_lost or failure.lost_nodes else 3,
        cause=failure.cause,
        attempt=failure.attempt,
        time=None if noticed is None else noticed - _silent_s(failure),
        rank=failure.rank,
        what=failure.what,
        phases=_phases(failure),
        lost_steps=failure.work_lost,
        restarted=failure.restarted_attempt is not None,
    )


def _silent_s(failure: Failure) -> float:
    """Return the seconds of silence; a host that leaves with notice is not silent."""
    return 0.0 if failure.has_left else failure.silent_s


def _phases(cost: Failure | PlannedRestart) -> tuple[tuple[str, float], ...]:
    """Return the phases of a restart of all workers, as (name, seconds since the failure).

    The failure of a worker that hung, and of a host that was lost, begins with its silence.
    """
    silent, detected = 0.0, None
    if isinstance(cost, Failure):
        silent, detected = _silent_s(cost), cost.detected_after_s
    named = (
        ("detected", 0.0 if silent and detected is None else detected),
        ("restarted", cost.restarted_after_s),
        ("first step", cost.first_step_after_s),
    )
    return tuple((name, silent + after) for name, after in named if after is not None)


def _failed_at(event: Record) -> float | None:
    """Return when a worker failed; its event was written later."""
    time, written = real(event, "time"), real(event, "monotonic")
    failed = real(event, "failed_monotonic")
    if time is None or written is None or failed is None:
        return None
    return time - max(written - failed, 0.0)


def _ended(logs: Sequence[Evidence], attempt: int) -> float | None:
    return min((log.ended[attempt] for log in logs if attempt in log.ended), default=None)
