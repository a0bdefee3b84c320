"""The rendezvous of nodes that live in one process: a world of one node, and tests.

`LocalRounds` is the shortest way to drive the rules of `_round`: one lock around the state, one
condition on which everybody waits, and the last call as a timed wait on it. A job on one host
needs no more, so `--standalone` opens no port and asks no name service. The drivers for many hosts
have the same parts, with a store in the place of the lock.

Every round has a store of its own, which is closed when the round is over: whoever is blocked in
it is woken, and nobody can read what an older round left.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from regrow.rendezvous._errors import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from regrow.rendezvous._news import (
    Effect,
    Event,
    Failed,
    Join,
    Judged,
    Leave,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._patience import Bounds, Patience, look
from regrow.rendezvous._round import Round, judged, standing, stands_by, step
from regrow.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[Effect, Round], None]

LAST_CALL_TIMEOUT = 30.0  # seconds


class LostTouch(Exception):
    """The rounds went on without the node: it can only come back as a new one."""


class LocalRounds:
    """The rounds of one job, shared by the handlers of all its nodes in this process.

    Args:
        run_id: the id of the job.
        min_nodes: the fewest nodes that make a round.
        max_nodes: the most nodes in a round.
        last_call: seconds that a big enough round waits for more nodes.
    """

    def __init__(
        self,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        *,
        last_call: float = LAST_CALL_TIMEOUT,
    ) -> None:
        self.run_id = run_id
        self._bounds = Bounds(last_call=last_call)
        self._changed = threading.Condition()
        self._state = Round(min_nodes, max_nodes)
        self._patience = Patience()
        self._store = MemoryStore()
        self._listeners: dict[object, Listener] = {}
        self._lives = 0

    @property
    def state(self) -> Round:
        """The rounds as they are now."""
        return self._state

    def new_id(self, addr: str) -> str:
        """Return an id that no other node has had."""
        with self._changed:
            self._lives += 1
            return f"{addr}/{os.getpid()}/{self._lives}"

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every effect, and the state in which it came about.

        Returns:
            A function that ends it.
        """
        key = object()
        with self._changed:
            self._listeners[key] = listener

        def stop() -> None:
            with self._changed:
                self._listeners.pop(key, None)

        return stop

    def wake(self) -> None:
        """Let everyone who waits look again at what it waits for."""
        with self._changed:
            self._changed.notify_all()

    def post(self, event: Event) -> tuple[Effect, ...]:
        """Apply an event, wake everyone and return the news."""
        with self._changed:
            before, (self._state, effects) = self._state, step(self._state, event)
            if self._state.number != before.number:
                self._store.close()
                self._store = MemoryStore()
            self._changed.notify_all()
            for effect in effects:
                for listener in tuple(self._listeners.values()):
                    listener(effect, before)
            return effects

    def meet(
        self, join: Join, timeout: float, interrupted: Callable[[], bool]
    ) -> tuple[Seated, MemoryStore]:
        """Join, and block until the node is seated.

        Args:
            join: who, and with which token.
            timeout: seconds to wait; the time in which the node stands by does not count.
            interrupted: asked after every `wake` whether to give up.

        Returns:
            The node's seat and the round's store.

        Raises:
            LostTouch: the token is stale, or the node was given up while it waited.
            RendezvousClosedError: there will be no other round.
            RendezvousGracefulExitError: interrupted, or closed while the node stood by.
            RendezvousTimeoutError: says who was missing.
        """
        id = join.node.id
        with self._changed:
            for effect in self.post(join):
                if isinstance(effect, RoundClosed):
                    raise self._closed(effect)
                if isinstance(effect, Refused):
                    raise LostTouch(f"node {id} was refused: {effect.why}")
            try:
                return self._wait(join, timeout, interrupted)
            except BaseException:
                self.post(Leave(id))
                raise

    def _wait(
        self, join: Join, timeout: float, interrupted: Callable[[], bool]
    ) -> tuple[Seated, MemoryStore]:
        id = join.node.id
        deadline: float | None = None
        while True:
            match standing(self._state, id):
                case Seated() as seated:
                    return seated, self._store
                case RoundClosed() as closed:
                    if stands_by(self._state, id):
                        raise RendezvousGracefulExitError(
                            f"node {id} stood by until the rendezvous '{self.run_id}' was closed"
                        )
                    raise self._closed(closed)
                case RoundEnded(round):  # before this thread could see that it was seated
                    self.post(Join(join.node, round, join.why))
                    continue
                case None:
                    raise LostTouch(f"node {id} was given up while it waited")
            self._check(id, interrupted)
            now = time.monotonic()
            if stands_by(self._state, id):
                deadline = None
            elif deadline is None:
                deadline = now + timeout
            again = self._look(now)
            if again == now:
                continue
            if deadline is not None and now >= deadline:
                from regrow.rendezvous._waiting import explain_timeout

                raise RendezvousTimeoutError(explain_timeout(self._state, self.run_id, id, timeout))
            until = min((t for t in (deadline, again) if t is not None), default=None)
            self._changed.wait(None if until is None else until - now)

    def judge(self, failed: Failed, interrupted: Callable[[], bool]) -> Judged | None:
        """Report a failure, and block until it is judged; None: that round was over already.

        Raises:
            RendezvousClosedError: there will be no other round.
            RendezvousGracefulExitError: interrupted.
        """
        with self._changed:
            for effect in self.post(failed):
                if isinstance(effect, Refused):
                    return None
                if isinstance(effect, RoundClosed):
                    raise self._closed(effect)
            while (verdict := judged(self._state, failed.token)) is None:
                if self._state.closed:
                    raise self._closed(self._state.closed)
                if failed.id not in self._state.awaited:
                    return None
                self._check(failed.id, interrupted)
                now = time.monotonic()
                again = self._look(now)
                if again != now:
                    self._changed.wait(None if again is None else again - now)
            return verdict

    def _check(self, id: str, interrupted: Callable[[], bool]) -> None:
        if interrupted():
            raise RendezvousGracefulExitError(
                f"node {id} was told to stop waiting for round {self._state.number}"
            )

    def _look(self, now: float) -> float | None:
        """Do what is due; return when to look again, which is now if something was."""
        self._patience, due, again = look(self._patience, self._state, None, self._bounds, now)
        for event in due:
            self.post(event)
        return now if due else again

    def _closed(self, closed: RoundClosed) -> RendezvousClosedError:
        error = RendezvousClosedError(
            f"the rendezvous '{self.run_id}' is closed: node {closed.id}: {closed.why}"
        )
        error.report = closed.report
        return error
