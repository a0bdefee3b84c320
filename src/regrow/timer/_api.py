"""What a countdown timer is, and the loop of a server that reaps whoever let one expire.

A worker arms a timer of some scope (`TimerClient.acquire`) and disarms it (`release`); each of the
two is a `TimerRequest` that travels to a `TimerServer`, which keeps the timers and reaps a worker
one of whose timers expires. How requests travel, how timers are kept and what reaping means is up
to the implementations: this file names no queue, no pipe and no process. The names and what they
mean are those of `torch.distributed.elastic.timer`, so that a server written for it runs here.

The loop differs in when it wakes. It sees every request on its way to `register_timers`, keeps the
deadlines for itself, and waits for the next request only until the next deadline. So a timer is
acted on when it expires, `max_interval` or no, and without timers nothing wakes at intervals
shorter than that. It differs in what it takes for the time, too: what is compared with the
expiration of a request, which is in seconds since the epoch, does not move when the clock is set
(`_steady`).
"""

from __future__ import annotations

import abc
import copy
import threading
from collections.abc import Mapping
from typing import Any

from regrow.timer._steady import SteadyClock
from regrow.timer._watch import Watch
from regrow.utils import get_logger

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer"]

logger = get_logger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds from a pass that failed to the next: after the first such pass, doubled after each, and
at most."""

LOOKS = 10
"""How often those who are to be reaped are looked at again, if requests come all the time."""


class TimerRequest:
    """That a timer be armed, or released.

    Args:
        worker_id: whatever the client and the server have agreed on to tell workers apart.
        scope_id: what the timer is about; a worker has one timer in each scope.
        expiration_time: when it expires, in seconds since the epoch; negative: release it.
    """

    __slots__ = ("expiration_time", "scope_id", "worker_id")
    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimerRequest):
            return False
        return (self.worker_id, self.scope_id, self.expiration_time) == (
            other.worker_id,
            other.scope_id,
            other.expiration_time,
        )

    def __repr__(self) -> str:
        return f"TimerRequest({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


class TimerClient(abc.ABC):
    """A worker's way to its timers."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm this worker's timer of a scope, or arm it anew.

        Args:
            expiration_time: when it expires, in seconds since the epoch.
        """

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Disarm this worker's timer of a scope."""


class RequestQueue(abc.ABC):
    """Where a server gets its requests from."""

    @abc.abstractmethod
    def size(self) -> int:
        """How many requests wait. More may come; none may go, but by `get`."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take up to `size` requests out of the queue, waiting `timeout` seconds at most for them.

        A request that has come is to be returned soon, also if it was not there when this was
        called: the server waits in here, and asks for no more than there are, or one.
        """


