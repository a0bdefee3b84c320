"""The account of a worker: its seconds by what they were spent on, in memory shared with the agent.

The ledger (`regrow.ledger`) needs to know how long a worker was in each phase of its script, and
how long in steps that were done before. The worker itself books this, so nothing has to be sent,
and the agent can read the account after a SIGKILL.

An account has rows with seconds; those of steps also have a count. One row is open at any time. A
*mark* (the start or end of a phase, or a step) adds the seconds since the last mark to the open
row, and may open another one. So the rows partition the time since the first mark, and the agent
adds the time since the last mark to the open row. Outside of phases the row PENDING is open. It is
not stored: it is the time that no other row has. Only the next step shows what that time was:
`step` moves it to STEPS if no worker of the job has reached that number before, else to
REPEATED_STEPS, and the phases since the step before to REPEATED_PHASES. The first step after a
start goes to rows of its own, because it includes the startup; its phases stay, because the script
loads in them.

Phases may be nested: the time of the inner one counts for it alone. `PHASES` names are kept; the
time of further ones goes to OTHER. Only marks of the main thread count, because the account
describes what the training waits for. Children of the worker book nothing.

Layout, in words of 8 bytes: the header, the seconds of all rows, the counts of all rows, and the
names of the phases in UTF-8, padded with zeros.
"""

from __future__ import annotations

import math
import os
import struct
from _thread import get_ident
from time import monotonic
from typing import Any, NamedTuple

NO_STEP = -(1 << 63)
"""Highest step of a job that has not reported one."""
PHASES = 16
"""Number of phases with a name of their own."""
_NAME_BYTES = 32

PENDING = "pending"  # since the last step, or since the start; its end is not known yet
STEPS = "steps"  # steps with a number that the job had not reached before
REPEATED_STEPS = "repeated_steps"
FIRST_STEP = "first_step"  # from the first mark, or the last restart, to the step after it
FIRST_REPEATED_STEP = "first_repeated_step"
REPEATED = (REPEATED_STEPS, FIRST_REPEATED_STEP)
STARTUP = "startup"  # a start without a step, ended by an in-process restart
UNFINISHED = "unfinished"  # the step that an in-process restart ended
DETECTION = "detection"  # parts of in-process restarts: from the fault until this rank knew it
STOPPING = "stopping"  # until its function had ended
MEETING = "meeting"  # until all ranks met
RESTART = "restart"  # until the function was called again
REPEATED_PHASES = "repeated_phases"  # of all but the first repeated step
OTHER = "phase:other"
PHASE = "phase:"
"""Prefix of the rows of phases."""
_FIXED = (
    *(PENDING, STEPS, REPEATED_STEPS, FIRST_STEP, FIRST_REPEATED_STEP, STARTUP, UNFINISHED),
    *(DETECTION, STOPPING, MEETING, RESTART, REPEATED_PHASES, OTHER),
)
_PENDING, _STEPS, _REPEATED, _FIRST, _FIRST_REPEATED, _STARTUP, _UNFINISHED = range(7)
_OTHER, _REPEATED_PHASES = map(_FIXED.index, (OTHER, REPEATED_PHASES))
_NAMED = len(_FIXED)
_ROWS = _NAMED + PHASES
_DETECTION, _STOPPING, _MEETING, _RESTART = map(
    _FIXED.index, (DETECTION, STOPPING, MEETING, RESTART)
)
# The row of each part of an in-process restart, in their order.
_PARTS = {"notified": _DETECTION, "aborted": _STOPPING, "finalized": _STOPPING}
_PARTS |= {"checked": _STOPPING, "met": _MEETING, "called": _RESTART}

_HIGHEST, _OWNER, _STARTING, _OPENED, _SINCE, _OPEN = range(6)
_SECONDS = 6
_COUNTS = _SECONDS + _ROWS
_NAMES = _COUNTS + _ROWS
_LAYOUT = struct.Struct(f"@qqqddq{_ROWS}d{_ROWS}q" + f"{_NAME_BYTES}s" * PHASES)
ACCOUNT_BYTES = _LAYOUT.size


