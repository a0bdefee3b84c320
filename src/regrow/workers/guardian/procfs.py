"""Processes as /proc shows them: their state, their children, the worker that they belong to.

A pid that was read here may name another process a moment later. Every caller relies on one of
three facts to use a pid safely:
- A child of the caller keeps its pid until the caller reaps it.
- A pidfd always names the same process.
- The kernel does not reuse a session's number while the session has members.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`
import os
import select
from time import monotonic, sleep

TYPE_CHECKING = False  # the guardian starts without `typing`
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class Stat:
    """A process as /proc/<pid>/stat shows it: state letter, parent, session."""

    __slots__ = ("parent", "session", "state")

    def __init__(self, state: str, parent: int, session: int) -> None:
        self.state, self.parent, self.session = state, parent, session


#: Environment variable that names the worker of a process: `/<agent>/<number>/`. A job inside that
#: worker appends its own part. So the mark of a job is a prefix of the marks of its parts.
MARK = "REGROW_WORKER"
#: Environment variable with the process id of the worker's own process.
WORKER_PID = "REGROW_WORKER_PID"
#: Environment variable with the source of a worker: `exec`, `template` or `standby`.
STARTED_FROM = "REGROW_STARTED_FROM"

#: How often, and with which pause in seconds, a process within execve is read again.
EXEC_TRIES = 50
EXEC_PAUSE_S = 0.0005
#: Pause in seconds before the next search for a family if no process could be opened.
EMPTY_PAUSE_S = 0.001


def stat(pid: int | str) -> Stat | None:
    """Return the process `pid`, or a thread; None if it does not exist or has ended.

    Args:
        pid: a process id; `<pid>/task/<tid>` for a thread.
    """
    data = _read(f"/proc/{pid}/stat")
    if not data:
        return None
    # The name, in parentheses, may contain spaces and parentheses.
    fields = data[data.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]))


def process_states(pids: Iterable[int]) -> dict[int, str]:
    """Return the state letter of each process as in /proc/<pid>/stat: R, S, D, T, Z, ...

    Args:
        pids: processes to look up; the result omits those that do not exist.
    """
    found = {pid: stat(pid) for pid in pids}
    return {pid: entry.state for pid, entry in found.items() if entry is not None}


def mark(pid: int) -> bytes | None:
    """Return the worker's mark of process `pid`; None: it has none, or may not be read."""
    path = f"/proc/{pid}/environ"
    for _ in range(EXEC_TRIES):
        if data := _read(path):
            break
        if not _in_exec(pid):
            data = _read(path)  # the process may have been within execve until now
            break
        sleep(EXEC_PAUSE_S)
    prefix = MARK.encode() + b"="
    for entry in (data or b"").split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :]
    return None


def _in_exec(pid: int) -> bool:
    """Return whether a process of this user is within execve: memory, but no environment yet."""
    fields = (_read(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    if len(fields) <= 48 or fields[20] == b"0" or fields[48] != b"0":  # vsize, env_end
        return False
    # For a moment the process is as unreadable as a process of another user, which always looks
    # like this.
    return b"\nUid:\t%d\t" % os.getuid() in (_read(f"/proc/{pid}/status") or b"")


def mark_and_session(pid: int) -> tuple[bytes | None, int | None]:
    """Return the worker's mark of a process, and its session; None: not known."""
    entry = stat(pid)
    return mark(pid), entry.session if entry is not None else None


def children(pid: int, thread: int) -> list[int]:
    """Return the children of thread `thread` of process `pid`, including zombies.

    The result is complete if none of the children is reaped during the call.
    """
    data = _read(f"/proc/{pid}/task/{thread}/children")
    if data is not None:
        return [int(word) for word in data.split()]
    # For a kernel without CONFIG_PROC_CHILDREN.
    return [other for other, entry in _everyone().items() if entry.parent == pid]


def family(
    sessions: Collection[int], tokens: Collection[bytes], roots: Collection[int] = ()
) -> list[int]:
    """Find all living processes of a family: members, marked processes, roots, and descendants.

    A process belongs to the family if one of these is true: its session is in `sessions`, its mark
    is in `tokens`, it is in `roots`, or it is below such a process. The search reads all of /proc,
    so it is meant for processes that are not the caller's descendants.
    """
    everyone = {pid: entry for pid, entry in _everyone().items() if entry.state not in "ZX"}
    everyone.pop(os.getpid(), None)
    found: set[int] = set()
    for pid, entry in everyone.items():
        if pid in roots or entry.session in sessions:
            found.add(pid)
        elif tokens:
            found_mark = mark(pid) or b""
            if any(found_mark.startswith(token) for token in tokens):
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
    """Kill a family until it is empty; return the processes left after `timeout` seconds.

    Raises:
        OSError: no descriptor is free to read /proc.
    """
    deadline = monotonic() + timeout
    while remaining := family(sessions, tokens):
        fds = []
        # All pidfds, or as many as this process may open, are opened before any process is killed.
        # So a listed pid is still the listed process, or a process that got its number within the
        # microseconds between.
        for pid in remaining:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
            except OSError:  # no descriptor is free: the next search finds the rest
                break
        for fd in fds:
            send(fd, signal.SIGKILL)
        for fd in fds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, deadline - monotonic()) * 1000)
            os.close(fd)
        if monotonic() >= deadline:
            return family(sessions, tokens)
        if not fds:
            sleep(EMPTY_PAUSE_S)
    return []


def send(pidfd: int, signum: int) -> bool:
    """Send a signal by `pidfd`; return False if the process is gone or belongs to another user."""
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
    except OSError:  # the process ended, or belongs to another user
        return None
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:  # the process ended between the two calls
        return None
    finally:
        os.close(fd)
