"""What /proc knows about processes: their state, their children, whose they are.

A pid read here may be another process's a moment later. Three things make acting on one safe, and
every caller relies on one of them: a child of the caller keeps its pid until the caller reaps it;
a pidfd names one process for ever; a session's number is not given out anew while the session has
members.
"""

from __future__ import annotations

import os
import select
import signal
from time import monotonic, sleep

TYPE_CHECKING = False  # the guardian starts without `typing`
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class Stat:
    """A process as /proc/<pid>/stat shows it: state letter, parent, process group, session."""

    __slots__ = ("group", "parent", "session", "state")

    def __init__(self, state: str, parent: int, group: int, session: int) -> None:
        self.state, self.parent, self.group, self.session = state, parent, group, session


#: Names the worker that a process belongs to, in its environment: `/<agent>/<number>/`, and so on
#: for a job inside that worker, so that the mark of a whole is a prefix of its parts' marks.
MARK = "REGROW_WORKER"

#: How often, and how many seconds apart, a process in the middle of execve is looked at again.
EXEC_TRIES = 20
EXEC_PAUSE_S = 0.0005


def stat(pid: int) -> Stat | None:
    """The process `pid`, or None where there is none (any more)."""
    data = _read(f"/proc/{pid}/stat")
    if not data:
        return None
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = data[data.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def process_states(pids: Iterable[int]) -> dict[int, str]:
    """The state letter of each process as in /proc/<pid>/stat: R, S, D, T, Z, ...

    Args:
        pids: processes to look at; those that do not exist are left out of the answer.
    """
    found = {pid: stat(pid) for pid in pids}
    return {pid: entry.state for pid, entry in found.items() if entry is not None}


def mark(pid: int) -> bytes | None:
    """The worker's mark that `pid` was started with; None: none, or not ours to read."""
    path = f"/proc/{pid}/environ"
    for _ in range(EXEC_TRIES):
        if data := _read(path):
            break
        if not _in_exec(pid):
            data = _read(path)  # it may have been until just now
            break
        sleep(EXEC_PAUSE_S)
    prefix = MARK.encode() + b"="
    for entry in (data or b"").split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :]
    return None


def _in_exec(pid: int) -> bool:
    """Whether `pid`, a process of ours, is within execve: has memory, but no environment there."""
    fields = (_read(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    if len(fields) <= 48 or fields[20] == b"0" or fields[48] != b"0":  # vsize, env_end
        return False
    # For a moment it is as closed to us as another user's, of which the same is seen for ever.
    return b"\nUid:\t%d\t" % os.getuid() in (_read(f"/proc/{pid}/status") or b"")


def belongs(found: bytes | None, token: bytes) -> bool:
    """Whether a process marked `found` is part of the worker or agent `token`."""
    return found is not None and found.startswith(token)


def children(pid: int, thread: int) -> list[int]:
    """The children of `pid`'s thread `thread`, zombies included.

    Complete as long as none of them is reaped during the call.
    """
    data = _read(f"/proc/{pid}/task/{thread}/children")
    if data is not None:
        return [int(word) for word in data.split()]
    # A kernel without CONFIG_PROC_CHILDREN.
    return [other for other, entry in _everyone().items() if entry.parent == pid]


def family(
    sessions: Collection[int], tokens: Collection[bytes], roots: Collection[int] = ()
) -> list[int]:
    """Every living process of `sessions`, marked with one of `tokens`, among `roots`, or below one.

    Looks at all of /proc, so it is for processes that are not the caller's descendants.
    """
    everyone = {pid: entry for pid, entry in _everyone().items() if entry.state not in "ZX"}
    everyone.pop(os.getpid(), None)
    found: set[int] = set()
    for pid, entry in everyone.items():
        if pid in roots or entry.session in sessions:
            found.add(pid)
        elif tokens:
            seen = mark(pid)
            if any(belongs(seen, token) for token in tokens):
                found.add(pid)
    offspring: dict[int, list[int]] = {}
    for pid, entry in everyone.items():
        offspring.setdefault(entry.parent, []).append(pid)
    todo = list(found)
    while todo:
        for child in offspring.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return sorted(found)


def kill_family(sessions: Collection[int], tokens: Collection[bytes], timeout: float) -> list[int]:
    """SIGKILL a family until none of it is left; returns who is left after `timeout` seconds."""
    deadline = monotonic() + timeout
    while remaining := family(sessions, tokens):
        poll, fds = select.poll(), []
        # All are opened before any is killed: a pid of the list is then still the process listed,
        # or one that took its number within the microseconds between.
        for pid in remaining:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
            poll.register(fds[-1], select.POLLIN)
        for fd in fds:
            send(fd, signal.SIGKILL)
        left = deadline - monotonic()
        while fds and left > 0:
            ended = {fd for fd, _ in poll.poll(left * 1000)}
            for fd in ended:
                poll.unregister(fd)
                os.close(fd)
            fds = [fd for fd in fds if fd not in ended]
            left = deadline - monotonic()
        for fd in fds:
            os.close(fd)
        if left <= 0:
            return family(sessions, tokens)
    return []


def send(pidfd: int, signum: int) -> bool:
    """Signal the process behind `pidfd`; False: it is gone, or not ours to signal."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _everyone() -> dict[int, Stat]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return {pid: entry for pid in pids if (entry := stat(pid)) is not None}


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it ended, or is another user's
        return None
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:  # it ended between the two calls
        return None
    finally:
        os.close(fd)
