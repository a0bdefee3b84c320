"""Interruption of the thread that runs the wrapped function, at any point of the function.

Another thread requests the interrupt. `RankShouldRestart` is then raised in the function and ends
it. CPython offers an asynchronous exception for this (`PyThreadState_SetAsyncExc`). It has two
drawbacks:

- It needs the interpreter: it does not wake a thread in `time.sleep`, in `select` or at a lock.
- It has no target: a request made while the function runs may be raised after the function, in any
  later code of the thread. Flags and handlers around the call do not help, because the exception
  may be raised in them as well.

So regrow uses a signal, as Ctrl-C does. A signal ends the system call in which the thread waits.
Its handler is Python code, runs in the interrupted thread, and sees the thread's stack. It raises
only if the frame that called the function is on the interrupted stack. The call is over when that
frame ends; a later signal then raises nothing.

The handler can also skip code in which an exception would do harm that no restart repairs
(`no_interrupt_zones`).

An exception can get lost: user code catches every exception and continues, or C code that called
Python cannot pass the exception on. So the request is repeated with growing pauses until the call
is over.

**Without a signal.** Python handles signals in the main thread only. If the function runs in
another thread, or no signal is free, blocking calls are not woken. Python 3.13 and later have
events that call the same handler in that thread while it executes Python code
(`no_interrupt_zones`). Python 3.11 and 3.12 have only the asynchronous exception. These rules keep
it inside the function:

- Requests are made under a lock, and none is made after the thread has begun to leave.
- Leaving begins with a plain store of a flag, before which no exception can be raised. It ends with
  a wait, under the lock, for a request that has not been raised yet. Cancelling the request by NULL
  is no alternative. CPython 3.11 would then check for an exception at every turn, and without end
  while it is traced.
- Another thread checks whether the function is in skipped code. It makes the request only if the
  thread is still at the checked instruction. The test runs without letting that thread continue in
  between.
"""

from __future__ import annotations

import ctypes
import operator
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from types import FrameType
from typing import ParamSpec, TypeVar

from regrow.inprocess.exception import RankShouldRestart
from regrow.inprocess.interrupt.no_interrupt_zones import InterruptCheck, Trigger, free_signal
from regrow.timer.stacks.answering import CANDIDATES
from regrow.utils import Backoff
from regrow.utils.logging import library_logger

if sys.version_info >= (3, 13):
    from regrow.inprocess.interrupt.no_interrupt_zones import CodeEvents

P = ParamSpec("P")
T = TypeVar("T")

logger = library_logger(__name__)

FIRST_PAUSE = 0.001
"""Seconds from a request to its first repetition; the pause doubles each time."""
LONGEST_PAUSE = 0.25
"""Longest pause between two requests in seconds. Each may end a system call of the thread early."""
_END = "its end, by a return"
AIMS = 20
"""Largest number of checks in one request from outside; the thread may move between the checks."""


