"""Thread that follows an iteration and, after a fault, aborts and interrupts the function.

The thread sleeps at the store until there is a fault. It then answers the last call. When the last
call is over, it runs the termination procedure: the abort, then the interrupt. No
`CallWrapper.atomic` section overlaps with this procedure. The abort makes blocking calls of the
main thread fail. The interrupt is repeated until the main thread has left the function, and each
repetition also ends a wait in torch's store. torch's abort runs once more at the end, because the
function may have created a process group meanwhile.

**Process groups are held here** from before the abort until all objects of the function are freed,
garbage included. The code that drops the last reference to a process group destroys the group and
joins gloo's threads. The reducer of DistributedDataParallel is C++ and holds the interpreter's lock
while it does so. A thread of gloo may wait for that lock to release a failed collective, which is a
deadlock. With the groups held here, Python drops the last reference, and torch releases the lock
before it destroys the group.

**A failure in this thread must still stop the main thread**, because no other thread can. If an
abort raises, the error is logged, the function is interrupted, and the health check decides whether
the rank is fit. A lost link ends the function as a fault does, and its error is raised in the main
thread.

Between iterations this thread waits at the barrier "ready". Meanwhile the main thread collects
garbage, because finalizers should run in the thread that used the objects.

**Atomic sections.** An atomic section of the function and the termination procedure (abort, then
interrupt) exclude each other through a re-entrant lock. So sections nest, and an abort plug-in may
use one. A lock alone has two gaps:

1. A thread that leaves a section and enters the next one takes the lock again before the waiting
   thread is awake. So the procedure closes a door first, and sections start only while the door is
   open.
2. A thread that arrives late must still be interruptible. So it waits at the door in a call that a
   signal ends.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from regrow.inprocess.abort import Abort, AbortTorchDistributed
from regrow.inprocess.call.restart import Timeline, release
from regrow.inprocess.compose import Compose
from regrow.inprocess.exception import LinkClosedError
from regrow.inprocess.group.group_messages import Met
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.interrupt.interrupt import GuardedCall
from regrow.inprocess.ranks.assignment import call_plugin
from regrow.inprocess.state import FrozenState
from regrow.utils import start_thread
from regrow.utils.logging import library_logger

logger = library_logger(__name__)


STOP_TIME = 5.0
"""Seconds to wait for the thread when the call ends. A thread that is still in an abort stays."""


@dataclass(slots=True, eq=False)
class Ending:
    """State of the end of one iteration on this rank, filled in step by step."""

    guarded: GuardedCall
    """The call of the function."""
    state: FrozenState
    """State of this rank in the iteration."""
    wakers: list[Callable[[], object]]
    """Functions that wake the main thread from a wait in torch."""
    timeline: Timeline | None = None
    """Times of the restart, from the faults to the end of the abort and the interrupt."""
    error: BaseException | None = None
    """Why this rank cannot continue; None if it can."""
    groups: list[object] = field(default_factory=list)
    """torch's process groups that were aborted."""
    last_call_over: threading.Event = field(default_factory=threading.Event)
    """Set when the last call is over and the abort may begin."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the main thread has left the function and this thread has finished the iteration."""


