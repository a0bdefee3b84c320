"""The thread that looks whether the main thread makes progress, and has it restarted if not.

Automatic progress is asked for by a pending call, which the interpreter makes when the main thread
next executes Python code. It is `sem_post` itself: a function in Python there could be interrupted
by the restart, whose exception would be lost in it. The thread looks at each interval whether the
semaphore was posted, or earlier when something may become stale; it sleeps while nothing is
judged.

What this cannot see is a thread that holds the interpreter's lock: nothing in Python runs then,
this thread included. That, and a stopped process, is seen from outside: the monitor of the host is
told until when this rank may go on, again with all progress. What this thread has reported the
monitor need not report once more.

Pending calls are the main thread's. A function that runs in another one is judged by its pings.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from regrow.inprocess._deadlines import NOT_JUDGED
from regrow.inprocess._hard_watch import HardWatch
from regrow.inprocess._link import LinkError
from regrow.inprocess._progress import Progress, Which
from regrow.utils import get_logger

logger = get_logger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_SEM_T: Final = 32
"""Bytes of a `sem_t`, of the largest there is."""
_ran = ctypes.create_string_buffer(_SEM_T)
"""The semaphore; never freed, since a pending call may come late."""
_libc.sem_init(_ran, 0, 0)
_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)


class SoftWatch:
    """Watches one rank's progress in its own process; a `Watch`.

    Args:
        allowed: the soft time-out, seconds.
        interval: between two looks, seconds.
        report: called with the iteration and what was found, once an iteration.
        look: called at each look, for what else is to be seen from time to time.
        outside: told until when this rank may go on; closed with this.
        hard: the hard time-out, seconds; what `outside` is told is made of it.
        clock: seconds; monotonic.
    """

    def __init__(
        self,
        allowed: float,
        interval: float,
        report: Callable[[int, str], None],
        look: Callable[[], None] = lambda: None,
        outside: HardWatch | None = None,
        hard: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = Progress(allowed, hard)
        self._interval = interval
        self._report = report
        self._look = look
        self._outside = outside
        self._clock = clock
        self._runs_in = threading.get_ident()
        self._automatic = threading.current_thread() is threading.main_thread()
        self._asked = False
        self._iteration = 0
        self._told = (-1, False)
        self._closed = False
        self._begun = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="regrow-progress", daemon=True)
        self._thread.start()

    def begin(self, iteration: int) -> None:
        """See `Watch.begin`."""
        self._iteration = iteration
        self._progress.begin(self._clock())
        self._changed()
        self._begun.set()

    def recover(self) -> None:
        """See `Watch.recover`."""
        self._progress.recover(self._clock())
        self._changed()
        self._begun.set()

    def rest(self) -> None:
        """See `Watch.rest`."""
        self._progress.rest()
        self._changed()

    def ping(self) -> None:
        """See `Watch.ping`."""
        self._progress.ping(self._clock())

    @contextmanager
    def unjudged(self) -> Iterator[None]:
        """See `Watch.unjudged`."""
        self._progress.suspend()
        self._changed()
        try:
            yield
        finally:
            self._progress.resume(self._clock())
            self._changed()

    def close(self) -> None:
        """See `Watch.close`."""
        self._progress.rest()
        self._end.set()
        self._begun.set()
        self._thread.join()
        if self._outside is not None:
            self._outside.close()

    def _run(self) -> None:
        while True:
            self._begun.wait()
            if self._end.is_set():
                return
            self._begun.clear()
            self._keep()
            self._ask()
            while self._progress.judged or self._progress.recovering:
                due = self._progress.due
                told = self._told == self._span
                left = self._interval if due is None or told else due - self._clock()
                if self._end.wait(max(min(self._interval, left), 0.0)):
                    return
                self._tick()

    def _tick(self) -> None:
        if not self._automatic or _libc.sem_trywait(_ran) == 0:
            self._progress.ran(self._clock())
            self._asked = False
        self._ask()
        self._keep()
        self._look()
        span = iteration, recovering = self._span
        which = self._progress.stale(self._clock())
        if which is None or self._told == span:
            return
        self._told = span
        message = self._message(which, "the restart" if recovering else "the function")
        if recovering:
            return
        try:
            self._report(iteration, message)
        except LinkError as error:
            logger.warning("a soft time-out cannot be told to the other ranks: %s", error)
        self._keep()

    def _changed(self) -> None:
        """Tell the monitor, from the thread that may be in native code from now on."""
        if self._outside is not None:
            self._outside.change(self._progress.ends, self._judged_in)

    def _keep(self) -> None:
        """Tell the monitor of progress."""
        outside, change = self._outside, -1
        while outside is not None and change != outside.changes:  # what was said to none is lost
            change = outside.changes  # before that is looked at which it is about
            until, iteration = self._progress.ends, self._judged_in
            outside.keep(change, until, iteration)
            outside.say(change, until, iteration)

    def _ask(self) -> None:
        if self._automatic and not self._asked:
            self._asked = ctypes.pythonapi.Py_AddPendingCall(_post, _ran) == 0

    @property
    def _judged_in(self) -> int:
        """Which iteration the monitor has to see to the end of, at the soft time-out."""
        told = self._told == (self._iteration, False)
        return self._iteration if self._progress.judged and not told else NOT_JUDGED

    @property
    def _span(self) -> tuple[int, bool]:
        """What is told of once: the iteration, and whether it is over."""
        return self._iteration, self._progress.recovering

    def _message(self, which: Which, what: str) -> str:
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        frame = frames.pop(self._runs_in, None)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        logger.error(
            "no %s progress for %g s; %s stands here:\n%s%s",
            which,
            self._progress.allowed,
            what,
            "".join(stack.format()),
            "".join(
                f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(other))}"
                for thread, other in frames.items()
            ),
        )
        at = f", at {stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
        return f"no {which} progress for {self._progress.allowed:g} s{at}"
