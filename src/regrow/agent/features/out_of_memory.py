"""Adds the OOM killer to the failure of a worker killed by SIGKILL, as the likely cause.

The kernel counts, for each cgroup, the processes that its OOM killer ends. The workers are in the
agent's cgroup. The kernel counts a process before it sends SIGKILL, so the count is there when the
agent knows of the death. The count does not show which process was ended. So every worker of this
host that SIGKILL ended gets the explanation.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from regrow.agent.features import Feature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regrow.agent.features import StartedWorkers
    from regrow.workers import ProcessFailure

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OutOfMemory(Feature):
    """Explains a worker's SIGKILL if the kernel's count has grown in the attempt.

    Args:
        count: returns the count of this process's cgroup; None if the system has none.
    """

    def __init__(self, count: Callable[[], int | None] | None = None) -> None:
        self._count = count or oom_kills
        self._before: int | None = None

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class."""
        self._before = self._count()

    def explain(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """See base class."""
        killed = [
            failure
            for failure in failures.values()
            if failure.exitcode == -signal.SIGKILL and not failure.has_error_file
        ]
        if not killed or self._before is None:
            return failures
        ended = (self._count() or 0) - self._before
        if ended > 0:
            processes = f"{ended} process{'es' if ended > 1 else ''}"
            for failure in killed:
                failure.message = (
                    f"out of memory: the kernel's OOM killer ended {processes} of this cgroup"
                )
        return failures


def oom_kills(proc: str = "/proc/self/cgroup", mounted: str = "/sys/fs/cgroup") -> int | None:
    """Return how many processes of this process's cgroup the OOM killer has ended.

    Args:
        proc: the file with this process's cgroups (cgroups(7)).
        mounted: where cgroups are mounted. A container may see its own cgroup as the root.

    Returns:
        The count; None if the kernel has none, as for the root of a system with cgroup v2.
    """
    for file in _files(proc, Path(mounted)):
        try:
            found = _COUNT.search(file.read_text())
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _files(proc: str, mounted: Path) -> Iterator[Path]:
    """Return where the count may be: version 1 of cgroups, then version 2."""
    try:
        lines = Path(proc).read_text().splitlines()
    except OSError:
        return
    cgroups = dict(line.split(":", 2)[1:] for line in lines if line.count(":") >= 2)
    for controllers, path in cgroups.items():
        if "memory" in controllers.split(","):
            for place in (path.lstrip("/"), ""):
                yield mounted / "memory" / place / "memory.oom_control"
    for folder in (mounted, mounted / "unified"):
        for place in (cgroups.get("", "").lstrip("/"), ""):
            yield folder / place / "memory.events"
