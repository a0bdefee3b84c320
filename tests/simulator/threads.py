"""Threads in virtual time: a replacement of the module `threading` for code that blocks.

One thread runs at a time, until it blocks. While faults happen, a thread may also lose the
processor when it takes a lock, for a moment or for longer. Other threads then run between its last
action and its first action under the lock. Threads of a dead program neither block nor wake others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from greenlet import getcurrent

from simulator.kernel import Program, Resume

T = TypeVar("T")


class Threads:
    """The threads and locks of one program; see `regrow.rendezvous.node.driver.Threads`."""

    def __init__(self, program: Program) -> None:
        self.Lock = partial(Lock, program)
        self.RLock = partial(RLock, program)
        self.Condition = partial(Condition, program)
        self.Event = partial(Event, program)
        self.Thread = partial(Thread, program)

    def current_thread(self) -> Thread:
        """See `threading.current_thread`; the thread must be a simulated one."""
        thread: Thread = getcurrent().thread
        return thread


class Waiters:
    """The threads that wait for something, in order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._waiting: dict[Resume, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wait(self, timeout: float | None, ready: Callable[[], object] = lambda: True) -> bool:
        """Block until woken; return whether that was before the time-out."""
        woken: bool = self.program.wait(lambda resume: self._enter(resume, timeout, ready))
        return woken

    def _enter(self, resume: Resume, timeout: float | None, ready: Callable[[], object]) -> None:
        self._waiting[resume] = ready

        def expired() -> None:
            if self._waiting.pop(resume, None):
                resume(False)

        if timeout is not None:
            # Time must pass, even if the time-out is too short to change the clock.
            self.program.machine.after(max(timeout, 1e-6), expired)

    def wake(self, most: int | None = None) -> None:
        """Wake the threads with `ready()` true, at most `most`, longest wait first."""
        for resume in [resume for resume, ready in self._waiting.items() if ready()][:most]:
            del self._waiting[resume]
            self.program.sim.after(0.0, partial(resume, True))


class Lock:
    """See `threading.Lock`; the thread that waits longest gets it next."""

    reentrant = False

    def __init__(self, program: Program) -> None:
        self.program = program
        self._depth = 0
        self._owner: object = None
        self._waiters = Waiters(program)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken within `timeout` seconds."""
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
        """Release the lock, and hand it to the next thread."""
        if self.program.alive:
            assert self._depth, "a lock is released that no thread holds"
            self._depth -= 1
            if not self._depth:
                self._owner = None  # else this thread could enter beside the next one
                if self._waiters:
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
        """Wait until `predicate()` is true; return its last result."""
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
        """Wait to be notified; return whether that was before the time-out."""
        held_once = self._depth == 1 or not self.program.alive
        assert held_once, "a thread that waits holds the lock once"
        self.release()
        try:
            return self._listeners.wait(timeout, ready)
        finally:
            self.acquire()

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        if self.program.alive:
            self._listeners.wake()


class Event:
    """See `threading.Event`."""

    def __init__(self, program: Program) -> None:
        self._set = False
        self._changed = Condition(program)

    def set(self) -> None:
        """Set the event: threads that wait continue, and later ones do not wait."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._set

    def clear(self) -> None:
        """Clear the event: later threads wait again."""
        with self._changed:
            self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or until the time-out; return whether it is set."""
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
        return self._number  # makes the order of a set of threads independent of addresses

    def start(self) -> None:
        """Start the thread."""
        self._program.start(self._run)

    def _run(self) -> None:
        setattr(getcurrent(), "thread", self)  # noqa: B010 - a greenlet accepts any attribute
        self._target()
        self._over.set()

    def is_alive(self) -> bool:
        """Return whether the thread has not ended; it counts as alive before its start."""
        return not self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, or until the time-out."""
        self._over.wait(timeout)
