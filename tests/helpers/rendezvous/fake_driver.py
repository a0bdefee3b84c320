"""Rounds in memory; a test can cut a node off, withhold answers, and evict a node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from helpers.stores.storing import PATIENCE
from regrow.rendezvous.errors import RendezvousConnectionError, RendezvousGracefulExitError
from regrow.rendezvous.node.driver import Snapshot, answer, differs, snapshot
from regrow.rendezvous.node.node_rules import explain_timeout
from regrow.rendezvous.protocol.failure_detector import Bounds, FailureDetector
from regrow.rendezvous.protocol.messages import Departed, Event, LastCallOver, subject
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round, holds
from regrow.store import MemoryStore, Store


class FakeRounds:
    """The state that the drivers of a test share.

    Args:
        low: the fewest nodes that make a round.
        high: the most nodes.
        bounds: time limits of the last call; None: no time passes by itself.
    """

    def __init__(self, low: int, high: int, bounds: Bounds | None = None) -> None:
        self.state = Round(low, high)
        self._bounds = bounds
        self._detector = FailureDetector()
        self.store = MemoryStore()
        self.changed = threading.Condition()
        self.events: list[Event] = []

    def post(self, event: Event) -> Snapshot:
        """Apply an event to the rounds."""
        id = subject(event)
        with self.changed:
            self.events.append(event)
            self.state, refusal = step(self.state, event)
            self.changed.notify_all()
            return answer(self.state, id, refusal)

    def judge_due(self) -> float | None:
        """Apply what is due; return the time of the next check."""
        if self._bounds is None:
            return None
        now = time.monotonic()
        self._detector, due, again = self._detector.check(self.state, None, self._bounds, now)
        for event in due:
            self.post(event)
        return now if due else again

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition of the rounds is true."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)


class FakeDriver:
    """One node's connection to `FakeRounds`."""

    local_addr = "10.0.0.1"
    server = None

    def __init__(self, rounds: FakeRounds) -> None:
        self.rounds = rounds
        self.beats = 0
        self.timeouts: list[float] = []
        """The time-outs of the calls of `submit`."""
        self.blocked = False
        """Whether a call has waited, because the node is cut off or answers are withheld."""
        self.closed: list[bool] = []
        self.stores: list[MemoryStore] = []
        self._cut = ""
        self._hangs = False
        self._held: tuple[type, bool] | None = None
        self._fault: Exception | None = None
        self._interrupted = False

    serves = False

    def report_to(self, report: object) -> None:
        """See `Driver.report_to`; no agent serves these rounds, so there is nothing to report."""

    def new_life(self) -> None:
        """See `Driver.new_life`."""

    voter = None
    """No agent of these rounds may serve them."""

    def is_served_by(self, addr: str) -> bool:
        """Return False: none of the job's hosts serves these rounds."""
        return False

    def cut(self, why: str) -> None:
        """Fail every call from now on with the reason `why`; an empty reason ends this."""
        with self.rounds.changed:
            self._cut = why
            self.rounds.changed.notify_all()

    def hang_beats(self, hangs: bool) -> None:
        """Withhold the answers to heartbeats, and ignore their timeouts."""
        with self.rounds.changed:
            self._hangs = hangs
            self.rounds.changed.notify_all()

    def hold(self, kind: type | None, *, applied: bool = False) -> None:
        """Withhold the answers to events of a kind, and ignore their timeouts; None ends this.

        Args:
            kind: the kind of the events.
            applied: whether such an event reaches the rounds, and only its answer does not come.
        """
        with self.rounds.changed:
            self._held = None if kind is None else (kind, applied)
            self.rounds.changed.notify_all()

    def break_down(self, fault: Exception) -> None:
        """Raise `fault` in each following call of `follow`."""
        with self.rounds.changed:
            self._fault = fault
            self.rounds.changed.notify_all()

    def wait_for_beats(self, count: int) -> None:
        """Wait until `count` more heartbeats were answered."""
        beats = self.beats
        self.rounds.until(lambda: self.beats >= beats + count)

    def submit(self, event: Event, timeout: float) -> Snapshot:
        self.timeouts.append(timeout)
        with self._reached(timeout):
            self._wait_while_held(event, applied=False)
            answered = self.rounds.post(event)
            self._wait_while_held(event, applied=True)
            return answered

    def _wait_while_held(self, event: Event, *, applied: bool) -> None:
        while (type(event), applied) == self._held:
            self._check_interrupt()
            self.blocked = True
            self.rounds.changed.wait()

    def follow(self, id: str, seen: Snapshot | None, timeout: float) -> Snapshot | None:
        deadline = time.monotonic() + timeout
        while True:
            with self._reached(0):
                if self._fault is not None:
                    raise self._fault
                now = snapshot(self.rounds.state, id)
                if differs(now, seen):
                    return now
                again = self.rounds.judge_due()
                left = min(deadline, again or deadline) - time.monotonic()
                if time.monotonic() >= deadline:
                    return None
                self.rounds.changed.wait(max(left, 0.0))

    def beat(self, id: str, token: int, timeout: float) -> bool:
        with self._reached(0):
            while self._hangs and not self._interrupted:
                self.rounds.changed.wait()
            self.beats += 1
            self.rounds.changed.notify_all()
            return holds(self.rounds.state, id, token)

    def round_store(self, round: int) -> Store:
        self.end_round_store()
        self.stores.append(self.rounds.store.session())
        return self.stores[-1]

    def end_round_store(self) -> None:
        if self.stores:
            self.stores[-1].close()

    def peek(self, id: str) -> Snapshot:
        return snapshot(self.rounds.state, id)

    def explain_timeout(self, id: str, timeout: float) -> tuple[str, tuple[Departed, ...]]:
        return explain_timeout(self.rounds.state, "job", id, timeout)

    def interrupt(self) -> None:
        with self.rounds.changed:
            self._interrupted = True
            self.rounds.changed.notify_all()

    def close(self, linger: bool) -> None:
        self.interrupt()
        self.closed.append(linger)

    def _check_interrupt(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError("interrupted")

    @contextmanager
    def _reached(self, timeout: float) -> Any:
        with self.rounds.changed:
            if self._cut:
                self.blocked = self.blocked or timeout > 0
                self.rounds.changed.wait_for(lambda: not self._cut or self._interrupted, timeout)
            self._check_interrupt()
            if self._cut:
                raise RendezvousConnectionError(self._cut)
            yield


def last_call_over(rounds: FakeRounds) -> None:
    """End the last call now."""
    rounds.until(lambda: rounds.state.last_call)
    rounds.post(LastCallOver(rounds.state.last_call))
