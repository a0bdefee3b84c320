"""The rounds run by the nodes themselves, over any backend that can compare and set.

Every node applies its own event to the state that it has read (`_round.step`), and publishes what
comes out if nobody was faster; else it applies the event to what the faster one has written
(`_shared`). The rules do not mind a call that is made twice, so an answer that was lost is no
problem either: the node makes the call again.

What takes time with a service of its own is done here by all nodes, each by its own clock
(`_patience`): the time of the last call, and listening to the others' beats (`_neighbours`).
Everyone's judgement names what it is about, so that of ten nodes which notice the same thing nine
change nothing.

**Beats** go to the backend where it has a place for them. Else they stand in the document, and a
beat is a write like any other. A beat counts as answered only by a state that was read after it and
shows the node's seat; a node that was given up meanwhile learns so from its first beat.
"""

from __future__ import annotations

import os
import threading
import time
from random import Random
from typing import TYPE_CHECKING, Any

from regrow.rendezvous._backend import LivenessRendezvousBackend
from regrow.rendezvous._driver import View, answer, differs, view
from regrow.rendezvous._errors import RendezvousConnectionError
from regrow.rendezvous._neighbours import Ear, listen, whom
from regrow.rendezvous._news import Leave, Lost, Seated, subject
from regrow.rendezvous._round import step
from regrow.rendezvous._round_store import scoped
from regrow.rendezvous._shared import FIRST_PAUSE, Shared
from regrow.rendezvous._state import Round, holds, watched
from regrow.rendezvous._waiting import explain_timeout
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regrow.rendezvous._backend import RendezvousBackend
    from regrow.rendezvous._envelope import Envelope
    from regrow.rendezvous._news import Effect, Event
    from regrow.rendezvous._settings import RendezvousSettings
    from regrow.rendezvous._threads import Threads
    from regrow.store import Store

_PAUSE_TO_REACH = 0.25  # seconds, between two tries to reach the backend

logger = get_logger(__name__)


class NodesDriver:
    """One node's part in the rounds that the nodes run over a backend; a `Driver`.

    Args:
        backend: holds the rounds; one that can be watched is this driver's own, and is closed.
        store: shared by the nodes, for the keys of the rounds.
        settings: how many nodes, and how long is too long.
        random: for the pauses.
        clock: seconds of this node's monotonic clock.
        threads: whose locks to use.
    """

    def __init__(
        self,
        backend: RendezvousBackend,
        store: Store,
        settings: RendezvousSettings,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
    ) -> None:
        self._backend = backend
        self._alive = backend if isinstance(backend, LivenessRendezvousBackend) else None
        self._store = store
        self._run_id = settings.run_id
        self._bounds = settings.bounds
        self._random = random or Random()
        self._clock = clock
        self._shared = Shared(backend, settings, self._random, clock, threads)
        self._minding = threads.Lock()
        self._ear = Ear()
        self._count = 0
        self._round_store: Any = None

    @property
    def local_addr(self) -> str:
        """The backend's, where it knows one; else the name that this host has."""
        known = getattr(self._backend, "local_addr", None)
        return str(known) if known else os.uname().nodename

    def submit(self, event: Event, timeout: float) -> View:
        """See `Driver.submit`."""
        id = subject(event)
        deadline = self._clock() + timeout
        while True:
            try:
                state, effects = self._apply(event, deadline)
                break
            except RendezvousConnectionError:
                left = deadline - self._clock()
                if left <= 0:
                    raise
                self._shared.sleep(min(left, _PAUSE_TO_REACH * self._random.random()))
        if self._alive is not None and isinstance(event, Leave):
            try:
                self._alive.forget(id)
            except RendezvousConnectionError as error:  # its beats are dropped in time
                logger.debug("the backend could not be told to forget node %s: %s", id, error)
        return answer(state, id, effects)

    def follow(self, id: str, seen: View | None, timeout: float) -> View | None:
        """See `Driver.follow`."""
        deadline = self._clock() + timeout
        pause = FIRST_PAUSE
        self._shared.read()
        while True:
            again = self._mind(id)
            now = self.peek(id)
            if differs(now, seen):
                return now
            left = deadline - self._clock()
            if left <= 0:
                return None
            if again is not None:
                left = min(left, max(again - self._clock(), 0.0))
            pause = self._shared.wait(left, pause, isinstance(now.news, Seated))

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """See `Driver.beat`."""
        self._count += 1
        count = self._count
        if self._alive is not None:
            self._alive.beat(id, count, self._bounds.lease)
            self._shared.read()
            return holds(self._shared.state, id, token)

        def beaten(old: Envelope) -> Envelope:
            if id not in watched(old.state) or old.beats.get(id) == count:
                return old
            return old._replace(beats={**old.beats, id: count})

        self._shared.change(beaten, self._clock() + timeout)
        return holds(self._shared.state, id, token)

    def round_store(self, round: int) -> Store:
        """See `Driver.round_store`."""
        self.end_round_store()
        self._round_store = scoped(self._store)
        store: Store = self._round_store
        return store

    def end_round_store(self) -> None:
        """See `Driver.end_round_store`."""
        store = self._round_store
        if store is not None:
            store.close()

    def peek(self, id: str) -> View:
        """See `Driver.peek`."""
        return view(self._shared.state, id)

    def interrupt(self) -> None:
        """See `Driver.interrupt`."""
        self._shared.interrupt()

    def close(self, linger: bool) -> None:
        """See `Driver.close`."""
        self.interrupt()
        self.end_round_store()
        self._shared.close()

    def explain_timeout(self, id: str, timeout: float) -> str:
        """Say what a node waited for in vain, and who was missing."""
        return explain_timeout(self._shared.state, self._run_id, id, timeout)

    # --- what every node does to the rounds

    def _apply(self, event: Event, deadline: float) -> tuple[Round, tuple[Effect, ...]]:
        effects: tuple[Effect, ...] = ()

        def applied(old: Envelope) -> Envelope:
            nonlocal effects
            after, effects = step(old.state, event)
            return old if after is old.state else old._replace(state=after)

        return self._shared.change(applied, deadline), effects

    def _mind(self, id: str) -> float | None:
        """Do what is due by this node's clock; return when to look again."""
        with self._minding:
            while True:
                state = self._shared.state
                others = whom(self._ear, state, id, self._bounds)
                if others is None:
                    return None
                beats: Mapping[str, int] = self._shared.envelope.beats
                gone: list[Event] = []
                if self._alive is not None and others:
                    beats = self._alive.beats(others)
                    gone = [Lost(other, why) for other, why in self._alive.ended(others).items()]
                now = self._clock()
                self._ear, due, again = listen(
                    self._ear, state, id, others, beats, self._bounds, now
                )
                if not (due or gone):
                    return again
                for event in (*gone, *due):
                    self._apply(event, now + self._bounds.keep_alive)
