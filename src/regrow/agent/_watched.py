"""The workers whose timers an agent keeps, and whose worker a process is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from regrow.timer._dump_file import dump_path
from regrow.workers import _procfs

if TYPE_CHECKING:
    from regrow.agent._hang import Hang
    from regrow.workers import Guardian, PContext

_MOST_ANCESTORS = 64


class Watched(NamedTuple):
    """The workers of one attempt."""

    attempt: int
    ranks: Sequence[int]
    """The global rank of each local rank."""
    context: PContext
    guardian: Guardian
    world_size: int = 0
    """How many ranks the job has, on all nodes; 0: these."""

    def owner(self, pid: int) -> int | None:
        """The local rank whose worker `pid` is, or was started by; None if that is not to be seen.

        It is not for a process of no worker, nor for one that has left its worker's session and
        whose parent has ended.
        """
        workers = {worker: rank for rank, worker in self.context.pids().items()}
        if pid in workers:  # also one that has ended meanwhile
            return workers[pid]
        kin = (candidate for ancestor in _lineage(pid) for candidate in ancestor)
        return next((workers[each] for each in kin if each in workers), None)

    def includes(self, pid: int) -> bool:
        """Whether `pid` is a process of some worker."""
        guardian = self.guardian.pid
        if pid in (guardian, os.getpid()):
            return False
        if self.owner(pid) is not None:
            return True
        # All that is below the guardian is of a worker, also one that is just being started.
        return any(guardian == ancestor for ancestor, _ in _lineage(pid))

    def pids(self) -> dict[int, int]:
        """The process of each worker, by global rank."""
        return {self.ranks[local_rank]: pid for local_rank, pid in self.context.pids().items()}

    def error_file(self, hang: Hang) -> str | None:
        """Where a worker's error file is; None for a process that is no worker's own."""
        if hang.local_rank is None or not hang.is_worker:
            return None
        path = self.context.error_files.get(hang.local_rank, "")
        return path if path and path != os.devnull else None

    def stacks_file(self, pid: int) -> str:
        """Where the stacks of a process go; empty: nowhere, as there are no logs."""
        owner = self.owner(pid)
        beside = self.context.error_files.get(owner, "") if owner is not None else ""
        if not beside or beside == os.devnull:
            return ""
        return dump_path(os.path.join(os.path.dirname(beside), "stacks"), pid)


def _lineage(pid: int) -> list[tuple[int, int]]:
    """A process and its ancestors, each with its session."""
    found: list[tuple[int, int]] = []
    while pid > 1 and len(found) < _MOST_ANCESTORS and (entry := _procfs.stat(pid)) is not None:
        found.append((pid, entry.session))
        pid = entry.parent
    return found
