"""How a group of workers changes and ends, as its owner is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from regrow.workers.errors import ProcessFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.workers._group import Group, Member


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Something happened to a worker, or to its group."""

    local_rank: int
    """Which worker; -1 for the group."""
    pid: int
    """Its process; 0 where there is none."""
    kind: Literal["exited", "lost", "suspended", "resumed", "guardian_lost", "ended"]
    """`lost`: it ended, and the others go on without it. `guardian_lost`: the guardian is gone, and
    all workers with it. `ended`: nothing of the group is left, and `wait` has its result."""
    status: int
    """`exited`, `lost`: the exit code, negative for a signal. `suspended`, `resumed`: the signal.
    `guardian_lost`: -9. `ended`: 0."""
    monotonic: float
    """When, in seconds of the monotonic clock."""


@dataclass
class RunProcsResult:
    """How a group of workers ended; everything by local rank."""

    return_values: dict[int, Any] = field(default_factory=dict)
    """What the functions returned; None for commands. Empty if any worker failed."""
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    """The workers that failed by themselves, not those stopped because of them."""
    stdouts: dict[int, str] = field(default_factory=dict)
    """Path of each stdout.log; empty if not redirected."""
    stderrs: dict[int, str] = field(default_factory=dict)
    """Path of each stderr.log; empty if not redirected."""

    def is_failed(self) -> bool:
        """Whether any worker failed."""
        return len(self.failures) > 0

    def root_cause(self) -> ProcessFailure:
        """What failed first, by the most exact moments known.

        Raises:
            ValueError: nothing failed.
        """
        if not self.failures:
            raise ValueError("no worker failed, so there is no root cause")
        return min(self.failures.values(), key=lambda failure: failure.failed_monotonic)


def work_up(
    group: Group,
    failure: Callable[[int, Member], ProcessFailure],
    return_values: Callable[[list[int]], dict[int, Any]],
) -> tuple[dict[int, Any], dict[int, ProcessFailure]]:
    """Find out who failed, and if nobody did, what was returned; both by local rank.

    A worker that ended after it was told to stop has failed all the same if its error file is older
    than that: it caught its exception before the others' and lingered in its clean-up.

    Args:
        group: nothing of which is left.
        failure: the failure of a worker, for better or worse: reads its error file.
        return_values: what workers returned that ended well; one missing there has failed.
    """
    failures = {}
    for rank, member in enumerate(group.members):
        if member.code is None:  # its program never ran
            continue
        failed = failure(rank, member)
        lingered = (
            failed.has_error_file
            and not member.well
            and not member.lost
            and group.stopped_at is not None
            and failed.failed_monotonic < group.stopped_at
        )
        if member.failed or lingered:
            failures[rank] = failed
    if failures:
        return {}, failures
    fine = [rank for rank, member in enumerate(group.members) if member.well]
    values = return_values(fine)
    failures = {rank: failure(rank, group.members[rank]) for rank in fine if rank not in values}
    return {} if failures else values, failures
