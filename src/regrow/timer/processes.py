"""Processes with timers: their pidfds and signals; the thread and the sleep of a timer server.

A pid in a request is a number that any process can write. When the number is used, it may already
name another process. So the server looks up a process once, when it first arms a timer, and holds a
pidfd from then on. The pidfd becomes readable when the process ends. A signal through it reaches
this process or none.
"""

from __future__ import annotations

import errno
import os
import select
import signal as signals
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from regrow.utils import Backoff, ends_within, get_logger

logger = get_logger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0
"""First pause after a failed turn, doubled after each, and longest pause, in seconds."""
LONGEST_WAIT = 86400.0
"""Most seconds of one wait: the timeout of an epoll is an int of milliseconds."""
LAST_PID = 2**22
"""The highest process id that Linux can be configured for."""
GONE = "is of a process that is gone"
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the last two errors mean a thread


class ServerThread:
    """A thread that calls `turn` again and again, until it is stopped.

    It logs an exception, and tries again after a growing pause.

    Args:
        name: name of the server, for the log and the thread.
        turn: sleeps until there is work, and does it.
        daemon: whether the thread ends with the program.
        close: called at the end, in the thread.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        *,
        daemon: bool,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.stopping = threading.Event()
        self._name = name
        self._turn = turn
        self._close = close
        self._thread = threading.Thread(target=self._run, name=f"regrow-{name}", daemon=daemon)
        self.start = self._thread.start
        self.is_alive = self._thread.is_alive

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, unless the caller runs in it."""
        if self.is_current():
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning(
                "timers: the thread of %s did not end within %s s; it ends after its current work",
                self._name,
                seconds,
            )

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        try:
            while not self.stopping.is_set():
                try:
                    self._turn()
                    backoff.reset()
                except Exception:
                    pause = backoff.next()
                    logger.exception("timers: %s failed; next try in %s s", self._name, pause)
                    self.stopping.wait(pause)
        finally:
            self._close()


class Sleeper:
    """Sleeps for one thread until a deadline, or until a descriptor is readable.

    An epoll waits for whole milliseconds and rounds up. So the rest of the last millisecond is
    slept without it, and a deadline is met within the 50 microseconds of a kernel timer.

    Args:
        monotonic: the clock of the deadlines, in seconds.
    """

    __slots__ = ("_epoll", "_monotonic", "_wake")

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._wake = -1  # -1 while there is nothing to close
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add(self._wake)

    def add(self, fd: int) -> None:
        """End a sleep when `fd` is readable."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Undo `add`; closing `fd` is not enough if a forked child has a copy."""
        self._epoll.unregister(fd)

    def sleep(self, until: float) -> list[int]:
        """Sleep until a time, which may have passed; infinity: without a limit.

        Returns:
            the readable file descriptors.
        """
        while True:
            left = until - self._monotonic()
            milliseconds = int(max(min(left, LONGEST_WAIT), 0.0) * 1000)
            if milliseconds == 0:
                time.sleep(max(0.0, left))
            # Half a millisecond less, because epoll rounds up.
            ready = self._epoll.poll(max(0.0, (milliseconds - 0.5) / 1000))
            if ready or left < 0.001:
                return self._woken([fd for fd, _ in ready])

    def _woken(self, ready: list[int]) -> list[int]:
        if self._wake in ready:
            ready.remove(self._wake)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return ready

    def wake(self) -> None:
        """End the sleep, or the next one, from any thread."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the descriptors."""
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            self._epoll.close()
            os.close(wake)

    def __del__(self) -> None:
        self.close()


class TimedProcess:
    """A process that has, or had, timers.

    Args:
        pidfd: -1: no descriptor was free.
    """

    __slots__ = ("pid", "pidfd", "reaped")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.reaped = float("-inf")
        """Requests from before this time are ignored, in seconds on the monotonic clock.

        The worker was reaped at this time; infinity: it was killed.
        """

    def ended(self) -> bool:
        """Return whether the process is known to have ended."""
        return self.pidfd >= 0 and ends_within(self.pidfd, 0)

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd >= 0:
            pidfd, self.pidfd = self.pidfd, -1
            os.close(pidfd)

    def __del__(self) -> None:
        self.close()


class TimedProcesses:
    """Workers by pid; the end of a worker wakes the server.

    Args:
        sleeper: the server's sleeper.
    """

    __slots__ = ("_by_fd", "_by_pid", "_lock", "_sleeper")

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper
        self._lock = threading.Lock()
        self._by_pid: dict[int, TimedProcess] = {}
        self._by_fd: dict[int, TimedProcess] = {}

    def get(self, pid: int) -> TimedProcess | None:
        """Return the worker with this pid, if it is known."""
        return self._by_pid.get(pid)

    def of(self, fd: int) -> TimedProcess | None:
        """Return the worker with this pidfd."""
        return self._by_fd.get(fd)

    def add(self, pid: int) -> TimedProcess:
        """Hold a pidfd of a process, unless one is held.

        Raises:
            ProcessLookupError: there is no process with this pid.
        """
        with self._lock:
            known = self._by_pid.get(pid)
            if known is not None:
                return known
            worker = self._by_pid[pid] = TimedProcess(pid, self._watched(pid))
            if worker.pidfd >= 0:
                self._by_fd[worker.pidfd] = worker
            return worker

    def _watched(self, pid: int) -> int:
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            if ends_within(pidfd, 0):  # the process ended, but its parent has not waited for it yet
                raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
            self._sleeper.add(pidfd)
        except OSError as error:
            if pidfd >= 0:
                os.close(pidfd)
            if error.errno in _NO_PROCESS:
                raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}") from error
            # No descriptor or memory is free. The process can have timers without a pidfd.
            return -1
        return pidfd

    def signal(self, pid: int, number: int) -> bool:
        """Send a worker the signal of its expired timer.

        Returns:
            whether the worker needs no further signal: it got this one, has ended, or is this
            process.
        """
        worker = self.get(pid)
        if pid == os.getpid():
            logger.error(
                "timers: a timer of the server's own process has expired; no signal is sent, "
                "because it would end the server"
            )
        elif worker is None or worker.ended():
            logger.info("timers: worker %d has already ended; no signal is sent", pid)
        else:
            try:
                if worker.pidfd >= 0:
                    signals.pidfd_send_signal(worker.pidfd, number)
                else:
                    os.kill(pid, number)
            except ProcessLookupError:
                logger.info("timers: worker %d ended when its timer expired", pid)
            except OSError as error:
                logger.error("timers: cannot send worker %d signal %d: %s", pid, number, error)
                return False
        return True

    def forget(self, worker: TimedProcess) -> None:
        """Release the pidfd of a worker."""
        with self._lock:
            del self._by_pid[worker.pid]
            if worker.pidfd >= 0:
                del self._by_fd[worker.pidfd]
                self._sleeper.remove(worker.pidfd)
                worker.close()

    def close(self) -> None:
        """Close all descriptors; also in a forked child, while the parent continues to watch."""
        for worker in self._by_fd.values():
            worker.close()
        self._by_fd, self._by_pid = {}, {}


def foreign(pid: int) -> str | None:
    """Return why a timer server must not signal a process; None: it may."""
    if pid == os.getpid():
        return "is of the timer server's own process"
    try:
        # The owner of the folder is root if the process may not be traced, so the file is read.
        with open(f"/proc/{pid}/status", "rb") as status:
            (owner,) = (int(line.split()[1]) for line in status if line.startswith(b"Uid:"))
    except OSError:
        return GONE
    if owner != os.getuid():
        return f"is of a process of another user ({owner})"
    return None
