"""Report training steps to the agent through shared memory: `step(n)`.

A report costs two stores into memory. The agent shares one page with its workers, with one slot for
each local rank. A worker writes its first and its latest step into its slot, with their monotonic
times. All processes of a host share that clock. The agent can read the slot at any time, also after
the worker has died. So the step is exact up to the instant of a SIGKILL, and a running training
sends nothing. Only the first step of a process wakes the agent, by one byte in a pipe. The agent
records it as the event `regrow.worker.first_step`, which ends the recovery in the story.

The agent writes one flag for the workers, the last byte of the page: it has begun to stop the
workers of this attempt. A worker that misses a heartbeat reads the flag before it ends itself. If
the flag is set, the stop has caused the miss, and the worker uses its grace.

A slot also holds five bits about the worker's in-process wrapper (`regrow.inprocess`). The agent
reads three of them when the worker has ended. They mean: the other workers continue without this
one; the wrapped function has no result yet; another process may take the worker's place. The agent
reads the other two when its round ends: the worker can go on in the next round in this process; the
worker has left the round and waits for the next one. Events of the job (`send_event`) go through
the pipe, one JSON object on each line.

The last field is the time of the worker's last heartbeat (`regrow.heartbeat`), for `regrow top`.
The rest of a slot is the worker's account (`regrow._accounts`): how long the script was in each of
its phases, in steps that it had done before, and so on.

A worker opens the memory and the pipe as `/proc/<agent>/fd/<n>`. The environment variable
REGROW_PROGRESS contains `<memory path>|<pipe path>|<slot>`. So no descriptor has to survive an
exec, and a script that never reports costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import struct
from _thread import allocate_lock  # the import of `threading` costs more
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow._accounts import ACCOUNT_BYTES, Account

if TYPE_CHECKING:
    import mmap
    from contextlib import AbstractContextManager

PROGRESS_ENV = "REGROW_PROGRESS"
PRIVATE_ENV = "REGROW_PRIVATE_STATE"  # `<memory path>|<local rank>`; see regrow.state.private
INCARNATION_ENV = "REGROW_INCARNATION"  # number of processes that had this worker's ranks before
CHAOS_ENV = "REGROW_CHAOS"  # the agent's abstract unix socket; see regrow._chaos
ORDERS_ENV = "REGROW_ORDERS"  # path of the pipe with the agent's orders; see inprocess.call.moving
REPLACES_ENV = "REGROW_REPLACES"  # how the latest of these processes ended, for people
# Layout of a slot: first step, its time, latest step, its time, state of the wrapper (five bits),
# time of the last heartbeat. A time of zero means "never reported". The agent reads a slot with
# this struct, in the machine's own format, which copies each field as a whole. Workers do not write
# with it: `pack_into` sets all bytes to zero first, and a worker killed at that moment loses its
# report.
SLOT = struct.Struct("@qdqdqd")
_FIRST, _FIRST_TIME, _LATEST, _LATEST_TIME, _RESTART_STATE, _HEARTBEAT_TIME = range(6)
SLOT_BYTES = SLOT.size + ACCOUNT_BYTES
LONGEST = 4096  # bytes of a message; a pipe takes a write of this size as a whole (PIPE_BUF)


# State of a worker's in-process wrapper: these bits, read after the worker has ended.
OTHERS_GO_ON = 1  # the other workers continue without it
OWES_RESULT = 2  # its wrapped function has no result yet: exit code 0 is no success
MAY_BE_REPLACED = 4  # the other workers wait for another process in its place
MAY_STAY = 8  # it can go on in the next round, without another process
PARKED = 16  # it has left its round by order of the agent, and waits for the next one

NOT_IN_WRAPPER = 0  # in no wrapper: its end is a failure of all workers, unless it exits with 0
IN_WRAPPER = (
    OTHERS_GO_ON | OWES_RESULT
)  # in a call; OWES_RESULT alone: the worker joins a call, or completes it
LEFT_WRAPPER = OTHERS_GO_ON  # the call has raised: the script decides how the process ends


class _Reporter:
    """Writer of this process's slot; each field is one store."""

    __slots__ = (
        "_account",
        "_account_memory",
        "_memory",
        "_numbers",
        "_pipe",
        "_started",
        "_times",
    )

    def __init__(self, memory: mmap.mmap, pipe: str, offset: int) -> None:
        slot = memoryview(memory)[offset : offset + SLOT.size]
        self._account_memory = memoryview(memory)[offset + SLOT.size : offset + SLOT_BYTES]
        self._account: Account | None = None
        self._memory = memory
        self._numbers = slot.cast("q")
        self._times = slot.cast("d")
        self._pipe = pipe
        self._started = False

    @property
    def account(self) -> Account:
        """The account of this process, which its first use begins."""
        if self._account is None:
            self._account = Account(self._account_memory)
        return self._account

    def report(self, step: int) -> None:
        account = self._account or self.account
        now = monotonic()
        account.step(step, now)
        self._numbers[_LATEST] = step
        self._times[_LATEST_TIME] = now
        if not self._started:
            self._started = True
            self._numbers[_FIRST] = step
            self._times[_FIRST_TIME] = now  # last of the four fields: makes the others valid
            self.send(b"\0")

    def send(self, message: bytes) -> None:
        """Write a message of at most 4096 bytes to the pipe."""
        # The agent may have ended, or its pipe may be full. A failed report never stops a training.
        with contextlib.suppress(OSError):
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, message)
            finally:
                os.close(pipe)

    def heartbeat(self, at: float) -> None:
        self._times[_HEARTBEAT_TIME] = at

    def set_restart_state(self, state: int) -> None:
        self._numbers[_RESTART_STATE] = state

    def latest(self) -> int | None:
        """Return the latest reported step; None before the first report."""
        return self._numbers[_LATEST] if self._times[_LATEST_TIME] > 0 else None

    def stopping(self) -> bool:
        """Return whether the agent has begun to stop the workers."""
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
        offset = int(slot) * SLOT_BYTES
    except (OSError, ValueError):
        return None
    return _Reporter(memory, pipe_path, offset) if offset + SLOT_BYTES < len(memory) else None


