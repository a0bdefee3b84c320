"""Rules for the life of one group of workers.

If one worker fails, all are stopped. When all are gone, the group is over. The rules are pure:
`WorkerSet` (`worker_set`) calls them with the guardian's events and stops the workers.

A worker has *ended* when its process has ended. It is *gone* when all processes that it started are
gone as well. The group is over when every worker is gone. So no process of one attempt can meet a
process of the next.

A worker that ends after a stop has not failed, whatever its exit code, because the stop is the
reason. But a worker may have failed before the stop and ended later. Its error file shows that, and
`collect_results` in `worker_set` reads the file.

The other workers can continue without a worker if all of them have an in-process restarter. Then
its end is a *loss*. The others continue as long as one of them runs or has completed its task, and
their ends decide how the group ended. If no worker is left, the losses were failures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

EndKind = Literal["completed", "left", "stopped", "failed", "lost"]
"""How a worker ended.

`completed`: its task is done. `left`: its task is done, but the others had continued without it.
`stopped`: it ended unsuccessfully after a stop. `failed`: it ended unsuccessfully without a stop.
`lost`: as `failed`, and the others continue without it.
"""


class WorkerEnd(NamedTuple):
    """The end of a worker's process."""

    code: int
    """Exit code, negative for a signal."""
    at: float
    """Time of the end, in seconds of the monotonic clock."""
    outcome: EndKind
    late: bool = False
    """The worker may have ended before `at`, because the guardian was suspended."""

    @property
    def well(self) -> bool:
        """Whether the worker completed its task."""
        return self.outcome in ("completed", "left")


class GroupState(NamedTuple):
    """All workers of a group, by local rank."""

    size: int
    ends: Mapping[int, WorkerEnd] = {}
    """The workers whose process has ended."""
    gone: frozenset[int] = frozenset()
    """The workers of which no process is left."""
    stopped_at: float | None = None
    """Time of the first stop of the workers, in seconds of the monotonic clock."""

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks that failed."""
        return tuple(sorted(rank for rank, end in self.ends.items() if end.outcome == "failed"))

    @property
    def over(self) -> bool:
        """Whether no process of any worker is left."""
        return len(self.gone) == self.size


def ended(group: GroupState, rank: int, end: WorkerEnd, replaceable: bool = False) -> GroupState:
    """Return the group after the end of a worker.

    Args:
        group: the group before the end.
        rank: the worker.
        end: how the worker ended, without regard to in-process restart: its outcome is
            `completed`, `stopped` or `failed`. This function may change it to `left` or `lost`.
        replaceable: whether the other workers can continue without this one. If this worker
            completed its task: whether the others had already continued without it.
    """
    if replaceable and end.outcome == "completed":
        end = end._replace(outcome="left")
    elif replaceable and end.outcome == "failed" and group.stopped_at is None:
        end = end._replace(outcome="lost")
    ends = {**group.ends, rank: end}
    if end.outcome in ("left", "lost") and not _any_continues(group.size, ends):
        ends = {
            each: other._replace(outcome="failed") if other.outcome == "lost" else other
            for each, other in ends.items()
        }
    return group._replace(ends=ends)


def _any_continues(size: int, ends: Mapping[int, WorkerEnd]) -> bool:
    """Return whether a worker runs, or has completed its task with the others."""
    return len(ends) < size or any(end.outcome == "completed" for end in ends.values())
