"""The state that nodes share over a backend: read, changed by compare-and-set, and waited for.

**Conflicts.** Of N nodes that write at once one succeeds. The others wait for a random part of a
time that doubles with each failure, counted in calls as long as the backend's last one took; so
the time between two writes soon is what the backend needs for one, whatever it is.

**Waiting.** A backend that can be watched wakes the node. Any other is asked, after a random part
of a pause that grows while nothing happens: to 0.3 s while this node waits for a round, and to a
second, at most a keep-alive interval, while it has a seat. This is the bound of how late a node
can be.

**What is believed.** The latest that any thread has read. An older answer that comes later changes
nothing; the document of another life of the job, or none where there was one, is an error, as
nothing that this node was told would mean anything in it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from regrow.rendezvous._backend import LivenessRendezvousBackend, WatchedRendezvousBackend
from regrow.rendezvous._envelope import Envelope, seal, unseal
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous._state import Round, watched
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from regrow.rendezvous._backend import RendezvousBackend, Token
    from regrow.rendezvous._settings import RendezvousSettings
    from regrow.rendezvous._threads import Threads

T = TypeVar("T")

FIRST_PAUSE = 0.02  # seconds
_LONGEST_PAUSE = 1.0
_PAUSE_TO_FORM = 0.3

logger = get_logger(__name__)


class Shared:
    """What one node knows of the shared state, and how it changes it.

    Args:
        backend: holds the state; one that can be watched is closed with this.
        settings: how many nodes, and how long is too long.
        random: for the pauses.
        clock: seconds of this node's monotonic clock.
        threads: whose locks to use.
    """

    def __init__(
        self,
        backend: RendezvousBackend,
        settings: RendezvousSettings,
        random: Random,
        clock: Callable[[], float],
        threads: Threads,
    ) -> None:
        self._backend = backend
        self._watched = backend if isinstance(backend, WatchedRendezvousBackend) else None
        self._heard = backend.get_state
        if isinstance(backend, LivenessRendezvousBackend):
            self._heard = backend.heard_state
        self._settings = settings
        self._random = random
        self._clock = clock
        self._one_at_a_time: AbstractContextManager[Any] = (
            threads.Lock() if self._watched is None else nullcontext()
        )
        self._changed = threads.Condition()
        self._data = b""
        self._token: Token | None = None
        self._last_call_took = 0.0
        self._interrupted = False
        self.envelope = Envelope("", Round(settings.min_nodes, settings.max_nodes), {})
        """What was read last."""

    @property
    def state(self) -> Round:
        """The rounds, as they were read last."""
        return self.envelope.state

    # --- compare and set

    def change(self, change: Callable[[Envelope], Envelope], deadline: float) -> Round:
        """Replace what the backend holds by what `change` makes of it.

        Returns:
            What it holds now; `change` was called with what it held, as nobody can have changed it
            in between. Nothing is written when that is the same object.

        Raises:
            RendezvousConnectionError: others were faster each time, until the deadline.
        """
        fresh, failures = False, 0
        while True:
            self._check()
            with self._changed:
                old, token = self.envelope, self._token
            new = change(old)
            if new is old:
                if fresh:
                    return old.state
                self.read()
                fresh = True
                continue
            new = _begun(new)
            answered = self._call(lambda: self._backend.set_state(seal(new), token))  # noqa: B023
            if answered is None:
                self.read()  # the backend cannot say, so look what became of it
            else:
                data, now, has_set = answered
                self._take(data, now)
                if has_set:
                    return new.state
            fresh, failures = True, failures + 1
            if self._clock() >= deadline:
                raise RendezvousConnectionError(
                    f"the backend '{self._backend.name}' did not take a change of the rendezvous "
                    f"'{self._settings.run_id}' in {failures} tries, other nodes were faster"
                )
            window = max(self._last_call_took, 0.0002) * 1.5 ** min(failures, 14)
            pause = self._random.uniform(0, min(window, _LONGEST_PAUSE))
            self.sleep(pause)
            if pause > self._last_call_took:  # others had the time to write meanwhile
                self.read()

    def read(self) -> None:
        """Read what the backend holds."""
        self._read(self._backend.get_state)

    def _read(self, state: Callable[[], tuple[bytes, Token] | None]) -> None:
        got = self._call(state)
        if got is not None:
            self._take(*got)
        elif self.envelope.life:
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
            old = self.envelope
            if old.life and new.life != old.life:
                raise RendezvousStateError(
                    f"somebody has emptied the backend '{self._backend.name}' while the rendezvous "
                    f"'{self._settings.run_id}' was running, and begun it anew"
                )
            if not old.life:
                self._compare_sizes(new.state)
            if new.state.version < old.state.version:  # another thread was faster
                return
            self._data, self._token, self.envelope = data, token, new
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

    # --- waiting

    def wait(self, left: float, pause: float, seated: bool) -> float:
        """Wait until there may be something new, and read it.

        Args:
            left: seconds to wait at most.
            pause: what the last call returned; `FIRST_PAUSE` at first.
            seated: whether the node has its seat, and merely watches.

        Returns:
            How long to pause the next time.
        """
        self._check()
        token, version, began = self._token, self.state.version, self._clock()
        if self._watched is not None:
            if pause > FIRST_PAUSE:
                self.sleep(min(left, pause))
            self._watched.wait_state(token, max(left - (self._clock() - began), 0.0))
            at_once = self._clock() - began < FIRST_PAUSE + pause
            self._read(self._heard)
            for_nothing = at_once and self._token == token
            return min(pause * 1.25, _PAUSE_TO_FORM) if for_nothing else FIRST_PAUSE
        with self._changed:
            self._changed.wait_for(
                lambda: self._interrupted or self.state.version != version,
                min(left, pause * self._random.uniform(0.5, 1.0)),
            )
        self.read()
        keep_alive = self._settings.bounds.keep_alive
        longest = min(_LONGEST_PAUSE, keep_alive) if seated else _PAUSE_TO_FORM
        return min(pause * 1.25, max(longest, 20 * self._last_call_took))

    def sleep(self, seconds: float) -> None:
        """Sleep until then, or until interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted, seconds)

    # --- the end

    def interrupt(self) -> None:
        """End all calls, now and later, with RendezvousGracefulExitError."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()
        if self._watched is not None:
            self._watched.interrupt()

    def close(self) -> None:
        """Give back a backend that is this node's own; its calls were interrupted."""
        if self._watched is not None:
            self._watched.close()

    def _check(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError(
                f"this node of the rendezvous '{self._settings.run_id}' was told to stop"
            )


def _begun(new: Envelope) -> Envelope:
    beats = {id: new.beats[id] for id in new.beats if id in watched(new.state)}
    return Envelope(new.life or os.urandom(8).hex(), new.state, beats)
