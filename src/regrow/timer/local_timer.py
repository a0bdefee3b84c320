"""The local timer: workers send their requests over a multiprocessing queue to their parent.

It is for programs that start their workers by `multiprocessing` themselves, as with torch's local
timer. It uses only the public methods of a queue, and so has the limits of such a queue:

- The queue is locked while a worker sends. If this server or another process kills the worker at
  that moment, the lock stays held. Then no other worker can send. A timer that another worker
  releases expires in spite of the release.
- A thread of the worker sends the requests, shortly after `expires` begins or ends. Native code
  that holds the GIL from the start of the block keeps the thread from running. Then the timer is
  armed only when the code ends.
- A worker that ends waits until its requests are in the pipe of the queue. If the server does not
  read, the pipe is full after some hundred requests.

The file timer (`FileTimerServer`, and `regrow run --timers`) has none of these limits.

A worker is identified by a pidfd from its first request on. So the server kills neither an ended
worker nor a process that got its pid.
"""

from __future__ import annotations

import math
import os
import signal
import time
from queue import Empty
from typing import Any

from regrow.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer
from regrow.timer.processes import LAST_PID, Sleeper, TimedProcesses
from regrow.timer.rules import Timers
from regrow.timer.stacks.answering import arm
from regrow.utils import describe, get_logger, repr_of

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

logger = get_logger(__name__)

POLL = 0.5
"""Seconds between two polls for `stop` and for ended workers, because a queue cannot be woken."""
ARRIVING = 0.1
"""Seconds in which requests that the queue has counted may still arrive.

A worker that was killed while it sent has counted requests that never arrive.
"""


class LocalTimerClient(TimerClient):
    """Sends the requests of this process to a `LocalTimerServer`.

    Args:
        mp_queue: the queue that the server reads: a `multiprocessing.Queue` that was passed to this
            process, or a queue of a `Manager`.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm this process's timer of a scope; see `TimerClient`."""
        arm()  # so that the server can request the stacks of this process
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """Disarm this process's timer of a scope."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """The requests in a multiprocessing queue; other items are dropped and logged once.

    Args:
        mp_queue: a `multiprocessing.Queue`, or a queue of a `Manager`.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._reported: set[str] = set()

    def size(self) -> int:
        """Return the number of waiting requests, with those that a killed worker did not send."""
        size: int = self._mp_queue.qsize()
        return size

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Remove up to `size` requests; wait `timeout` seconds for the first one.

        For each further request, wait at most 0.1 s.
        """
        end = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        while len(requests) < size:
            try:
                item = self._mp_queue.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                break
            except (OSError, EOFError, ValueError):  # the queue is closed
                raise
            except Exception as error:  # noqa: BLE001  # unpickling can raise anything
                self._report(f"it cannot be read: {describe(error)}")
                continue
            end = min(end, time.monotonic() + ARRIVING)
            fault = _fault(item)
            if fault:
                self._report(fault)
            else:
                requests.append(item)
        return requests

    def _report(self, what: str) -> None:
        if len(self._reported) < 100 and what not in self._reported:
            self._reported.add(what)
            logger.warning("timers: ignored an item of the queue: %s", what)


def _fault(item: object) -> str:
    """Return why an item is no request of a process; empty if it is one."""
    pid, scope = getattr(item, "worker_id", None), getattr(item, "scope_id", None)
    at = getattr(item, "expiration_time", None)
    if not isinstance(pid, int) or not 0 < pid <= LAST_PID or not isinstance(scope, str):
        return f"{repr_of(item)} is no TimerRequest with a pid and the name of a scope"
    if not isinstance(at, (int, float)) or math.isnan(at):
        return f"the expiration time {repr_of(at)} of process {pid} is not a number"
    return ""


class LocalTimerServer(TimerServer):
    """Kills a worker when one of its timers expires; first it requests the stacks of the worker.

    Args:
        mp_queue: a `multiprocessing.Queue` that the workers have too, or a queue of a `Manager`.
        max_interval: the longest wait for a request, in seconds; values above 0.5 count as 0.5. The
            server acts on timers when they expire, whatever the value.
        daemon: whether the server's thread ends with the program.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), min(max_interval, POLL), daemon)
        self._timers: Timers[int, TimerRequest] = Timers()
        self._sleeper = Sleeper()
        self._workers = TimedProcesses(self._sleeper)

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Arm and release timers as requested; remove those of workers that have ended."""
        for request in timer_requests:
            pid, scope, at = request.worker_id, request.scope_id, request.expiration_time
            if at < 0:
                self._timers.release(pid, scope)
                continue
            try:
                self._workers.add(pid)
            except ProcessLookupError:  # the worker ended before its request arrived
                continue
            self._timers.arm(pid, scope, at, request)
        for worker in filter(None, map(self._workers.of, self._sleeper.sleep(-math.inf))):
            self._timers.clear(worker.pid)
            self._workers.forget(worker)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Remove all timers of these processes."""
        for pid in worker_ids:
            self._timers.clear(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        """Return the due timers, the earliest first, for each process that has any."""
        return self._timers.due(deadline)

    def _reap_worker(self, worker_id: int) -> bool:
        worker = self._workers.get(worker_id)
        if worker is not None and not worker.ended() and worker_id != os.getpid():
            try:
                from regrow.timer.stacks.capture import Target, log_stacks

                target = Target(worker_id, worker.pidfd, doomed=True)
                log_stacks({target: f"timers: killing worker {worker_id}"})
            except Exception:  # the worker is killed in any case
                logger.exception("timers: the stacks of process %s are not known", worker_id)
        return self._workers.signal(worker_id, signal.SIGKILL)
