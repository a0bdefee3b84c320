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
    Join,
    Leave,
    Node,
    NodesWaiting,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._patience import Bounds, Patience, look
from regrow.rendezvous._round import Round, standing, stands_by, step
from regrow.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Listener = Callable[[RoundEnded | NodesWaiting, Mapping[str, int]], None]

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

    def new_node(self, addr: str, wanted: int | None = None) -> Node:
        """Return a node with an id that no other has had."""
        with self._changed:
            self._lives += 1
            return Node(f"{addr}/{os.getpid()}/{self._lives}", addr, wanted)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with what members must hear, and the ranks of those members.

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
                if isinstance(effect, RoundEnded | NodesWaiting):
                    for listener in tuple(self._listeners.values()):
                        listener(effect, before.ranks)
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
            if interrupted():
                raise RendezvousGracefulExitError(
                    f"node {id} was told to stop waiting for round {self._state.number}"
                )
            now = time.monotonic()
            if stands_by(self._state, id):
                deadline = None
            elif deadline is None:
                deadline = now + timeout
            self._patience, due, again = look(self._patience, self._state, None, self._bounds, now)
            if due:
                for event in due:
                    self.post(event)
                continue
            if deadline is not None and now >= deadline:
                raise RendezvousTimeoutError(explain_timeout(self._state, self.run_id, id, timeout))
            until = min((t for t in (deadline, again) if t is not None), default=None)
            self._changed.wait(None if until is None else until - now)

    def _closed(self, closed: RoundClosed) -> RendezvousClosedError:
        return RendezvousClosedError(
            f"the rendezvous '{self.run_id}' is closed: node {closed.id}: {closed.why}"
        )


def explain_timeout(state: Round, run_id: str, id: str, timeout: float) -> str:
    """Say what a node waited for in vain, how long, and who was missing."""
    waited = f"the rendezvous '{run_id}': node {id} waited {timeout:g} s for "
    members = len(state.members)
    if state.complete:
        return (
            f"{waited}a seat, and round {state.number} goes on with its {members} "
            f"node{'s' if members != 1 else ''}: {', '.join(state.ranks)}"
        )
    text = (
        f"{waited}round {state.number}, which has {members} of at least {state.min_nodes} "
        f"nodes: {', '.join(state.members)}"
    )
    if state.awaited:
        gone = ", ".join(sorted(state.awaited))
        text += f"; of round {state.number - 1} nothing was heard from {gone}"
    return text
