"""The processes that have asked for timers, each held by a pidfd.

A pid from the pipe is a number that somebody wrote, and by the time it is used the process may be
gone and the number another's. So the process is looked up once, when it first arms a timer, and
from then on is what its pidfd says: when it ends that is readable, and what is signalled through it
is this process or none.
"""

from __future__ import annotations

import errno
import os
import select
import signal as signals
import threading

from regrow.timer._sleeper import Sleeper

GONE = "is of a process that is gone"
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the last two: a thread


class Worker:
    """A process that has, or had, timers."""

    __slots__ = ("pid", "pidfd", "reaped")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        """-1: there was none to be had."""
        self.reaped = float("-inf")
        """Up to when its requests count no more, in seconds on the monotonic clock: it was reaped
        for its timers then; infinity: it was killed."""

    def ended(self) -> bool:
        """Whether the process has ended, as far as is known without a pidfd."""
        return self.pidfd >= 0 and _ended(self.pidfd)

    def send(self, number: int) -> None:
        """Signal it, by its pidfd if there is one.

        Raises:
            OSError: as the kernel says; ProcessLookupError: it is gone.
        """
        if self.pidfd >= 0:
            signals.pidfd_send_signal(self.pidfd, number)
        else:
            os.kill(self.pid, number)


class Workers:
    """Workers by pid; the end of one ends the server's sleep.

    Args:
        sleeper: told of their pidfds.
    """

    __slots__ = ("_by_fd", "_by_pid", "_lock", "_sleeper")

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper
        self._lock = threading.Lock()
        self._by_pid: dict[int, Worker] = {}
        self._by_fd: dict[int, Worker] = {}

    def get(self, pid: int) -> Worker | None:
        """The worker with this pid, if it is known."""
        return self._by_pid.get(pid)

    def pidfd(self, pid: int) -> int:
        """The pidfd of a worker; -1: it has none, or is not known."""
        worker = self._by_pid.get(pid)
        return worker.pidfd if worker else -1

    def of(self, fd: int) -> Worker | None:
        """The worker with this pidfd."""
        return self._by_fd.get(fd)

    def add(self, pid: int) -> Worker:
        """Hold on to a process, unless it is held on to.

        Raises:
            ProcessLookupError: there is none with this pid.
        """
        with self._lock:
            known = self._by_pid.get(pid)
            if known is not None:
                return known
            worker = self._by_pid[pid] = Worker(pid, self._watched(pid))
            if worker.pidfd >= 0:
                self._by_fd[worker.pidfd] = worker
            return worker

    def _watched(self, pid: int) -> int:
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            if _ended(pidfd):  # and nobody has waited for it yet
                raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
            self._sleeper.add(pidfd)
        except OSError as error:
            if pidfd >= 0:
                os.close(pidfd)
            if error.errno in _NO_PROCESS:
                raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}") from error
            # There are no descriptors left, or no memory. The process has timers all the same.
            return -1
        return pidfd

    def forget(self, worker: Worker) -> None:
        """Let go of a worker."""
        with self._lock:
            del self._by_pid[worker.pid]
            if worker.pidfd >= 0:
                del self._by_fd[worker.pidfd]
                self._sleeper.remove(worker.pidfd)
                os.close(worker.pidfd)

    def close(self) -> None:
        """Let go of all."""
        for worker in list(self._by_pid.values()):
            self.forget(worker)

    def abandon(self) -> None:
        """In a forked child: close the copies of what its parent watches."""
        for fd in self._by_fd:
            os.close(fd)
        self._by_fd, self._by_pid = {}, {}


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def foreign(pid: int) -> str | None:
    """Why a process is none that a server of its own accord may signal; None: it may."""
    if pid == os.getpid():
        return "is of the timer server's own process, which would end with it"
    try:
        # The owner of the folder would be root if the process may not be traced.
        with open(f"/proc/{pid}/status", "rb") as status:
            (owner,) = (int(line.split()[1]) for line in status if line.startswith(b"Uid:"))
    except OSError:
        return GONE
    if owner != os.getuid():
        return f"is of a process of another user ({owner})"
    return None
