"""Rounds in memory whose nodes can be cut off, left without an answer, and given up by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from storing import PATIENCE

from regrow.rendezvous._driver import View, answer, differs, view
from regrow.rendezvous._errors import RendezvousConnectionError, RendezvousGracefulExitError
from regrow.rendezvous._news import Event, LastCallOver, subject
from regrow.rendezvous._round import Round, holds, step
from regrow.store import MemoryStore, Store


class FakeRounds:
    """The state that the drivers of a test share; no time passes in it by itself."""

    def __init__(self, low: int, high: int) -> None:
        self.state = Round(low, high)
        self.changed = threading.Condition()
        self.events: list[Event] = []

    def post(self, event: Event) -> View:
        """Something happens."""
        id = subject(event)
        with self.changed:
            self.events.append(event)
            self.state, effects = step(self.state, event)
            self.changed.notify_all()
            return answer(self.state, id, effects)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something to hold of the rounds."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)


class FakeDriver:
    """One node's line to `FakeRounds`."""

    local_addr = "10.0.0.1"

    def __init__(self, rounds: FakeRounds) -> None:
        self.rounds = rounds
        self.beats = 0
        self.closed: list[bool] = []
        self.stores: list[MemoryStore] = []
        self._cut = ""
        self._hangs = False
        self._held: type | None = None
        self._fault: Exception | None = None
        self._interrupted = False

    def cut(self, why: str) -> None:
        """Every call fails from now on; with an empty text, none does any more."""
        with self.rounds.changed:
            self._cut = why
            self.rounds.changed.notify_all()

    def hang_beats(self, hangs: bool) -> None:
        """Beats are not answered, and their timeouts not heeded."""
        with self.rounds.changed:
            self._hangs = hangs
            self.rounds.changed.notify_all()

    def hold(self, kind: type | None) -> None:
        """Events of a kind are not answered, and their timeouts not heeded; None: no longer."""
        with self.rounds.changed:
            self._held = kind
            self.rounds.changed.notify_all()

    def break_down(self, fault: Exception) -> None:
        """Whoever follows runs into a fault."""
        with self.rounds.changed:
            self._fault = fault
            self.rounds.changed.notify_all()

    def submit(self, event: Event, timeout: float) -> View:
        with self._reached(timeout):
            while type(event) is self._held and not self._interrupted:
                self.rounds.changed.wait()
            return self.rounds.post(event)

    def follow(self, id: str, seen: View | None, timeout: float) -> View | None:
        deadline = time.monotonic() + timeout
        while True:
            with self._reached(0):
                if self._fault is not None:
                    raise self._fault
                now = view(self.rounds.state, id)
                if differs(now, seen):
                    return now
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.rounds.changed.wait(left)

    def beat(self, id: str, token: int, timeout: float) -> bool:
        with self._reached(0):
            while self._hangs and not self._interrupted:
                self.rounds.changed.wait()
            self.beats += 1
            self.rounds.changed.notify_all()
            return holds(self.rounds.state, id, token)

    def round_store(self, round: int) -> Store:
        self.end_round_store()
        self.stores.append(MemoryStore())
        return self.stores[-1]

    def end_round_store(self) -> None:
        if self.stores:
            self.stores[-1].close()

    def peek(self, id: str) -> View:
        return view(self.rounds.state, id)

    def interrupt(self) -> None:
        with self.rounds.changed:
            self._interrupted = True
            self.rounds.changed.notify_all()

    def close(self, linger: bool) -> None:
        self.interrupt()
        self.closed.append(linger)

    @contextmanager
    def _reached(self, timeout: float) -> Any:
        with self.rounds.changed:
            if self._cut:
                self.rounds.changed.wait_for(lambda: not self._cut or self._interrupted, timeout)
            if self._interrupted:
                raise RendezvousGracefulExitError("interrupted")
            if self._cut:
                raise RendezvousConnectionError(self._cut)
            yield


def last_call_over(rounds: FakeRounds) -> None:
    """The time of the last call is up."""
    rounds.until(lambda: rounds.state.last_call)
    rounds.post(LastCallOver(rounds.state.last_call))
