"""Interrupting the thread that runs the wrapped function, wherever it stands.

Another thread asks for it; `RankShouldRestart` is then raised in the function, and ends it. What
CPython offers for that is an asynchronous exception (`PyThreadState_SetAsyncExc`), with two faults.
It waits for the interpreter: a thread in `time.sleep`, in `select`, at a lock is not woken. And it
is not aimed: asked for while the function runs, it may be raised when the function is over, in
whatever the thread does by then. No order of flags and handlers around the call helps, since the
exception may be raised in those too.

So it is done by a signal, as Ctrl-C is. A signal ends the system call that the thread waits in, and
its handler is Python code that runs in the interrupted thread and sees where it stands: it raises
if, and only if, the frame that called the function is on the interrupted stack. The call is over
when that frame is left, and from then on a late signal finds nothing to raise in.

What a handler can see, it can spare as well: code in which an exception would do harm that no
restart heals (`_spared`).

An exception can get lost: user code catches everything and goes on, or C code that called Python
has nobody to hand it to. So the request is repeated, at growing pauses, until the call is over.

Signals reach the main thread only. Where the function runs in another, or no signal is free, the
asynchronous exception is what is left. It is aimed as follows: requests are made under a lock, and
never again once the thread has begun to leave; leaving begins with a plain store, before which
nothing can be raised, and ends with waiting, under the lock, for what was asked for and has not
been raised. (Taking it back, by setting NULL, makes CPython 3.11 check for an exception at every
turn from then on, and for ever while it is traced.) Calls that block are not woken then, and what
is spared is judged from outside: the thread is asked for only if it still stands where it was
judged, which is found out without letting it run in between.
"""

from __future__ import annotations

import ctypes
import operator
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from regrow.inprocess._spared import Look, RankShouldRestart
from regrow.timer._stacks import CANDIDATES, Signals
from regrow.utils import get_logger

P = ParamSpec("P")
T = TypeVar("T")

logger = get_logger(__name__)

FIRST_PAUSE = 0.001
"""Seconds from a request to its first repetition; doubled after each."""
LONGEST_PAUSE = 0.25
"""Seconds between two requests, at most. Each may end a system call of the thread's early."""
AIMS = 20
"""Looks at a thread in one request from outside, as long as it has gone on meanwhile each time."""