class TimerServer(abc.ABC):
    """Keeps the timers of workers and reaps a worker one of whose timers has expired.

    A subclass says how timers are kept and what reaping is. All of its methods are called in the
    thread that `start` starts.

    Args:
        request_queue: where the requests come from.
        max_interval: seconds that `request_queue.get` is asked to wait at most. A timer is acted on
            when it expires, however long this is; it bounds how long `stop` may take if the queue
            cannot be woken.
        daemon: whether the thread ends with the program.
    """

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        # Mangled: a subclass that knows nothing of these may use their names.
        self.__stopping = threading.Event()
        self.__clock = SteadyClock()
        self.__watch = Watch()

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Arm and release timers as asked for, in this order.

        A request with a negative `expiration_time` releases the timer of its worker and scope.
        """

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """For each worker that has any: its timers whose `expiration_time` is not after `deadline`.

        Args:
            deadline: the time, in seconds since the epoch.
        """

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker.

        Returns:
            whether it is reaped. If it is, its timers are cleared; if not, this is called again,
            at growing pauses. An exception counts as reaped.
        """

    def _wake(self) -> None:  # noqa: B027  # a queue that cannot be woken is no mistake
        """End a wait in the queue's `get`, as far as it can be ended. For subclasses."""

    def _late_requests(self) -> list[TimerRequest]:
        """Those that have come by now, taken without waiting. For subclasses.

        Called when a timer has expired, until nothing comes or none has: a worker that released
        its timer in time is not reaped because the server was late to read that.
        """
        return []

    def _before_reaping(  # noqa: B027
        self, expired: Mapping[Any, list[TimerRequest]]
    ) -> None:
        """Do what is to be done for all workers that are about to be reaped. For subclasses.

        Args:
            expired: their timers that have expired.
        """

    def start(self) -> None:
        """Start the server's thread. Once it runs, this changes nothing."""
        if self._watchdog_thread is not None and self._watchdog_thread.is_alive():
            logger.warning("%s runs already; it is not started again", type(self).__name__)
            return
        self.__stopping = threading.Event()  # its own: an older thread may not have ended yet
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name=f"regrow-{type(self).__name__}", daemon=self._daemon
        )
        self._watchdog_thread.start()
        logger.info("%s started, max_interval=%s s", type(self).__name__, self._max_interval)

    def stop(self) -> None:
        """Stop the server's thread and wait for its end, `max_interval` seconds at most."""
        self.__stopping.set()
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is None or thread is threading.current_thread():
            return
        self._wake()
        thread.join(self._max_interval)
        if thread.is_alive():
            logger.warning(
                "the thread of %s has not ended within %s s; it will after what it does now",
                type(self).__name__,
                self._max_interval,
            )

    def _watchdog_loop(self) -> None:
        pause, stopping = 0.0, self.__stopping
        while not stopping.is_set():
            try:
                self._run_watchdog()
                pause = 0.0
            except Exception:
                pause = min(2 * pause or FIRST_PAUSE, LAST_PAUSE)
                logger.exception(
                    "%s could not look after its timers; next try in %s s",
                    type(self).__name__,
                    pause,
                )
                stopping.wait(pause)

    def _run_watchdog(self) -> None:
        """Wait for requests or the next deadline, and act on them."""
        queue, watch, clock = self._request_queue, self.__watch, self.__clock
        begin = clock.now()
        patience = watch.patience(begin, self._max_interval)
        self.__register(queue.get(max(1, queue.size()), patience))
        now = clock.now()
        watch.late(now - begin - patience, now)
        expired = self.get_expired_timers(now)
        for _ in range(LOOKS):
            late = self._late_requests() if expired else []
            if not late:
                break
            self.__register(late)
            expired = self.get_expired_timers(now)
        watch.woken(now, expired)
        ripe = {worker: expired[worker] for worker in watch.ripe(expired, now)}
        if ripe:
            self.__prepare(ripe)
        reaped = {worker for worker, timers in ripe.items() if self.__reaped(worker, timers, now)}
        self.clear_timers(reaped)

    def __register(self, requests: list[TimerRequest]) -> None:
        jump = self.__clock.jumped() if requests else 0.0
        if jump:
            requests = [_moved(request, -jump) for request in requests]
        for request in requests:
            self.__watch.note(request.worker_id, request.scope_id, request.expiration_time)
        self.register_timers(requests)

    def __prepare(self, expired: Mapping[Any, list[TimerRequest]]) -> None:
        try:
            self._before_reaping(expired)
        except Exception:  # nobody is spared for that
            logger.exception("before reaping %s", list(expired))

    def __reaped(self, worker_id: Any, expired: list[TimerRequest], now: float) -> bool:
        """Try to reap a worker."""
        logger.info(
            "reaping worker %s: %s expired, the first %.3f s ago",
            worker_id,
            self._get_scopes(expired),
            now - min((request.expiration_time for request in expired), default=now),
        )
        if self._reap_worker_no_throw(worker_id):
            logger.info("reaped worker %s", worker_id)
            self.__watch.reaped(worker_id)
            return True
        pause = self.__watch.survived(worker_id, now)
        logger.error("worker %s could not be reaped; next try in %s s", worker_id, pause)
        return False

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception(
                "%s._reap_worker(%r) raised; the worker counts as reaped and its timers are "
                "cleared. It should return False to be called again",
                type(self).__name__,
                worker_id,
            )
            return True

    def _get_scopes(self, timer_requests: list[TimerRequest]) -> list[str]:
        return [request.scope_id for request in timer_requests]


def _moved(request: TimerRequest, seconds: float) -> TimerRequest:
    """The request with its expiration, if it has one, moved."""
    if not request.expiration_time >= 0:
        return request
    moved = copy.copy(request)
    moved.expiration_time = max(0.0, request.expiration_time + seconds)
    return moved
