"""A section and the termination procedure never run at once, and neither waits without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from regrow.inprocess.monitor_thread import RankShouldRestart

from helpers.processes import PATIENCE, wait_until
from helpers.ranks.interrupting import Striker, blocked
from regrow.inprocess.call.follower import Atomic
from regrow.inprocess.interrupt.interrupt import Interrupter


class Monitor:
    """A thread that goes through a termination procedure."""

    def __init__(self, atomic: Atomic) -> None:
        self.inside, self.finish = threading.Event(), threading.Event()
        self._atomic = atomic
        self._thread = threading.Thread(target=self._terminate)
        self._thread.start()

    def _terminate(self) -> None:
        with self._atomic.termination(), self._atomic.section():  # an abort may use one
            self.inside.set()
            self.finish.wait(PATIENCE)

    @property
    def native_id(self) -> int:
        assert self._thread.native_id is not None
        return self._thread.native_id

    def close(self) -> None:
        self.finish.set()
        self._thread.join()


@pytest.fixture
def striker() -> Iterator[Striker]:
    striker = Striker()
    yield striker
    striker.close()


def test_the_procedure_begins_when_the_section_is_over() -> None:
    atomic = Atomic()
    with atomic.section():
        monitor = Monitor(atomic)
        wait_until(blocked(monitor.native_id), "the procedure waits for the section")
        with atomic.section():  # sections still nest
            pass
        assert not monitor.inside.is_set()
    assert monitor.inside.wait(PATIENCE)
    monitor.close()


def test_sections_without_a_pause_do_not_keep_it_out() -> None:
    atomic = Atomic()
    monitor = Monitor(atomic)

    def let_it_begin() -> None:
        monitor.inside.wait(PATIENCE)
        monitor.finish.set()

    helper = threading.Thread(target=let_it_begin)
    helper.start()
    deadline = time.monotonic() + PATIENCE
    while not monitor.finish.is_set():
        with atomic.section():
            assert not monitor.inside.is_set() or monitor.finish.is_set()
            assert time.monotonic() < deadline
    helper.join()
    monitor.close()


def test_a_thread_that_waits_for_a_section_is_interrupted(striker: Striker) -> None:
    atomic = Atomic()
    entering = threading.Event()

    def enter() -> None:
        entering.set()
        with atomic.section():
            pytest.fail("the procedure is in progress")

    with Interrupter() as interrupter:
        call = interrupter.call()
        monitor = Monitor(atomic)
        monitor.inside.wait(PATIENCE)
        striker.strike(call, when=entering.is_set)
        with pytest.raises(RankShouldRestart):
            call.run(enter)
        assert striker.result()
        monitor.close()
    with atomic.section():  # the procedure is over
        pass


def test_no_interrupt_arrives_in_a_section(striker: Striker) -> None:
    atomic = Atomic()
    done = []

    def work() -> None:
        while True:
            with atomic.section():
                done.append("begun")
                done.append("ended")

    class Terminating:
        """Acts as a monitor: interrupts within the procedure."""

        def run(self, fn: object, /) -> None: ...

        def interrupt(self) -> bool:
            with atomic.termination():
                return call.interrupt()

    with Interrupter() as interrupter:
        for _ in range(30):
            call = interrupter.call()
            striker.strike(Terminating(), when=lambda: bool(done))
            with pytest.raises(RankShouldRestart):
                call.run(work)
            assert striker.result()
            assert done.count("begun") == done.count("ended")
            done.clear()