class GuardedCall:
    """One call of a function that another thread can interrupt, from its making to its end.

    `run` is for the thread that made it, once; `interrupt` for any other.
    """

    def __init__(self, signum: int | None, clock: Callable[[], float]) -> None:
        self._signum = signum
        self._clock = clock
        self._thread = threading.get_ident()
        self._lock = threading.Lock()  # no request is made once the call is over
        self._ended = threading.Lock()  # held until then
        self._ended.acquire()
        self._over = False
        self._requested = False
        self._leaving = False
        self._guard: FrameType | None = None
        self._look: Look | None = None

    @property
    def requested(self) -> bool:
        """Whether an interrupt was asked for before the call was over."""
        return self._requested

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function.

        Raises:
            RankShouldRestart: it was asked for before the function ended. What the function raised
                by itself meanwhile is the cause of it, but for a BaseException, which is raised
                in its stead.
        """
        try:
            try:
                result = self._guarded(fn, args, kwargs)
            except Exception as error:
                if self._end():
                    raise RankShouldRestart from error
                raise
            if self._end():
                raise RankShouldRestart
            return result
        finally:
            self._end()

    def interrupt(self, meanwhile: Callable[[], object] | None = None) -> bool:
        """Have the call end by `RankShouldRestart`, and wait until it is over.

        One that does not run yet will end as soon as it does, and is not waited for.

        Args:
            meanwhile: called before each repetition: what may free a thread that no signal does.

        Returns:
            False: it was over before, and has ended as it would have without.
        """
        pause = FIRST_PAUSE
        while True:
            with self._lock:
                if self._over:
                    return self._requested
                self._requested = True
                if self._guard is None:
                    return True
                self._request(self._guard)
            if self._ended.acquire(timeout=pause):
                self._ended.release()
                return True
            if meanwhile is not None:
                meanwhile()
            pause = min(2 * pause, LONGEST_PAUSE)

    def strike(self, top: FrameType | None) -> None:
        """Raise, if it is asked for and may be done in this frame; the signal's handler."""
        guard, look = self._guard, self._look
        if not self._requested or top is None or guard is None or look is None:
            return
        if look.at(top, guard, sys.exception()):
            raise RankShouldRestart

    # --- in the thread that runs the function

    def _guarded(
        self, fn: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> T:
        self._look = Look(self._clock, wakes=self._signum is not None)
        if self._signum is None:
            return self._leave_behind(fn, args, kwargs)
        self._guard = sys._getframe()
        if self._requested:  # before there was a frame to raise in
            raise RankShouldRestart
        return fn(*args, **kwargs)

    def _leave_behind(
        self, fn: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> T:
        """Call the function so that no asynchronous exception outlives it.

        When `_leaving` is set, at most two can come yet: one that is pending, and one whose
        request had seen it unset. The last of them is raised in the last line here, at the latest.
        """
        try:
            try:
                self._guard = sys._getframe()
                if self._requested:
                    raise RankShouldRestart
                return fn(*args, **kwargs)
            finally:
                self._leaving = True
                self._let_it_come()
        except RankShouldRestart:
            self._leaving = True  # unset yet if it was raised in the very store above
            self._let_it_come()
            raise

    def _let_it_come(self) -> None:
        """Wait for a request that is being made; what is pending is then raised."""
        with self._lock:
            pass
        _look_up()

    def _end(self) -> bool:
        """Let no more requests be made, and the one that waits go on; whether there was one."""
        with self._lock:
            if not self._over:
                self._over = True
                self._guard = self._look = None  # they hold the function's frames
                self._ended.release()
            return self._requested

    # --- in the thread that asks

    def _request(self, guard: FrameType) -> None:
        if self._signum is not None:
            signal.pthread_kill(self._thread, self._signum)
            return
        for _ in range(AIMS):
            top, look = sys._current_frames().get(self._thread), self._look
            if top is None or look is None:
                return
            at = top.f_lasti
            handled: object = sys._current_exceptions().get(self._thread)
            if isinstance(handled, tuple):  # Python 3.11
                handled = handled[1]
            found = handled if isinstance(handled, BaseException) else None
            if not look.at(top, guard, found) or self._leaving:
                return
            if _raise_at(self._thread, top, at):
                return


class Interrupter:
    """Makes calls that can be interrupted, in the thread that enters it; one a process at a time.

    In the main thread it handles one of the real-time signals that are nobody's; the thread it is
    left in has to be the one it was entered in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signum: int | None = None
        self._call: GuardedCall | None = None
        self._was_blocked = False

    def __enter__(self) -> Interrupter:
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "the wrapped function runs in another thread than the main one: it is interrupted"
                " when it executes Python code, and calls that block are not woken"
            )
            return self
        self._signum = _free_signal()
        if self._signum is None:
            logger.warning(
                "the process catches or ignores the signals %d to %d: without one of them, the"
                " wrapped function is interrupted when it executes Python code, and calls that"
                " block are not woken",
                CANDIDATES[0],
                CANDIDATES[-1],
            )
            return self
        signal.signal(self._signum, self._handle)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._signum})
        self._was_blocked = self._signum in before
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signum, self._call = self._signum, None
        if signum is None:
            return
        self._signum = None
        if signal.getsignal(signum) == self._handle:
            # One that is still on its way would kill; ignoring a signal discards it.
            signal.signal(signum, signal.SIG_IGN)
            signal.signal(signum, signal.SIG_DFL)
        if self._was_blocked:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def call(self) -> GuardedCall:
        """Make the next call; the one before has to be over."""
        self._call = GuardedCall(self._signum, self._clock)
        return self._call

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        call = self._call
        if call is not None and not _handles(frame):
            call.strike(frame)


def _handles(frame: FrameType | None) -> bool:
    """Whether a thread stands in the handler, which on a busy machine can last until the next
    signal: that one is not to raise there, past all that is spared below. It is repeated."""
    while frame is not None and frame.f_code is not _HANDLER:
        frame = frame.f_back
    return frame is not None


def _free_signal() -> int | None:
    """A real-time signal that the process neither catches nor ignores, also not in native code.

    The last one, since processes that can be asked for their stacks take the first.
    """
    with open("/proc/self/status", "rb") as status:
        signals = Signals.of(status.read())
    taken = signals.caught | signals.ignored
    return next((n for n in reversed(CANDIDATES) if not taken >> n - 1 & 1), None)


_HANDLER = Interrupter._handle.__code__
_set_async_exception = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


def _look_up() -> None:
    """Do nothing; CPython raises what is pending when a function is entered."""


def _raise_at(thread: int, top: FrameType, at: int) -> bool:
    """Have an exception raised in a thread, if it stands at this instruction of this frame.

    The interpreter may turn to another thread between any two instructions of Python code, so the
    three steps are those of iterators in C, and one call takes them all.
    """
    frames = map(operator.itemgetter(thread), iter(sys._current_frames, None))
    is_there = map(operator.is_, frames, (top,))
    is_at = map(operator.eq, map(operator.attrgetter("f_lasti"), (top,)), (at,))
    is_told = map(_set_async_exception, (thread,), (RankShouldRestart,))
    return all(chain(is_there, is_at, is_told))
