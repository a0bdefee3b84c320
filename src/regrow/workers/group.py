"""Rules for the life of one group of workers.

If one worker fails, all are stopped. When all are gone, the group is over. The rules are pure:
`WorkerSet` (`worker_set`) calls them with the guardian's events and stops the workers.

A worker has *ended* when its process has ended. It is *gone* when all processes that it started are
gone as well. The group is over when every worker is gone. So no process of one attempt can meet a
process of the next.

A worker that ends after a stop has not failed, whatever its exit code, because the stop is the
reason. But a worker may have failed before the stop and ended later. Its error file shows that, and
`collect_results` in `worker_set` reads the file.

The other workers can continue without a worker if all of them have an in-process wrapper. Then
its end is a *loss*. The others continue as long as one of them runs or has completed its task, and
their ends decide how the group ended. If no worker is left, the losses were failures.

The owner may start another process in the place of such a worker, when the worker is gone. Until it
has decided (`replaced` or `given_up`), the place is *vacant*, and the group is not over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

EndKind = Literal["completed", "left", "stopped", "failed", "lost", "vacant"]
"""How a worker ended.

`completed`: its task is done. `left`: its task is done, but the others had continued without it.
`stopped`: it ended unsuccessfully after a stop. `failed`: it ended unsuccessfully without a stop.
`lost`: as `failed`, and the others continue without it. `vacant`: as `lost`, and another process
may take its place.
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
        """Whether no process of any worker is left, and none follows."""
        vacant = any(end.outcome == "vacant" for end in self.ends.values())
        return len(self.gone) == self.size and not vacant


def ended(
    group: GroupState,
    rank: int,
    end: WorkerEnd,
    others_continue: bool = False,
    vacates: bool = False,
) -> GroupState:
    """Return the group after the end of a worker.

    Args:
        group: the group before the end.
        rank: the worker.
        end: how the worker ended, without regard to in-process restart: its outcome is
            `completed`, `stopped` or `failed`. This function may change it to `left`, `lost` or
            `vacant`.
        others_continue: whether the other workers can continue without this one. If this worker
            completed its task: whether the others had already continued without it.
        vacates: whether a worker that is lost may be replaced.
    """
    if others_continue and end.outcome == "completed":
        end = end._replace(outcome="left")
    elif others_continue and end.outcome == "failed" and group.stopped_at is None:
        end = end._replace(outcome="vacant" if vacates else "lost")
    return _settled(group._replace(ends={**group.ends, rank: end}))


def replaced(group: GroupState, rank: int) -> GroupState:
    """Return the group in which another process has the place of a vacant rank."""
    ends = {each: end for each, end in group.ends.items() if each != rank}
    return group._replace(ends=ends, gone=group.gone - {rank})


def given_up(group: GroupState, *ranks: int) -> GroupState:
    """Return the group in which no process takes the places of these ranks, if they are vacant."""
    ends = {
        each: end._replace(outcome="lost") if each in ranks and end.outcome == "vacant" else end
        for each, end in group.ends.items()
    }
    return _settled(group._replace(ends=ends))


def _settled(group: GroupState) -> GroupState:
    """Return the group in which losses are failures, if every worker has ended without success."""
    outcomes = {end.outcome for end in group.ends.values()}
    if len(group.ends) < group.size or not outcomes <= {"left", "lost"}:
        return group
    ends = {
        each: end._replace(outcome="failed") if end.outcome == "lost" else end
        for each, end in group.ends.items()
    }
    return group._replace(ends=ends)