class IterationFollower:
    """Thread that follows the iterations of one call, one after the other.

    Args:
        link: the link of this rank.
        atomic: keeps atomic sections and the termination procedure apart.
        abort: the abort plug-in.
        limited: limits the time of a run of the abort.
        leaving: returns whether this rank leaves its round (`Moves`), so that its link was closed.
    """

    def __init__(
        self,
        link: ServiceLink,
        atomic: Atomic,
        abort: Abort | Compose | None,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = link
        self._atomic = atomic
        self._abort = abort
        self._limited = limited
        self._leaving = leaving
        self._work: SimpleQueue[Callable[[], BaseException | None] | None] = SimpleQueue()
        self._thread = start_thread(self._run, "regrow-inprocess")

    def follow(self, guarded: GuardedCall, state: FrozenState) -> Ending:
        """Start to follow an iteration; call this before the rank enters."""
        ending = Ending(guarded, state, [abort.waking() for abort in _of_torch(self._abort)])
        self._work.put(partial(self._follow, ending))
        return ending

    def ready(self, iteration: int) -> Future[Met]:
        """Wait at the barrier "ready" for the next iteration, and collect garbage meanwhile.

        Returns:
            A future with the result or the exception of `ServiceLink.ready`.
        """
        met: Future[Met] = Future()
        asking = threading.Event()

        def ask() -> BaseException | None:
            asking.set()
            try:
                met.set_result(self._link.ready(iteration))
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                met.set_exception(error)
            return met.exception()

        self._work.put(ask)
        asking.wait()
        gc.collect()
        return met

    def settle(self) -> None:
        """Wait until the thread has finished the iterations that it follows.

        The caller has closed the link, so the thread only ends what it has begun.
        """
        settled = threading.Event()
        self._work.put(settled.set)
        settled.wait()

    def stop(self) -> None:
        """End the thread. The caller has closed the link to the group."""
        self._work.put(None)
        self._thread.join(STOP_TIME)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            error = work()
            del work  # it refers to the call of the function
            if error is not None:  # its frames refer to the call of the function
                release(error)
                del error

    def _follow(self, ending: Ending) -> BaseException | None:
        """Follow an iteration to its end, and wake the main thread in every case.

        Returns:
            Why this rank cannot continue; None if it can.
        """
        try:
            if self._wait_for_fault(ending):
                self._end(ending)
        except BaseException as error:
            logger.exception(
                "rank %s could not be interrupted in iteration %d; it cannot continue, for this "
                "reason:",
                ending.state.rank,
                ending.state.iteration,
            )
            ending.error = ending.error or error
        finally:
            if ending.timeline is not None:
                ending.timeline.reached("aborted", time.monotonic())
            ending.last_call_over.set()
            ending.over.set()
        return ending.error

    def _wait_for_fault(self, ending: Ending) -> bool:
        """Wait until the iteration ends; return whether the function has to be ended.

        The faults of the iteration are in the timeline of `ending` afterwards.
        """
        iteration = ending.state.iteration
        try:
            faults = self._link.follow(iteration)
            if faults is None:  # the call is over: there is no function to end
                return False
            ending.timeline = Timeline(faults, time.monotonic())
            all_faults = self._link.answer_last_call(iteration)
            ending.timeline.faults = all_faults._replace(now=faults.now)
        except LinkClosedError as error:
            if not self._leaving():
                return False
            ending.error = error
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            ending.error = error
        return True

    def _end(self, ending: Ending) -> None:
        """Run the abort, and interrupt the function until the main thread has left it."""
        ending.last_call_over.set()
        with self._atomic.termination():
            self._run_abort(self._abort, ending)
            ending.guarded.interrupt(partial(self._wake, ending.wakers))
            for abort in _of_torch(self._abort):
                self._run_abort(abort, ending)

    @staticmethod
    def _wake(wakers: list[Callable[[], object]]) -> None:
        for wake in wakers:
            try:
                wake()
            except Exception:
                logger.exception(
                    "a wait in torch may not end: a function that should wake it failed"
                )
                wakers.clear()
                return

    def _run_abort(self, abort: Abort | Compose | None, ending: Ending) -> None:
        try:
            with self._limited():
                for part in _of_torch(abort):
                    ending.groups += part.groups()
                call_plugin(abort, ending.state)
        except BaseException:
            logger.exception(
                "abort failed on rank %s in iteration %d; the function is interrupted nevertheless",
                ending.state.rank,
                ending.state.iteration,
            )


def _of_torch(abort: object) -> Iterator[AbortTorchDistributed]:
    """Return the aborts of torch's process groups in a chain of plug-ins."""
    if isinstance(abort, Compose):
        for part in reversed(abort.instances):
            yield from _of_torch(part)
    elif isinstance(abort, AbortTorchDistributed):
        yield abort


class Atomic:
    """Lock between the termination procedure and the atomic sections of the function."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._door = threading.RLock()
        self._inside: set[int] = set()  # idents of the threads in a section

    @contextmanager
    def section(self) -> Iterator[None]:
        """Run code that excludes the termination procedure; wait while the procedure runs."""
        me = threading.get_ident()
        if me in self._inside:
            yield
            return
        with self._door:  # open, unless the procedure runs or waits in another thread
            pass
        with self._lock:
            self._inside.add(me)
            try:
                yield
            finally:
                self._inside.discard(me)

    @contextmanager
    def termination(self) -> Iterator[None]:
        """Run the termination procedure when no thread is in a section; block new sections."""
        with self._door, self._lock:
            yield
