"""The server of file timers: reads a named pipe, and reaps whoever let a timer expire.

One thread waits for everything at once: requests, the ends of the workers, `stop`, and the earliest
deadline. Nothing is looked at by interval. What comes through the pipe is not under its control, so
a piece of it is read at a time, and deadlines are looked at between pieces.

Three things keep a healthy worker from being reaped. What is in the pipe when a deadline has passed
is read first: the release may be there. Deadlines are kept on the monotonic clock, and what comes
in seconds since the epoch is converted on arrival (`_steady`). And a worker is what its pidfd says:
a process that got the pid of one that has ended has none of its timers and is never signalled.

A worker with expired timers is reaped once, for all of them, and those that are due at the same
time are reaped together, so that a report about them can compare their stacks. What it sent before
that counts no more, whenever it arrives. A reaping that fails is tried again, at growing pauses.

torch's server is the one whose interface this has. It signals its own process after a worker; here
the agent is told of the worker's death by the kernel as of any other, and lives.
"""

from __future__ import annotations

import math
import os
import signal as signals
import time
from collections.abc import Callable
from contextlib import suppress

from regrow.timer._file_request import FileTimerRequest
from regrow.timer._file_workers import Workers, foreign
from regrow.timer._intake import Intake
from regrow.timer._lines import Refusal
from regrow.timer._pipe import Pipe
from regrow.timer._reaping import Reaping, reapings
from regrow.timer._server_thread import ServerThread
from regrow.timer._steady import SteadyClock
from regrow.timer._timers import Timers
from regrow.timer.debug_info_logging import log_debug_info_for_expired_timers
from regrow.utils import get_logger

__all__ = ["FileTimerServer", "Reaping"]

logger = get_logger(__name__)

NAP = 0.002
"""Seconds without a look at the pipe after it was read empty, so that under load one wake-up serves
many requests. A timer that is shorter than that is noticed this much late."""
FIRST_PAUSE = 0.1
"""Seconds from a reaping that failed to the next attempt; doubled after each."""
STANDSTILL = 1.0
"""Seconds that the server wakes too late, so that the whole host is taken to have stood still, and
nobody had a chance to release a timer. Then the time in which it slept does not count."""


