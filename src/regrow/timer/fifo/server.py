"""The server of file timers: reads a named pipe, and kills workers with expired timers.

One thread waits for everything at once: requests, the ends of workers, `stop`, and the earliest
deadline. Nothing is polled. Any process can fill the pipe. So the server reads one piece at a time,
and checks deadlines between pieces.

Three rules protect a healthy worker from being killed:
- When a deadline has passed, the server reads the pipe first, because the release may be there.
- Deadlines are on the monotonic clock. An expiration in seconds since the epoch is converted on
  arrival (`SteadyClock`).
- A worker is identified by its pidfd. A process that got the pid of an ended worker has none of its
  timers and never receives a signal.

The server checks whether the sender of a request may have timers. It looks up a process when the
process arms its first timer, and never again while the process lives. So a request costs no system
call. Refused input is reported once for each kind and source, because a process that writes invalid
input usually repeats it.

A worker is reaped once for all its expired timers. Workers that are due at the same time are reaped
together, so that a report can compare their stacks. Requests that a worker sent before that are
ignored if they arrive later. A failed reaping is retried at growing pauses.

The interface is that of torch's server. torch's server signals its own process after a worker. Here
the kernel notifies the agent of the worker's death, and the agent continues.
"""

from __future__ import annotations

import math
import os
import signal as signals
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from regrow.timer.debug_info_logging import log_debug_info_for_expired_timers
from regrow.timer.fifo.pipe import PIECE, Pipe
from regrow.timer.fifo.request import FileTimerRequest, RequestLines, RequestRefusal
from regrow.timer.processes import GONE, ServerThread, Sleeper, TimedProcesses, foreign
from regrow.timer.rules import STANDSTILL, SteadyClock, Timers
from regrow.utils import Backoff, get_logger

__all__ = ["FileTimerServer", "Reaping"]

logger = get_logger(__name__)

NAP = 0.002
"""Seconds without a read of the pipe after it was emptied.

So under load one wake-up serves many requests. A timer that is shorter than this is detected this
much late.
"""
FIRST_PAUSE = 0.1
"""Seconds from a failed reaping to the next attempt; doubled after each."""
STOP_TIMEOUT = 10.0
"""Most seconds that `stop` waits for the thread's current work, such as writing a report."""
MANY = 16384
"""Most timers kept for one worker, within a piece of the pipe, so that memory is bounded."""
REPORTS = 256
"""Most kinds and sources of bad input that are reported one by one."""
SHOWN = 16
"""Most expired timers of one worker that are reported one by one."""


class Reaping(NamedTuple):
    """A worker that is about to be reaped."""

    pid: int
    expired: list[FileTimerRequest]
    """The worker's expired timers, the earliest first; `monotonic` and `armed` are set."""
    signal: int
    """The signal of the earliest timer that requests one.

    Zero: no timer requests a signal, and the expiration is only reported.
    """
    deadline: float
    """Expiration of the earliest timer, in seconds on the monotonic clock."""
    noticed: float
    """Time at which the server detected the expiration."""
    pidfd: int
    """Pidfd of the process; -1: no descriptor was free, or the process has ended."""

    @property
    def shown(self) -> list[FileTimerRequest]:
        """The expired timers to report one by one."""
        return self.expired[:SHOWN]

    @property
    def scopes(self) -> list[str]:
        """The scopes of the timers to report."""
        return [request.scope_id for request in self.shown]

    @property
    def cause(self) -> FileTimerRequest:
        """The request with the signal to send; the earliest request if there is none."""
        asking = (request for request in self.expired if request.signal > 0)
        return next(asking, self.expired[0])


