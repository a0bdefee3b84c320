"""The wrapped function is interrupted once, wherever it stands, and nothing else ever is."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from regrow.inprocess._interrupt import Interrupter, RankShouldRestart

PATIENCE = 30.0
SEED = 20261121


class Interruptible(Protocol):
    """What the tests need of a call; the one with the classical race has it as well."""

    def run(self, fn: Callable[[], Any], /) -> Any: ...
    def interrupt(self) -> bool: ...


@pytest.fixture(autouse=True)
def threads_take_turns_quickly() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    with Interrupter() as interrupter:
        yield interrupter


class Striker:
    """A thread that interrupts calls as they are handed to it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Interruptible, float] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            call, delay = job
            end = time.monotonic() + delay
            while time.monotonic() < end:
                time.sleep(0)
            self._results.put(call.interrupt())

    def strike(self, call: Interruptible, delay: float = 0.0) -> None:
        """Interrupt a call `delay` seconds from now."""
        self._calls.put((call, delay))

    def result(self) -> bool:
        return self._results.get(timeout=PATIENCE)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()


@pytest.fixture
def striker() -> Iterator[Striker]:
    striker = Striker()
    yield striker
    striker.close()


def in_another_thread(work: Callable[[], None]) -> None:
    """Run `work` elsewhere than in the main thread, and raise what it raises."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the function was never interrupted"
    if failures:
        raise failures[0]


# --- everywhere, once


class Deaf(logging.Handler):
    """Takes its lock for each record, and does nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        pass


class Sites:
    """Endless functions of all kinds of code; each counts the exceptions that reach it."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.swallow = 0
        self.open = 0
        self.lock = threading.Lock()
        self.condition = threading.Condition()
        self.queue: queue.Queue[int] = queue.Queue()
        self.log = logging.Logger("of the test")
        self.handler = Deaf()
        self.log.addHandler(self.handler)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def numbers(self) -> Iterator[int]:
        for number in itertools.count():
            try:
                yield number
            finally:
                self.open += 0

    def generators(self) -> None:
        for number in self.numbers():
            sum(n for n in range(number % 10))

    def contexts(self) -> None:
        while True:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.opened())
                stack.callback(len, ())

    def cleanups(self) -> None:
        while True:
            try:
                raise KeyError
            except KeyError:
                with contextlib.suppress(IndexError):
                    [].pop()
            finally:
                str(self.open)

    def nested(self) -> None:
        def deeper(level: int) -> int:
            return deeper(level - 1) + 1 if level else 0

        while True:
            deeper(20)

    def comprehensions(self) -> None:
        while True:
            {str(a): [b * a for b in range(5)] for a in range(5)}

    def locks(self) -> None:
        while True:
            with self.lock, self.condition:
                self.condition.notify()

    def queues(self) -> None:
        while True:
            self.queue.put(1)
            self.queue.get()

    def logging(self) -> None:
        while True:
            self.log.warning("here")

    def naps(self) -> None:
        while True:
            time.sleep(0.0001)

    def swallowing(self) -> None:
        while True:
            try:
                self.nested()
            except BaseException:
                self.arrivals += 1
                if not self.swallow:
                    self.arrivals -= 1  # `count` sees it
                    raise
                self.swallow -= 1

    def kinds(self) -> list[Callable[[], None]]:
        return [
            self.generators,
            self.contexts,
            self.cleanups,
            self.nested,
            self.comprehensions,
            self.locks,
            self.queues,
            self.logging,
            self.naps,
            self.swallowing,
        ]

    def locked(self) -> bool:
        """Whether a lock is left locked. An exception that is aimed from outside may do that."""
        plain = self.lock.locked() or self.queue.mutex.locked()
        owned: list[Any] = [self.condition, self.handler.lock]  # this thread may lock them again
        return plain or any(lock._is_owned() for lock in owned)

    def count(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except RankShouldRestart:
            self.arrivals += 1
            raise


def interrupt_everywhere(
    interrupter: Interrupter, striker: Striker, times: int, *, exact: bool = True
) -> None:
    dice = random.Random(SEED)
    sites = Sites()
    kinds = sites.kinds()
    dice.shuffle(kinds)
    for number in range(times):
        fn = kinds[number % len(kinds)]
        sites.arrivals = 0
        sites.swallow = swallowed = dice.randrange(3) if fn == sites.swallowing else 0
        call = interrupter.call()
        striker.strike(call, dice.random() * 0.0004)
        with contextlib.suppress(RankShouldRestart):  # as pytest.raises, and far cheaper
            call.run(sites.count, fn)
            pytest.fail(f"{fn.__name__} came back in round {number}")
        assert striker.result()
        # A second arrival would be raised here, or in the next round outside of `run`.
        assert sites.arrivals in (0, 1 + swallowed), f"{fn.__name__}, round {number}"
        if exact:
            assert not sites.locked(), f"{fn.__name__} left a lock locked in round {number}"
        assert sites.open == 0, f"{fn.__name__} was not unwound in round {number}"


def test_thousands_of_interrupts_arrive_once_each(
    interrupter: Interrupter, striker: Striker
) -> None:
    interrupt_everywhere(interrupter, striker, 2000)


def test_they_do_in_another_thread_than_the_main_one(striker: Striker) -> None:
    def work() -> None:
        with Interrupter() as interrupter:
            interrupt_everywhere(interrupter, striker, 200, exact=False)

    in_another_thread(work)