_reporter: _Reporter | None = None
_opened = False
_opening = allocate_lock()  # another thread may call `latest` while the slot is being opened


def _own() -> _Reporter | None:
    """Return the reporter of this process; None if no regrow agent started it."""
    global _reporter, _opened
    with _opening:
        if not _opened:
            _reporter = _open_reporter(os.environ.get(PROGRESS_ENV))
            _opened = True
    return _reporter


def reopen() -> None:
    """Let the next call look for the agent again: this process has become a worker (`_standby`)."""
    global _opened
    _opened = False
    _phases.clear()


def step(n: int) -> None:
    """Report that training step `n` is done, so the job's story can show what a failure cost.

    The call is optional, with one exception: a process that replaced another one is itself
    replaced only after its first step. Outside of regrow the call does nothing.

    Args:
        n: the global step that just finished; after a restart, continue from the checkpoint's
            step.
    """
    if (reporter := _reporter if _opened else _own()) is not None:
        reporter.report(n)


_phases: dict[str, AbstractContextManager[None]] = {}


def phase(name: str) -> AbstractContextManager[None]:
    """Book the time within `with regrow.phase(name):` under this name, in `regrow goodput`.

    Use it for what a training does besides its steps: "data" (it waits for a batch), "checkpoint",
    "load", "eval", or any name of your own. Phases may be nested: the inner one gets its time, the
    outer one the rest. The steps get the time outside of all phases.

    A phase costs less than a microsecond. It counts in the main thread only, and does nothing in
    other threads, in children of the worker and outside of regrow.

    Args:
        name: up to 32 bytes in UTF-8. A process has up to 16 names; the time of further ones is
            booked as "other".
    """
    try:
        return _phases[name]
    except KeyError:
        reporter = _own()
        nothing = contextlib.nullcontext()
        found = nothing if reporter is None else reporter.account.phase(str(name))
        _phases[name] = found
        return found


def restarted(ends: dict[str, float]) -> None:
    """Book an in-process restart that is over now.

    Args:
        ends: for each part of the restart, the seconds from the fault to its end.
    """
    reporter = _own()
    if reporter is not None:
        reporter.account.restarted(ends)


def latest() -> int | None:
    """Return this worker's last reported step; None if there is none, or outside of regrow."""
    reporter = _own()
    return reporter.latest() if reporter is not None else None


def stopping() -> bool | None:
    """Return whether the agent has begun to stop all workers of its node, this one included.

    Outside of regrow the result is None.
    """
    reporter = _own()
    return None if reporter is None else reporter.stopping()


def heartbeat(at: float) -> None:
    """Report when an exchange of heartbeats last succeeded; no effect outside of regrow.

    Args:
        at: monotonic seconds; 0: the heartbeats have ended.
    """
    reporter = _own()
    if reporter is not None:
        reporter.heartbeat(at)


def wake_agent() -> None:
    """Let the agent read this worker's slot; no effect outside of regrow."""
    reporter = _own()
    if reporter is not None:
        reporter.send(b"\0")


_restart_state = NOT_IN_WRAPPER


def set_restart_state(state: int) -> None:
    """Publish the state of this worker's in-process wrapper, for the agent to read.

    Args:
        state: a combination of `OTHERS_GO_ON`, `OWES_RESULT`, `MAY_BE_REPLACED`, `MAY_STAY` and
            `PARKED`.
    """
    global _restart_state
    _restart_state = state
    reporter = _own()
    if reporter is not None:
        reporter.set_restart_state(state)


def has_agent() -> bool:
    """Return whether an agent of regrow started this process, or the worker that started it."""
    return _own() is not None


def restart_state() -> int:
    """Return the state of this process's in-process wrapper; works without an agent too."""
    return _restart_state


def event_line(name: str, fields: dict[str, Any]) -> bytes:
    """Encode an event as the line that `send_event` sends."""
    import json

    text = json.dumps({"name": name, "fields": fields}, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # JSON's escape of a lone surrogate


def send_event(name: str, **fields: Any) -> None:
    """Send an event of the job to the agent, which records it.

    Args:
        name: name of the event.
        fields: values that JSON can express. An event of more than 4 KB in all is dropped.
    """
    reporter = _own()
    if reporter is None:
        return
    line = event_line(name, fields)
    if len(line) <= LONGEST:
        reporter.send(line)
