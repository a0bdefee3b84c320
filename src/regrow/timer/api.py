"""Interfaces of countdown timers, as in torch; `regrow run --timers` uses `timer.fifo.server`.

A worker arms a timer of a scope (`TimerClient.acquire`) and disarms it (`release`). Each call sends
a `TimerRequest` to a `TimerServer`, which keeps the timers and reaps a worker with an expired
timer. Implementations decide how requests travel, how timers are kept and what reaping means. The
names are those of `torch.distributed.elastic.timer`, so a server written for torch runs here.

The loop differs from torch's loop in when it wakes. It sees each request on its way to
`register_timers` and notes the deadline. It waits for the next request only until the next
deadline. So the server acts on a timer when the timer expires, for any `max_interval`. Without
timers, nothing wakes it at shorter intervals. It also compares expirations with a clock that does
not move when the wall clock is set (`SteadyClock`).
"""

from __future__ import annotations

import abc
import copy
import math
import time
from typing import Any, NamedTuple

from regrow.timer.processes import FIRST_PAUSE, LAST_PAUSE, ServerThread
from regrow.timer.rules import STANDSTILL, SteadyClock, Timers
from regrow.timer.timed_block import configure, expires
from regrow.utils import Backoff, get_logger

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

logger = get_logger(__name__)

BATCH = 0.005
"""Seconds in which further requests are collected after the first one. To handle each by itself
would cost a busy server twice the processor time."""
LOOKS = 10
"""Most polls for late requests before the server reaps, if requests keep arriving."""
STOP_GRACE = 1.0
"""Seconds that `TimerServer.stop` waits beyond `max_interval`."""


