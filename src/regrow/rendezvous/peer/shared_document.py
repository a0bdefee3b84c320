"""The state that nodes share over a backend, with read, compare-and-set and wait operations.

**Conflicts.** If N nodes write at the same time, one succeeds. Each other node waits for a random
part of a window that grows by half with each failure. The window starts at the duration of the
backend's last call. So the time between two writes soon matches the time that the backend needs for
one write, on any backend.

**Waiting.** A backend that can be watched wakes the node. The node polls any other backend, after a
random part of a pause. The pause grows while nothing happens: to 0.3 s while this node waits for a
round; to one second, but at most a keep-alive interval, while it has a seat. This pause is the
upper limit of a node's delay.

**Which state counts.** The node uses the latest state that any of its threads has read. An older
answer that arrives later changes nothing. A document of another life of the job is an error, and
so is a missing document. Everything that this node has received is then invalid.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous.peer.backend import LivenessRendezvousBackend, WatchedRendezvousBackend
from regrow.rendezvous.protocol.document import Envelope, seal, unseal
from regrow.rendezvous.protocol.state import Round, watched
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from regrow.rendezvous.node.driver import Threads
    from regrow.rendezvous.peer.backend import RendezvousBackend, Token
    from regrow.rendezvous.settings import RendezvousSettings

T = TypeVar("T")

FIRST_PAUSE = 0.02  # seconds
_LONGEST_PAUSE = 1.0
_PAUSE_TO_FORM = 0.3

logger = get_logger(__name__)


class Shared:
    """One node's copy of the shared state, with the operations to change it and wait for changes.

    Args:
        backend: holds the state; if it can be watched, `close` closes it.
        settings: the number of nodes, and the time limits.
        random: for random pauses.
        clock: returns the seconds of this node's monotonic clock.
        threads: the module that provides the locks.
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
        self._latest_state = backend.get_state
        if isinstance(backend, LivenessRendezvousBackend):
            self._latest_state = backend.heard_state
        self._settings = settings
        self._random = random
        self._clock = clock
        self._call_lock: AbstractContextManager[Any] = (
            threads.Lock() if self._watched is None else nullcontext()
        )
        self._changed = threads.Condition()
        self._data = b""
        self._token: Token | None = None
        self._last_call_took = 0.0
        self._interrupted = False
        self.envelope = Envelope("", Round(settings.min_nodes, settings.max_nodes), {})
        """The latest content that was read."""

    @property
    def state(self) -> Round:
        """The latest state of the rounds that was read."""
        return self.envelope.state

    # --- compare and set

    def change(self, change: Callable[[Envelope], Envelope], deadline: float) -> Round:
        """Replace the content of the backend by the result of `change`.

        Args:
            change: returns the new content for the current one. If it returns the same object,
                nothing is written.
            deadline: time by this node's clock after which no further attempt is made.

        Returns:
            The new state. `change` was called with the content that this replaced, because no other
            node can have changed it in between.

        Raises:
            RendezvousConnectionError: other nodes were faster each time, until the deadline.
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
            new = _next_content(new)
            answered = self._call(lambda: self._backend.set_state(seal(new), token))  # noqa: B023
            if answered is None:
                self.read()  # the result is unknown: read it
            else:
                data, now, has_set = answered
                self._store_latest(data, now)
                if has_set:
                    return new.state
            fresh, failures = True, failures + 1
            if self._clock() >= deadline:
                raise RendezvousConnectionError(
                    f"the backend '{self._backend.name}' refused {failures} changes of the "
                    f"rendezvous '{self._settings.run_id}', because other nodes were faster"
                )
            window = max(self._last_call_took, 0.0002) * 1.5 ** min(failures, 14)
            pause = self._random.uniform(0, min(window, _LONGEST_PAUSE))
            self.sleep(pause)
            if pause > self._last_call_took:  # other nodes had time to write meanwhile
                self.read()

    def read(self) -> None:
        """Read the content of the backend."""
        self._read(self._backend.get_state)

    def _read(self, state: Callable[[], tuple[bytes, Token] | None]) -> None:
        got = self._call(state)
        if got is not None:
            self._store_latest(*got)
        elif self.envelope.life:
            raise RendezvousConnectionError(
                f"the backend '{self._backend.name}' has lost the document of the rendezvous "
                f"'{self._settings.run_id}': it was deleted, or the backend was restarted empty, "
                "while the job ran; start the job again"
            )

    def _call(self, call: Callable[[], T]) -> T:
        with self._call_lock:
            self._check()
            started = self._clock()
            result = call()
            self._last_call_took = self._clock() - started
        return result

    def _store_latest(self, data: bytes, token: Token) -> None:
        """Store the content of the backend, unless it is older than the stored one."""
        if data == self._data:
            with self._changed:
                self._token = token
            return
        new = unseal(data)
        with self._changed:
            old = self.envelope
            if old.life and new.life != old.life:
                raise RendezvousStateError(
                    f"the backend '{self._backend.name}' was emptied while the rendezvous "
                    f"'{self._settings.run_id}' was running, and other nodes have started it again"
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
                "this node was started for %d to %d nodes, and the rendezvous '%s' uses %d to %d: "
                "start all nodes with the same --nnodes",
                *mine,
                self._settings.run_id,
                state.min_nodes,
                state.max_nodes,
            )

    # --- waiting

    def wait(self, left: float, pause: float, seated: bool) -> float:
        """Wait until something may have changed, and read it.

        Args:
            left: maximum time to wait, in seconds.
            pause: the return value of the previous call; `FIRST_PAUSE` in the first call.
            seated: whether the node is already a member of the round, so that longer pauses are
                enough.

        Returns:
            The pause for the next call, in seconds.
        """
        self._check()
        token, version, began = self._token, self.state.version, self._clock()
        if self._watched is not None:
            if pause > FIRST_PAUSE:
                self.sleep(min(left, pause))
            self._watched.wait_state(token, max(left - (self._clock() - began), 0.0))
            at_once = self._clock() - began < FIRST_PAUSE + pause
            self._read(self._latest_state)
            unchanged = at_once and self._token == token
            return min(pause * 1.25, _PAUSE_TO_FORM) if unchanged else FIRST_PAUSE
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
        """Sleep for a number of seconds, or until `interrupt` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted, seconds)

    # --- the end

    def interrupt(self) -> None:
        """End all current and later calls with RendezvousGracefulExitError."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()
        if self._watched is not None:
            self._watched.interrupt()

    def close(self) -> None:
        """Close the backend if this node owns it; `interrupt` must have ended its calls."""
        if self._watched is not None:
            self._watched.close()

    def _check(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError(
                f"this node of the rendezvous '{self._settings.run_id}' was interrupted"
            )


def _next_content(new: Envelope) -> Envelope:
    beats = {id: new.beats[id] for id in new.beats if id in watched(new.state)}
    return Envelope(new.life or os.urandom(8).hex(), new.state, beats)
