"""Soft time-out of a rank: check in its own process whether it makes progress.

There are two kinds of progress. *Automatic* progress: the main thread executes Python code;
`SoftWatch` checks this. *Manual* progress: the wrapped function calls `ping`; it counts from the
first `ping` of an iteration. If either kind is older than the soft time-out, the iteration ends.

A rank has three states:

- **The function runs.** The soft time-out applies to the function and to the plug-ins just before
  it.
- **Recovering.** Between two calls of the function the rank aborts, finalizes, checks its health
  and takes a new rank. A restart would be pointless there, but all other ranks wait. So the rank
  logs its stacks at the soft time-out, and the hard time-out ends it.
- **At rest.** The rank waits for other ranks. The time-outs of the barriers and those of the other
  ranks apply. The function can also suspend the checks (`CallWrapper.disable_hang_protection`).

When the agent stops the process, no time-out applies: the process has its grace, to save.

The abort runs in another thread, and the main thread leaves the function only after it. So the
function may make progress for as long as the abort hangs. Therefore the hard time-out limits the
abort in each of these states, with or without progress.

`RankProgress` decides and reads no clock; times are seconds of a monotonic clock.

`SoftWatch` is the thread that checks the main thread, and reports the rank to the group if it makes
no progress. To measure automatic progress it requests a pending call, which the interpreter makes
when the main thread next executes Python code. The call is `sem_post` itself. A Python function
could be interrupted by the restart, and the exception would be lost in it. The thread checks the
semaphore once per interval, or earlier when a time-out may expire. While the rank waits for others,
the thread itself is the only progress: it shows that the process is not stopped.

This thread cannot detect a thread that holds the interpreter's lock, because no Python code runs
then. It cannot detect a stopped process either. The monitor of the host detects both from outside:
this rank sends it the time until which it may continue, and a new time after each progress. The
monitor does not repeat a report of this thread.

Pending calls run in the main thread only. A function in another thread is checked by its pings.
"""

from __future__ import annotations

import ctypes
import enum
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from regrow import _progress as board
from regrow.inprocess.exception import LinkError
from regrow.inprocess.watchdog.monitor_client import LIMITED, UNCHECKED, HardWatch, RankDeadline
from regrow.utils import describe, start_thread
from regrow.utils.logging import library_logger

logger = library_logger(__name__)


Which = Literal["automatic", "manual"]


class RankPhase(enum.Enum):
    """What a rank does, as far as time-outs are concerned."""

    ENDED = enum.auto()
    """The call is over: no progress is due."""
    FUNCTION = enum.auto()
    """The function runs."""
    RECOVERING = enum.auto()
    """The rank does its own part between two calls."""
    RESTING = enum.auto()
    """The rank waits for others."""