class Account:
    """The worker's side, for the main thread of the first process that opened it.

    Args:
        memory: `ACCOUNT_BYTES` bytes, which the agent has blanked with `blank`.
    """

    __slots__ = (
        "again",
        "counts",
        "highest",
        "new",
        "numbers",
        "open",
        "outer",
        "pending",
        "phases",
        "rows",
        "since",
        "spent",
        "thread",
        "times",
    )

    def __init__(self, memory: memoryview) -> None:
        import threading

        self.numbers, self.times = memory.cast("q"), memory.cast("d")
        self.highest = self.numbers[_HIGHEST]
        self.outer: list[int] = []  # the rows of the phases around the open one
        self.rows: dict[str, int] = {}
        self.thread = threading.main_thread().ident
        self.spent, self.counts = [0.0] * _ROWS, [0] * _ROWS  # quicker to read than the memory
        self.pending = 0.0
        self.phases: dict[int, float] = {}  # seconds since the last step, by row
        self.open = _PENDING
        self.since = monotonic()
        owner = self.numbers[_OWNER]
        if owner and os.path.exists(f"/proc/{owner}"):  # this process is a child of the worker
            self.new, self.again = _FIRST, _FIRST_REPEATED
            self.disable()
            return
        memory[:] = _blank(self.highest)
        self.numbers[_OWNER] = os.getpid()
        self._begin_start()
        self.times[_SINCE] = self.since
        self.times[_OPENED] = self.since
        os.register_at_fork(after_in_child=self.disable)

    def disable(self) -> None:
        """Ignore all further marks."""
        self.thread = -1

    def step(self, step: int, now: float) -> None:
        """Book the time since the last step, which is pending."""
        if get_ident() != self.thread:
            return
        row, pending = self.open, self.pending
        if row == _PENDING:
            pending += now - self.since
        else:
            self._add_phase(row, now - self.since)
        if step > self.highest:
            self.highest = self.numbers[_HIGHEST] = step
            to = self.new
        else:
            to = self.again
        if self.phases:
            if to == _REPEATED:
                for row, seconds in self.phases.items():
                    self._add(row, -seconds)
                    self._add(_REPEATED_PHASES, seconds)
            self.phases.clear()
        spent, counts = self.spent, self.counts
        spent[to] = self.times[_SECONDS + to] = spent[to] + pending
        counts[to] = self.numbers[_COUNTS + to] = counts[to] + 1
        self.times[_SINCE] = self.since = now
        self.pending = 0.0
        if to >= _FIRST:
            self.new, self.again = _STEPS, _REPEATED
            self.numbers[_STARTING] = 0

    def restarted(self, ends: dict[str, float]) -> None:
        """Book an in-process restart that is over now; no phase is open any more.

        Args:
            ends: for each part of the restart, the seconds from the fault to its end.
        """
        if get_ident() != self.thread:
            return
        now = monotonic()
        if self.open == _PENDING:
            self.pending += now - self.since
        else:  # an interrupt came between a phase and its `with`
            self._add(self.open, now - self.since)
        self.phases.clear()
        lengths, before = dict.fromkeys(_PARTS.values(), 0.0), 0.0
        for part, row in _PARTS.items():
            end = max(ends.get(part, before), before)
            lengths[row] += end - before
            before = end
        # A phase that the restart interrupted has booked its beginning. A new process, which
        # replaces another one, was not there when the restart began.
        share = min(1.0, self.pending / before) if before > 0 else 0.0
        lost = _STARTUP if self.new == _FIRST else _UNFINISHED
        self._add(lost, self.pending - before * share)
        for row, length in lengths.items():
            self._add(row, length * share)
        self.pending = 0.0
        self.times[_SINCE] = self.since = now
        self.numbers[_OPEN] = self.open = _PENDING
        self.outer.clear()
        self._begin_start()

    def phase(self, name: str) -> OpenPhase:
        """Return the phase with this name; beyond `PHASES` names, that of all others."""
        row = self.rows.get(name)
        if row is None:
            row = _NAMED + len(self.rows)
            data = name.encode(errors="replace")[:_NAME_BYTES]
            if row < _ROWS and data.strip(b"\0 ") and self.thread != -1:
                for word, value in enumerate(struct.unpack("@4q", data.ljust(_NAME_BYTES, b"\0"))):
                    self.numbers[_NAMES + 4 * (row - _NAMED) + word] = value
                self.rows[name] = row
            else:
                row = _OTHER
        return OpenPhase(self, row)

    def _add(self, row: int, seconds: float) -> None:
        self.spent[row] = self.times[_SECONDS + row] = self.spent[row] + seconds

    def _add_phase(self, row: int, seconds: float) -> None:
        self._add(row, seconds)
        self.phases[row] = self.phases.get(row, 0.0) + seconds

    def _begin_start(self) -> None:
        self.new, self.again = _FIRST, _FIRST_REPEATED
        self.numbers[_STARTING] = 1


