"""The local timer: workers send their requests over a multiprocessing queue to their parent.

For programs that start their workers by `multiprocessing` themselves; workers of an agent use the
file timer, which needs no object handed down. The server sleeps in the kernel until a request
comes, a deadline passes, a worker ends or `stop` is called. A queue of a `Manager` has nothing to
sleep on; there a wait is a timeout, and `stop` waits for its end.

All who write to the queue share a lock, and what a dead process holds stays locked: nobody could
arm or release a timer any more, and one after the other would be killed for nothing. So when a
worker has ended, in whatever way, the server sees to it that the lock is free.

A pid names a process only as long as that lives. So a worker is held on to by a pidfd from its
first request on, and neither a worker that ended nor a stranger that got its pid is killed for it.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Pipe
from queue import Empty
from typing import Any

from regrow.timer._api import RequestQueue, TimerRequest, TimerServer
from regrow.timer._timers import Timers
from regrow.utils import get_logger

logger = get_logger(__name__)

AT_ONCE = 1000
"""Requests that are taken before deadlines are looked at again."""
NAP = 0.002
"""Seconds without a look at the queue after there was something in it, so that under load one
wake-up serves many requests. No deadline waits for it."""
LOCK_PATIENCE = 0.05
"""Seconds that a lock may be held before it counts as left by a process that has ended."""


class MultiprocessingRequestQueue(RequestQueue):
    """The requests in a multiprocessing queue.

    Args:
        mp_queue: a `multiprocessing.Queue`, or what behaves like it.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """How many requests wait. Those that a worker could not send before it died count too."""
        size: int = self._mp_queue.qsize()
        return size

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take `size` requests, or those that come within `timeout` seconds."""
        end = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        try:
            while len(requests) < size:
                requests.append(self._mp_queue.get(timeout=max(0.0, end - time.monotonic())))
        except Empty:
            pass
        return requests


class LocalTimerServer(TimerServer):
    """Kills a worker process one of whose timers has expired, after asking it where it stands.

    Args:
        mp_queue: a `multiprocessing.Queue`, which the workers have, too.
        max_interval: seconds that the server waits at most without looking after its timers, and
            `stop` for its end. Nothing else depends on it, unless the queue is a `Manager`'s.
        daemon: whether the server's thread ends with the program.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        self._arrivals = _Arrivals(mp_queue)
        super().__init__(self._arrivals, max_interval, daemon)
        self._write_lock = getattr(mp_queue, "_wlock", None)
        self._timers: Timers[int, TimerRequest] = Timers()

    def _wake(self) -> None:
        self._arrivals.wake()

    def _late_requests(self) -> list[TimerRequest]:
        return self._arrivals.get(AT_ONCE, 0)

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Arm and release timers as asked for."""
        for request in timer_requests:
            pid, scope, at = request.worker_id, request.scope_id, request.expiration_time
            if at < 0:
                self._timers.release(pid, scope)
            else:
                self._timers.arm(pid, scope, at, request)
        ended = self._arrivals.ended()
        if ended:
            self.clear_timers(ended)
            _set_free(self._write_lock)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget all timers of these processes."""
        for pid in worker_ids:
            self._timers.clear(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        """For each process that has any: its timers that are due, the earliest first."""
        return self._timers.due(deadline)

    def _before_reaping(self, expired: Mapping[int, list[TimerRequest]]) -> None:
        from regrow.timer._capture import Target, capture
        from regrow.timer._frames import where

        held = {pid: self._arrivals.pidfd(pid) for pid in expired}
        targets = [Target(pid, fd, doomed=True) for pid, fd in held.items() if fd not in (None, -1)]
        for pid, dump in capture(targets).items():
            logger.error(
                "the timers %s of process %s have expired; it is %s\n%s",
                self._get_scopes(expired[pid]),
                pid,
                where(dump),
                dump.text,
            )

    def _reap_worker(self, worker_id: int) -> bool:
        pidfd = self._arrivals.pidfd(worker_id)
        if pidfd is None:
            logger.info("process %s had ended before its timer expired", worker_id)
            return True
        if worker_id == os.getpid():
            logger.error("the expired timers are of the server's own process, which is not killed")
            return True
        try:
            if pidfd < 0:
                os.kill(worker_id, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            logger.info("process %s ended when its timer expired", worker_id)
        except OSError:
            logger.exception("process %s could not be killed", worker_id)
            return False
        return True


class _Arrivals(MultiprocessingRequestQueue):
    """What comes to a server: requests, and the end of processes that have sent some."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__(mp_queue)
        self._pidfds: dict[int, int] = {}  # -1: the descriptors were used up
        self._pids: dict[int, int] = {}  # by pidfd
        self._ended: set[int] = set()
        self._busy = False  # whether something came at the last look
        self._reported: set[str] = set()
        self._poll = select.epoll()
        # Not an eventfd: connections are closed when nobody has them any more.
        self._woken, self._waker = Pipe(duplex=False)
        self._poll.register(self._woken.fileno(), select.EPOLLIN)
        reader = getattr(mp_queue, "_reader", None)  # a manager's queue has none
        self._wakes = reader is not None
        if reader is not None:
            self._poll.register(reader.fileno(), select.EPOLLIN)

    def __del__(self) -> None:
        for pidfd in self._pids:
            os.close(pidfd)

    def wake(self) -> None:
        """End a wait, or the next one."""
        self._waker.send_bytes(b"")

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Wait for something to happen, and take the requests that are there by then.

        However many there are said to be: those that a worker did not send before it died count,
        and never come.
        """
        if self._busy:
            time.sleep(min(NAP, timeout))
            timeout = max(0.0, timeout - NAP)
        ready = [fd for fd, _ in self._poll.poll(timeout if self._wakes else 0)]
        if self._woken.fileno() in ready:
            self._woken.recv_bytes()
        patience = 0.0 if self._wakes else timeout
        requests: list[TimerRequest] = []
        for _ in range(AT_ONCE):
            try:
                item = self._mp_queue.get(timeout=patience)
            except Empty:
                break
            except (OSError, EOFError, ValueError):  # the queue is closed
                raise
            except Exception as error:  # noqa: BLE001  # to unpickle is to run anything
                self._report(f"something that cannot be read: {error!r}")
                continue
            patience = 0.0
            if self._takes(item):
                requests.append(item)
        self._busy = bool(requests) and self._wakes
        for fd in ready:  # at last: what a process sent before it ended is no news of it
            if fd in self._pids:
                self._bury(fd)
        return requests

    def pidfd(self, pid: int) -> int | None:
        """The descriptor of a process, -1 if there was none left; None: it has ended."""
        return self._pidfds.get(pid)

    def ended(self) -> set[int]:
        """The processes that have ended since the last call."""
        ended, self._ended = self._ended, set()
        return ended

    def _takes(self, item: object) -> bool:
        """Whether this is a request that can be followed; the end of its process is watched."""
        pid = getattr(item, "worker_id", None)
        scope, at = getattr(item, "scope_id", None), getattr(item, "expiration_time", None)
        if not isinstance(pid, int) or not isinstance(scope, str):
            self._report(f"{item!r}, which is no TimerRequest with a pid and the name of a scope")
        elif not isinstance(at, (int, float)) or math.isnan(at):
            self._report(f"the expiration time {at!r} of process {pid}, which is no time")
        else:
            return at < 0 or self._pidfds.get(pid, -1) >= 0 or self._watch(pid)
        return False

    def _watch(self, pid: int) -> bool:
        """Watch for the end of a process; whether it may have timers."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(pid)  # with the queue's lock, perhaps
            return False
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                self._pidfds[pid] = -1
            return True  # what can be no process will be found to have ended
        self._pidfds[pid], self._pids[pidfd] = pidfd, pid
        self._poll.register(pidfd, select.EPOLLIN)
        return True

    def _bury(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        del self._pidfds[pid]
        self._ended.add(pid)
        self._poll.unregister(pidfd)
        os.close(pidfd)

    def _report(self, what: str) -> None:
        if len(self._reported) < 100 and what not in self._reported:
            self._reported.add(what)
            logger.warning("the timers' queue holds %s: it is left out", what)


def _set_free(lock: Any) -> None:
    """After the end of a process: if it held the lock, somebody has to release it."""
    if lock is None:
        return
    if not lock.acquire(timeout=LOCK_PATIENCE):
        # Should it be held by somebody alive after all, who is stopped or starved: a message is
        # written at once, so that two who write at a time do no harm.
        logger.warning("the lock of the timers' queue was left by a process: it is freed")
    with suppress(ValueError):  # it has been released this very moment
        lock.release()