@dataclass(slots=True)
class RankProgress:
    """Progress of a rank, as known so far.

    Several threads read and write this without a lock, because the function may be interrupted
    anywhere, even while it holds a lock. Each fact is one store. A condition that may change at any
    time is checked again.
    """

    allowed: float
    """Soft time-out: largest age in seconds of either progress."""
    hard: float = math.inf
    """Hard time-out: seconds after which the process is ended."""
    phase: RankPhase = RankPhase.ENDED
    """What the rank does; only the thread that runs the function writes this."""
    limit: float = math.inf
    """Latest time for the end of its own part, with or without progress."""
    abort_limit: float = math.inf
    """Latest time for the end of the abort, which runs in another thread; infinity: none runs."""
    automatic_at: float = 0.0
    """Last time at which the main thread executed Python code; at rest, any thread."""
    manual_at: float | None = None
    """Time of the last `ping` in this iteration; None without one."""
    suspended: int = 0
    """Number of sections without hang protection that the function is in."""
    stopping: bool = False
    """Whether the agent is stopping the process, which then has its grace to save."""

    def enter(self, phase: RankPhase, now: float, within: float = math.inf) -> None:
        """Begin a phase; automatic progress is due from now on, manual progress is not yet.

        A rank that recovers has to make progress within the hard time-out, repeatedly, and has to
        end the phase within `within` seconds. A rank at rest only has to run.
        """
        if phase is RankPhase.FUNCTION:
            self.manual_at, self.suspended = None, 0
        self.automatic_at, self.limit = now, now + within
        self.phase = phase

    def resume(self, now: float) -> None:
        """End a section without hang protection; its time does not count."""
        self.automatic_at = now
        if self.manual_at is not None:
            self.manual_at = now
        self.suspended = max(self.suspended - 1, 0)

    @property
    def due(self) -> float:
        """When the first progress becomes stale; infinity if no check is active."""
        if self.stopping:
            return math.inf
        if self.phase is RankPhase.RECOVERING:
            return self.automatic_at + self.allowed
        if self.phase is not RankPhase.FUNCTION or self.suspended:
            return math.inf
        manual = self.manual_at
        at = self.automatic_at if manual is None else min(self.automatic_at, manual)
        return at + self.allowed

    @property
    def ends(self) -> float:
        """When the process is to be ended if it makes no progress; infinity: never."""
        if self.stopping:
            return math.inf
        if self.phase is RankPhase.RESTING:
            ends = self.automatic_at + self.hard
        else:
            ends = self.due - self.allowed + self.hard
        return min(ends, self._limit)

    @property
    def limited(self) -> bool:
        """Whether a limit ends the process even if it makes progress."""
        return self.ends == self._limit < math.inf

    @property
    def _limit(self) -> float:
        """The earlier one of the limits that apply now; infinity: none does."""
        recovering = self.phase is RankPhase.RECOVERING
        return min(self.limit, self.abort_limit) if recovering else self.abort_limit

    def stale(self, now: float) -> Which | None:
        """Return the progress that is older than allowed, if any; automatic if both are."""
        if now < self.due:
            return None
        return "automatic" if now >= self.automatic_at + self.allowed else "manual"


_libc = ctypes.CDLL(None, use_errno=True)
_SEM_T: Final = 32
"""Largest size of a `sem_t` in bytes."""
_ran = ctypes.create_string_buffer(_SEM_T)
"""The semaphore. It is never freed, because a pending call may come late."""
_libc.sem_init(_ran, 0, 0)
_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)


