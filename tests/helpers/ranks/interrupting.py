"""Interrupt calls from another thread, at random moments and at each instruction in turn."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from regrow.inprocess.monitor_thread import RankShouldRestart

from helpers.processes import PATIENCE, wait_until
from regrow.inprocess.interrupt import interrupt

if sys.version_info >= (3, 13):
    from regrow.inprocess.interrupt.no_interrupt_zones import CodeEvents

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

#: Seconds in which a thread makes progress if the other thread does not block it.
A_MOMENT = 0.002


@runtime_checkable
class Interruptible(Protocol):
    """The methods of a call that these helpers use."""

    def run(self, fn: Callable[[], Any], /) -> Any: ...
    def interrupt(self) -> bool: ...


class Striker:
    """A thread that interrupts calls."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._results: list[bool] = []
        self._over = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def strike(
        self, call: Interruptible, delay: float = 0.0, when: Callable[[], bool] | None = None
    ) -> None:
        """Interrupt a call `delay` seconds from now, or once `when()` is true."""

        self._results, self._over = results, over = list[bool](), threading.Lock()
        over.acquire()

        def job() -> None:
            if when is not None:
                wait_until(when, "time to interrupt")
            time.sleep(delay)
            results.append(call.interrupt())
            over.release()

        self._jobs.put(job)

    def result(self) -> bool:
        """Return the result of the last interrupt; retry if an exception interrupts the wait."""
        if not self._results:
            assert self._over.acquire(timeout=PATIENCE)
        return self._results[0]

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def blocked(thread: int) -> Callable[[], bool]:
    """Return a check whether a thread has stayed in one system call over several checks.

    Sleep between two checks: a thread that waits for the GIL is in a system call, too.
    """
    seen: list[str] = []

    def check() -> bool:
        seen.append(Path(f"/proc/self/task/{thread}/syscall").read_text())
        return len(seen) > 4 and len(set(seen[-4:])) == 1 and not seen[-1].startswith("running")

    return check


class Sweep(NamedTuple):
    """Result of a sweep."""

    strays: list[int]
    """Instructions at which an interrupt raised an exception outside the call."""
    interrupted: int
    """Number of calls that the interrupt ended."""
    instructions: int


def sweep(
    make: Callable[[], Interruptible],
    striker: Striker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    late: bool,
) -> Sweep:
    """Interrupt calls that return at once, each at another instruction around the function.

    Args:
        make: creates a call.
        striker: the thread that interrupts.
        monkeypatch: adds a pause to the functions that send an interrupt.
        late: delay the sending of each interrupt until the caller has advanced as far as it can.
    """
    decided, gone_on, sent = threading.Event(), threading.Event(), threading.Event()

    def slowed(send: Callable[..., T]) -> Callable[..., T]:
        def sending(*args: object, **options: object) -> T:
            decided.set()
            if late:
                gone_on.wait(A_MOMENT)
            done = send(*args, **options)
            sent.set()
            return done

        return sending

    monkeypatch.setattr(signal, "pthread_kill", slowed(signal.pthread_kill))
    monkeypatch.setattr(interrupt, "set_async_exception", slowed(interrupt.set_async_exception))
    if sys.version_info >= (3, 13):
        monkeypatch.setattr(CodeEvents, "switch", slowed(CodeEvents.switch))
    strays, interrupted = [], 0
    for number in range(1, 10_000):
        for event in (decided, gone_on, sent):
            event.clear()
        call = make()

        def ask(call: Interruptible = call) -> None:
            striker.strike(call)
            (decided if late else sent).wait(A_MOMENT)

        at = _AtInstruction(number, ask)
        ended_by_it = False
        try:
            try:
                with at:
                    call.run(lambda: None)
            except RankShouldRestart:
                ended_by_it = True
            gone_on.set()
            if at.reached:
                sent.wait(A_MOMENT)
                ended_by_it &= striker.result()
        except RankShouldRestart:
            strays.append(number)
            striker.result()
        interrupted += ended_by_it
        if not at.reached:
            return Sweep(strays, interrupted, number - 1)
    raise AssertionError("a call that returns at once has no end")


class _AtInstruction:
    """Calls a function before the n-th instruction of this thread in a method of a call."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act
        self.reached = False

    def __enter__(self) -> None:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 sends no opcode events without it
        sys.settrace(self._trace)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.reached or not isinstance(frame.f_locals.get("self"), Interruptible):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                self.reached = True
                sys.settrace(None)
                self._act()
                return None
        return self._trace
