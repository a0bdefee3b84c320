"""End a training early, at the same step on all ranks: `should_stop()` and `deadline()`.

A script calls `should_stop()` once in each step, on all ranks. So the number of the call is a clock
that all ranks share without a collective. To end the job, the agents choose a call in which all
ranks get True. No rank may have passed it. Ranks run on while the agents talk, so:

1. Each agent writes HOLD into a page of memory that it shares with its workers. From then on a rank
   waits in its next call.
2. Each agent reads the calls that its ranks have begun. No rank passes a later call before the
   decision. So the greatest call of all ranks, plus one, is a call that no rank has passed.
3. Each agent writes that call into its page and wakes the ranks that wait. They go on up to it.

A rank writes the number of its call and then reads the page. The agent writes the page and then
reads the numbers. Processors may delay a store behind a later load, so the agent has the kernel put
a memory barrier into all running threads in between (`membarrier`). So either the rank sees HOLD,
or the agent sees the call. A call costs two stores and two loads as long as there is no request.

A position is the number of the call, counted from the start of the iteration of a wrapped function
(`regrow.inprocess`), with the numbers of that iteration and of the wrapped call before it. Ranks of
a later iteration are beyond the chosen position, all of them in their first call. So they stop
there, all in the same step again. After 1,024 wrapped calls the positions begin again at 0, so they
are compared as points of a circle (`is_reached`): ranks are never half of it apart.

A scheduler sends its signal to all processes of a job. A worker that calls `should_stop` must not
die of it, so the first call installs a handler for SIGTERM and SIGUSR1, unless the script has its
own. The worker survives if its agent, which got the signal as well, asks the ranks to stop, or if
it saves already. Otherwise the signal ends it as without the handler: it came from the agent or
from another process of regrow, or from a person. A rank that waits in native code runs no handler,
so the slot shows the agent that SIGTERM is to end this worker at once; the agent then kills it.
"""

from __future__ import annotations

import os
import select
import signal

# `signal.getsignal` takes ten times as long, for the conversion of its result.
from _signal import getsignal  # type: ignore[import-not-found]
from _thread import get_ident  # the import of `threading` costs more
from contextlib import suppress
from time import monotonic, monotonic_ns, sleep
from typing import TYPE_CHECKING, Any, Final

from regrow import _progress

if TYPE_CHECKING:
    from collections.abc import Iterable

STOP_ENV: Final = "REGROW_STOP"
"""`<memory path>|<pipe path>|<slot>`: the page, and a pipe that is readable after the decision."""
# Layout of the page, in words of 8 bytes: the decision, the deadline, then two words for each slot.
DECISION, DEADLINE, SLOTS = 0, 1, 2
SLOT_WORDS = 2
POSITION, USE = 0, 1

RUN, HOLD, END = 0, -1, -2
"""Values of the decision: none, not made yet, and the ranks end at different steps. A value above 0
is the position at which all ranks stop."""
_CYCLE: Final = 1 << 62
"""Number of positions: 10 bits for the wrapped call, 20 for the iteration, 32 for the call."""
UNUSED, USES, STOPS, USES_AND_DIES = 0, 1, 2, 3
"""Values of USE: this process has not called `should_stop`; it has; it has got True; it has called
it, and SIGTERM would end it at once if its handler could run."""
NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler asks a job to end."""
STOP_COMMAND: Final = signal.SIGURG
"""Before a SIGTERM to an agent: `regrow stop` sends both, and asks the whole job to end.

