"""Triggers of the interrupt, and the code of the wrapped function that it must not reach.

An interrupt finds the function at an arbitrary point. Some code gets time to finish, because an
exception in it does harm that no restart repairs:

- An import: some modules cannot be imported again (`import torch`).
- `__del__` and callbacks of the garbage collector: they lose the exception and the rest of their
  work.
- Code that handles this exception, such as a `finally` that closes a file: it was interrupted once
  and may clean up.
- A function that is about to take or release a lock: the lock would never be released.
  `Condition.__enter__` is written in Python and has this gap. Queues use it. logging has the gap
  for a lock that all its loggers share; if it is never released, all other threads wait without
  end.

User code with the same gap has the same risk as with Ctrl-C.

The handler of SIGTERM is not interrupted at all. It may still save a checkpoint after other ranks
have ended. If the agent or the monitor has sent the signal, it kills the process after a grace. If
another process has, the time-outs of the rank and of the barrier apply, as to a function that
swallows the exception.

**Triggers.** A trigger calls a handler in the thread to be interrupted. In the main thread this is
a signal's handler, and the signal ends a call that blocks.

Other threads handle no signals. The alternative is an asynchronous exception. Another thread raises
it (`PyThreadState_SetAsyncExc`) at a chosen moment: the target thread is at one of the
interpreter's checks and waits for the interpreter's lock. The other thread examines it there, and
the target gets the exception when it continues. Up to Python 3.12 the exception is raised at that
same check. From Python 3.13 on, the check reads its pending work before it waits for the lock. So
the exception is raised at the next check, where the thread was not examined. That may be in
`Condition.__enter__`, after it takes the lock and before it returns, and the lock is never
released.

So from Python 3.13 on, other threads have a handler too. Python has events for debuggers and
profilers (`sys.monitoring`). Their callbacks run in the thread of the event and may raise there.
Three events occur exactly at a check, where a signal's handler may run: the start of a function,
the resumption of a generator, and the jump back at the end of a loop's turn. They are enabled while
an interrupt is requested. Each then costs 0.3 us, in the other threads of the process as well.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import NamedTuple

from regrow.inprocess.exception import RankShouldRestart
from regrow.timer.stacks.answering import CANDIDATES, Signals
from regrow.utils import get_context, is_a

HOLD_LIMIT = 10.0
"""Seconds for code that should not be interrupted: imports, `__del__`, handling the exception."""
LOOKS = 5
"""Checks after which a function that takes or releases a lock counts as blocked.

The thread has to be in the same call of that function at each check, and no farther than before. It
is then interrupted. On a busy machine, any number of checks may find a thread that is not blocked.
Such a thread has moved on between two checks.
"""

PASSING = {"__enter__", "__exit__", "acquire", "release", "handle"}
PASSING |= {"_acquireLock", "_releaseLock", "_clear_cache"}  # in logging, until Python 3.12
"""Names of functions that take or release a lock."""
_IMPORT = "<frozen importlib._bootstrap>"
_WEAK = {
    code
    for made in (weakref.WeakSet.__init__, weakref.WeakValueDictionary.__init__)
    for code in made.__code__.co_consts
    if isinstance(code, CodeType)
}
"""Code that weak collections run after the collector has freed one of their objects."""


class InterruptCheck:
    """Decides whether a thread may be interrupted where it is; remembers earlier checks."""

    __slots__ = ("_clock", "_farthest", "_held_since", "_looks", "_outer", "_passing", "_wakes")

    def __init__(self, clock: Callable[[], float], wakes: bool) -> None:
        """Start without an earlier check.

        Args:
            clock: time in seconds.
            wakes: whether an exception ends a call that blocks. Otherwise it is raised after the
                call, which may have taken a lock.
        """
        self._clock = clock
        self._wakes = wakes
        self._outer = sys.exception()  # the caller handles it, not the function
        self._held_since: float | None = None
        self._passing: FrameType | None = None
        self._farthest = 0  # instruction in that frame
        self._looks = 0

    def at(self, top: FrameType, guard: FrameType, handled: BaseException | None) -> bool:
        """Return whether to raise now.

        Args:
            top: the innermost frame of the thread.
            guard: the frame that called the function.
            handled: the exception that the thread handles; None without one.
        """
        held = self.is_ours(handled)
        collector = _WEAK | {getattr(each, "__code__", None) for each in gc.callbacks}
        handler = _code_of(signal.getsignal(signal.SIGTERM))
        frame: FrameType | None = top
        while frame is not None and frame is not guard:
            code = frame.f_code
            if code is handler:
                return False
            held = held or code.co_name == "__del__" or code.co_filename == _IMPORT
            held = held or code in collector
            frame = frame.f_back
        if frame is None:
            return False
        return self._has_waited_enough() if held else self._waits(top)

    def is_ours(self, handled: BaseException | None) -> bool:
        """Return whether the thread handles the exception that ends the function."""
        seen: set[int] = set()  # the user's code can build a cycle of contexts
        while handled is not None and handled is not self._outer and id(handled) not in seen:
            if is_a(handled, RankShouldRestart):
                return True
            seen.add(id(handled))
            handled = get_context(handled)
        return False

    def _has_waited_enough(self) -> bool:
        now = self._clock()
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < HOLD_LIMIT:
            return False
        self._held_since = None
        return True

    def _waits(self, top: FrameType) -> bool:
        at = top.f_lasti
        passes = top.f_code.co_name in PASSING
        if passes and top is self._passing and at == self._farthest and not self._wakes:
            return self._has_waited_enough()
        self._held_since = None
        if not passes:
            return True
        if top is self._passing and at <= self._farthest:
            self._looks += 1
            return self._looks >= LOOKS
        self._passing, self._farthest, self._looks = top, at, 1
        return False


def _code_of(handler: object) -> object:
    """Return the code of a signal's handler; None if it has none in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