class TimerRequest:
    """A request to arm or release a timer.

    Args:
        worker_id: identifies the worker; the client and the server agree on the form.
        scope_id: the name of the timer; a worker has one timer in each scope.
        expiration_time: seconds since the epoch; negative: release the timer.
    """

    __slots__ = ("expiration_time", "scope_id", "worker_id")
    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimerRequest) and all(
            getattr(self, name) == getattr(other, name) for name in TimerRequest.__slots__
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


class TimerClient(abc.ABC):
    """Arms and releases the timers of a worker."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm this worker's timer of a scope, or arm it again.

        Args:
            expiration_time: seconds since the epoch.
        """

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Disarm this worker's timer of a scope."""


class RequestQueue(abc.ABC):
    """The source of a server's requests."""

    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of waiting requests. More may arrive; only `get` removes requests."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Remove up to `size` requests from the queue; wait at most `timeout` seconds for them.

        Return soon after a request has arrived, also during the call, because the server waits in
        this call. The server requests no more than the number of waiting requests, or one.
        """


class TimerServer(abc.ABC):
    """Keeps the timers of workers and reaps a worker when one of its timers expires.

    A subclass decides how timers are kept and what reaping means. The thread that `start` starts
    calls all its methods.

    Args:
        request_queue: the source of the requests.
        max_interval: the longest timeout for `request_queue.get`, in seconds. The server acts on a
            timer when it expires, however long this is. `stop` may take this time and one second
            more.
        daemon: whether the thread ends with the program.
    """

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._max_interval = max_interval
        self._daemon = daemon
        # The name is mangled, because a subclass may use the plain one.
        self.__watchdog = ServerTurns(self, request_queue, max_interval)
        self.__thread: ServerThread | None = None

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Arm and release timers as requested, in this order.

        A request with a negative `expiration_time` releases the timer of its worker and scope.
        """

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire no later than `deadline`, for each worker that has any.

        Args:
            deadline: the time, in seconds since the epoch.
        """

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker.

        Returns:
            whether the worker is reaped. If so, the server clears its timers. If not, the server
            calls this method again, at growing pauses. If it raises an exception, the server
            clears the timers as well.
        """

    def start(self) -> None:
        """Start the server's thread, unless it runs."""
        name = type(self).__name__
        if self.__thread is not None and self.__thread.is_alive():
            logger.warning("timers: %s runs already; ignored this call of start", name)
            return
        self.__thread = ServerThread(name, self._run_watchdog, daemon=self._daemon)
        self.__thread.start()
        logger.info("timers: %s has started, max_interval=%s s", name, self._max_interval)

    def stop(self) -> None:
        """Stop the server's thread and wait for its end, at most `max_interval` and one second."""
        thread, self.__thread = self.__thread, None
        if thread is not None:
            thread.stopping.set()
            thread.join(self._max_interval + STOP_GRACE)

    def _run_watchdog(self) -> None:
        """Wait for requests or the next deadline, and act on them."""
        self.__watchdog.turn()


class _Retry(NamedTuple):
    """The next attempt to reap a worker."""

    at: float
    failures: int
    """Number of consecutive failed attempts."""


class ServerTurns:
    """The loop turns of a `TimerServer`.

    They see only the requests that pass through, while a subclass keeps the timers. A mistake costs
    one needless wake-up, because the server asks the subclass for the expired timers each time. So
    a deadline is dropped once the server has woken for it.

    Args:
        server: keeps the timers and reaps the workers.
        requests: queue of the server.
        max_interval: the longest timeout for `requests.get`, in seconds.
        clock: the time; None: the host's time.
    """

    def __init__(
        self,
        server: TimerServer,
        requests: RequestQueue,
        max_interval: float,
        clock: SteadyClock | None = None,
    ) -> None:
        self._server = server
        self._requests = requests
        self._max_interval = max_interval
        self._clock = clock or SteadyClock()
        self._deadlines: Timers[Any, str] = Timers()
        self._retries: dict[Any, _Retry] = {}
        self._held_until = -math.inf
        """Before this time, no worker is reaped: the host was suspended."""

    def turn(self) -> None:
        """Wait for requests or the next deadline, and act on them."""
        requests, server = self._requests, self._server
        begin = self._clock.now()
        timeout = self._timeout(begin)
        arrived = requests.get(max(1, requests.size()), timeout)
        if arrived and self._timeout(self._clock.now()) > BATCH:  # no deadline is near
            time.sleep(BATCH)
            arrived += requests.get(waiting, 0.0) if (waiting := requests.size()) else []
        self._register(arrived)
        now = self._clock.now()
        if now - begin - timeout > STANDSTILL:
            self._held_until = now + STANDSTILL
        expired = server.get_expired_timers(now)
        for _ in range(LOOKS):
            # A release that arrived in time counts, even if the server reads it late.
            waiting = requests.size() if expired else 0
            late = requests.get(waiting, 0.0) if waiting else []
            if not late:
                break
            self._register(late)
            expired = server.get_expired_timers(now)
        for worker, scopes in self._deadlines.due(now).items():
            for scope in scopes:
                self._deadlines.release(worker, scope)
        self._retries = {worker: r for worker, r in self._retries.items() if worker in expired}
        ready = [
            worker
            for worker in expired
            if now >= self._held_until
            and (worker not in self._retries or self._retries[worker].at <= now)
        ]
        server.clear_timers(
            {worker for worker in ready if self._reap(worker, expired[worker], now)}
        )

    def _timeout(self, now: float) -> float:
        """Seconds until there is work even without requests, at most `max_interval`."""
        deadline = self._deadlines.next()
        times = [math.inf if deadline is None else deadline]
        times += [retry.at for retry in self._retries.values()]
        until = self._held_until if self._held_until > now else min(times)
        return min(self._max_interval, max(0.0, until - now))

    def _register(self, requests: list[TimerRequest]) -> None:
        jump = self._clock.jumped() if requests else 0.0
        if jump:
            requests = [_moved(request, -jump) for request in requests]
        for request in requests:
            worker, scope, at = request.worker_id, request.scope_id, request.expiration_time
            if at >= 0:
                self._deadlines.arm(worker, scope, at, scope)
            else:  # or not a number, a time that never comes
                self._deadlines.release(worker, scope)
        self._server.register_timers(requests)

    def _reap(self, worker_id: Any, expired: list[TimerRequest], now: float) -> bool:
        """Try to reap a worker; return whether it is reaped."""
        logger.info(
            "timers: %s of worker %s expired, the first %.3f s ago; reaping the worker",
            [request.scope_id for request in expired],
            worker_id,
            now - min((request.expiration_time for request in expired), default=now),
        )
        try:
            reaped = self._server._reap_worker(worker_id)
        except Exception:
            logger.exception(
                "timers: %s._reap_worker(%r) raised an exception, so the worker's timers are "
                "removed. To be called again, the method must return False instead of raising",
                type(self._server).__name__,
                worker_id,
            )
            reaped = True
        if reaped:
            logger.info("timers: reaped worker %s", worker_id)
            self._deadlines.clear(worker_id)
            self._retries.pop(worker_id, None)
            return True
        failures = self._retries[worker_id].failures + 1 if worker_id in self._retries else 1
        # The second attempt follows at once.
        pause = Backoff(FIRST_PAUSE, LAST_PAUSE).pause(failures - 1)
        self._retries[worker_id] = _Retry(now + pause, failures)
        logger.error(
            "timers: the timer of worker %s expired, but the worker could not be ended; next try "
            "in %s s",
            worker_id,
            pause,
        )
        return False


def _moved(request: TimerRequest, seconds: float) -> TimerRequest:
    """Return the request with its expiration, if it has one, moved by `seconds`."""
    if not request.expiration_time >= 0:
        return request
    moved = copy.copy(request)
    moved.expiration_time = max(0.0, request.expiration_time + seconds)
    return moved
