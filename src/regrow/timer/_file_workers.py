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
from collections.abc import Iterator


class Worker:
    """A process that has, or had, timers."""

    __slots__ = ("failures", "pid", "pidfd", "reaped")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        """-1: there was none to be had."""
        self.reaped = float("-inf")
        """Up to when its requests count no more, in seconds on the monotonic clock: it was reaped
        for its timers then; infinity: it was killed."""
        self.failures = 0
        """How often in a row it could not be reaped."""


class Workers:
    """Workers by pid; their ends wake an epoll.

    Args:
        epoll: told of their pidfds.
    """

    __slots__ = ("_by_fd", "_by_pid", "_epoll")

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._by_pid: dict[int, Worker] = {}
        self._by_fd: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_pid.values()))

    def get(self, pid: int) -> Worker | None:
        """The worker with this pid, if it is known."""
        return self._by_pid.get(pid)

    def of(self, fd: int) -> Worker | None:
        """The worker with this pidfd."""
        return self._by_fd.get(fd)

    def add(self, pid: int) -> Worker:
        """Hold on to a process.

        Raises:
            ProcessLookupError: there is none with this pid.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # The last two: descriptors are used up. It has timers all the same.
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
            pidfd = -1
        worker = self._by_pid[pid] = Worker(pid, pidfd)
        if pidfd >= 0:
            self._by_fd[pidfd] = worker
            self._epoll.register(pidfd, select.EPOLLIN)
        return worker

    def forget(self, worker: Worker) -> None:
        """Let go of a worker."""
        if self._by_pid.get(worker.pid) is worker:
            del self._by_pid[worker.pid]
        if worker.pidfd >= 0:
            del self._by_fd[worker.pidfd]
            # Not by closing it alone, if a forked child has a copy.
            self._epoll.unregister(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1

    def close(self) -> None:
        """Let go of all."""
        for worker in self:
            self.forget(worker)


def send(pid: int, pidfd: int, number: int) -> None:
    """Signal a process, by its pidfd if there is one.

    Raises:
        OSError: as the kernel says; ProcessLookupError: it is gone.
    """
    if pidfd >= 0:
        signals.pidfd_send_signal(pidfd, number)
    else:
        os.kill(pid, number)


def foreign(pid: int) -> str | None:
    """Why a process is none that a server of its own accord may signal; None: it may."""
    if pid == os.getpid():
        return "is of the timer server's own process, which would end with it"
    try:
        owner = os.lstat(f"/proc/{pid}").st_uid
    except OSError:
        return "is of a process that is gone"
    if owner != os.geteuid():
        return f"is of a process of another user ({owner})"
    return None
