"""Memory and processor time of a process and its descendants, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and processor time of one process."""

    pid: int
    command: str
    """The first 60 characters of its command line."""
    resident_mb: float
    """VmRSS in units of 10^6 bytes; shared memory counts in full."""
    proportional_mb: float
    """PSS in units of 10^6 bytes; shared memory is divided by the number of processes."""
    cpu_s: float
    """User and system time of all its threads so far, in seconds; the kernel counts in ticks."""


def descendants(root: int) -> set[int]:
    """Return the pids of `root` and of every living process below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, [])
    return found


def usage(pid: int) -> Usage:
    """Return the usage of process `pid`; raises FileNotFoundError if the process has ended."""
    proc = Path(f"/proc/{pid}")
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return Usage(
        pid=pid,
        command=command.strip()[:60],
        resident_mb=_kilobytes(proc / "status", "VmRSS:") * 1024 / 1e6,
        proportional_mb=_kilobytes(proc / "smaps_rollup", "Pss:") * 1024 / 1e6,
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def _kilobytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise ValueError(f"{path} has no line {key!r}")
