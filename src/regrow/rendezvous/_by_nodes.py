"""The rounds run by the nodes themselves, over any backend that can compare and set.

Every node applies its own event to the state that it has read (`_round.step`), and publishes what
comes out if nobody was faster; else it applies the event to what the faster one has written. The
rules do not mind a call that is made twice, so an answer that was lost is no problem either: the
node makes the call again.

What takes time with a service of its own is done here by all nodes, each by its own clock
(`_patience`): the time of the last call, and listening to the others' beats. Everyone's judgement
names what it is about, so that of ten nodes which notice the same thing nine change nothing.

**Conflicts.** Of N nodes that write at once one succeeds. The others wait for a random part of a
time that doubles with each failure, counted in calls as long as the backend's last one took; so
the time between two writes soon is what the backend needs for one, whatever it is.

**Waiting.** A backend that can be watched wakes the node. Any other is asked, after a random part
of a pause that grows while nothing happens: to 0.3 s while this node waits for a round, and to a
second, at most a keep-alive interval, while it has a seat. This is the bound of how late a node
can be.

**Beats** go to the backend where it has a place for them. Else they stand in the document, and a
beat is a write like any other. A beat counts as answered only by a state that was read after it and
shows the node's seat; a node that was given up meanwhile learns so from its first beat.

**Who listens to whom.** Each node listens to the three that follow it in the order of ranks, so
what it reads every second does not grow with the job. When those are silent it listens to as many
more as are silent or were found lost, which doubles their number again and again: so of a thousand
nodes that die at once, the last is found soon after the first.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from regrow.rendezvous._backend import LivenessRendezvousBackend, WatchedRendezvousBackend
from regrow.rendezvous._driver import View, answer, differs, view
from regrow.rendezvous._envelope import Envelope, seal, unseal
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous._news import Join, LastCallOver, Leave, Lost, Seated
from regrow.rendezvous._patience import Patience, look
from regrow.rendezvous._round import step
from regrow.rendezvous._round_store import scoped
from regrow.rendezvous._state import Round, holds, watched
from regrow.rendezvous._waiting import explain_timeout
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regrow.rendezvous._backend import RendezvousBackend, Token
    from regrow.rendezvous._news import Effect, Event
    from regrow.rendezvous._settings import RendezvousSettings
    from regrow.store import Store

T = TypeVar("T")

_NEIGHBOURS = 3  # nodes that each one listens to
_FIRST_PAUSE = 0.02  # seconds
_LONGEST_PAUSE = 1.0
_PAUSE_TO_FORM = 0.3
_PAUSE_TO_REACH = 0.25  # between two tries to reach the backend

logger = get_logger(__name__)


class NodesDriver:
    """One node's part in the rounds that the nodes run over a backend; a `Driver`.

    Args:
        backend: holds the rounds; one that can be watched is this driver's own, and is closed.
        store: shared by the nodes, for the keys of the rounds.
        settings: how many nodes, and how long is too long.
        random: for the pauses.
        clock: seconds of this node's monotonic clock.
    """

    def __init__(
        self,
        backend: RendezvousBackend,
        store: Store,
        settings: RendezvousSettings,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._watched = backend if isinstance(backend, WatchedRendezvousBackend) else None
        self._alive = backend if isinstance(backend, LivenessRendezvousBackend) else None
        self._store = store
        self._settings = settings
        self._bounds = settings.bounds
        self._random = random or Random()
        self._clock = clock
        self._one_at_a_time: AbstractContextManager[Any] = (
            threading.Lock() if self._watched is None else nullcontext()
        )
        self._changed = threading.Condition()
        self._minding = threading.Lock()
        self._data = b""
        self._token: Token | None = None
        self._envelope = Envelope("", Round(settings.min_nodes, settings.max_nodes), {})
        self._patience = Patience()
        self._lost = 0  # nodes that were found lost since one was last heard
        self._count = 0
        self._last_call_took = 0.0
        self._interrupted = False
        self._round_store: Any = None

    @property
    def local_addr(self) -> str:
        """The backend's, where it knows one; else the name that this host has."""
        known = getattr(self._backend, "local_addr", None)
        return str(known) if known else os.uname().nodename

    # --- Driver

    def submit(self, event: Event, timeout: float) -> View:
        """See `Driver.submit`."""
        id = _subject(event)
        deadline = self._clock() + timeout
        while True:
            try:
                said = answer(*self._apply(id, event, deadline))
                break
            except RendezvousConnectionError:
                left = deadline - self._clock()
                if left <= 0:
                    raise
                self._sleep(min(left, _PAUSE_TO_REACH * self._random.random()))
        if self._alive is not None and isinstance(event, Leave):
            try:
                self._alive.forget(id)
            except RendezvousConnectionError as error:  # its beats are dropped in time
                logger.debug("the backend could not be told to forget node %s: %s", id, error)
        return said

    def follow(self, id: str, seen: View | None, timeout: float) -> View | None:
        """See `Driver.follow`."""
        deadline = self._clock() + timeout
        pause = _FIRST_PAUSE
        self._read()
        while True:
            again = self._mind(id)
            now = view(self._envelope.state, id)
            if differs(now, seen):
                return now
            left = deadline - self._clock()
            if left <= 0:
                return None
            if again is not None:
                left = min(left, max(again - self._clock(), 0.0))
            pause = self._wait(left, pause, isinstance(now.news, Seated))

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """See `Driver.beat`."""
        self._count += 1
        count = self._count
        if self._alive is not None:
            self._alive.beat(id, count, self._bounds.lease)
            self._read()
            return holds(self._envelope.state, id, token)

        def beaten(old: Envelope) -> Envelope:
            if id not in watched(old.state) or old.beats.get(id) == count:
                return old
            return old._replace(beats={**old.beats, id: count})

        self._change(beaten, self._clock() + timeout)
        return holds(self._envelope.state, id, token)

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
        return view(self._envelope.state, id)

    def interrupt(self) -> None:
        """See `Driver.interrupt`."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()
        if self._watched is not None:
            self._watched.interrupt()

    def close(self, linger: bool) -> None:
        """See `Driver.close`."""
        self.interrupt()
        self.end_round_store()
        if self._watched is not None:
            self._watched.close()

    def explain_timeout(self, id: str, timeout: float) -> str:
        """Say what a node waited for in vain, and who was missing."""
        return explain_timeout(self._envelope.state, self._settings.run_id, id, timeout)

    # --- compare and set

    def _apply(
        self, id: str, event: Event, deadline: float
    ) -> tuple[Round, str, tuple[Effect, ...]]:
        effects: tuple[Effect, ...] = ()

        def applied(old: Envelope) -> Envelope:
            nonlocal effects
            after, effects = step(old.state, event)
            return old if after is old.state else old._replace(state=after)

        return self._change(applied, deadline).state, id, effects

    def _change(self, change: Callable[[Envelope], Envelope], deadline: float) -> Envelope:
        """Replace what the backend holds by what `change` makes of it.

        Returns:
            What it holds now; `change` was called with what it held, as nobody can have changed it
            in between. Nothing is written when that is the same object.
        """
        fresh, failures = False, 0
        while True:
            self._check()
            with self._changed:
                old, token = self._envelope, self._token
            new = change(old)
            if new is old:
                if fresh:
                    return old
                self._read()
                fresh = True
                continue
            new = self._begun(new)
            answered = self._call(lambda: self._backend.set_state(seal(new), token))  # noqa: B023
            if answered is None:
                self._read()  # the backend cannot say, so look what became of it
            else:
                data, now, has_set = answered
                self._take(data, now)
                if has_set:
                    return new
            fresh, failures = True, failures + 1
            if self._clock() >= deadline:
                raise RendezvousConnectionError(
                    f"the backend '{self._backend.name}' did not take a change of the rendezvous "
                    f"'{self._settings.run_id}' in {failures} tries, other nodes were faster"
                )
            window = max(self._last_call_took, 0.0002) * 1.5 ** min(failures, 14)
            pause = self._random.uniform(0, min(window, _LONGEST_PAUSE))
            self._sleep(pause)
            if pause > self._last_call_took:  # others had the time to write meanwhile
                self._read()

    def _begun(self, new: Envelope) -> Envelope:
        beats = {id: new.beats[id] for id in new.beats if id in watched(new.state)}
        return Envelope(new.life or os.urandom(8).hex(), new.state, beats)

    def _read(self, state: Callable[[], tuple[bytes, Token] | None] | None = None) -> None:
        got = self._call(state or self._backend.get_state)
        if got is not None:
            self._take(*got)
        elif self._envelope.life:
            raise RendezvousConnectionError(
                f"the backend '{self._backend.name}' does not know the rendezvous "
                f"'{self._settings.run_id}' any more: what it held is gone"
            )

    def _call(self, call: Callable[[], T]) -> T:
        with self._one_at_a_time:
            self._check()
            begun = self._clock()
            result = call()
            self._last_call_took = self._clock() - begun
        return result

    def _take(self, data: bytes, token: Token) -> None:
        """Take in what the backend holds, unless it is older than what was taken in before."""
        if data == self._data:
            with self._changed:
                self._token = token
            return
        new = unseal(data)
        with self._changed:
            old = self._envelope
            if old.life and new.life != old.life:
                raise RendezvousStateError(
                    f"somebody has emptied the backend '{self._backend.name}' while the rendezvous "
                    f"'{self._settings.run_id}' was running, and begun it anew"
                )
            if not old.life:
                self._compare_sizes(new.state)
            if new.state.version < old.state.version:  # another thread was faster
                return
            self._data, self._token, self._envelope = data, token, new
            if new.state.version != old.state.version:
                self._changed.notify_all()

    def _compare_sizes(self, state: Round) -> None:
        mine = self._settings.min_nodes, self._settings.max_nodes
        if mine != (state.min_nodes, state.max_nodes):
            logger.warning(
                "this node was started for %d to %d nodes, and the rendezvous '%s' has %d to %d, "
                "which count: give all nodes the same --nnodes",
                *mine,
                self._settings.run_id,
                state.min_nodes,
                state.max_nodes,
            )

    # --- what takes time

    def _wait(self, left: float, pause: float, seated: bool) -> float:
        """Wait until there may be something new, and read it.

        Returns:
            How long to pause the next time.
        """
        self._check()
        token, version, began = self._token, self._envelope.state.version, self._clock()
        if self._watched is not None:
            if pause > _FIRST_PAUSE:
                self._sleep(min(left, pause))
            self._watched.wait_state(token, max(left - (self._clock() - began), 0.0))
            at_once = self._clock() - began < _FIRST_PAUSE + pause
            self._read(self._watched.heard_state)
            for_nothing = at_once and self._token == token
            return min(pause * 1.25, _PAUSE_TO_FORM) if for_nothing else _FIRST_PAUSE
        with self._changed:
            self._changed.wait_for(
                lambda: self._interrupted or self._envelope.state.version != version,
                min(left, pause * self._random.uniform(0.5, 1.0)),
            )
        self._read()
        longest = min(_LONGEST_PAUSE, self._bounds.keep_alive) if seated else _PAUSE_TO_FORM
        return min(pause * 1.25, max(longest, 20 * self._last_call_took))

    def _mind(self, id: str) -> float | None:
        """Do what is due by this node's clock; return when to look again."""
        with self._minding:
            while True:
                state = self._envelope.state
                others = neighbours(state, id, self._silent(), self._lost)
                if others is None:
                    return None
                beats: Mapping[str, int] = self._envelope.beats
                gone: list[Event] = []
                if self._alive is not None and others:
                    beats = self._alive.beats(others)
                    ended = self._alive.ended(others)
                    gone = [Lost(other, why) for other, why in ended.items()]
                now, before = self._clock(), self._patience.silent
                if any(
                    other in before and before[other][0] != beats.get(other, 0) for other in others
                ):
                    self._lost = 0
                narrowed = narrow(state, {*others, id})
                self._patience, due, again = look(
                    self._patience, narrowed, beats, self._bounds, now, id
                )
                if not (due or gone):
                    return again
                deadline = now + self._bounds.keep_alive
                self._lost += sum(isinstance(event, Lost) for event in due)
                for event in (*gone, *due):
                    self._apply("", event, deadline)

    def _silent(self) -> frozenset[str]:
        longest = self._bounds.keep_alive
        return frozenset(id for id, (_, s) in self._patience.silent.items() if s >= longest)

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted, seconds)

    def _check(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError(
                f"this node of the rendezvous '{self._settings.run_id}' was told to stop"
            )


def neighbours(
    state: Round, id: str, silent: frozenset[str], lost: int = 0
) -> Sequence[str] | None:
    """Return the nodes that a node listens to; None if it is itself none of the rendezvous.

    Args:
        state: the rounds.
        id: the node.
        silent: of the nodes it listens to, those that have not been heard of as they should.
        lost: how many it has found lost, in the same run of silence.
    """
    order = [*state.ranks] if state.complete else [*state.members]
    ring = [*order, *sorted(state.awaited), *state.queue]
    minding = watched(state)
    ring = [other for other in ring if other in minding]
    if id not in ring:
        return None
    at = ring.index(id)
    after = [*ring[at + 1 :], *ring[:at]]
    wanted = max(_NEIGHBOURS, lost + sum(other in silent for other in after))
    chosen: list[str] = []
    heard = 0
    for other in after:
        if heard == wanted:
            break
        chosen.append(other)
        heard += other not in silent
    return chosen


def narrow(state: Round, ids: set[str]) -> Round:
    """Return a state in which only these nodes are to be listened to, and all else is as it is."""
    return replace(
        state,
        members={id: node for id, node in state.members.items() if id in ids},
        queue={id: node for id, node in state.queue.items() if id in ids},
        awaited=state.awaited & ids,
    )


def _subject(event: Event) -> str:
    match event:
        case Join(node=node):
            return node.id
        case LastCallOver():
            return ""
        case _:
            return event.id
