"""Ends a worker after a failed heartbeat, even if no Python code can run in it.

`sys.exit` in a thread ends only the thread. `os._exit` needs the GIL, which native code may hold
without end. A stopped process runs no code. So the end has three steps, and each step needs less of
the process than the one before:

1. `die`, in the heartbeat's thread, writes the log, all buffered output, and the error file that
   the agent reads. Each write has a thread of its own, and `die` waits `REPORT_S` for all of
   them. Any write may hang like the training: a full pipe, a dead file system, a lock of the main
   thread. Then `die` calls C's `abort`, which neither a handler nor a mask prevents.
2. If Python does not run, the kernel sends SIGABRT. `faulthandler`, if enabled (as `record` does),
   still prints the stacks of all threads.
3. The kernel sends SIGKILL, which also ends a process that is stopped or ignores SIGABRT.

The signals of steps 2 and 3 come from POSIX timers, which need no thread and no helper process.
Each successful beat arms the timers again (`FailurePolicy.arm`), so they are armed before
they are needed. An agent acts earlier, and first reads the stacks. A forked child does not inherit
timers, and `exec` removes them. The standard library has no call for these timers, so this module
uses ctypes.

A training that runs as PID 1 of a PID namespace (a container without an init) is a special case.
The kernel drops every signal from within the namespace that PID 1 does not catch, SIGKILL included.
So its last timer sends another signal, whose handler is C's `_exit`. This works where Python does
not run, but not in a stopped process.

An agent stops its workers because another worker failed or the job ends. It gives each worker a
grace period to save. During this period, the loss of other workers does not end the process
(`is_being_stopped`). Agents and workers may detect a loss at the same moment, so a worker first
gives the agent a moment to begin.

If a whole job is suspended, for example by `scontrol suspend`, its heartbeats are overdue when it
resumes, and it ends.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from regrow._progress import stopping
from regrow.heartbeat.terms import KILL_S
from regrow.utils import get_logger, start_thread
from regrow.workers.errors import get_error_handler

if TYPE_CHECKING:
    from regrow.heartbeat.failure import HeartbeatFailure

logger = get_logger(__name__)

STOP_NOTICE_S = 0.25
"""Seconds that the agent has to begin a stop of the worker, before the worker ends itself."""
REPORT_S = 0.9
"""Seconds that an ending process may spend on reporting the reason."""
ABORT_S = 1.0
"""The kernel sends SIGABRT this many seconds after the deadline, if the process still runs."""

_MOST_FRAMES = 40
PID_1_SIGNAL = 60
"""A real-time signal; also the exit code of a PID 1 that the signal ends.

