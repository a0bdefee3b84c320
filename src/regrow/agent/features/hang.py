"""The report of a worker with an expired countdown timer, in three forms.

- The job's event `regrow.timer.expired`, for the story and for programs.
- The worker's error file, so that its failure is reported and charged like any other.
- One line in the agent's log, at once.

All functions are pure: they turn a `Hang` into plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.events import short_scope
from regrow.heartbeat.terms import SCOPE, STALLED
from regrow.timer.stacks.report import Dump, where
from regrow.utils import signal_text

if TYPE_CHECKING:
    from regrow.timer.fifo.request import FileTimerRequest

#: Number of the main thread's latest frames in the report; the file has all frames.
MOST_FRAMES = 40


class Hang(NamedTuple):
    """A process that did not release a timer in time."""

    attempt: int
    """The attempt of the worker."""
    local_rank: int | None
    """Local rank of the worker; None for a process with an unknown worker."""
    rank: int | None
    """Global rank of the worker."""
    pid: int
    worker_pid: int | None
    """Process id of the worker itself; `pid` may be a process that the worker started."""
    request: FileTimerRequest
    """The timer that expired first."""
    deadline: float
    """Deadline of the timer, in monotonic seconds."""
    noticed: float
    """Monotonic seconds at which the server noticed the expiry."""
    signum: int
    """Signal for the process; 0 or less for none."""
    dump: Dump
    """The stacks of the process, or the reason why there are none."""
    compared: Sequence[str]
    """Groups of this host's workers at the same place; empty if their stacks were not read."""
    over: float
    """Seconds from the deadline until all fields were known."""
    places: Mapping[int, str] = MappingProxyType({})
    """Places of this host's workers, by global rank; empty if their stacks were not read."""

    @property
    def is_worker(self) -> bool:
        """Whether the process is the worker itself."""
        return self.worker_pid == self.pid

    @property
    def is_silent(self) -> bool:
        """Whether the expired timer is that of the worker's heartbeat."""
        return self.request.scope_id == SCOPE

    @property
    def stalled(self) -> str | None:
        """Text of a timer that only reports training without progress; None for other timers."""
        scope = self.request.scope_id
        return scope.removeprefix(STALLED) if scope.startswith(STALLED) else None

    @property
    def after(self) -> float | None:
        """Seconds that the timer was set to, to the millisecond; None if unknown."""
        armed = self.request.armed
        return None if armed is None else max(0.0, round(self.deadline - armed, 3))


def message(hang: Hang) -> str:
    """Return the failure as one line."""
    if hang.is_silent:
        silent = (hang.after or 0.0) + hang.over
        return f"no heartbeat for {silent:.{silent < 9.95:d}f} s: {where(hang.dump)}"
    after = f" of {hang.after:.10g} s" if hang.after is not None else ""
    scope = short_scope(hang.request.scope_id)
    over = f"{hang.over * 1000:.1f} ms"
    return f"timer {scope}{after} was exceeded by {over}; location: {where(hang.dump)}"


def announcement(hang: Hang) -> str:
    """Return the line for the agent's log."""
    subject = f"rank {hang.rank}" if hang.rank is not None else "a worker"
    subject += f" (pid {hang.pid})" if hang.is_worker else f" (its process {hang.pid})"
    name = signal_name(hang.signum)
    signal = f"sending {name}" if name else "no signal is sent, because the timer requests none"
    stacks = f"; stacks in {hang.dump.path}" if hang.dump.path else ""
    return f"{subject} hangs: {message(hang)}; {signal}{stacks}"


def signal_name(signum: int) -> str | None:
    """Return the name of a signal; None for 0 and less, which mean no signal."""
    return signal_text(signum) if signum > 0 else None


def event(hang: Hang) -> dict[str, Any]:
    """Return the metadata of `regrow.timer.expired`."""
    return {
        "attempt": hang.attempt,
        "rank": hang.rank,
        "local_rank": hang.local_rank,
        "pid": hang.pid,
        "worker_pid": hang.worker_pid,
        "scope": hang.request.scope_id,
        "heartbeat": hang.is_silent,
        "after_s": hang.after,
        "over_s": hang.over,
        "deadline_monotonic": hang.deadline,
        "noticed_monotonic": hang.noticed,
        "signal": signal_name(hang.signum),
        "outcome": hang.dump.outcome,
        "stood": where(hang.dump),
        "compared": list(hang.compared),
        "stacks": hang.dump.path or None,
        "message": message(hang),
    }


def error(hang: Hang, wall: float) -> Mapping[str, Any]:
    """Return the content of the worker's error file, in the format of `record`.

    Args:
        hang: a hang of the worker itself.
        wall: current time, in seconds since the epoch.
    """
    extra = {
        "py_callstack": callstack(hang),
        "timestamp": str(int(wall - hang.over)),
        "monotonic": hang.deadline,
    }
    return {"message": {"message": message(hang), "extraInfo": extra}}


def callstack(hang: Hang) -> str:
    """Return the text that replaces the traceback in the launcher's report."""
    lines = [message(hang)]
    thread = next((each for each in hang.dump.threads if each.main), None)
    if thread is not None and thread.frames:
        lines.append("Main thread (most recent call first):")
        for frame in thread.frames[:MOST_FRAMES]:
            lines.append(f'  File "{frame.file}", line {frame.line or "?"}, in {frame.function}')
        if (more := len(thread.frames) - MOST_FRAMES) > 0:
            lines.append(f"  ... {more} more frames")
    if len(hang.compared) > 1:
        lines += ["Workers of this host:", *(f"  {line}" for line in hang.compared)]
    if hang.dump.path:
        lines.append(f"Stacks of all threads: {hang.dump.path}")
    return "\n".join(lines)
