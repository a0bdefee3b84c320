"""The thread that hears of the end of an iteration, and ends the function for it.

It sleeps at the store until there is a fault. Then it answers the last call, and when that is over
begins the termination procedure, which no `CallWrapper.atomic` section overlaps: the abort, which
has blocking calls of the main thread fail, and the interrupt, which it repeats until the function
was left. What waits in torch by then is woken at each repetition, and torch's abort comes once more
in the end: the function may have been making a process group.

Whoever drops the last reference to a process group of torch's ends it, and joins gloo's threads.
The reducer of DistributedDataParallel is C++ and holds the interpreter's lock meanwhile, for which
one of those threads may be waiting, to let go of a collective that has failed. So the groups are
held here from before the abort until all that the function has left behind is gone, also what is
garbage: then the last reference is Python's, and torch releases the lock to end the group.

What fails here must not leave the main thread running with nobody who could stop it. So an abort
that raises is logged and the function interrupted all the same, whose health the health check is to
judge; and a link that is lost ends the function as a fault does, and is raised in the main thread.

Between iterations the thread asks for the barrier "ready", for the main thread to collect garbage
meanwhile: finalizers should run where the objects were used.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from regrow.inprocess._atomic import Atomic
from regrow.inprocess._generations import call
from regrow.inprocess._interrupt import GuardedCall
from regrow.inprocess._link import Faults, Link, LinkClosedError, Met
from regrow.inprocess.abort import Abort, AbortTorchDistributed
from regrow.inprocess.compose import Compose
from regrow.inprocess.state import FrozenState
from regrow.utils import get_logger

logger = get_logger(__name__)

LEAVE_TIME = 5.0
"""Seconds for the thread to end at the end of the call; one that is still in an abort is left."""


class Ending:
    """The end of one iteration on this rank, as it comes about."""

    __slots__ = (
        "aborted_at",
        "error",
        "faults",
        "groups",
        "guarded",
        "heard",
        "over",
        "state",
        "told_at",
        "waking",
    )

    def __init__(self, guarded: GuardedCall, state: FrozenState) -> None:
        self.guarded = guarded
        """The call of the function."""
        self.state = state
        """Of this rank in the iteration."""
        self.faults: Faults | None = None
        """What ended it."""
        self.told_at = 0.0
        """When that was heard of, in seconds of the monotonic clock."""
        self.aborted_at = 0.0
        """When it was through."""
        self.error: Exception | None = None
        """Why this rank cannot go on, if so."""
        self.groups: list[object] = []
        """torch's process groups that were aborted."""
        self.waking: list[Callable[[], object]] = []
        """What wakes the main thread where it waits in torch."""
        self.heard = threading.Event()
        """Set when the last call is over, and the abort may begin."""
        self.over = threading.Event()
        """Set when the function was left and everything here is done."""


class Follower:
    """Follows the iterations of one call, in a thread of its own.

    Args:
        link: this rank's.
        atomic: keeps sections of the function and the termination procedure apart.
        abort: the plug-in.
    """

    def __init__(self, link: Link, atomic: Atomic, abort: Abort | None) -> None:
        self._link = link
        self._atomic = atomic
        self._abort = abort
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="regrow-inprocess", daemon=True)
        self._thread.start()

    def follow(self, guarded: GuardedCall, state: FrozenState) -> Ending:
        """Begin to follow an iteration, which this rank has met for and not entered yet."""
        ending = Ending(guarded, state)
        ending.waking = [abort.waking(state) for abort in _of_torch(self._abort)]
        self._work.put(partial(self._follow, ending))
        return ending

    def ready(self, iteration: int) -> Future[Met]:
        """Be ready for the next iteration, and collect garbage while the others are waited for.

        Returns:
            What becomes of it; raises as `Link.ready`.
        """
        met: Future[Met] = Future()
        asking = threading.Event()

        def ask() -> None:
            asking.set()
            try:
                met.set_result(self._link.ready(iteration))
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                met.set_exception(error)

        self._work.put(ask)
        asking.wait()
        gc.collect()
        return met

    def stop(self) -> None:
        """End the thread; the link has to be closed."""
        self._work.put(None)
        self._thread.join(LEAVE_TIME)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds the function's call

    def _follow(self, ending: Ending) -> None:
        iteration = ending.state.iteration
        try:
            faults = self._link.follow(iteration)
            ending.told_at = time.monotonic()
            if faults is None:
                return
            ending.faults = faults
            ending.faults = self._link.heard(iteration)._replace(now=faults.now)
        except LinkClosedError:
            return
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            ending.error = error
        ending.heard.set()
        try:
            with self._atomic.termination():
                self._aborted(self._abort, ending)
                ending.guarded.interrupt(partial(self._wake, ending.waking))
                for again in _of_torch(self._abort):
                    self._aborted(again, ending)
        finally:
            ending.aborted_at = time.monotonic()
            ending.over.set()

    @staticmethod
    def _wake(waking: list[Callable[[], object]]) -> None:
        for wake in waking:
            try:
                wake()
            except Exception:
                logger.exception("who waits in torch may not be woken")
                waking.clear()
                return

    @staticmethod
    def _aborted(abort: Abort | None, ending: Ending) -> None:
        if abort is None:
            return
        try:
            for part in _of_torch(abort):
                ending.groups += part.groups()
            call(abort, ending.state)
        except BaseException:
            logger.exception(
                "abort failed on rank %s in iteration %d; the function is interrupted all the same",
                ending.state.rank,
                ending.state.iteration,
            )


def _of_torch(abort: object) -> Iterator[AbortTorchDistributed]:
    """The aborts of torch's process groups in a chain."""
    if isinstance(abort, Compose):
        for part in reversed(abort.instances):
            yield from _of_torch(part)
    elif isinstance(abort, AbortTorchDistributed):
        yield abort