class SoftWatch:
    """Thread that checks the progress of one rank, from its first iteration to its last.

    It reports a soft time-out at most once per iteration.

    Args:
        progress: the time-outs of the rank.
        interval: the pause between two checks, seconds.
        report: called with the iteration and the finding, once per iteration.
        check: called at each check, for other periodic checks.
        outside: receives the time until which this rank may continue; closed with this object.
    """

    def __init__(
        self,
        progress: RankProgress,
        interval: float,
        report: Callable[[int, str], None],
        check: Callable[[], None],
        outside: HardWatch,
    ) -> None:
        self._progress = progress
        self._interval = interval
        self._report = report
        self._check = check
        self._outside = outside
        self._runs_in = threading.get_ident()
        self._automatic = threading.current_thread() is threading.main_thread()
        self._requested = False
        self._iteration = 0
        self._reported = (-1, False)
        self._begun = threading.Event()
        self._end = threading.Event()
        self.rest()
        self._thread = start_thread(self._run, "regrow-progress")

    def begin(self, iteration: int) -> None:
        """Begin an iteration; called by the main thread."""
        self._iteration = iteration
        self._enter(RankPhase.FUNCTION)

    def recover(self, within: float = math.inf) -> None:
        """Begin the rank's own part after the function; only the hard time-out applies.

        Args:
            within: seconds after which this part has to be over, with or without progress.
        """
        self._enter(RankPhase.RECOVERING, within)

    def rest(self) -> None:
        """Begin to wait for other ranks: no progress is due, but the process has to run."""
        self._enter(RankPhase.RESTING)

    def ping(self) -> None:
        """Record manual progress; cheap enough for every step of the wrapped function."""
        self._progress.manual_at = time.monotonic()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run a section without time-outs."""
        self._progress.suspended += 1
        self._changed()
        try:
            yield
        finally:
            self._progress.resume(time.monotonic())
            self._changed()

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Run an abort, which has to end within the hard time-out; for another thread.

        The main thread may still execute the function meanwhile, and make progress.
        """
        self._progress.abort_limit = time.monotonic() + self._progress.hard
        self._begun.set()  # only the main thread may count a change, so the watch sends this
        try:
            yield
        finally:
            self._progress.abort_limit = math.inf
            self._begun.set()

    def close(self) -> None:
        """End the watch at the end of the call."""
        self._progress.phase = RankPhase.ENDED
        self._end.set()
        self._begun.set()
        self._thread.join()
        self._outside.close()

    def _run(self) -> None:
        while not self._end.is_set():
            self._send_progress()
            if self._progress.phase is not RankPhase.RESTING:
                self._request_sign()
            left = self._interval
            if self._reported != self._span:
                left = min(left, self._progress.due - time.monotonic())
            if self._begun.wait(max(left, 0.0)):
                self._begun.clear()  # and check the new state
            else:
                self._tick()

    def _tick(self) -> None:
        progress = self._progress
        progress.stopping = bool(board.stopping())
        if progress.phase is RankPhase.RESTING:
            progress.automatic_at = time.monotonic()
            return
        if not self._automatic or _libc.sem_trywait(_ran) == 0:
            progress.automatic_at = time.monotonic()
            self._requested = False
        self._request_sign()
        self._send_progress()
        try:
            self._check()
        except Exception:
            logger.exception("a periodic check of this rank failed, and is not repeated")
            self._check = lambda: None
        span = iteration, recovering = self._span
        which = progress.stale(time.monotonic())
        if which is None or self._reported == span:
            return
        self._reported = span
        try:
            message = self._message(which, "the restart" if recovering else "the function")
        except Exception as error:  # noqa: BLE001 - the source of a module may be missing
            message = f"no {which} progress for {progress.allowed:g} s ({describe(error)})"
        if recovering:
            return
        try:
            self._report(iteration, message)
        except LinkError as error:
            logger.warning(
                "this rank exceeded its soft time-out, but could not report that to the other "
                "ranks: %s",
                error,
            )
        self._send_progress()

    def _enter(self, phase: RankPhase, within: float = math.inf) -> None:
        self._progress.enter(phase, time.monotonic(), within)
        self._changed()
        if phase is not RankPhase.RESTING:
            self._begun.set()

    def _changed(self) -> None:
        """Send the new deadline; this thread may be in native code from now on."""
        self._outside.change(self._progress.ends, self._checked_iteration)

    def _send_progress(self) -> None:
        """Send progress to the monitor."""
        outside, change = self._outside, -1
        # Repeat after a change: a message sent while there was no monitor is lost.
        while change != outside.changes:
            change = outside.changes  # read before the state that belongs to it
            deadline = RankDeadline(change, self._progress.ends, self._checked_iteration)
            outside.reconnect(deadline)
            outside.send(deadline)

    def _request_sign(self) -> None:
        """Request a pending call, by which the main thread shows that it makes progress."""
        if self._automatic and not self._requested:
            self._requested = ctypes.pythonapi.Py_AddPendingCall(_post, _ran) == 0

    @property
    def _checked_iteration(self) -> int:
        """The iteration that the monitor has to end at the soft time-out."""
        if self._progress.limited:
            return LIMITED
        reported = self._reported == (self._iteration, False)
        in_function = self._progress.phase is RankPhase.FUNCTION
        return self._iteration if in_function and not reported else UNCHECKED

    @property
    def _span(self) -> tuple[int, bool]:
        """Key for reporting once: the iteration, and whether it is over."""
        return self._iteration, self._progress.phase is RankPhase.RECOVERING

    def _message(self, which: Which, what: str) -> str:
        """Log the stacks of all threads; return the place of the main thread."""
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        frame = frames.pop(self._runs_in, None)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = f"no {which} progress for {self._progress.allowed:g} s"
        others = "".join(
            f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(other))}"
            for thread, other in frames.items()
        )
        logger.error("%s; stack of %s:\n%s%s", text, what, "".join(stack.format()), others)
        at = f", at {stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
        return f"{text}{at}"
