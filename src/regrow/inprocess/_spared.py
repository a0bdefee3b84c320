"""What ends the wrapped function, and the code that is spared by it.

Where an interrupt finds the function is left to chance. Three kinds of code are given time, because
an exception in them does harm that no restart heals: an import, which could not be repeated
(`import torch` cannot); `__del__` and callbacks of the collector, which lose the exception and the
rest of their own work; and code that handles this very exception, a `finally` that closes a file:
one that is interrupted once should be let clean up. And a function that is just taking or releasing
a lock is let finish, as the lock would never be released (`Condition.__enter__`, and with it
queues, are written in Python and have that gap, as has logging with a lock of all its loggers, for
which every other thread would wait for ever). Code like that of the user's own has the risk that it
has with Ctrl-C.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType

PATIENCE = 10.0
"""Seconds for what should not be interrupted: imports, `__del__`, handling the exception."""
LOOKS = 5
"""Looks that find a thread in the same call of a function that takes or releases something, and no
farther than before, after which it is not passing by but waits there, and is interrupted. On a busy
machine any number of looks may find one that passes by, but each of these a step farther."""

_PASSING = {"__enter__", "__exit__", "acquire", "release", "handle"}
_PASSING |= {"_acquireLock", "_releaseLock", "_clear_cache"}  # of logging, until Python 3.12
_IMPORT = "<frozen importlib._bootstrap>"
_WEAK = {
    code
    for made in (weakref.WeakSet.__init__, weakref.WeakValueDictionary.__init__)
    for code in made.__code__.co_consts
    if isinstance(code, CodeType)
}
"""What weak collections do when the collector has taken one of theirs."""


class RankShouldRestart(BaseException):
    """Raised in the wrapped function, to end it so that it can be called again.

    Whoever catches it should clean up and raise it again; one that is swallowed comes back.
    """

    def __init__(self, message: str = "another rank or this one has failed") -> None:
        super().__init__(message)


class Look:
    """Judges whether a thread may be interrupted where it stands; remembers earlier looks."""

    __slots__ = ("_clock", "_farthest", "_held_since", "_looks", "_outer", "_passing", "_wakes")

    def __init__(self, clock: Callable[[], float], wakes: bool) -> None:
        """Make one.

        Args:
            clock: seconds.
            wakes: whether an exception ends a call that blocks. One that does not is raised when
                the call is over, which may have taken a lock.
        """
        self._clock = clock
        self._wakes = wakes
        self._outer = sys.exception()  # what the caller handles is none of the function's
        self._held_since: float | None = None
        self._passing: FrameType | None = None
        self._farthest = 0  # instruction of that frame
        self._looks = 0

    def at(self, top: FrameType, guard: FrameType, handled: BaseException | None) -> bool:
        """Whether to raise now.

        Args:
            top: the innermost frame of the thread.
            guard: the frame that called the function.
            handled: the exception that the thread handles, if any.
        """
        held = self._is_ours(handled)
        collector = _WEAK | {getattr(each, "__code__", None) for each in gc.callbacks}
        frame: FrameType | None = top
        while frame is not None and frame is not guard:
            code = frame.f_code
            held = held or code.co_name == "__del__" or code.co_filename == _IMPORT
            held = held or code in collector
            frame = frame.f_back
        if frame is None:
            return False
        return self._patience_is_over() if held else self._waits(top)

    def _is_ours(self, handled: BaseException | None) -> bool:
        while handled is not None and handled is not self._outer:
            if isinstance(handled, RankShouldRestart):
                return True
            handled = handled.__context__
        return False

    def _patience_is_over(self) -> bool:
        now = self._clock()
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < PATIENCE:
            return False
        self._held_since = None
        return True

    def _waits(self, top: FrameType) -> bool:
        at = top.f_lasti
        passes = top.f_code.co_name in _PASSING
        if passes and top is self._passing and at == self._farthest and not self._wakes:
            return self._patience_is_over()
        self._held_since = None
        if not passes:
            return True
        if top is self._passing and at <= self._farthest:
            self._looks += 1
            return self._looks >= LOOKS
        self._passing, self._farthest, self._looks = top, at, 1
        return False
