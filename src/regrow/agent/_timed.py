"""An agent's countdown timers: when there is a server for them, and what its news mean to the loop.

The server is made before anything else of the job, so that a pipe that cannot be made costs no
training, and lasts through all attempts. Its news come in as messages and become events there: who
listens to events may be slow, and a worker is reaped on time all the same.
"""

from __future__ import annotations

import os
import signal
from time import time
from typing import TYPE_CHECKING, NamedTuple

from regrow.agent import _words as words
from regrow.agent._environment import TORCHELASTIC_TIMER_FILE
from regrow.agent._probed import ProbedAgent
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.agent._hang import Hang
    from regrow.agent._timers import Watchdog
    from regrow.timer._file_request import FileTimerRequest
    from regrow.workers import Guardian, PContext, ProcessFailure

#: Seconds from the deadline of a timer to the end of its worker: the dump may take half of them.
REAPED_S = 0.1
#: Seconds that py-spy may take on top, where it is asked for.
NATIVE_S = 2.0

logger = get_logger(__name__)


class _Hung(NamedTuple):
    """A worker's timer ran out."""

    hang: Hang


class _ServerSaid(NamedTuple):
    """Something that torch's agent records as an event."""

    name: str
    request: FileTimerRequest | None


class TimedAgent(ProbedAgent):
    """An agent with a timer server, if it is asked for."""

    _timers: bool
    _native_stacks: bool
    _guardian: Guardian | None
    _watchdog: Watchdog | None = None
    _path: str  # of its pipe
    _hung: dict[int, Hang]  # processes of the running attempt that are signalled, by pid

    def _reaping_bound(self) -> float | None:
        """Seconds from the deadline of a timer to the end of its worker; None without timers."""
        if not self._timers:
            return None
        return REAPED_S + (NATIVE_S if self._native_stacks else 0.0)

    def _start_watchdog(self) -> None:
        """Start the timer server, if there is to be one.

        Raises:
            OSError: its pipe cannot be made.
        """
        if not self._timers or self._watchdog is not None:
            return
        from regrow.agent._timers import Watchdog, timer_file

        self._path = timer_file(os.environ)
        self._watchdog = Watchdog(
            self._path,
            self._worker_group.spec.rdzv_handler.get_run_id(),
            native_s=NATIVE_S if self._native_stacks else 0.0,
            on_hang=self._take_hang,
            log_event=lambda name, request: self._inbox.put(_ServerSaid(name, request)),
        )
        self._watchdog.start()

    def _stop_watchdog(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _timer_file(self) -> str | None:
        """What workers are to find in TORCHELASTIC_TIMER_FILE, if anything."""
        if self._watchdog is not None:
            return self._path
        return os.environ.get(TORCHELASTIC_TIMER_FILE)

    def _watch(self, context: PContext) -> None:
        """Keep the timers of workers that are about to be started."""
        self._hung = {}
        if self._watchdog is not None and self._guardian is not None:
            from regrow.agent._watched import Watched

            workers = self._worker_group.workers
            ranks, size = [each.global_rank for each in workers], workers[0].world_size
            self._watchdog.watch(Watched(self._attempt, ranks, context, self._guardian, size))

    def _heed(self, message: object) -> words.Event | None:
        match message:
            case _Hung(hang):
                self._heed_hang(hang)
                return None
            case _ServerSaid(name, request):
                self._record_watchdog_event(name, request)
                return None
        return super()._heed(message)

    def _take_hang(self, hang: Hang) -> None:
        """Of the server's thread, as whoever explains a failure does not wait for the loop."""
        if hang.signum > 0 and hang.attempt == self._attempt:
            self._hung[hang.pid] = hang
        self._inbox.put(_Hung(hang))

    def _heed_hang(self, hang: Hang) -> None:
        from regrow.agent import _hang

        self._emit("regrow.timer.expired", **_hang.event(hang))
        if hang.signum > 0:
            logger.error("%s", _hang.announcement(hang))
        else:
            logger.warning("%s", _hang.announcement(hang))

    def _explained(self, failure: ProcessFailure) -> ProcessFailure:
        """A failure of this node; if it was for a timer, with what is known of that.

        The error file says it already, unless there is none, or a worker that was to be killed
        wrote one after its time was over: to be asked for its stacks may have interrupted what it
        was hanging in, and then it may have ended before all that was known. What a worker writes
        that handles its signal is its own account.
        """
        if self._watchdog is not None:
            self._watchdog.await_hang(failure.pid, self._reaping_bound() or 0.0)
        hang = self._hung.get(failure.pid)
        if hang is None:
            return failure
        doomed = hang.signum == signal.SIGKILL and failure.failed_monotonic >= hang.deadline
        if doomed or not failure.has_error_file:
            from regrow.agent import _hang

            failure.error_file_data = dict(_hang.error(hang, time()))
            failure.message = failure.error_file_data["message"]
        if doomed:
            failure.failed_monotonic = hang.deadline
        return failure

    def _age(self) -> float:
        """Seconds since the loop last turned, or the timer server last did if that is longer."""
        watchdog, age = self._watchdog, super()._age()
        if watchdog is None:
            return age
        # Whole seconds, as the server's answer is.
        return max(age, int(time()) - watchdog.get_last_progress_time())