class Trigger(NamedTuple):
    """Calls `GuardedCall.strike` in the thread that runs the function."""

    fire: Callable[[], None]
    """Have `strike` called once, soon."""
    stop: Callable[[], None]
    """Stop further calls of `strike`."""
    wakes: bool
    """Whether the trigger ends a call that blocks."""


def free_signal() -> int | None:
    """Return a real-time signal that the process neither catches nor ignores, native code included.

    It is the last free one, because processes that answer requests for stacks use the first.
    """
    with open("/proc/self/status", "rb") as status:
        signals = Signals.of(status.read())
    taken = signals.caught | signals.ignored
    return next((n for n in reversed(CANDIDATES) if not taken >> n - 1 & 1), None)


if sys.version_info >= (3, 13):
    from sys import monitoring

    TOOLS = (4, 3, 5, 2, 1, 0)
    """Identifiers of tools; those without a predefined meaning come first."""
    EVENTS = (monitoring.events.PY_START, monitoring.events.PY_RESUME, monitoring.events.JUMP)

    class CodeEvents:
        """Calls a function in the thread that creates this, when another thread fires it.

        Args:
            tool: an identifier that no other tool has.
            strike: called with the current frame of the thread; its exceptions are raised there.
        """

        def __init__(self, tool: int, strike: Callable[[FrameType], None]) -> None:
            self._tool = tool
            self._strike = strike
            self._thread = threading.get_ident()
            self._fired = False
            self._open = True
            self._lock = threading.Lock()  # the identifier is unused after close()
            monitoring.use_tool_id(tool, "regrow")
            for event in EVENTS:
                monitoring.register_callback(tool, event, self._at)

        @classmethod
        def take(cls, strike: Callable[[FrameType], None]) -> CodeEvents | None:
            """Create the events; return None if other tools have all identifiers."""
            free = (tool for tool in TOOLS if monitoring.get_tool(tool) is None)
            tool = next(free, None)
            return None if tool is None else cls(tool, strike)

        def switch(self, *, on: bool) -> None:
            """Have the function called once, soon; or stop further calls of it."""
            with self._lock:
                if self._open:
                    self._fired = on
                    monitoring.set_events(self._tool, sum(EVENTS) if on else 0)

        def close(self) -> None:
            """Release the identifier."""
            self.switch(on=False)
            with self._lock:
                self._open = False
            for event in EVENTS:
                monitoring.register_callback(self._tool, event, None)
            monitoring.free_tool_id(self._tool)

        def _at(self, code: CodeType, at: int, to: int = 0) -> None:
            """Call the function, except at a jump forward, where no signal's handler runs."""
            if self._fired and to <= at and threading.get_ident() == self._thread:
                self._fired = False
                self._strike(sys._getframe(1))