Other runtimes use signals at the ends of the range, and `timer.stacks` uses 44 to 55.
"""

# C structures of 64-bit Linux, as `struct` packs them.
_SIGEVENT = struct.Struct("@Pii48x")  # value, signal, kind of notification (0: the signal)
_ITIMERSPEC = struct.Struct("@4l")  # interval and remaining time, in seconds and nanoseconds


def is_being_stopped() -> bool:
    """Return whether the agent is stopping this worker, so that it keeps its grace period.

    An agent may detect the loss of another host at the same moment as the workers. So it gets
    `STOP_NOTICE_S` to set a byte in shared memory. This function polls the byte, because a write to
    it wakes no process.
    """
    until = time.monotonic() + STOP_NOTICE_S
    while (stopped := stopping()) is False and time.monotonic() < until:
        time.sleep(0.01)
    return bool(stopped)


def die(failure: HeartbeatFailure) -> NoReturn:
    """End this process, from any thread, and report the reason as far as possible.

    The process ends by SIGABRT after `REPORT_S` at most. If SIGABRT has no effect, it ends by
    SIGKILL within `KILL_S` seconds.

    Args:
        failure: the reason. The log gets its text. The error file that the agent reads
            (`TORCHELASTIC_ERROR_FILE`) gets the text and the stack of the main thread.
    """
    failed = time.monotonic()
    for timer, more in kernel_timers(warn=False):
        with suppress(OSError):
            timer.set(max(more, REPORT_S + 0.5) - STOP_NOTICE_S)
    _all_within(
        REPORT_S,
        lambda: _write_error_file(failure, failed),
        lambda: _log(failure),
        lambda: sys.stdout.flush(),
        lambda: sys.stderr.flush(),
    )
    os.abort()


def kernel_timers(*, warn: bool) -> list[tuple[KernelTimer, float]]:
    """Create the kernel timers.

    Args:
        warn: whether to log that the kernel has no timers left.

    Returns:
        Each timer with its delay after the deadline, in seconds; empty if there are none.
    """
    try:
        return [(KernelTimer(signal.SIGABRT), ABORT_S), (KernelTimer(fatal_signal()), KILL_S)]
    except (OSError, ImportError) as error:
        if warn:
            logger.warning(
                "heartbeat: the kernel will not end process %d if native code holds the"
                " interpreter's lock or the process is stopped: %s. If `ulimit -i` is low, raise"
                " it",
                os.getpid(),
                error,
            )
        return []


def _all_within(seconds: float, *calls: Callable[[], object]) -> None:
    """Run all calls at the same time, and wait at most `seconds` for them."""
    deadline = time.monotonic() + seconds
    threads = []
    for call in calls:
        try:
            threads.append(start_thread(partial(_quietly, call), "regrow-heartbeat-end"))
        except RuntimeError:  # too many threads exist, or the interpreter is about to end
            _quietly(call)  # if the call hangs, the kernel's timers end the process
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _quietly(call: Callable[[], object]) -> None:
    with suppress(Exception):  # the process ends in any case
        call()


def _log(failure: HeartbeatFailure) -> None:
    logger.critical("%s; this process (%d) ends", failure, os.getpid())
    logging.shutdown()  # flushes every handler


def _write_error_file(failure: HeartbeatFailure, failed: float) -> None:
    handler = get_error_handler()
    path = handler._get_error_file_path()
    if path:
        handler._write_json(path, _error(failure, failed))


def _error(failure: HeartbeatFailure, failed: float) -> Mapping[str, Any]:
    """The content of an error file, in the format of `record`.

    Args:
        failure: the reason.
        failed: time at which the failure was detected, in seconds of the monotonic clock.
    """
    text = f"{type(failure).__name__}: {failure}"
    extra = {
        "heartbeat": {
            "kind": failure.kind,
            "ranks": failure.ranks,
            "count": failure.count,
            "beat": failure.beat,
            "seconds": failure.seconds,
        },
        "py_callstack": "\n".join([text, *_main_thread()]),
        "timestamp": str(int(time.time() - (time.monotonic() - failed))),
        "monotonic": failed,
    }
    return {"message": {"message": text, "extraInfo": extra}}


def _main_thread() -> list[str]:
    """The stack of the main thread, without source lines, because reading a file may hang."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        frame = frame.f_back
    return ["Main thread (most recent call first):", *lines] if lines else []


class KernelTimer:
    """A kernel timer that sends this process one signal, unless it is set again or closed first.

    Args:
        signum: the signal.

    Raises:
        OSError: the kernel has no timer left for this user (`ulimit -i`).
    """

    __slots__ = ("_id", "_pid")

    def __init__(self, signum: int) -> None:
        self._id = ctypes.c_void_p()
        self._pid = os.getpid()
        event = _SIGEVENT.pack(0, signum, 0)
        _call("timer_create", time.CLOCK_MONOTONIC, event, ctypes.byref(self._id))

    def set(self, seconds: float) -> None:
        """Send the signal in `seconds`, instead of at the time set before.

        In a forked child, which has no such timer, the call does nothing.

        Args:
            seconds: from now; zero or less: at once.
        """
        if os.getpid() != self._pid:
            return
        left = max(math.ceil(seconds * 1e9), 1)  # the kernel treats zero as never
        _call("timer_settime", self._id, 0, _ITIMERSPEC.pack(0, 0, *divmod(left, 10**9)), None)

    def close(self) -> None:
        """Delete the timer."""
        if os.getpid() == self._pid:
            self._pid = 0
            _call("timer_delete", self._id)


def fatal_signal() -> int:
    """Return a signal with which a timer reliably ends this process."""
    if os.getpid() != 1:
        return signal.SIGKILL
    library = _library()
    library.signal(PID_1_SIGNAL, ctypes.cast(library._exit, ctypes.c_void_p))
    return PID_1_SIGNAL


def _call(name: str, *arguments: object) -> None:
    if getattr(_library(), name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


@cache
def _library() -> ctypes.CDLL:
    for path in (None, "librt.so.1"):  # glibc before 2.34 has the timer calls in a separate library
        library = ctypes.CDLL(path, use_errno=True)
        if hasattr(library, "timer_create"):
            return library
    raise OSError("the C library has no timer_create")