class FileTimerServer(ServerThread):
    """Keeps the timers of the workers of this host.

    A subclass may override `_reap_worker`, `_refusal`, `_before_reaping` and `_refused`, which are
    called in the server's thread.

    Args:
        file_path: where to make the named pipe, for this user alone.
        run_id: the job, for the log.
        max_interval: seconds between two attempts to reap a worker, at most. torch's loop looks at
            this interval; here nothing else depends on it.
        daemon: whether the thread ends with the program.
        log_event: told what happens: "watchdog started", "timer expired", "kill worker process",
            "bad request", "watchdog stopped", and the request that it is about, if there is one.

    Raises:
        FileExistsError: there is something at `file_path` that is not a pipe left behind.
        OSError: the pipe cannot be made there.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        pipe = Pipe(file_path)
        super().__init__(file_path, daemon, log_event)
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._clock = SteadyClock(self._wall, self._monotonic)
        self._timers: Timers[int, FileTimerRequest] = Timers()
        self._failures: dict[int, int] = {}  # how often in a row a worker could not be reaped
        self._workers = Workers(self._sleeper)
        self._intake = Intake(
            pipe,
            self._workers,
            self._timers,
            self._monotonic,
            self._refusal,
            lambda refusal, request: self._safely(self._refused, refusal, request),
        )
        self._sleeper.add(self._intake.fd)
        self._working_since: float | None = None
        self._let_go_in_children()

    # --- what others call

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Arm and release timers as asked for, in this order.

        What comes through the pipe arrives here once its pids are checked; what is given directly
        is believed.
        """
        with self._lock:
            now = self._monotonic()
            for request in timer_requests:
                pid, scope = request.worker_pid, request.scope_id
                if self._workers.get(pid) is None:
                    with suppress(ProcessLookupError):  # then there is nobody to reap
                        self._workers.add(pid)
                if request.expiration_time < 0:
                    self._timers.release(pid, scope)
                    continue
                if request.monotonic is None:
                    request.monotonic = self._clock.monotonic(request.expiration_time)
                if request.armed is None:
                    request.armed = now
                self._timers.arm(pid, scope, request.monotonic, request)
        self._wake_up()

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget all timers of these workers, and of those that have ended."""
        with self._lock:
            for pid in list(self._timers.workers()):
                if pid in worker_pids or not self.is_process_running(pid):
                    self._timers.clear(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """For each worker that has any: its timers that expire no later than `deadline`.

        Args:
            deadline: the time, in seconds since the epoch.
        """
        with self._lock:
            return self._timers.due(self._clock.monotonic(deadline))

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process, and we may signal it."""
        if pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def get_last_progress_time(self) -> int:
        """When this server was last seen to do what it should, in seconds since the epoch.

        That is now, while it waits and no timer is overdue. While it acts on something, it is when
        it began to; if its thread has ended, when it did.
        """
        now = self._monotonic()
        with self._lock:
            since, due = self._working_since, self._timers.next()
        thread = self._watchdog_thread
        if self._ended is not None:
            since = self._ended
        elif thread is None:
            since = now
        elif since is None:
            since = now if due is None else due
        return int(self._wall() - max(0.0, now - since))

    # --- what a subclass may override

    def _refusal(self, pid: int) -> str | None:
        """Why a process may have no timers, None if it may. Asked when it first arms one."""
        return foreign(pid)

    def _refused(self, refusal: Refusal, request: FileTimerRequest | None) -> None:
        """Something came through the pipe that does not count; once for each kind and source.

        Args:
            request: what it was, if it was a request.
        """
        source = f"process {refusal.pid}" if refusal.pid else "somebody"
        logger.warning(
            "what %s wrote into %s %s; it does not count, and the next of this kind will not be"
            " reported: %r",
            source,
            self._file_path,
            refusal.why,
            refusal.sample,
        )
        self._tell("bad request", request)

    def _before_reaping(self, reapings: list[Reaping]) -> None:
        """Look at workers that are about to be reaped, all of those that are at the same time.

        It delays their reaping, and once for each. Here their stacks are logged.
        """
        from regrow.timer._reaping_report import report

        report(reapings, self._monotonic())

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Send a worker the signal that its timer asks for.

        Returns:
            whether it is reaped; if not, this is called again, at growing pauses. An exception
            counts as reaped.
        """
        if worker_pid == os.getpid():
            logger.error("a timer of the server's own process has expired; it is not signalled")
            return True
        worker = self._workers.get(worker_pid)
        if worker is None or (worker.pidfd < 0 and self._refusal(worker_pid)):
            logger.info("worker %d had ended before its timer expired", worker_pid)
            return True
        try:
            worker.send(signal)
        except ProcessLookupError:
            logger.info("worker %d ended when its timer expired", worker_pid)
        except OSError as error:
            logger.error("worker %d cannot be sent signal %d: %s", worker_pid, signal, error)
            return False
        return True

    # --- the thread

    def _run_watchdog(self, *, wait: bool) -> None:
        ready = self._sleep() if wait else []
        if self._intake.fd in ready:
            self._read()
        if not wait:
            self._drain()
        # After the pipe: what a worker sent before it ended is not news of it.
        for worker in filter(None, map(self._workers.of, ready)):
            with self._lock:
                self._timers.clear(worker.pid)
            self._workers.forget(worker)
            self._failures.pop(worker.pid, None)
        self._expire()

    def _sleep(self) -> list[int]:
        with self._lock:
            due = self._timers.next()
        self._working_since = None
        begin = self._monotonic()
        until = math.inf if due is None else max(due, begin)
        if self._intake.emptied:
            time.sleep(min(NAP, until - begin))
            self._intake.emptied = False
        ready = self._sleeper.sleep(until)
        self._working_since = self._monotonic()
        if self._working_since > until + STANDSTILL:
            self._postpone(self._working_since - begin, "slept")
        return ready

    def _postpone(self, seconds: float, did: str) -> None:
        """Give all timers more time."""
        logger.warning("the timer server %s for %.3f s: that does not count", did, seconds)
        with self._lock:
            for pid, requests in self._timers.due(math.inf).items():
                for request in requests:
                    at = request.monotonic = (request.monotonic or 0.0) + seconds
                    self._timers.arm(pid, request.scope_id, at, request)

    def _read(self) -> int:
        """Act on a piece of what is in the pipe; how many bytes that were."""
        requests, size = self._intake.read()
        if requests:
            self.register_timers(requests)
        return size

    def _drain(self) -> None:
        """Act on all that is in the pipe now, and not on what comes meanwhile."""
        left = self._intake.waiting()
        while left > 0 and (size := self._read()):
            left -= size

    # --- reaping

    def _expire(self) -> None:
        """Reap the workers with timers that are due."""
        with self._lock:
            due = self._timers.due(self._monotonic())
        if not due:
            return
        self._drain()
        noticed = self._monotonic()
        with self._lock:
            due = self._timers.due(noticed)
            for worker in filter(None, map(self._workers.get, list(due))):
                if worker.ended():  # just now, by itself
                    self._timers.clear(worker.pid)
                    del due[worker.pid]
        found = reapings(due, noticed, self._workers.pidfd)
        self._announce([each for each in found if each.pid not in self._failures])
        reaped = {each.pid for each in found if self._reaped(each)}
        if reaped:
            self.clear_timers(reaped)
        with self._lock:  # whatever a subclass has made of that
            for pid in reaped:
                self._timers.clear(pid)
        if found and self._intake.full():  # who has released a timer meanwhile could not say so
            self._postpone(self._monotonic() - noticed, "let its pipe run full while it reaped")

    def _announce(self, reapings: list[Reaping]) -> None:
        if not reapings:
            return
        log_debug_info_for_expired_timers(
            self._run_id,
            {each.pid: [r.to_json() for r in each.shown] for each in reapings},
        )
        for each in reapings:
            for request in each.shown:
                self._tell("timer expired", request)
        self._safely(self._before_reaping, reapings)

    def _reaped(self, reaping: Reaping) -> bool:
        """Do what expired timers ask for; whether the worker is reaped."""
        pid, signal = reaping.pid, reaping.signal
        if signal <= 0:
            # Its other timers are still there: one that reports may lie within one that kills.
            logger.info("worker %d goes on without its timers %s", pid, reaping.scopes)
            with self._lock:
                for request in reaping.expired:
                    self._timers.release(pid, request.scope_id)
            return False
        try:
            done = self._reap_worker(pid, signal)
        except Exception:
            logger.exception("worker %d counts as reaped, and its timers are cleared", pid)
            done = True
        if done:
            logger.info("worker %d is reaped by signal %d for %s", pid, signal, reaping.scopes)
            self._failures.pop(pid, None)
            worker = self._workers.get(pid)
            if worker is not None:
                killed = signal == signals.SIGKILL
                worker.reaped = math.inf if killed else self._monotonic()
            self._tell("kill worker process", reaping.cause)
            return True
        failures = self._failures[pid] = self._failures.get(pid, 0) + 1
        pause = max(FIRST_PAUSE, min(FIRST_PAUSE * 2 ** min(failures - 1, 20), self._max_interval))
        logger.error("worker %d could not be reaped; next try in %s s", pid, pause)
        with self._lock:
            self._timers.postpone(pid, self._monotonic() + pause)
        return False

    # --- the end

    def _remove(self) -> None:
        self._intake.remove()

    def _close(self, *, forked: bool) -> None:
        self._intake.close()
        if forked:
            self._workers.abandon()
        else:
            self._workers.close()
