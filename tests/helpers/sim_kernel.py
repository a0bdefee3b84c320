"""Virtual time, machines with clocks of their own, and programs that can be paused and killed.

A simulation is a heap of things to do and one seeded source of chance; nothing else decides
anything, so a seed is a history. A thread of a program is a generator: it yields what it waits for
(`Sleep`, `Until`, or any function that is given the thread's `resume`), and is resumed when that
has come and its program runs. So a program that is paused does nothing and forgets nothing, and
one that is killed never does anything again.

A thread may also be code that blocks, which knows nothing of simulations: it runs as a greenlet,
and where it would block it is given something that calls `Program.wait` (`sim_threads`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

Resume = Callable[[Any], None]
Waits = Callable[[Resume], None]
Thread = Generator[Waits, Any, Any]


class Simulation:
    """A heap of things to do, and a seeded source of chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.done = 0
        self.preempted = 0.0
        """How often a thread loses the processor where it takes a lock."""
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + seconds, self._order, do))

    def run(self, until: float) -> None:
        """Do what is to be done until then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, do = heapq.heappop(heap)
            self.done += 1
            do()
        self.now = until


class Machine:
    """A host: its clocks, its network, and whether it runs at all."""

    def __init__(self, sim: Simulation, name: str, drift: float = 5e-4) -> None:
        self.sim, self.name = sim, name
        self._rate = 1.0 + sim.random.uniform(-drift, drift)
        self._start = sim.random.uniform(0, 1e6)
        self.wall = sim.random.uniform(-1e3, 1e3)
        """Seconds by which its wall clock is wrong."""
        self.frozen_until = 0.0
        self.cut_until = {"out": 0.0, "in": 0.0}
        self.trouble_at = 0.0
        """When it was last seen not to be healthy; may lie ahead."""

    @property
    def clock(self) -> float:
        """Seconds of its monotonic clock, which agrees with no other."""
        return self._start + self.sim.now * self._rate

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something when so many seconds of its clock have passed."""
        self.sim.after(max(seconds, 0.0) / self._rate, do)

    def trouble(self, until: float) -> None:
        """Note that nobody has to be surprised if nothing is heard of it until then."""
        self.trouble_at = max(self.trouble_at, until)


class Program:
    """A process on a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.sim = machine, machine.sim
        self.alive = True
        self.paused_until = 0.0
        self.threads = 0
        """How many it has made so far."""
        self._waiters: dict[object, tuple[Callable[[], bool], Resume]] = {}
        self._blocking: dict[greenlet, None] = {}

    def spawn(self, thread: Thread) -> None:
        """Run a thread."""

        def resume(value: Any) -> None:
            self.when_awake(lambda: step(value))

        def step(value: Any) -> None:
            try:
                if isinstance(value, BaseException):
                    waits = thread.throw(value)
                else:
                    waits = thread.send(value)
            except StopIteration:
                return
            waits(resume)

        step(None)

    def start(self, call: Callable[[], None]) -> None:
        """Run code that blocks, as a thread."""
        thread = greenlet(lambda _: call())
        self._blocking[thread] = None

        def resume(value: Any) -> None:
            self.when_awake(lambda: step(value))

        def step(value: Any) -> None:
            thread.parent = getcurrent()
            waits = (thread.throw if isinstance(value, Exception) else thread.switch)(value)
            if thread.dead:
                self._blocking.pop(thread, None)
            else:
                waits(resume)

        self.sim.after(0.0, lambda: resume(None))

    def wait(self, waits: Waits) -> Any:
        """Block a thread that was begun by `start`; return, or raise, what it is resumed with."""
        parent = getcurrent().parent
        if not self.alive:
            raise GreenletExit
        assert parent is not None, "what may block has to be called in a thread"
        return parent.switch(waits)

    def kill(self) -> None:
        """Never run again.

        What blocks is unwound here and now, so that nothing is left to be unwound at some other
        time; the world must not mind what a program does that is not alive.
        """
        self.alive = False
        for thread in [*self._blocking]:
            if thread is not getcurrent() and not thread.dead:
                thread.parent = getcurrent()
                thread.throw()
        self._blocking.clear()

    def when_awake(self, do: Callable[[], None]) -> None:
        """Do something now, or when the program is resumed; never if it is dead."""
        if not self.alive:
            return
        until = max(self.paused_until, self.machine.frozen_until)
        if self.sim.now < until:
            self.sim.after(until - self.sim.now, lambda: self.when_awake(do))
        else:
            do()

    def notify(self) -> None:
        """Let the threads that wait `until` something look again."""
        for key, (ready, resume) in list(self._waiters.items()):
            if key in self._waiters and ready():
                del self._waiters[key]
                resume(None)

    def sleep(self, seconds: float) -> Waits:
        """Wait for so many seconds of the machine's clock."""
        return lambda resume: self.machine.after(seconds, lambda: resume(None))

    def until(self, ready: Callable[[], bool], timeout: float | None = None) -> Waits:
        """Wait until something holds, or for so many seconds."""

        def waits(resume: Resume) -> None:
            if ready():
                self.sim.after(0.0, lambda: resume(None))
                return
            key = object()
            self._waiters[key] = ready, resume
            if timeout is not None:

                def expired() -> None:
                    if self._waiters.pop(key, None) is not None:
                        resume(None)

                self.machine.after(timeout, expired)

        return waits
