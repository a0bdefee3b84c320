"""`step(n)`: a training script says how far it is, at the price of two stores into memory.

The agent shares one page of memory with its workers, a slot for each local rank. A worker writes
the first and the latest step it reported, with their monotonic times (which all processes of a
host share); the agent reads the slot when the worker has died, so the figure is exact up to the
instant of a SIGKILL, and nothing is sent while the training runs. Only the first step of a process
wakes the agent, by one byte in a pipe: that ends the recovery, and is an event of its own.

In the other direction goes one bit, the last byte of the page: the agent has begun to stop the
workers of this attempt. What another thread of a worker was about to end it for, a missed
heartbeat for instance, has its cause in that then, and the worker is left its grace.

A worker has two more things to say. Its slot holds how it stands in an in-process restarter, which
the agent reads when the worker has ended: whether the others go on without it. And what is worth an
event of the job (`tell`) goes into the pipe, a JSON object on a line.

All are opened through `/proc/<agent>/fd/<n>`, named in the environment variable REGROW_PROGRESS
as `<memory path>|<pipe path>|<slot>`, so no descriptor has to survive an exec and a script that
never reports costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import struct
from _thread import allocate_lock  # without the rest of threading, which costs an import
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap

PROGRESS_ENV = "REGROW_PROGRESS"
# first step, its time, latest step, its time; a time of zero means "never reported"; the standing
SLOT = struct.Struct("=qdqdq")
_STEPS = struct.Struct("=qdqd")
_LATEST = struct.Struct("=qd")
_LATEST_OFFSET = _STEPS.size - _LATEST.size
_STANDING = struct.Struct("=q")
_STANDING_OFFSET = _STEPS.size
_ATOMIC = 4096  # bytes that are written to a pipe as a whole


# How a worker stands in an in-process restarter:
STANDS_ALONE = 0  # it is in none: its end is a failure of all
IN_RESTARTER = 1  # it is in one, as the others are: they go on when it ends
LEFT_RESTARTER = 2  # it has told the others to go on without it


class _Reporter:
    """Writes this process's steps into its slot."""

    __slots__ = ("_memory", "_offset", "_pipe", "_started")

    def __init__(self, memory: mmap.mmap, pipe: str, offset: int) -> None:
        self._memory = memory
        self._pipe = pipe
        self._offset = offset
        self._started = False

    def report(self, step: int) -> None:
        now = monotonic()
        if self._started:
            _LATEST.pack_into(self._memory, self._offset + _LATEST_OFFSET, step, now)
            return
        self._started = True
        _STEPS.pack_into(self._memory, self._offset, step, now, step, now)
        self.send(b"\0")

    def send(self, message: bytes) -> None:
        """Write to the pipe, at most 4096 bytes."""
        # The agent may be gone, or its pipe full: a training never stops over its own report.
        with contextlib.suppress(OSError):
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, message)
            finally:
                os.close(pipe)

    def stand(self, standing: int) -> None:
        _STANDING.pack_into(self._memory, self._offset + _STANDING_OFFSET, standing)

    def latest(self) -> int | None:
        """The latest step, if any was reported."""
        step, at = _LATEST.unpack_from(self._memory, self._offset + _LATEST_OFFSET)
        return step if at > 0 else None

    def stopping(self) -> bool:
        """Whether the agent has begun to stop the workers."""
        return self._memory[-1] != 0


def _open_reporter(address: str | None) -> _Reporter | None:
    if not address:
        return None
    try:
        memory_path, pipe_path, slot = address.split("|")
        import mmap

        fd = os.open(memory_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        offset = int(slot) * SLOT.size
    except (OSError, ValueError):
        return None
    return _Reporter(memory, pipe_path, offset) if offset + SLOT.size < len(memory) else None


_reporter: _Reporter | None = None
_opened = False
_opening = allocate_lock()  # a thread may ask how far this is while it is being opened


def _own() -> _Reporter | None:
    """The reporter of this process; None outside of regrow."""
    global _reporter, _opened
    with _opening:
        if not _opened:
            _reporter = _open_reporter(os.environ.get(PROGRESS_ENV))
            _opened = True
    return _reporter


def step(n: int) -> None:
    """Report that training step `n` is done, so the launcher can say what a failure cost.

    Optional: a job restarts the same without it. Outside regrow it does nothing.

    Args:
        n: the global step just finished; after a restart, go on from the checkpoint's step.
    """
    if (reporter := _reporter if _opened else _own()) is not None:
        reporter.report(n)


def latest() -> int | None:
    """The step that this worker reported last; None if it has not, or outside of regrow."""
    reporter = _own()
    return reporter.latest() if reporter is not None else None


def stopping() -> bool | None:
    """Whether the agent has begun to stop this worker, with all others; None outside of regrow."""
    reporter = _own()
    return None if reporter is None else reporter.stopping()


_standing = STANDS_ALONE


def stand(standing: int) -> None:
    """Let the agent know how this worker stands in an in-process restarter.

    Args:
        standing: one of the three above.
    """
    global _standing
    _standing = standing
    reporter = _own()
    if reporter is not None:
        reporter.stand(standing)


def standing() -> int:
    """How this process stands in an in-process restarter: one of the three, also without agent."""
    return _standing


def tell(name: str, **fields: Any) -> None:
    """Have the agent record an event of the job.

    Args:
        name: of the event.
        fields: what JSON can express. One that takes more than 4 KB in all is not told.
    """
    reporter = _own()
    if reporter is None:
        return
    import json

    line = json.dumps({"name": name, "fields": fields}).encode() + b"\n"
    if len(line) <= _ATOMIC:
        reporter.send(line)
