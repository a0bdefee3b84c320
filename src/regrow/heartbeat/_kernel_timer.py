"""A timer of the kernel's that signals this process, whatever its threads do.

No Python thread runs while native code holds the interpreter's lock, and no thread at all runs in a
process that is stopped. A POSIX timer needs neither: the kernel sends the signal itself. SIGKILL
ends a stopped process, too. There is no helper process to start, to watch and to leave behind.

A forked child has no timers of its parent's, and `exec` ends them. The standard library has no call
for them, so it is made by ctypes.

What the kernel does not do: a signal that is not caught does nothing to the first process of a PID
namespace (PID 1 of a container that runs the training without an init), SIGKILL included, if it
comes from within. There another signal stands in, whose handler is C's own `_exit`. It runs where
Python does not, but not in a process that is stopped, which for PID 1 only somebody outside of the
container can do.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from functools import cache

STAND_IN = 60
"""A real-time signal, and the exit code of a PID 1 that it ends. Other runtimes take theirs from
the ends of the range, and `timer._stacks` has 44 to 55."""

_SIGEV_SIGNAL = 0


class _Event(ctypes.Structure):
    """`struct sigevent`: 64 bytes on every 64-bit Linux."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _Spec(ctypes.Structure):
    """`struct itimerspec`: the interval, which stays zero, and the time left."""

    _fields_ = [
        ("interval", ctypes.c_long * 2),
        ("value", ctypes.c_long * 2),
    ]


class KernelTimer:
    """Sends this process one signal, unless it is told otherwise in time.

    Args:
        signum: the signal.

    Raises:
        OSError: the kernel has no timer left for this user (`ulimit -i`).
    """

    __slots__ = ("_id", "_pid")

    def __init__(self, signum: int) -> None:
        event = _Event(signo=signum, notify=_SIGEV_SIGNAL)
        self._id = ctypes.c_void_p()
        self._pid = os.getpid()
        _call("timer_create", time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id))

    def set(self, seconds: float) -> None:
        """Send the signal in so many seconds, instead of when it was to be sent before.

        In a forked child, which has no such timer, nothing happens.

        Args:
            seconds: from now; zero or less: at once.
        """
        if os.getpid() != self._pid:
            return
        left = max(math.ceil(seconds * 1e9), 1)  # to the kernel, zero is never
        seconds_left, nanoseconds = divmod(left, 10**9)
        spec = _Spec(value=(ctypes.c_long * 2)(seconds_left, nanoseconds))
        _call("timer_settime", self._id, 0, ctypes.byref(spec), None)

    def close(self) -> None:
        """Give the timer back; it sends nothing any more."""
        if os.getpid() == self._pid:
            self._pid = 0
            _call("timer_delete", self._id)


def fatal_signal() -> int:
    """Return a signal by which a timer ends this process for certain."""
    if os.getpid() != 1:
        return signal.SIGKILL
    library = _library()
    library.signal(STAND_IN, ctypes.cast(library._exit, ctypes.c_void_p))
    return STAND_IN


def _call(name: str, *arguments: object) -> None:
    if getattr(_library(), name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


@cache
def _library() -> ctypes.CDLL:
    for path in (None, "librt.so.1"):  # glibc before 2.34 has them in a library of their own
        library = ctypes.CDLL(path, use_errno=True)
        if hasattr(library, "timer_create"):
            return library
    raise OSError("the C library has no timer_create")