A process without a handler for this signal ignores it.
"""
_WAIT_MS = 100  # a restart of the in-process wrapper interrupts the wait between two system calls
_ANNOUNCED_S = 2.0  # an agent that a scheduler signals as well has shown it by then
_SIGTERM = int(signal.SIGTERM)


def answer(position: int, decision: int) -> bool | None:
    """Return what a call at `position` returns; None if it waits for the decision."""
    if decision == HOLD:
        return None
    return decision > RUN and is_reached(decision, position)


def is_reached(goal: int, position: int) -> bool:
    """Return whether a position is at another one, or beyond it on the shorter way around."""
    return (position - goal) % _CYCLE < _CYCLE // 2


def latest(positions: Iterable[int]) -> int:
    """Return the position that no other one is beyond; 0 for none."""
    found: int | None = None
    for position in positions:
        found = position if found is None or is_reached(found, position) else found
    return found or 0


class _Slot:
    """This process's slot of the page."""

    __slots__ = ("_decided", "at", "handler", "pid", "thread", "words")

    def __init__(self, words: Any, at: int, decided: int) -> None:
        self.words = words  # a memoryview: each store and each load is that of a whole word
        self.at = at
        self._decided = decided  # the pipe that is readable after the decision
        self.pid = 0  # of this process, from its first call of `should_stop`
        self.thread = 0  # whose calls count: the main thread, or the first other one that calls
        self.handler: object = None  # of SIGTERM, unless the script has its own

    def begin_use(self) -> None:
        """Show the agent that this worker calls `should_stop`; survive a scheduler's signals."""
        self.pid, self.thread, handler = os.getpid(), get_ident(), self._on_signal
        with suppress(ValueError):  # not the main thread
            for signum in NOTICES:
                if signal.getsignal(signum) is signal.SIG_DFL:
                    signal.signal(signum, handler)
        self.handler = handler if getsignal(_SIGTERM) is handler else None
        self.show_use()
        _progress.wake_agent()

    def show_use(self) -> None:
        """Show the agent that this worker calls `should_stop`, and what SIGTERM does to it."""
        self.words[self.at + USE] = USES if self.handler is None else USES_AND_DIES

    def lose_handler(self) -> None:
        """Note that the script has installed its own handler of SIGTERM."""
        self.handler = None
        if not self._saves():
            self.show_use()

    def slow_answer(self, position: int) -> bool:
        """Return the answer to a call, which may have to wait for the decision."""
        while (found := answer(position, self.words[DECISION])) is None and self._wait():
            pass
        if found:
            self.words[self.at + USE] = STOPS
        return bool(found)

    def answer_thread(self) -> bool | None:
        """Return the answer to a call of another thread, which does not count.

        Returns:
            None for the first call of the main thread: from now on, only its calls count.
        """
        if get_ident() != _main_thread():
            return self._saves()
        self.words[self.at] = _base
        self.begin_use()
        return None

    def _saves(self) -> bool:
        return bool(self.words[self.at + USE] == STOPS)

    def _wait(self) -> bool:
        """Wait for the decision for a moment; return whether it can still be made."""
        poll = select.poll()
        poll.register(self._decided, select.POLLIN)
        ended = poll.poll(_WAIT_MS) == [(self._decided, select.POLLHUP)]  # the agent has ended
        return not ended and monotonic_ns() < self.words[DEADLINE]

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Survive a signal that the agent got as well; die of any other one, unless this saves."""
        until = monotonic() + _ANNOUNCED_S
        while not self._saves():
            if os.getpid() != self.pid or _progress.stopping() or monotonic() >= until:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            if self.words[DECISION] not in (RUN, END):
                return
            sleep(0.01)


_slot: _Slot | None = None
_opened = False
_base = 0  # position before the first call of this iteration


def _main_thread() -> int | None:
    import threading

    return threading.main_thread().ident


def _open() -> _Slot | None:
    global _slot, _opened
    _slot, _opened = _slot_at(os.environ.get(STOP_ENV, "")), True
    if _slot is not None:
        _slot.words[_slot.at] = _base
    return _slot


def _slot_at(address: str) -> _Slot | None:
    """Return the slot at an address; None if no agent of regrow started this process."""
    if not address:
        return None
    import mmap

    try:
        path, pipe, number = address.split("|")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            words = memoryview(mmap.mmap(fd, 0)).cast("q")
        finally:
            os.close(fd)
        at = SLOTS + int(number) * SLOT_WORDS
        if not SLOTS <= at <= len(words) - SLOT_WORDS:
            return None
        # Open from now on: a rank that cannot wait would pass the position at which it has to stop.
        decided = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, TypeError):
        return None
    return _Slot(words, at, decided)


def should_stop() -> bool:
    """Return whether the job is to end now, so that this rank saves and leaves its loop.

    Call it once at the end of each step, on all ranks, in one thread. It returns True on all ranks
    in the same step, without a collective, when a signal (SIGTERM, SIGUSR1), `regrow stop` or
    `regrow run --time-limit` asks the job to end. It may then wait for some milliseconds.

    A worker that exits with 0 after True has stopped early: `regrow run` ends with code 85, so
    that a scheduler runs the job again.

    Calls in further threads do not count: they return whether this rank has got True. If the main
    thread calls it, its calls are those that count.

    Returns:
        False while the job goes on, and outside of `regrow run`.
    """
    slot = _slot if _opened else _open()
    if slot is None:
        return False
    if not slot.pid:
        slot.begin_use()
    if slot.handler is not None and getsignal(_SIGTERM) is not slot.handler:
        slot.lose_handler()
    if get_ident() != slot.thread and (found := slot.answer_thread()) is not None:
        return found
    words, at = slot.words, slot.at
    words[at] = position = words[at] + 1
    if words[DECISION] == RUN:
        return False
    return slot.slow_answer(position)


def deadline() -> float | None:
    """Return the seconds until the agent kills this worker.

    Returns:
        At least 0. None if no end is known: the job has no `--time-limit`, and nothing has asked it
        to end.
    """
    slot = _slot if _opened else _open()
    at = 0 if slot is None else slot.words[DEADLINE]
    return float(max(0.0, at / 1e9 - monotonic())) if at else None


def begin_iteration(call: int, iteration: int) -> None:
    """Count the calls of `should_stop` from here: an iteration of a wrapped function begins.

    Args:
        call: number of the wrapped call in this process.
        iteration: number of the iteration, equal on all ranks.
    """
    global _base
    _base = ((call << 20) + iteration << 32) % _CYCLE
    if _slot is not None:
        _slot.words[_slot.at] = _base
        if _slot.pid:  # the next attempt of this process has a blank slot
            _slot.show_use()
            _progress.wake_agent()


def reopen() -> None:
    """Let the next call look for the agent again: this process has become a worker."""
    global _opened, _base
    _opened, _base = False, 0
