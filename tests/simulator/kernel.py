"""Virtual time, machines with their own clocks, and programs that can be paused and killed.

A simulation is a heap of calls and one seeded source of chance. Nothing else decides anything, so a
seed determines a history. A thread of a program is a generator. It yields what it waits for: the
result of `Program.sleep` or `Program.until`, or any function that receives the thread's `resume`.
It is resumed when that has happened and its program runs. So a paused program does nothing and
forgets nothing, and a killed program never runs again.

A thread may also be code that blocks and does not know that it is simulated. Such code runs as a
greenlet, and its blocking calls are replaced by objects that call `Program.wait` (`threads.py`).
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
    """A heap of calls, ordered by virtual time, and a seeded source of chance."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.done = 0
        self.preempted = 0.0
        """The probability that a thread loses the processor when it takes a lock."""
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + seconds, self._order, do))

    def run(self, until: float) -> None:
        """Make all calls that are due until then."""
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
        """When the machine was last not healthy; may lie in the future."""

    @property
    def clock(self) -> float:
        """Seconds of its monotonic clock, which differs from every other clock."""
        return self._start + self.sim.now * self._rate

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` when the machine's clock has advanced by `seconds`."""
        self.sim.after(max(seconds, 0.0) / self._rate, do)

    def trouble(self, until: float) -> None:
        """Note that silence of the machine until then is expected."""
        self.trouble_at = max(self.trouble_at, until)


class Program:
    """A process on a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.sim = machine, machine.sim
        self.alive = True
        self.paused_until = 0.0
        self.threads = 0
        """How many threads it has made so far."""
        self._waiters: dict[object, tuple[Callable[[], bool], Resume]] = {}
        self._blocking: dict[greenlet, None] = {}

    def spawn(self, thread: Thread) -> None:
        """Run a thread that is a generator."""

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
        """Run a thread that is blocking code."""
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
        """Block a thread that `start` began; return or raise the value it is resumed with."""
        parent = getcurrent().parent
        if not self.alive:
            raise GreenletExit
        assert parent is not None, "what may block has to be called in a thread"
        return parent.switch(waits)

    def kill(self) -> None:
        """Stop the program permanently.

        Blocked code is unwound immediately, so that no later moment unwinds it. The rest of the
        simulation must ignore all actions of a dead program.
        """
        self.alive = False
        running, caller = set(), getcurrent()
        while caller is not None:  # the callers of this greenlet continue when it returns
            running.add(caller)
            caller = caller.parent
        for thread in [*self._blocking]:
            if thread not in running and not thread.dead:
                thread.parent = getcurrent()
                thread.throw()
        self._blocking.clear()

    def when_awake(self, do: Callable[[], None]) -> None:
        """Call `do` now, or when the program is resumed; never if it is dead."""
        if not self.alive:
            return
        until = max(self.paused_until, self.machine.frozen_until)
        if self.sim.now < until:
            self.sim.after(until - self.sim.now, lambda: self.when_awake(do))
        else:
            do()

    def notify(self) -> None:
        """Let the threads that wait `until` a condition check it again."""
        for key, (ready, resume) in list(self._waiters.items()):
            if key in self._waiters and ready():
                del self._waiters[key]
                resume(None)

    def sleep(self, seconds: float) -> Waits:
        """Wait for `seconds` of the machine's clock."""
        return lambda resume: self.machine.after(seconds, lambda: resume(None))

    def until(self, ready: Callable[[], bool], timeout: float | None = None) -> Waits:
        """Wait until `ready()` is true, or for `timeout` seconds."""

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