class FileTimerServer:
    """Keeps the timers of the workers of this host.

    A subclass may override `_reap_worker`, `refusal`, `before_reaping` and `on_refused`. The
    server's thread calls them.

    Args:
        file_path: path of the new named pipe, which only this user can access.
        run_id: the job, for the log.
        max_interval: most seconds between two attempts to reap a worker. torch's loop wakes at this
            interval; here only these attempts depend on it.
        daemon: whether the thread ends with the program.
        log_event: called with each event and its request, if any. The events are "watchdog
            started", "timer expired", "kill worker process", "bad request" and "watchdog stopped".
        clock: the time; None: the host's time.

    Raises:
        FileExistsError: an object at `file_path` is not an abandoned pipe.
        OSError: the pipe cannot be created there.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
        *,
        clock: SteadyClock | None = None,
    ) -> None:
        self._pipe = Pipe(file_path)
        self._run_id = run_id
        self._max_interval = max_interval
        self._log_event = log_event
        self._clock = clock or SteadyClock()
        self._lock = threading.RLock()
        """Guards the state that other threads use too."""
        self._timers: Timers[int, FileTimerRequest] = Timers()
        self._failures: dict[int, int] = {}  # consecutive failed reapings, by pid
        self._sleeper = Sleeper(self._now)
        self.workers = TimedProcesses(self._sleeper)
        """The living processes that have, or had, timers."""
        self._lines = RequestLines()
        self._emptied = False  # whether the last read emptied the pipe
        self._reported: set[tuple[str, int]] = set()  # kinds and sources of refused input
        self._sleeper.add(self._pipe.fd)
        self._working_since: float | None = None
        self._finishing = False
        self._ended: float | None = None
        """End of the server, in seconds on the monotonic clock."""
        self._thread = ServerThread(
            type(self).__name__, self._turn, daemon=daemon, close=self._close
        )
        server = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forked(server()))

    # --- public methods

    def start(self) -> None:
        """Start the server's thread, unless it runs.

        Raises:
            RuntimeError: the server was stopped.
        """
        if self._finishing:
            raise RuntimeError(
                f"the timer server of {self._pipe.path} was stopped: create a new one"
            )
        if self._thread.is_alive():
            logger.warning("timers: the server of %s runs already", self._pipe.path)
            return
        self._thread.start()
        logger.info("timers: the server of %s has started", self._pipe.path)
        self._emit("watchdog started", None)

    def stop(self) -> None:
        """Stop the server's thread, wait for its end, and remove the pipe."""
        self._thread.stopping.set()
        if self._finishing:
            return
        self._finishing = True
        self._wake_up()
        self._pipe.remove()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT)
        else:
            self._close()
        self._emit("watchdog stopped", None)

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Arm and release timers as requested, in this order.

        The pids of these requests are not checked here; requests from the pipe were checked before.
        """
        with self._lock:
            now = self._now()
            for request in timer_requests:
                pid, scope = request.worker_pid, request.scope_id
                with suppress(ProcessLookupError):  # no such process: none to reap
                    self.workers.add(pid)
                if request.expiration_time < 0:
                    self._timers.release(pid, scope)
                    continue
                if request.monotonic is None:
                    request.monotonic = self._clock.to_monotonic(request.expiration_time)
                if request.armed is None:
                    request.armed = now
                self._timers.arm(pid, scope, request.monotonic, request)
        self._wake_up()

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Remove all timers of these workers."""
        with self._lock:
            for pid in worker_pids:
                self._timers.clear(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire no later than `deadline`, for each worker that has any.

        Args:
            deadline: the time, in seconds since the epoch.
        """
        with self._lock:
            return self._timers.due(self._clock.to_monotonic(deadline))

    def get_last_progress_time(self) -> int:
        """Return the last time at which this server worked normally, in seconds since the epoch.

        While the server waits and no timer is overdue, this is now. While it acts on an event, this
        is the start of that work. If its thread has ended, this is the time of the end.
        """
        now = self._now()
        with self._lock:
            since, due = self._working_since, self._timers.next()
        if self._ended is not None:
            since = self._ended
        elif not self._thread.is_alive():
            since = now
        elif since is None:
            since = now if due is None else due
        return int(self._clock.wall() - max(0.0, now - since))

    # --- methods that a subclass may override

    def refusal(self, pid: int) -> str | None:
        """Return why a process may not have timers; None: it may.

        The server calls this when the process arms its first timer.
        """
        return foreign(pid)

    def on_refused(self, refusal: RequestRefusal, request: FileTimerRequest | None) -> None:
        """Handle refused input from the pipe; called once for each kind and source.

        Args:
            request: the input, if it was a request.
        """
        source = f"process {refusal.pid}" if refusal.pid else "an unknown process"
        logger.warning(
            "timers: ignored input of %s, which %s (%s); more of this kind is not reported: %r",
            source,
            refusal.why,
            self._pipe.path,
            refusal.sample,
        )
        self._emit("bad request", request)

    def before_reaping(self, reapings: list[Reaping]) -> None:
        """Report workers that are about to be reaped, all that are due at the same time.

        The report delays their reaping. This implementation logs their stacks.
        """
        from regrow.timer.stacks.capture import Target, log_stacks

        now = self._now()
        lines = {}
        for each in reapings:
            ends = f"is sent signal {each.signal}" if each.signal > 0 else "continues, as requested"
            late = f"the first {now - each.deadline:.3f} s ago"
            target = Target(each.pid, each.pidfd, doomed=each.signal == signals.SIGKILL)
            lines[target] = f"timers: {each.scopes} of worker {each.pid} expired, {late}; it {ends}"
        log_stacks(lines)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Send a worker the signal that its timer requests.

        Returns:
            whether the worker is reaped. If not, the server calls this method again, at growing
            pauses. If it raises an exception, the server removes the worker's timers.
        """
        worker = self.workers.get(worker_pid)
        if worker is not None and worker.pidfd < 0 and self.refusal(worker_pid):
            logger.info("timers: worker %d had ended before its timer expired", worker_pid)
            return True
        return self.workers.signal(worker_pid, signal)

    # --- the thread

    def _now(self) -> float:
        return self._clock.monotonic()

    def _turn(self) -> None:
        ready = self._sleep()
        if self._pipe.fd in ready:
            self._read()
        # After the pipe: requests that a worker sent before its end do not belong to another
        # process.
        for worker in filter(None, map(self.workers.of, ready)):
            with self._lock:
                self._timers.clear(worker.pid)
            self.workers.forget(worker)
            self._failures.pop(worker.pid, None)
        self._expire()

    def _sleep(self) -> list[int]:
        with self._lock:
            due = self._timers.next()
        self._working_since = None
        begin = self._now()
        until = math.inf if due is None else max(due, begin)
        if self._emptied:
            time.sleep(min(NAP, until - begin))
            self._emptied = False
        ready = self._sleeper.sleep(until)
        self._working_since = self._now()
        # Workers could not release their timers while the host was suspended.
        if self._working_since > until + STANDSTILL:
            self._postpone(self._working_since - begin, "could not run")
        return ready

    def _postpone(self, seconds: float, why: str) -> None:
        """Give all timers more time."""
        logger.warning("timers: the server %s; extended all timers by %.3f s", why, seconds)
        with self._lock:
            for pid, requests in self._timers.due(math.inf).items():
                for request in requests:
                    at = request.monotonic = (request.monotonic or 0.0) + seconds
                    self._timers.arm(pid, request.scope_id, at, request)

    def _read(self) -> int:
        """Act on a piece of the pipe; return its size in bytes."""
        data = self._pipe.read()
        self._emptied = len(data) < PIECE
        batch = self._lines.feed(data)
        for refusal in batch.refusals:
            self._report(refusal)
        requests = list(self._acceptable(batch.requests))
        if requests:
            self.register_timers(requests)
        return len(data)

    def _drain(self) -> None:
        """Act on the current content of the pipe, but not on later arrivals."""
        left = self._pipe.waiting()
        while left > 0 and (size := self._read()):
            left -= size

    def _acceptable(self, requests: Iterable[FileTimerRequest]) -> Iterable[FileTimerRequest]:
        now = self._now()
        refused: dict[int, str] = {}  # for this call only, because a pid may be reused later
        for request in requests:
            pid = request.worker_pid
            if request.armed is not None and request.armed > now:
                # The clock of the process differs, for example in another time namespace.
                request.monotonic = request.armed = None
            worker = self.workers.get(pid)
            if worker is not None:
                why = self._excess(request) if request.expiration_time >= 0 else ""
                if not why and (now if request.armed is None else request.armed) > worker.reaped:
                    yield request
            elif request.expiration_time < 0:
                continue  # the process has no timer to release
            elif pid in refused:
                why = refused[pid]
            else:
                why = refused[pid] = self._admit(pid)
                if not why:
                    yield request
            if why:
                self._report(RequestRefusal(why, pid, request.to_json()), request)

    def _admit(self, pid: int) -> str:
        """Look up a process that arms its first timer; return the reason if it may not."""
        try:
            worker = self.workers.add(pid)
        except ProcessLookupError:
            return GONE
        # The pidfd is held now, so a fact about the pid is a fact about the process.
        try:
            why = self.refusal(pid) or ""
        except Exception:
            logger.exception("timers: refused process %d, because its check failed", pid)
            why = "is of a process that cannot be checked"
        if why:
            self.workers.forget(worker)
        return why

    def _excess(self, request: FileTimerRequest) -> str:
        """Return why a worker may not arm another timer."""
        timers, pid = self._timers, request.worker_pid
        if len(timers) < MANY or timers.count(pid) < MANY or (pid, request.scope_id) in timers:
            return ""
        return f"is of a process with {MANY} timers"

    def _report(self, refusal: RequestRefusal, request: FileTimerRequest | None = None) -> None:
        """Report refused input, if its kind and source are new."""
        # Helpers may end before the look-up, which is no misuse: one report for all.
        source = refusal.why, 0 if refusal.why == GONE else refusal.pid
        if len(self._reported) > REPORTS or source in self._reported:
            return
        self._reported.add(source)
        if len(self._reported) > REPORTS:
            logger.warning("timers: no more bad requests in %s are reported", self._pipe.path)
        else:
            self._safely(self.on_refused, refusal, request)

    # --- reaping

    def _expire(self) -> None:
        """Reap the workers with due timers."""
        with self._lock:
            if not self._timers.due(self._now()):
                return
        self._drain()
        noticed = self._now()
        with self._lock:
            due = self._timers.due(noticed)
            for worker in filter(None, map(self.workers.get, list(due))):
                if worker.ended():  # the worker has just ended by itself
                    self._timers.clear(worker.pid)
                    del due[worker.pid]
        found = self._reapings(due, noticed)
        self._announce([each for each in found if each.pid not in self._failures])
        reaped = {each.pid for each in found if self._reaped(each)}
        self.clear_timers(reaped)
        # Workers could not release their timers while the pipe was full.
        if found and self._pipe.full():
            self._postpone(self._now() - noticed, "did not read its full pipe")

    def _reapings(self, due: Mapping[int, list[FileTimerRequest]], noticed: float) -> list[Reaping]:
        found = []
        for pid, expired in due.items():
            worker = self.workers.get(pid)
            signal = next((request.signal for request in expired if request.signal > 0), 0)
            deadline = noticed if expired[0].monotonic is None else expired[0].monotonic
            pidfd = worker.pidfd if worker else -1
            found.append(Reaping(pid, expired, signal, deadline, noticed, pidfd))
        return found

    def _announce(self, reapings: list[Reaping]) -> None:
        if not reapings:
            return
        log_debug_info_for_expired_timers(
            self._run_id,
            {each.pid: [r.to_json() for r in each.shown] for each in reapings},
        )
        for each in reapings:
            for request in each.shown:
                self._emit("timer expired", request)
        self._safely(self.before_reaping, reapings)

    def _reaped(self, reaping: Reaping) -> bool:
        """Do what the expired timers request; return whether the worker is reaped."""
        pid, signal = reaping.pid, reaping.signal
        if signal <= 0:
            # Its other timers stay: a timer that only reports may be inside one that kills.
            logger.info("timers: worker %d continues without %s, as requested", pid, reaping.scopes)
            with self._lock:
                for request in reaping.expired:
                    self._timers.release(pid, request.scope_id)
            return False
        try:
            done = self._reap_worker(pid, signal)
        except Exception:
            logger.exception(
                "timers: _reap_worker raised an exception for worker %d, so its timers are "
                "removed; the worker may still run",
                pid,
            )
            done = None
        if done:
            logger.info("timers: sent worker %d signal %d for %s", pid, signal, reaping.scopes)
            self._emit("kill worker process", reaping.cause)
        if done is not False:
            self._failures.pop(pid, None)
            worker = self.workers.get(pid)
            if worker is not None:
                killed = signal == signals.SIGKILL
                worker.reaped = math.inf if killed else self._now()
            return True
        failures = self._failures[pid] = self._failures.get(pid, 0) + 1
        pause = Backoff(FIRST_PAUSE, max(FIRST_PAUSE, self._max_interval)).pause(failures)
        logger.error(
            "timers: the timer of worker %d expired, but the worker could not be signalled; next "
            "try in %s s",
            pid,
            pause,
        )
        with self._lock:
            for request in reaping.expired:
                if (pid, request.scope_id) in self._timers:  # not released in the meantime
                    self._timers.arm(pid, request.scope_id, self._now() + pause, request)
        return False

    # --- the end

    def _close(self) -> None:
        """Close all descriptors; in a forked child, the copies."""
        with self._lock:
            self._ended = self._now()
            self._pipe.close()
            self.workers.close()
            self._sleeper.close()

    def _wake_up(self) -> None:
        """End the thread's sleep."""
        with self._lock:
            if self._ended is None and not self._thread.is_current():
                self._sleeper.wake()

    def _emit(self, name: str, request: FileTimerRequest | None) -> None:
        if self._log_event is not None:
            self._safely(self._log_event, name, request)

    def _safely(self, hook: Callable[..., None], *args: object) -> None:
        """Call a hook; an error in the hook must not stop the thread."""
        try:
            hook(*args)
        except Exception:
            logger.exception("timers: %r failed; the server of %s continues", hook, self._pipe.path)


def _forked(server: FileTimerServer | None) -> None:
    """Close a forked child's copies of a server's descriptors.

    With these copies, a client would consider the pipe read as long as the child lives.
    """
    if server is not None and server._ended is None:
        server._lock = threading.RLock()  # a thread of the parent may have held the old lock
        server._finishing = True
        server._close()
