"""The workers of a group, as their guardian tells of them.

The guardian knows single workers, by numbers of its own, and a worker has a life in its words:
started or refused, exited, gone. Here that becomes what happens to the group (`_group`); whom the
group wants stopped for it is told the guardian; and its owner gets a `WorkerChange`.

A worker may begin while the group is being stopped already, because another one failed as soon as
it ran: it is stopped with what is left of the same grace. And the guardian may be lost. Its workers
are gone with it then, killed by the kernel, and have failed unless they had been told to stop
before.
"""

from __future__ import annotations

import signal
from time import monotonic
from typing import TYPE_CHECKING

from regrow.utils import get_logger
from regrow.workers import _group
from regrow.workers import _guardian_events as guard
from regrow.workers._result import WorkerChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.workers._guardian_client import Guardian

logger = get_logger(__name__)


class Crew:
    """What is known of the workers; its owner calls it under one lock.

    Args:
        name: of the workers.
        size: how many they are.
        grace: seconds between SIGTERM and SIGKILL when a failure ends the group.
        guardian: has them.
        exit_code: the exit code of a worker that ended.
        ended_well: whether a worker that exited with that code did what it was started for.
        abandon: kills a worker that did not die with the guardian.
        replaceable: whether the others can go on without a worker that ended.
    """

    def __init__(
        self,
        name: str,
        size: int,
        grace: float,
        guardian: Guardian,
        exit_code: Callable[[int, guard.Exited], int],
        ended_well: Callable[[int, int], bool],
        abandon: Callable[[int], None],
        replaceable: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.group = _group.Group((_group.Member(),) * size, grace)
        self.pids: dict[int, int] = {}
        """The process of each local rank, also after it ended."""
        self.refusals: dict[int, OSError] = {}
        """Why programs could not be started."""
        self._name = name
        self._guardian = guardian
        self._exit_code = exit_code
        self._ended_well = ended_well
        self._abandon = abandon
        self._replaceable = replaceable
        self._workers: dict[int, int] = {}  # the guardian's numbers
        self._last_stop: tuple[int, float] | None = None  # signal, deadline
        self._guardian_lost = False
        self._stopping_when_lost = False

    @property
    def settled(self) -> bool:
        """Whether it is known of every worker that it runs, or will not."""
        return bool(self.refusals) or all(
            rank in self.pids or member.code is not None
            for rank, member in enumerate(self.group.members)
        )

    @property
    def left(self) -> list[int]:
        """The ranks of workers of which something is left."""
        return [rank for rank in self._workers if not self.group.members[rank].gone]

    def employ(self, rank: int, worker: int) -> None:
        """The guardian has a worker for this rank."""
        if rank not in self._workers:
            self._workers[rank] = worker
            if self._last_stop is not None:
                signum, deadline = self._last_stop
                self._guardian.stop([worker], signum, deadline - monotonic())

    def dismiss(self) -> None:
        """No more workers will be employed; those that were are stopped by `close`."""
        for rank in range(len(self.group.members)):
            if rank not in self._workers:
                self._feed(_group.Gone(rank))

    def close(self, signum: int, grace: float) -> None:
        """Stop the workers."""
        if self._workers and not self.group.over:
            self._feed(_group.Close(signum, grace))

    def note(self, rank: int, event: guard.GuardianEvent) -> WorkerChange | None:
        """Take in what the guardian tells; return what the owner has to know of it."""
        self.employ(rank, event.worker)
        pid = self.pids.get(rank, 0)
        match event:
            case guard.Started(pid=pid):
                self.pids[rank] = pid
            case guard.Refused(error=error):
                self.refusals[rank] = error
            case guard.Exited(monotonic=at):
                code = self._exit_code(rank, event)
                well = self._ended_well(rank, code)
                spare = not well and self._replaceable(rank)
                self._feed(_group.Ended(rank, code, well, event.stopping, at, spare))
                lost = self.group.members[rank].lost
                return WorkerChange(rank, pid, "lost" if lost else "exited", code, at)
            case guard.Suspended(signal=signum, monotonic=at):
                return WorkerChange(rank, pid, "suspended", signum, at)
            case guard.Resumed(signal=signum, monotonic=at):
                return WorkerChange(rank, pid, "resumed", signum, at)
            case guard.Gone(left_behind=left, stuck=stuck):
                self._feed(_group.Gone(rank))
                self._tell_what_was_left(rank, left, stuck)
            case guard.GuardianLost(monotonic=at):
                return self._lost(rank, at)
        return None

    def _tell_what_was_left(self, rank: int, left: int, stuck: int) -> None:
        pid = self.pids.get(rank, 0)
        if stuck:
            logger.error(
                "%s processes of local rank %s (pid %s) did not end of SIGKILL and are"
                " given up: probably in uninterruptible sleep (state D: a device hangs);"
                " this host may need a restart",
                stuck,
                rank,
                pid,
            )
        if left and self.group.stopped_at is None:
            logger.info(
                "worker of local rank %s (pid %s) left %s processes running when it ended;"
                " they have been stopped",
                rank,
                pid,
                left,
            )

    def _lost(self, rank: int, at: float) -> WorkerChange | None:
        first, self._guardian_lost = not self._guardian_lost, True
        if first:
            self._stopping_when_lost = self.group.stopped_at is not None
        self._abandon(rank)
        if self.group.members[rank].code is None:
            self._feed(_group.Ended(rank, -signal.SIGKILL, False, self._stopping_when_lost, at))
        self._feed(_group.Gone(rank))
        if not first:
            return None
        logger.error(
            "the guardian is gone, and the workers of %s with it; was it killed?"
            " (kill -9, a memory limit)",
            self._name,
        )
        return WorkerChange(-1, 0, "guardian_lost", -signal.SIGKILL, at)

    def _feed(self, event: _group.Ended | _group.Gone | _group.Close) -> None:
        now = monotonic()
        self.group, stop = _group.step(self.group, event, now)
        if stop is not None:
            workers = [self._workers[rank] for rank in stop.ranks if rank in self._workers]
            self._guardian.stop(workers, stop.signum, stop.grace)
            self._last_stop = stop.signum, now + stop.grace
