"""Threads in virtual time, for code that blocks: what it is given for the module `threading`.

One thread runs at a time, until it blocks. While faults happen a thread may also lose the processor
where it takes a lock, for a moment or for longer, so others come between what it did before and
what it does under the lock. Those of a program that is not alive block nobody and wake nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from greenlet import getcurrent
from sim_kernel import Program, Resume

T = TypeVar("T")


class Threads:
    """The threads and locks of one program; see `regrow.rendezvous._threads.Threads`."""

    def __init__(self, program: Program) -> None:
        self.Lock = partial(Lock, program)
        self.RLock = partial(RLock, program)
        self.Condition = partial(Condition, program)
        self.Event = partial(Event, program)
        self.Thread = partial(Thread, program)

    def current_thread(self) -> Thread:
        """See `threading.current_thread`; the thread must be one of these."""
        thread: Thread = getcurrent().thread
        return thread


class Waiters:
    """Those who wait for something, in order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._waiting: dict[Resume, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wait(self, timeout: float | None, ready: Callable[[], object] = lambda: True) -> bool:
        """Block until woken; return whether that was before the time was up."""
        woken: bool = self.program.wait(lambda resume: self._enter(resume, timeout, ready))
        return woken

    def _enter(self, resume: Resume, timeout: float | None, ready: Callable[[], object]) -> None:
        self._waiting[resume] = ready

        def expired() -> None:
            if self._waiting.pop(resume, None):
                resume(False)

        if timeout is not None:
            # Time must pass, also where it is too short to show in the clock.
            self.program.machine.after(max(timeout, 1e-6), expired)

    def wake(self, most: int | None = None) -> None:
        """Wake those for whom it is of use, or so many of them that have waited longest."""
        for resume in [resume for resume, ready in self._waiting.items() if ready()][:most]:
            del self._waiting[resume]
            self.program.sim.after(0.0, partial(resume, True))


class Lock:
    """See `threading.Lock`; whoever waits longest has it next."""

    reentrant = False

    def __init__(self, program: Program) -> None:
        self.program = program
        self._depth = 0
        self._owner: object = None
        self._waiters = Waiters(program)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken in that many seconds."""
        program, sim, me = self.program, self.program.sim, getcurrent()
        if not program.alive:
            return True
        if self.reentrant and self._depth and self._owner is me:
            self._depth += 1
            return True
        if sim.random.random() < sim.preempted:
            program.wait(program.sleep(sim.random.choice([0.0, 0.01, 0.3])))
        if self._depth:
            if not blocking or not self._waiters.wait(None if timeout < 0 else timeout):
                return False
        else:
            self._depth = 1
        self._owner = me
        return True

    def release(self) -> None:
        """Give the lock to whoever is next."""
        if self.program.alive:
            assert self._depth, "a lock that nobody holds is released"
            self._depth -= 1
            if not self._depth and self._waiters:
                self._depth = 1
                self._waiters.wake(1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class RLock(Lock):
    """See `threading.RLock`."""

    reentrant = True


class Condition(RLock):
    """See `threading.Condition`."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._listeners = Waiters(program)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until something holds; return what the predicate returned last."""
        machine = self.program.machine
        deadline = None if timeout is None else machine.clock + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - machine.clock
            if left is not None and left <= 0:
                break
            self.wait(left, predicate)
        return result

    def wait(
        self, timeout: float | None = None, ready: Callable[[], object] = lambda: True
    ) -> bool:
        """Wait to be notified; return whether that was before the time was up."""
        assert self._depth == 1, "whoever waits holds the lock once"
        self.release()
        try:
            return self._listeners.wait(timeout, ready)
        finally:
            self.acquire()

    def notify_all(self) -> None:
        """Wake all who wait."""
        if self.program.alive:
            self._listeners.wake()


class Event:
    """See `threading.Event`."""

    def __init__(self, program: Program) -> None:
        self._set = False
        self._changed = Condition(program)

    def set(self) -> None:
        """Let all go on who wait, now and later."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for that long; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._set, timeout)


class Thread:
    """See `threading.Thread`."""

    def __init__(self, program: Program, target: Callable[[], None], **_: Any) -> None:
        program.threads += 1
        self._number = program.threads
        self._program = program
        self._target = target
        self._over = Event(program)

    def __hash__(self) -> int:
        return self._number  # so that the order of a set of threads hangs on no address

    def start(self) -> None:
        """Let it run."""
        self._program.start(self._run)

    def _run(self) -> None:
        setattr(getcurrent(), "thread", self)  # noqa: B010 - greenlets take any
        self._target()
        self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, or for that long."""
        self._over.wait(timeout)