class GuardedCall:
    """One call of a function that another thread can interrupt.

    The thread that created the object calls `run` once; any other thread calls `interrupt`.

    Args:
        trigger: calls the handler in the thread; None: the exception is raised from outside.
        clock: time in seconds.
    """

    def __init__(self, trigger: Trigger | None, clock: Callable[[], float]) -> None:
        self._trigger = trigger
        self._clock = clock
        self._thread = threading.get_ident()
        self._lock = threading.Lock()  # no request is made after the call is over
        self._ended = threading.Lock()  # locked until the call is over
        self._ended.acquire()
        self._over = False
        self._requested = False
        self._leaving = False
        self._raised_at = ""  # place of the first raise
        self._continued_at = ""  # place of the function after it swallowed the exception
        self._reported = False
        self._guard: FrameType | None = None
        self._check: InterruptCheck | None = None

    @property
    def requested(self) -> bool:
        """Whether an interrupt was requested before the call was over."""
        return self._requested

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function.

        Raises:
            RankShouldRestart: it was requested before the function ended. Its cause is the
                exception that the function raised by itself, if any. A BaseException of the
                function is raised instead.
        """
        try:
            try:
                result = self._guarded(fn, args, kwargs)
            except Exception as error:
                if self._end():
                    raise RankShouldRestart from error
                raise
            if self._raised_at and not self._continued_at:
                self._continued_at = _END
            if self._end():
                raise RankShouldRestart
            return result
        finally:
            self._end()

    def interrupt(self, meanwhile: Callable[[], object] | None = None) -> bool:
        """End the call by raising `RankShouldRestart` in its thread, and wait until it is over.

        The exception is raised again, at growing pauses, until the call is over.

        A call that has not started ends as soon as it starts; this method does not wait for it.

        Args:
            meanwhile: called before each further attempt, to free a thread that no signal wakes.

        Returns:
            False if the call was over already, so nothing was done; otherwise True.
        """
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while True:
                with self._lock:
                    if self._over:
                        return self._requested
                    self._requested = True
                    if self._guard is None:
                        return True
                    self._request(self._guard)
                if self._ended.acquire(timeout=backoff.next()):
                    self._ended.release()
                    return True
                if meanwhile is not None:
                    meanwhile()
                self._report_swallowed()
        finally:
            if self._trigger is not None:
                self._trigger.stop()
            self._report_swallowed()

    def strike(self, top: FrameType | None) -> None:
        """Raise, if an interrupt is requested and this frame allows it; the trigger calls this."""
        guard, check = self._guard, self._check
        if not self._requested or top is None or guard is None or check is None:
            return
        handled = sys.exception()
        if check.at(top, guard, handled):
            if not self._raised_at:
                self._raised_at = _place(top, guard)
            elif not self._continued_at and not check.is_ours(handled):
                self._continued_at = _place(top, guard)
            raise RankShouldRestart

    # --- in the thread that runs the function

    def _guarded(
        self, fn: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> T:
        self._check = InterruptCheck(
            self._clock, wakes=self._trigger is not None and self._trigger.wakes
        )
        if self._trigger is None:
            return self._run_without_handler(fn, args, kwargs)
        self._guard = sys._getframe()
        if self._requested:  # requested before the frame existed
            raise RankShouldRestart
        return fn(*args, **kwargs)

    def _run_without_handler(
        self, fn: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> T:
        """Call the function so that no asynchronous exception outlives the call.

        After `_leaving` is set, at most two exceptions can still arrive. One is pending; the other
        has a request that read the flag before. The last line here is the latest point at which
        they are raised.
        """
        try:
            try:
                self._guard = sys._getframe()
                if self._requested:
                    raise RankShouldRestart
                return fn(*args, **kwargs)
            finally:
                self._leaving = True
                self._await_pending()
        except RankShouldRestart:
            self._leaving = True  # still unset if the store above raised
            self._await_pending()
            raise

    def _await_pending(self) -> None:
        """Wait until a running request to interrupt has finished; raise the pending exception."""
        with self._lock:
            pass
        _check_pending()

    def _end(self) -> bool:
        """Block new requests, and wake the waiting thread; return whether there was a request."""
        with self._lock:
            if not self._over:
                self._over = True
                self._guard = self._check = None  # they refer to the function's frames
                self._ended.release()
            return self._requested

    # --- in the thread that requests

    def _report_swallowed(self) -> None:
        if self._continued_at and not self._reported:
            self._reported = True
            logger.warning(
                "the wrapped function swallowed RankShouldRestart, raised at %s, and continued"
                " to %s: an except clause that catches BaseException has to raise it again",
                self._raised_at,
                self._continued_at,
            )

    def _request(self, guard: FrameType) -> None:
        if self._trigger is not None:
            self._trigger.fire()
            return
        for _ in range(AIMS):
            top, check = sys._current_frames().get(self._thread), self._check
            if top is None or check is None:
                return
            at = top.f_lasti
            handled: object = sys._current_exceptions().get(self._thread)
            if isinstance(handled, tuple):  # Python 3.11
                handled = handled[1]
            found = handled if isinstance(handled, BaseException) else None
            if not check.at(top, guard, found) or self._leaving:
                return
            if _raise_at(self._thread, top, at):
                return


class Interrupter:
    """Creates interruptible calls in the thread that enters it; one per process at a time.

    In the main thread it handles an unused real-time signal. The same thread has to enter and leave
    it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trigger: Trigger | None = None
        self._call: GuardedCall | None = None
        self._stack = ExitStack()
        self.signum: int | None = None
        """The signal that is handled; None without one."""

    def __enter__(self) -> Interrupter:
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "the wrapped function runs in another thread than the main one: it is interrupted"
                " when it executes Python code, and calls that block are not woken"
            )
        elif (signum := free_signal()) is None:
            logger.warning(
                "the process catches or ignores the signals %d to %d: without one of them, the"
                " wrapped function is interrupted when it executes Python code, and calls that"
                " block are not woken",
                CANDIDATES[0],
                CANDIDATES[-1],
            )
        else:
            me, self.signum = threading.get_ident(), signum
            self._trigger = Trigger(
                lambda: signal.pthread_kill(me, signum), lambda: None, wakes=True
            )
            self._stack.callback(self._restore_default, signum)
            signal.signal(signum, self._handle)
            if signum in signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum}):
                self._stack.callback(signal.pthread_sigmask, signal.SIG_BLOCK, {signum})
            return self
        if sys.version_info >= (3, 13):
            events = CodeEvents.take(self._strike)
            if events is not None:
                self._trigger = Trigger(
                    lambda: events.switch(on=True), lambda: events.switch(on=False), wakes=False
                )
                self._stack.callback(events.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._call = self._trigger = self.signum = None
        self._stack.close()

    def call(self) -> GuardedCall:
        """Create the next call; the previous one must be over."""
        self._call = GuardedCall(self._trigger, self._clock)
        return self._call

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not _handles(frame):
            self._strike(frame)

    def _strike(self, frame: FrameType | None) -> None:
        call = self._call
        if call is not None:
            call.strike(frame)

    def _restore_default(self, signum: int) -> None:
        if signal.getsignal(signum) == self._handle:
            # A signal still on its way would kill the process. Ignoring a signal discards it.
            signal.signal(signum, signal.SIG_IGN)
            signal.signal(signum, signal.SIG_DFL)


def _place(frame: FrameType | None, guard: FrameType) -> str:
    """Return the place of the function; `_END` in code that the wrapper calls after it."""
    while frame is not None and frame is not guard:
        if not str(frame.f_globals.get("__name__")).startswith("regrow."):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return _END


def _handles(frame: FrameType | None) -> bool:
    """Return whether the thread is in the handler.

    On a busy machine the handler may run until the next signal. That signal must not raise there,
    because it would skip the checks for protected code. It is repeated.
    """
    while frame is not None and frame.f_code is not _HANDLER:
        frame = frame.f_back
    return frame is not None


_HANDLER = Interrupter._handle.__code__
set_async_exception = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
"""Request an exception in a thread; arguments: ident of the thread, class of the exception."""


def _check_pending() -> None:
    """Do nothing; CPython raises a pending exception when a function is entered."""


def _raise_at(thread: int, top: FrameType, at: int) -> bool:
    """Raise an exception in a thread, if the thread is at this instruction of this frame.

    The interpreter may switch threads between any two instructions of Python code. So the three
    steps are iterators in C, and one call runs all of them.
    """
    frames = map(operator.itemgetter(thread), iter(sys._current_frames, None))
    is_there = map(operator.is_, frames, (top,))
    is_at = map(operator.eq, map(operator.attrgetter("f_lasti"), (top,)), (at,))
    is_raised = map(set_async_exception, (thread,), (RankShouldRestart,))
    return all(chain(is_there, is_at, is_raised))
