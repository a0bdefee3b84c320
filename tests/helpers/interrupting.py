"""Interrupting calls from another thread, at random and at each instruction in turn."""

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

from processes import PATIENCE, wait_until

from regrow.inprocess import _interrupt
from regrow.inprocess._spared import RankShouldRestart

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

#: Seconds in which a thread that is not held up by the other gets on.
A_MOMENT = 0.002


@runtime_checkable
class Interruptible(Protocol):
    """What these need of a call."""

    def run(self, fn: Callable[[], Any], /) -> Any: ...
    def interrupt(self) -> bool: ...


class Striker:
    """A thread that interrupts the calls that it is given."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._told: list[bool] = []
        self._over = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def strike(
        self, call: Interruptible, delay: float = 0.0, when: Callable[[], bool] | None = None
    ) -> None:
        """Interrupt a call `delay` seconds from now, or once `when()` holds."""

        self._told, self._over = told, over = list[bool](), threading.Lock()
        over.acquire()

        def job() -> None:
            if when is not None:
                wait_until(when, "time to interrupt")
            time.sleep(delay)
            told.append(call.interrupt())
            over.release()

        self._jobs.put(job)

    def result(self) -> bool:
        """What the last interrupt returned; asked for again if an exception came in between."""
        if not self._told:
            assert self._over.acquire(timeout=PATIENCE)
        return self._told[0]

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def blocked(thread: int) -> Callable[[], bool]:
    """Tells whether a thread has been in one system call for some looks.

    Sleep between two of them: who waits for the interpreter's lock is in a system call, too.
    """
    seen: list[str] = []

    def look() -> bool:
        seen.append(Path(f"/proc/self/task/{thread}/syscall").read_text())
        return len(seen) > 4 and len(set(seen[-4:])) == 1 and not seen[-1].startswith("running")

    return look


class Sweep(NamedTuple):
    """What a sweep found."""

    strays: list[int]
    """Instructions after whose interrupt something was raised outside of the call."""
    interrupted: int
    """How many of the calls ended by the interrupt."""
    instructions: int


def sweep(
    make: Callable[[], Interruptible],
    striker: Striker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    late: bool,
) -> Sweep:
    """Interrupt calls that end at once, each at another instruction of what runs the function.

    Args:
        late: what was asked for is sent when the caller has gone on as far as it can.
    """
    decided, gone_on, sent = threading.Event(), threading.Event(), threading.Event()

    def slowed(send: Callable[..., T]) -> Callable[..., T]:
        def sending(thread: int, what: object) -> T:
            decided.set()
            if late:
                gone_on.wait(A_MOMENT)
            done = send(thread, what)
            sent.set()
            return done

        return sending

    monkeypatch.setattr(signal, "pthread_kill", slowed(signal.pthread_kill))
    monkeypatch.setattr(_interrupt, "_set_async_exception", slowed(_interrupt._set_async_exception))
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
        sys._getframe().f_trace_opcodes = True  # or Python 3.12 has none to tell of
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
