"""Deadlines of the guardian's workers: the lease, the grace, and when SIGKILL is due.

The module is pure: it neither reads nor signals a process. Times are nanoseconds of the host's
monotonic clock, which agent and guardian share. So a lease that was renewed before the host paused
still ends at the same time.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`

TYPE_CHECKING = False  # the guardian starts without `typing`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class LeaseTimer:
    """The time until which the workers may run."""

    def __init__(self) -> None:
        self._until: int | None = None
        self._expired = False

    def renew(self, until: int | None) -> None:
        """Set the end of the lease; None: without end.

        To set the same end again does not revive an expired lease.
        """
        self._expired = self._expired and until == self._until
        self._until = until

    def is_over(self, now: int) -> bool:
        """Return whether the lease has expired, so that no worker may run."""
        return self._until is not None and now >= self._until

    def expire(self, now: int) -> bool:
        """Return whether to kill the workers now: true once for each expired lease."""
        if self._expired or not self.is_over(now):
            return False
        self._expired = True
        return True

    def next_check(self) -> int | None:
        """Return the time of the next check if no event comes before; None: no check."""
        return None if self._expired else self._until


class WorkerRecord:
    """One worker, from its start until none of its processes is left.

    Args:
        number: the agent's number for the worker.
        token: the worker's mark; see `procfs.MARK`.
        grace: ns between SIGTERM and SIGKILL for processes that the worker leaves behind.
        drains: pipes to empty into files if the agent dies.
    """

    def __init__(
        self, number: int, token: bytes, grace: int, drains: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        self.number = number
        self.token = token
        self.grace = grace
        self.drains = drains
        self.pid = 0
        self.pidfd = -1
        self.exec_pipe = -1  # open until the child runs its program
        self.source = b"exec"  # or the `template` or `standby` from which it has started
        self.refused = False  # the program could not be run
        self.status: int | None = None  # wait status of the worker, once reaped
        self.traced = False  # the worker ended, but a debugger gets its status first
        self.exited = False  # the end was reported to the agent
        self.stopped = False  # the agent requested a stop before the end
        self.stopped_at = 0  # time of the agent's first request for a stop
        self.killing = False  # the grace expired: SIGKILL for all remaining processes
        self.deadline: int | None = None  # end of the grace
        self.orphans: set[int] = set()  # processes that the worker left behind, each signalled
        self.adopted = False  # a child of the agent, not of the guardian
        self.session = True  # adopted: its session may still have members
        self.relatives: dict[int, int] = {}  # adopted: pidfds of the orphans, by pid

    def stop(self, signum: int, grace: int, now: int) -> bool:
        """Set the deadline of a stop. A later stop may shorten or lengthen the grace.

        A longer grace counts from the first stop. A grace that has expired does not start again.

        Returns:
            Whether to send the signal.
        """
        self.stopped_at = self.stopped_at or now
        if self.deadline is None or now + grace < self.deadline:
            self.deadline = now + grace
        elif self.deadline > now:
            self.deadline = max(self.deadline, self.stopped_at + grace)
        if self.exited or not signum:
            return False
        self.stopped = True
        return True

    def end(self, now: int) -> None:
        """Note the end of the worker's process; start the grace of its orphans, unless one runs."""
        self.exited = True
        if self.deadline is None:
            self.deadline = now + self.grace

    def orphan_signals(self, pid: int) -> tuple[int, ...]:
        """Return the signals for a process that the worker left behind."""
        first = pid not in self.orphans
        self.orphans.add(pid)
        if self.killing:
            return (signal.SIGKILL,)
        return (signal.SIGTERM, signal.SIGCONT) if first else ()


class WorkerRecords:
    """All workers of the guardian.

    Args:
        kill_timeout: ns from SIGKILL until the guardian gives up on a process.
    """

    def __init__(self, kill_timeout: int) -> None:
        self._kill_timeout = kill_timeout
        self.by_number: dict[int, WorkerRecord] = {}  # until no process of the worker is left
        self.by_pid: dict[int, WorkerRecord] = {}  # children of the guardian, until reaped
        self._owners: dict[int, WorkerRecord | None] = {}  # owners of orphans, until reaped

    def add(self, record: WorkerRecord) -> None:
        """Add a running worker."""
        self.by_number[record.number] = record
        if not record.adopted:
            self.by_pid[record.pid] = record

    def reaped(self, pid: int, status: int) -> WorkerRecord | None:
        """Note the wait status of the guardian's child; return its worker, None for an orphan."""
        record = self.by_pid.pop(pid, None)
        if record is not None:
            record.status = status
        self._owners.pop(pid, None)
        return record

    def end_lease(self, now: int) -> None:
        """Mark all workers as due to be killed."""
        for record in self.by_number.values():
            record.grace = 0
            if not record.killing:
                record.deadline = now

    def due(self, now: int) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Return the workers to kill, each once, and those that SIGKILL did not end."""
        late = [
            record
            for record in self.by_number.values()
            if record.deadline is not None and now >= record.deadline + self._wait(record)
        ]
        to_kill = [record for record in late if not record.killing]
        to_give_up = [record for record in late if record.killing]
        for record in to_kill:
            record.killing = True
        return to_kill, to_give_up

    def next_check(self) -> int | None:
        """Return the time of the next call of `due`, if no event comes before."""
        deadlines = [
            record.deadline + self._wait(record)
            for record in self.by_number.values()
            if record.deadline is not None
        ]
        return min(deadlines, default=None)

    def _wait(self, record: WorkerRecord) -> int:
        return self._kill_timeout if record.killing else 0

    def ended(self) -> list[WorkerRecord]:
        """Return the workers with an ended process and possible orphans."""
        return [record for record in self.by_number.values() if record.exited]

    def orphans_of_ended(
        self, children: Iterable[int], look_up: Callable[[int], tuple[bytes | None, int | None]]
    ) -> dict[int, list[int]]:
        """Return the processes that ended workers left behind, by the number of the worker.

        An orphan belongs to a worker if it carries the worker's mark, or is in its session. An
        orphan with neither continues until the last worker has ended, and is then stopped as well.

        Args:
            children: the pids of the guardian's children.
            look_up: returns mark and session of a process; called once for each orphan.
        """
        ended, found = self.ended(), dict[int, list[int]]()
        for pid in children:
            if pid in self.by_pid:
                continue
            if pid not in self._owners:
                self._owners[pid] = self._owner(*look_up(pid))
            owner = self._owners[pid]
            if owner is None and not self.by_pid and ended:
                owner = ended[-1]
            if owner is not None and owner.exited:
                found.setdefault(owner.number, []).append(pid)
        return found

    def _owner(self, mark: bytes | None, session: int | None) -> WorkerRecord | None:
        owner = None
        for record in self.by_number.values():
            if session == record.pid or (mark is not None and mark.startswith(record.token)):
                owner = record
        return owner

    def stuck(self, record: WorkerRecord) -> int:
        """Return the number of a worker's processes that have not ended, except its own."""
        return sum(pid in self._owners for pid in record.orphans) + len(record.relatives)
