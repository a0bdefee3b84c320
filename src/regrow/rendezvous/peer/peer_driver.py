"""One node's driver for rounds that the nodes run themselves, over a compare-and-set backend.

Every node applies its own event to the state that it has read (`rules.step`). It then publishes the
result, if no other node was faster. Otherwise it applies the event again, to the state of the
faster node (`shared_document.py`). A repeated call does no harm under the rules. So after a lost
answer, the node simply repeats the call.

The store server does some work over time for all nodes. Here every node does this work, by its own
clock (`failure_detector.py`): it times the last call, and checks the heartbeats of its peers. The
event of each node names its last call or the place of the lost node. So if ten nodes detect the
same fact, nine of the events change nothing.

**Heartbeats** go to the backend if it has a place for them. Otherwise they are in the document, and
a heartbeat is a write like any other. A heartbeat counts as answered only by a state that was read
after it and shows the node's seat. A node that was evicted in the meantime therefore detects this
with its first heartbeat.

**Keys of a round.** A call that waits for a key of a lost node must end with the round. A regrow
store provides sessions, and closing a session ends its calls. A c10d store has no sessions, and a
blocked call would hold the connection that all threads share. So no call blocks in a c10d store
here. `_PolledStore` polls for the key with growing pauses, and the end of the round interrupts
them.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING, Any, cast

from regrow.rendezvous.errors import RendezvousConnectionError
from regrow.rendezvous.node.driver import Snapshot, answer, differs, snapshot
from regrow.rendezvous.node.node_rules import explain_timeout
from regrow.rendezvous.peer.backend import LivenessRendezvousBackend
from regrow.rendezvous.peer.shared_document import FIRST_PAUSE, Shared
from regrow.rendezvous.protocol.failure_detector import PeerDetector
from regrow.rendezvous.protocol.messages import LeaveRound, NodeLost, Seated, subject
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round, holds, watched
from regrow.rendezvous.settings import FIRST_TRY, KEY_PAUSES, REACH_PAUSE
from regrow.store import Query, StoreClosedError, StoreTimeout, timeout_message, to_seconds
from regrow.utils import Backoff, get_logger, poll_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regrow.rendezvous.node.driver import Threads
    from regrow.rendezvous.peer.backend import RendezvousBackend
    from regrow.rendezvous.protocol.document import Envelope
    from regrow.rendezvous.protocol.messages import Departed, Event
    from regrow.rendezvous.protocol.rules import Refusal
    from regrow.rendezvous.settings import RendezvousSettings
    from regrow.store import Store

logger = get_logger(__name__)


class NodesDriver:
    """One node's part in the rounds that the nodes run over a backend; a `Driver`.

    Args:
        backend: holds the rounds; if it can be watched, this driver owns it and closes it.
        store: shared by the nodes, for the keys of the rounds.
        settings: the number of nodes, and the time limits.
        random: for random pauses; None: a new generator.
        clock: returns the seconds of this node's monotonic clock.
        threads: the module that provides the locks.
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
        self.backend = backend
        """The backend that holds the rounds."""
        self._alive = backend if isinstance(backend, LivenessRendezvousBackend) else None
        self._store = store
        self._run_id = settings.run_id
        self._bounds = settings.bounds
        self._random = random or Random()
        self._clock = clock
        self._shared = Shared(backend, settings, self._random, clock, threads)
        self._detector_lock = threads.Lock()
        self._detector = PeerDetector()
        self._count = 0
        self._round_store: Any = None

    server = None
    """Always None, because no node hosts the backend."""

    @property
    def local_addr(self) -> str:
        """The address that the backend knows; otherwise the name of this host."""
        known = getattr(self.backend, "local_addr", None)
        return str(known) if known else os.uname().nodename

    serves = False
    """No node hosts the backend."""

    def report_to(self, report: object) -> None:
        """See `Driver.report_to`; no agent serves these rounds, so there is nothing to report."""

    def new_life(self) -> None:
        """See `Driver.new_life`."""

    @property
    def voter(self) -> None:
        """None: the backend keeps the rounds, and no agent has to serve them."""
        return None

    def is_served_by(self, addr: str) -> bool:
        """See `Driver.is_served_by`; the backend is not on a host of the job."""
        return False

    def submit(self, event: Event, timeout: float) -> Snapshot:
        """See `Driver.submit`."""
        id = subject(event)
        deadline = self._clock() + timeout
        allowed = max(timeout, FIRST_TRY)
        while True:
            try:
                with self._alive.within(allowed) if self._alive else nullcontext():
                    state, refusal = self._apply(event, deadline)
                break
            except RendezvousConnectionError as error:
                left = deadline - self._clock()
                if left <= 0:
                    why = f"{error} (tried again for {round(timeout, 2):g} s)"
                    raise RendezvousConnectionError(why) from error
                self._shared.sleep(min(left, REACH_PAUSE * self._random.random()))
                allowed = max(deadline - self._clock(), 0.0)
        if self._alive is not None and isinstance(event, LeaveRound):
            try:
                self._alive.forget(id)
            except RendezvousConnectionError as error:  # its heartbeats expire later
                logger.debug(
                    "the backend keeps the heartbeats of node %s until they expire: %s", id, error
                )
        return answer(state, id, refusal)

    def follow(self, id: str, seen: Snapshot | None, timeout: float) -> Snapshot | None:
        """See `Driver.follow`."""
        deadline = self._clock() + timeout
        pause = FIRST_PAUSE
        self._shared.read()
        while True:
            again = self._report_losses(id)
            now = self.peek(id)
            if differs(now, seen):
                return now
            left = deadline - self._clock()
            if left <= 0:
                return None
            if again is not None:
                left = min(left, max(again - self._clock(), 0.0))
            pause = self._shared.wait(left, pause, isinstance(now.status, Seated))

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
        session = getattr(self._store, "session", None)
        self._round_store = session() if session is not None else _PolledStore(self._store)
        return cast("Store", self._round_store)

    def end_round_store(self) -> None:
        """See `Driver.end_round_store`."""
        store = self._round_store
        if store is not None:
            store.close()

    def peek(self, id: str) -> Snapshot:
        """See `Driver.peek`."""
        return snapshot(self._shared.state, id)

    def interrupt(self) -> None:
        """See `Driver.interrupt`."""
        self._shared.interrupt()

    def close(self, linger: bool) -> None:
        """See `Driver.close`."""
        self.interrupt()
        self.end_round_store()
        self._shared.close()

    def explain_timeout(self, id: str, timeout: float) -> tuple[str, tuple[Departed, ...]]:
        """See `Driver.explain_timeout`."""
        return explain_timeout(self._shared.state, self._run_id, id, timeout)

    # --- what every node does to the rounds

    def _apply(self, event: Event, deadline: float) -> tuple[Round, Refusal | None]:
        refusal: Refusal | None = None

        def applied(old: Envelope) -> Envelope:
            nonlocal refusal
            after, refusal = step(old.state, event)
            return old if after is old.state else old._replace(state=after)

        return self._shared.change(applied, deadline), refusal

    def _report_losses(self, id: str) -> float | None:
        """Report what is due by this node's clock (a lost node); return when to check next."""
        with self._detector_lock:
            while True:
                state = self._shared.state
                peers = self._detector.peers(state, id, self._bounds)
                if peers is None:
                    return None
                beats: Mapping[str, int] = self._shared.envelope.beats
                gone: list[Event] = []
                if self._alive is not None and peers:
                    beats = self._alive.beats(peers)
                    gone = [NodeLost(peer, why) for peer, why in self._alive.ended(peers).items()]
                now = self._clock()
                self._detector, due, again = self._detector.check(
                    state, id, peers, beats, self._bounds, now
                )
                if not (due or gone):
                    return again
                for event in (*gone, *due):
                    self._apply(event, now + self._bounds.keep_alive)


class _PolledStore:
    """A handle on a c10d store that can be closed and never blocks in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open(), name)

    def close(self) -> None:
        """End all blocked and later calls with StoreClosedError."""
        self._closed.set()

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        self.wait([key])
        return self._open().get(key)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        self.wait(keys)
        return self._open().multi_get(list(keys))

    def wait(self, keys: Sequence[str], timeout: Any = None, /) -> None:
        """See `Store.wait`."""
        seconds = to_seconds(self._store.timeout if timeout is None else timeout)
        names, backoff = list(keys), Backoff(*KEY_PAUSES)
        if not poll_until(lambda: self._open().check(names), backoff, seconds, self._closed):
            self._open()  # raises if the round is over
            raise StoreTimeout(timeout_message(Query("wait", tuple(names)), seconds))

    def _open(self) -> Store:
        if self._closed.is_set():
            raise StoreClosedError(
                "the round has ended, so its store is closed: use the store of the next round"
            )
        return self._store