class OpenPhase:
    """Context manager that books its time in a row of the account; it can be used again."""

    __slots__ = ("_account", "_row")

    def __init__(self, account: Account, row: int) -> None:
        self._account = account
        self._row = row

    # Both methods are written for speed: a call of a further method costs a tenth of a phase.

    def __enter__(self) -> None:
        account = self._account
        if get_ident() != account.thread:
            return
        now, before = monotonic(), account.open
        if before == _PENDING:
            account.pending += now - account.since
        else:
            account._add_phase(before, now - account.since)
        account.times[_SINCE] = account.since = now
        account.numbers[_OPEN] = account.open = self._row
        account.outer.append(before)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        account = self._account
        if get_ident() != account.thread or not account.outer:
            return
        now, row, times, spent = monotonic(), account.open, account.times, account.spent
        seconds, phases = now - account.since, account.phases
        spent[row] = times[_SECONDS + row] = spent[row] + seconds
        phases[row] = phases[row] + seconds if row in phases else seconds
        times[_SINCE] = account.since = now
        account.numbers[_OPEN] = account.open = account.outer.pop()


class Reading(NamedTuple):
    """What the agent reads of an account; times are in monotonic seconds."""

    highest_step: int | None
    """Highest step of the job as far as the node knows it."""
    starting: bool
    """Whether no step was reported since the start, or since the last in-process restart."""
    opened_monotonic: float
    """Time of the first mark."""
    since_monotonic: float
    """Time of the latest mark."""
    open: str
    """The row that is open since then."""
    seconds: dict[str, float]
    """The rows with seconds."""
    counts: dict[str, int]
    """How often each kind of step was reported."""


def blank(memory: Any, offset: int, highest_step: int) -> None:
    """Write an account without a mark at `offset`, for a process that begins."""
    memory[offset : offset + ACCOUNT_BYTES] = _blank(highest_step)


def _blank(highest_step: int) -> bytes:
    return struct.pack("@q", highest_step).ljust(ACCOUNT_BYTES, b"\0")


def read(memory: Any, offset: int) -> Reading | None:
    """Read the account at `offset`, which a worker may have filled with anything.

    Returns:
        None before the first mark.
    """
    highest, _, starting, opened, since, row, *rest = _LAYOUT.unpack_from(memory, offset)
    names = [*_FIXED, *map(_phase_name, rest[2 * _ROWS :])]
    if not 0 < opened <= since < math.inf or not 0 <= row < _ROWS:
        return None
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, spent, count in zip(names, rest[:_ROWS], rest[_ROWS : 2 * _ROWS], strict=True):
        if 0 < spent < math.inf and name != PENDING:
            seconds[name] = seconds.get(name, 0.0) + spent
        if count > 0:
            counts[name] = counts.get(name, 0) + count
    pending = since - opened - sum(seconds.values())
    if pending > 0:
        seconds[PENDING] = pending
    return Reading(
        None if highest == NO_STEP else highest,
        bool(starting),
        opened,
        since,
        names[row],
        seconds,
        counts,
    )


def open_phase(memory: Any, offset: int) -> str:
    """Return the phase in which a process is; "" outside of phases.

    Args:
        memory: the page, which a worker may have filled with anything.
        offset: where the account begins.
    """
    (row,) = struct.unpack_from("@q", memory, offset + 8 * _OPEN)
    if row == _OTHER:
        return OTHER.removeprefix(PHASE)
    if not _NAMED <= row < _ROWS:
        return ""
    name = offset + 8 * _NAMES + _NAME_BYTES * (row - _NAMED)
    return _phase_name(bytes(memory[name : name + _NAME_BYTES])).removeprefix(PHASE)


def _phase_name(data: bytes) -> str:
    text = data.rstrip(b"\0").decode(errors="ignore").strip()
    return PHASE + "".join(each if each.isprintable() else "?" for each in text) if text else OTHER
