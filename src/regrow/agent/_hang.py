"""What is said of a worker whose countdown timer ran out, and to whom.

Three readers, one account: the job's event `regrow.timer.expired`, for the story and for programs;
the worker's error file, so that its failure travels, is judged, counted and reported like any
other; and a line in the agent's log at once. Pure: what is known goes in, plain values come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.events._describe import short_scope
from regrow.timer._frames import Dump, where
from regrow.utils import _signals

if TYPE_CHECKING:
    from regrow.timer._file_request import FileTimerRequest

#: Frames of the main thread that the report shows, the most recent ones; the file has all.
MOST_FRAMES = 40


class Hang(NamedTuple):
    """A process that did not release a timer in time."""

    attempt: int
    """The attempt of its worker."""
    local_rank: int | None
    """Of its worker; None: a process of some worker, and it cannot be said of which."""
    rank: int | None
    """The worker's global rank."""
    pid: int
    worker_pid: int | None
    """The worker's own process, where `pid` is one that it started."""
    request: FileTimerRequest
    """The timer that was due first."""
    deadline: float
    """When it was due, in seconds of the monotonic clock."""
    noticed: float
    """When that was noticed, on the same clock."""
    signum: int
    """What the process is sent; 0 or less: nothing."""
    dump: Dump
    """Its stacks, or why there are none."""
    compared: Sequence[str]
    """Which of this host's workers stood in the same place; empty where they were not asked."""
    over: float
    """Seconds by which the timer was over when all this was known."""
    places: Mapping[int, str] = MappingProxyType({})
    """Where each of this host's workers stood, by rank; empty where they were not asked."""

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker's own process."""
        return self.worker_pid == self.pid

    @property
    def is_silent(self) -> bool:
        """Whether the timer is that of its heartbeat."""
        from regrow.heartbeat._terms import SCOPE

        return self.request.scope_id == SCOPE

    @property
    def after(self) -> float | None:
        """Seconds that the timer was set to, to the millisecond; None where that is not known."""
        armed = self.request.armed
        return None if armed is None else max(0.0, round(self.deadline - armed, 3))


def message(hang: Hang) -> str:
    """The failure in one line."""
    if hang.is_silent:
        return f"no heartbeat for {(hang.after or 0.0) + hang.over:.3g} s: {where(hang.dump)}"
    after = f" of {hang.after:.10g} s" if hang.after is not None else ""
    scope = short_scope(hang.request.scope_id)
    return f"timer {scope}{after} was over by {hang.over * 1000:.1f} ms: {where(hang.dump)}"


def announcement(hang: Hang) -> str:
    """The line for the agent's log."""
    who = f"rank {hang.rank}" if hang.rank is not None else "a worker"
    who += f" (pid {hang.pid})" if hang.is_worker else f" (its process {hang.pid})"
    name = signal_name(hang.signum)
    fate = f"it is sent {name}" if name else "it is left alone, as the timer asks for no signal"
    stacks = f"; stacks in {hang.dump.path}" if hang.dump.path else ""
    return f"{who} hangs: {message(hang)}; {fate}{stacks}"


def signal_name(signum: int) -> str | None:
    """The name of a signal; None for zero and less, which are none."""
    return _signals.signal_name(signum) or f"signal {signum}" if signum > 0 else None


def event(hang: Hang) -> dict[str, Any]:
    """The metadata of `regrow.timer.expired`."""
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
    """The content of the worker's error file, in the form that `record` gives it.

    Args:
        hang: of a worker's own process.
        wall: now, in seconds since the epoch.
    """
    extra = {
        "py_callstack": callstack(hang),
        "timestamp": str(int(wall - hang.over)),
        "monotonic": hang.deadline,
    }
    return {"message": {"message": message(hang), "extraInfo": extra}}


def callstack(hang: Hang) -> str:
    """What stands for the traceback in the launcher's report."""
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
