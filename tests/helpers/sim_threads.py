"""Locks in virtual time, for code that blocks: what it is given for the module `threading`.

One thread runs at a time, until it blocks. While faults happen a thread may also lose the processor
where it takes a lock, for a moment or for longer, so others come between what it did before and
what it does under the lock. Those of a program that is not alive block nobody and wake nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sim_kernel import Program, Resume

T = TypeVar("T")


class Threads:
    """The locks of one program; see `regrow.rendezvous._threads.Threads`."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def Lock(self) -> Lock:
        return Lock(self.program)

    def Condition(self) -> Condition:
        return Condition(self.program)


class Lock:
    """See `threading.Lock`; whoever waits longest has it next."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._held = False
        self._waiting: deque[Resume] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken in that many seconds."""
        program, sim = self.program, self.program.sim
        if not program.alive:
            return True
        if sim.random.random() < sim.preempted:
            program.wait(program.sleep(sim.random.choice([0.0, 0.01, 0.3])))
        if not self._held:
            self._held = True
            return True
        return blocking and bool(program.wait(lambda resume: self._queue(resume, timeout)))

    def _queue(self, resume: Resume, timeout: float) -> None:
        self._waiting.append(resume)

        def expired() -> None:
            if resume in self._waiting:
                self._waiting.remove(resume)
                resume(False)

        if timeout >= 0:
            self.program.machine.after(timeout, expired)

    def release(self) -> None:
        """Give the lock to whoever is next."""
        if self.program.alive:
            assert self._held
            self._held = bool(self._waiting)
            if self._waiting:
                self.program.sim.after(0.0, partial(self._waiting.popleft(), True))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class Condition(Lock):
    """See `threading.Condition`."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._notified = deque[Resume]()

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until something holds; return what the predicate returned last."""
        clock = self.program.machine
        deadline = None if timeout is None else clock.clock + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - clock.clock
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified; return whether it was before the time was up."""
        self.release()
        try:
            notified: bool = self.program.wait(lambda resume: self._listen(resume, timeout))
        finally:
            self.acquire()
        return notified

    def _listen(self, resume: Resume, timeout: float | None) -> None:
        self._notified.append(resume)

        def expired() -> None:
            if resume in self._notified:
                self._notified.remove(resume)
                resume(False)

        if timeout is not None:
            self.program.machine.after(max(timeout, 1e-6), expired)

    def notify_all(self) -> None:
        """Wake all who wait."""
        notified, self._notified = self._notified, deque()
        for resume in notified if self.program.alive else ():
            self.program.sim.after(0.0, partial(resume, True))
