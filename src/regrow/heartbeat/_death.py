"""Certain death: a worker whose heartbeat says so ends, whatever it is doing.

`sys.exit` in a thread ends the thread. `os._exit` needs the interpreter's lock, as any code in
Python does, and native code may hold that for good. A process that is stopped does nothing at all.
So death is in three steps, each of which needs less of the process than the one before:

1. `die`, in the thread that beats: the log, what is buffered, and the error file by which the
   agent learns the reason, each in a thread of its own that is waited for `LAST_WORDS_S` and no
   longer, as any of them may hang just like the training does (a full pipe, a dead file system, a
   lock that the main thread holds). Then C's `abort`, which neither a handler nor a mask prevents.
2. Where Python does not run, SIGABRT from a timer of the kernel's: `faulthandler`, where it is
   enabled (as `record` does), still says where every thread stands.
3. SIGKILL from another, which ends a process that is stopped, or blocks or ignores the first.

The timers of 2 and 3 are armed anew by every beat that comes to pass (`Deadline`), so that they are
there before they are needed. An agent is faster than that, and looks at the stacks first
(`_agent_timer`). A forked child has none of it, so a data loader's worker is not meant.

An agent that has begun to stop its workers, as another one failed or the job is to end, gives each
the grace to save what it has. That the others have gone by then is no reason to die (`is_spared`).
Since agents and workers may hear of a loss at the same moment, the agent has a moment to begin.

A job that is suspended as a whole, by `scontrol suspend` or the like, is over its bound when it
goes on, and ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from signal import SIGABRT
from typing import TYPE_CHECKING, Any, NoReturn

from regrow._progress import stopping
from regrow.heartbeat._agent_timer import AgentTimer
from regrow.heartbeat._kernel_timer import KernelTimer, fatal_signal
from regrow.heartbeat._terms import KILL_S
from regrow.utils import get_logger
from regrow.workers.errors import get_error_handler

if TYPE_CHECKING:
    from regrow.heartbeat._failure import HeartbeatFailure

logger = get_logger(__name__)

NEWS_S = 0.25
"""Seconds that an agent has to begin to stop a worker, after which this ends by itself."""
LAST_WORDS_S = 0.9
"""Seconds that a dying process may take to say why."""
ABORT_S = 1.0
"""Seconds after its deadline at which a process gets SIGABRT that has not begun to die."""

_MOST_FRAMES = 40


class Deadline:
    """The end of this process, put off by every beat that comes to pass.

    In a forked child its methods do nothing: the child's life is not this process's.

    Args:
        bound: seconds within which a beat must come to pass.
        timeout: seconds that the exchange of one may take.
    """

    __slots__ = ("_agent", "_armed", "_bound", "_pid", "_timers")

    def __init__(self, bound: float, timeout: float) -> None:
        self._bound = bound
        self._pid = os.getpid()
        self._timers = _kernel_timers(warn=True)
        self._agent = AgentTimer(bound, timeout)
        self._armed = False

    def alive(self) -> None:
        """The thread that beats is about to; whether the others will, it does not know yet.

        Nothing happens before `arm` was called for the first time: until all are there, a worker
        may wait for as long as it takes.
        """
        if self._armed and os.getpid() == self._pid:
            self._agent.alive(self._bound)

    def arm(self, seconds_from_now: float | None = None) -> None:
        """Put the end off.

        Args:
            seconds_from_now: to the deadline; None: the bound. SIGABRT comes `ABORT_S` later, and
                SIGKILL `KILL_S`.
        """
        if os.getpid() != self._pid:
            return
        self._armed = True
        left = self._bound if seconds_from_now is None else seconds_from_now
        for timer, more in self._timers:
            timer.set(left + more)
        self._agent.alive(left)

    def leave_to_agent(self) -> None:
        """Call off what the kernel would do; the agent goes on watching."""
        if os.getpid() != self._pid:
            return
        timers, self._timers = self._timers, []
        for timer, _ in timers:
            timer.close()

    def disarm(self) -> None:
        """Call the end off for good."""
        if os.getpid() != self._pid:
            return
        self._armed = False
        for timer, _ in self._timers:
            timer.close()
        self._agent.release()


def is_spared() -> bool:
    """Whether the agent is stopping this worker anyway, so that it should be left its grace.

    An agent may hear at the same moment as the workers that another host is lost. So where there is
    one, it is given `NEWS_S` to say so; the byte that it says it by wakes nobody.
    """
    until = time.monotonic() + NEWS_S
    while (stopped := stopping()) is False and time.monotonic() < until:
        time.sleep(0.01)
    return bool(stopped)


def die(failure: HeartbeatFailure) -> NoReturn:
    """End this process, from any thread, with the reason told as far as that is possible.

    The exit is by SIGABRT after `LAST_WORDS_S` at most, and by SIGKILL within `KILL_S` seconds if
    that does not come through.

    Args:
        failure: the reason. Its text is logged, and goes into the error file that the agent reads
            (`TORCHELASTIC_ERROR_FILE`), with where the main thread stood.
    """
    failed = time.monotonic()
    for timer, more in _kernel_timers(warn=False):
        with suppress(OSError):
            timer.set(max(more, LAST_WORDS_S + 0.5) - NEWS_S)
    _all_within(
        LAST_WORDS_S,
        lambda: _write_error_file(failure, failed),
        lambda: _log(failure),
        lambda: sys.stdout.flush(),
        lambda: sys.stderr.flush(),
    )
    os.abort()


def _kernel_timers(*, warn: bool) -> list[tuple[KernelTimer, float]]:
    """The timers, each with its seconds after the deadline; none where there are none."""
    try:
        return [(KernelTimer(SIGABRT), ABORT_S), (KernelTimer(fatal_signal()), KILL_S)]
    except (OSError, ImportError) as error:
        if warn:
            logger.warning(
                "heartbeat: should native code hold the interpreter's lock, or should this process"
                " (%d) be stopped, the kernel will not end it: %s",
                os.getpid(),
                error,
            )
        return []


def _all_within(seconds: float, *calls: Callable[[], object]) -> None:
    """Run all calls side by side, and wait for them no longer than that."""
    deadline = time.monotonic() + seconds
    threads = []
    for call in calls:
        thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter is about to end
            _quietly(call)  # the kernel's timers see to it that this ends as well
        else:
            threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _quietly(call: Callable[[], object]) -> None:
    with suppress(Exception):  # there is nobody left whom it could concern
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
    """The content of an error file, in the form that `record` gives it.

    Args:
        failure: the reason.
        failed: when that was known, in seconds of the monotonic clock.
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
    """Where the main thread stands; of no source file a line is read, as that may hang."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        frame = frame.f_back
    return ["Main thread (most recent call first):", *lines] if lines else []
