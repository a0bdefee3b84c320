"""One node's connection to the rendezvous: heartbeats, the lease of its workers, notifications.

It has three threads, because no one of these tasks may delay another. One sends a heartbeat in
every keep-alive interval, and each answer renews the lease of the node's workers (`SeatLease`). One
follows the rounds, and notifies the subscribers. One watches the time, because a call can hang: the
connection is lost when no answer came for the time of a lease. Calls of the node itself (`call`)
run in the caller's thread. Their answers are handled like those of the follower, so there is one
latest snapshot.

**A life** is one id of the node. A node that the others have evicted rejoins under a new id. The
thread that followed the old id ends at its next turn, and later answers about the old id are
ignored.

**Starved.** If the process gets no processor time, answers that have arrived are not read, and
heartbeats are late. A node that holds no lease then loses nothing by waiting, and would only add to
the load by joining again. So the time for which the thread that watches it was late itself does not
count as silence, and heartbeats get rarer if answers are slow (`beat_pause`). A node whose workers
may run counts every second.

Subscribers are called from these threads, in order, and never while the lock is held. An error that
is not about the connection (a document of another release, a fault in a plug-in) ends the thread.
The node's next call raises that error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from regrow.rendezvous.errors import RendezvousConnectionError, RendezvousGracefulExitError
from regrow.rendezvous.node.node_rules import Notified, beat_pause, is_evicted, notifications
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    RoundEnded,
    Seated,
    subject,
)
from regrow.rendezvous.settings import FOLLOW_TURN
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.node.driver import Driver, Snapshot, Threads
    from regrow.rendezvous.node.node_rules import Notification
    from regrow.rendezvous.protocol.failure_detector import Bounds
    from regrow.rendezvous.protocol.messages import Event, ServerRestarted, ServersChanged
    from regrow.utils import PortReservation

    Subscriber = Callable[[object], None]

logger = get_logger(__name__)


class SeatLease:
    """The lease of one node: the time until which its workers may run.

    The lease counts from when a heartbeat was *sent*. The server may have answered it at once, and
    counts the node's silence from then. So a node that gets no answers knows when its lease ends.
    The guardian receives each renewal, and kills the workers at the end of the lease.

    A node that learns of its eviction ends the lease at once, because another node may have its
    seat. No later answer to a heartbeat for that seat renews the lease. The next seat has its own
    lease.

    Args:
        seconds: the length of the lease.
        clock: returns the time of the node's monotonic clock, in seconds.
        threads: provides the locks.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], threads: Threads) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threads.Lock()  # keeps the calls of the subscribers in order
        self._round = 0
        self._lapsed = False
        self._until = 0.0
        self._subscribers: dict[object, Callable[[float], None]] = {}

    def begin(self, round: int) -> None:
        """Start the lease of the seat in another round."""
        with self._lock:
            self._round, self._lapsed = round, False

    def renew(self, round: int, sent: float) -> None:
        """Renew the lease after an answer to a heartbeat for the seat in a round.

        Args:
            round: the round.
            sent: when the heartbeat was sent, in seconds of the node's clock.
        """
        with self._lock:
            if round == self._round and not self._lapsed:
                self._set(max(self._until, sent + self._seconds))

    def lapse(self, round: int) -> None:
        """End the lease now, because the node was evicted from its seat in a round."""
        with self._lock:
            if round == self._round and not self._lapsed:
                self._lapsed = True
                self._set(self._clock())

    def keep(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See `PushingRendezvousHandler.keep_lease`."""
        key = object()
        with self._lock:
            renewed(self._until or self._clock())
            self._subscribers[key] = renewed

        def stop() -> None:
            self._subscribers.pop(key, None)

        return stop

    def _set(self, until: float) -> None:
        self._until = until
        for renewed in tuple(self._subscribers.values()):
            renewed(until)


class NodeConnection:
    """One node's connection to the rendezvous.

    Args:
        driver: the rounds.
        bounds: the heartbeat interval, and the length of a lease.
        beat_timeout: seconds to wait for the answer to a heartbeat.
        clock: returns the time of this node's monotonic clock, in seconds.
        threads: starts threads, and provides the locks.
    """

    def __init__(
        self,
        driver: Driver,
        bounds: Bounds,
        beat_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
    ) -> None:
        self.changed = threads.Condition()
        """Notified when one of the following fields changes; its lock guards them."""
        self.snapshot: Snapshot | None = None
        """The latest snapshot of this life; None before the first."""
        self.lost: str = ""
        """Why no answer comes, once none has come for the time of a lease; else empty."""
        self.lost_at: float = 0.0
        """When the connection was lost, in seconds of the monotonic clock."""
        self.broken: Exception | None = None
        """The error that ended a thread."""
        self.done = False
        """Whether `end` was called."""
        self.port: PortReservation | None = None
        """The port that the node holds for the workers, if any."""
        self._driver = driver
        self._clock = clock
        self._threading = threads
        self._bounds = bounds
        self._beat_timeout = min(beat_timeout, bounds.lease)
        self._id = ""
        self._token = 0
        self._notified = Notified()
        # The heartbeats and the watch of time have events of their own. A notification of `changed`
        # would wake their threads too, and with hundreds of nodes in a process they starve others.
        self._beat_at_once = threads.Event()
        self._ended = threads.Event()
        self._answered = 0.0
        self._beaten = 0.0
        self._leased = 0  # the last round in which this node has renewed the lease of its seat
        self._last_error = "no answer came"
        self._lease = SeatLease(bounds.lease, clock, threads)
        self._unconfirmed = 0  # the last round that this node leaves by its own decision
        self._threads: set[threading.Thread] = set()
        self._notifying = threads.RLock()
        self._queue: deque[Notification | ServerRestarted | ServersChanged] = deque()
        self._subscribers: dict[object, Subscriber] = {}
        self.keep_lease = self._lease.keep
        """See `PushingRendezvousHandler.keep_lease`."""

    # --- calls of the node's own thread

    def begin_life(self, id: str) -> None:
        """Begin a life: send its heartbeats, and follow the rounds for it.

        Raises:
            RendezvousGracefulExitError: `end` was called.
        """
        with self.changed:
            if self.done:
                raise RendezvousGracefulExitError(
                    "this rendezvous handler has been shut down, so it accepts no more calls; "
                    "create a new handler"
                )
            first = not self._id
            self._id, self._token, self._notified, self.snapshot = id, 0, Notified(), None
            self._answered = self._beaten = self._clock()
            self.lost = ""
            self.changed.notify_all()
        self.start(f"rendezvous follower of {id}", lambda: self._follow(id))
        if first:
            self.start("rendezvous keep-alive", self._beat)
            self.start("rendezvous lease", self._watch_time)

    def call(self, event: Event, timeout: float) -> Snapshot:
        """Submit an event of this life, and return the answer.

        Raises:
            RendezvousConnectionError: no answer came within `timeout` seconds.
        """
        answer = self._driver.submit(event, timeout)
        with self.changed:
            self._note_answer(self._clock())  # a slow answer counts too: it renews no lease
        if not isinstance(event, CloseRendezvous):  # a node that has its seat continues
            self._receive(subject(event), answer)
        return answer

    def take_seat(self, seated: Seated) -> None:
        """Take a seat: from now on the subscribers are notified about its round."""
        self._lease.begin(seated.round)
        with self.changed:
            self._token, self._notified = seated.round, Notified(seated.round)
            self._beat_at_once.set()
            self._answered = self._beaten = self._clock()
            self.changed.notify_all()
            snapshot, failing = self.snapshot, bool(self.lost or self.broken)
            if failing:  # no seat until now, so no subscriber was notified
                self._end(seated.id)
        if failing:
            self._driver.end_round_store()
        if snapshot is not None:
            self._receive(seated.id, snapshot)

    def leave_seat(self) -> None:
        """Leave the seat: the subscribers are no longer notified about its round.

        There is one exception: subscribers that were notified of the end still get the verdict on
        it. They may know that the workers of another node failed, and the cause may turn out to be
        a third node.
        """
        with self.changed:
            if self._notified.ended is None:
                self._notified = Notified()
        self._driver.end_round_store()

    def stop_confirming(self, round: int) -> None:
        """Stop confirming the end of a round, because the node leaves it by its own decision."""
        with self.changed:
            self._unconfirmed = round

    def end(self, *, linger: bool, wait: bool = True) -> None:
        """End the heartbeats and notifications, and release everything.

        Args:
            linger: see `Driver.close`.
            wait: whether to wait for the threads; the limit for all is the time-out of a heartbeat.
        """
        with self.changed:
            if self.done:
                return
            self.done, lost = True, bool(self.lost)
            self._ended.set()
            self._beat_at_once.set()
            self.changed.notify_all()
            threads = self._threads - {self._threading.current_thread()}
        self.release_port()
        self._driver.end_round_store()
        self._driver.interrupt()
        deadline = self._clock() + self._beat_timeout
        for thread in threads if wait and not lost else ():
            thread.join(max(deadline - self._clock(), 0.0))
        self._driver.close(linger and not lost)

    def release_port(self) -> None:
        """Release the port."""
        port, self.port = self.port, None
        if port is not None:
            port.close()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """See `PushingRendezvousHandler.subscribe`."""
        key = object()
        with self.changed:
            self._subscribers[key] = subscriber

        def stop() -> None:
            with self.changed:
                self._subscribers.pop(key, None)

        return stop

    def report(self, change: ServerRestarted | ServersChanged) -> None:
        """Notify the subscribers of a change of the server, or of the hosts that may serve."""
        with self.changed:
            if self.done:
                return
            self._queue.append(change)
        self._notify()

    # --- the threads

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run a function in a thread; it ends at the latest when the driver is interrupted."""

        def run() -> None:
            try:
                target()
            except RendezvousGracefulExitError:  # `end` was called
                pass
            except Exception as error:  # noqa: BLE001 - raised again by the node's next call
                self._fail(error)
            finally:
                with self.changed:
                    self._threads.discard(thread)

        thread = self._threading.Thread(target=run, name=name, daemon=True)
        with self.changed:  # `end` finds each thread either started or not there
            self._threads.add(thread)
            thread.start()

    def _follow(self, id: str) -> None:
        troubled: float | None = None
        confirmed = 0  # the last round that this node has confirmed as ended
        while (seen := self._seen(id)) is not None:
            try:
                match seen.status:
                    case RoundEnded(round, by) if self._confirms(round, confirmed) and by != id:
                        self._driver.submit(EndConfirmed(id, round), self._bounds.lease)
                        confirmed = round
                snapshot = self._driver.follow(id, seen, FOLLOW_TURN)
                if snapshot is not None:
                    self._receive(id, snapshot)
                troubled = None
            except RendezvousConnectionError as error:
                self._last_error = str(error)
                now = self._clock()
                troubled = now if troubled is None else troubled
                if now - troubled >= self._bounds.lease:  # although heartbeats are answered
                    self._lose(id)
                self._pause(id, self._bounds.keep_alive / 4)

    def _confirms(self, round: int, confirmed: int) -> bool:
        return self._token == round > max(confirmed, self._unconfirmed)

    def _seen(self, id: str) -> Snapshot | None:
        """Wait for the first snapshot under this node id; return the latest one.

        The result is None if the node does not use this id any more.

        A snapshot without this node looks the same before it has joined and after its eviction. So
        the node follows nothing before its first answer.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._over(id) or self.snapshot is not None)
            return None if self._over(id) else self.snapshot

    def _beat(self) -> None:
        self._beat_at_once.wait(self._bounds.keep_alive)  # the others do not know the node yet
        while True:
            with self.changed:
                if self.done:
                    return
                self._beat_at_once.clear()
                id, token = self._id, self._token
            sent, answered = self._clock(), False
            try:
                holds = self._driver.beat(id, token, self._beat_timeout)
            except RendezvousConnectionError as error:
                logger.debug("node %s: a heartbeat was not answered: %s", id, error)
                self._last_error = str(error)
            else:
                answered = True
                self._renew(id, token, sent, holds)
                if not holds and token:
                    self._receive(id, self._driver.peek(id))
            took = self._clock() - sent
            leased = self._may_run_workers()
            pause = beat_pause(self._bounds, took, answered=answered, leased=leased)
            self._beat_at_once.wait(max(pause - took, 0.0))

    def _watch_time(self) -> None:
        left = self._bounds.lease
        due = self._clock() + left
        while not self._ended.wait(left):
            starved = self._clock() >= due + self._bounds.keep_alive
            with self.changed:
                self.changed.wait_for(lambda: self.done or not self.lost)
                now = self._clock()
                id, left = self._id, self._answered + self._bounds.lease - now
                if starved and not self._may_run_workers():
                    left = self._bounds.lease
                due = now + left
            if left <= 0:
                self._lose(id)

    def _may_run_workers(self) -> bool:
        """Return whether this node has a seat and has renewed its lease."""
        notified = self._notified
        return bool(notified.round) and not notified.ended and self._leased == notified.round

    def _over(self, id: str) -> bool:
        return self.done or self._id != id

    def _pause(self, id: str, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._over(id), seconds)

    # --- events that the threads receive

    def _receive(self, id: str, snapshot: Snapshot) -> None:
        with self.changed:
            if self._over(id) or (
                self.snapshot is not None and snapshot.version < self.snapshot.version
            ):
                return
            self.snapshot = snapshot
            before = self._notified
            self._notified, due = notifications(before, snapshot, id)
            self._queue += due
            over = self._notified.ended is not None and before.ended is None
            lapsed = self._notified.round if is_evicted(self._notified, snapshot) else 0
            self.changed.notify_all()
        if lapsed:
            self._lease.lapse(lapsed)
        if over:
            self._driver.end_round_store()
        self._notify()

    def _renew(self, id: str, token: int, sent: float, holds: bool) -> None:
        if token and token == self._leased and sent > self._beaten + self._bounds.lease:
            # The lease expired while this process was stopped, so another node may have the seat.
            self._lose(id)
        self._beaten = sent
        with self.changed:
            if self._over(id):
                return
            self._note_answer(sent)
            if holds:
                self._leased = token
        if holds:
            self._lease.renew(token, sent)

    def _note_answer(self, at: float) -> None:
        """Record an answer, which shows that the connection worked at that time."""
        self._answered = max(self._answered, at)
        if self.lost:
            self.lost = ""
            self.changed.notify_all()

    def _lose(self, id: str) -> None:
        """Mark the connection as lost: no answer came for the time of a lease."""
        with self.changed:
            if self._over(id) or self.lost:
                return
            self.lost, self.lost_at = self._last_error, self._clock()
            self._end(id)
        logger.warning("node %s lost its connection to the other nodes: %s", id, self.lost)
        self._driver.end_round_store()
        self._notify()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            if self.done:
                return
            self.broken = self.broken or error
            self._end(self._id)
        logger.error(
            "node %s leaves its round, because it cannot read the rendezvous; the next call of "
            "the agent raises this error",
            self._id,
            exc_info=error,
        )
        self._driver.end_round_store()
        self._notify()

    def _end(self, id: str) -> None:
        """End the round for this node, if it has a seat, and wake the threads that wait."""
        why = f"it lost its connection to the other nodes: {self.lost}"
        if self.broken is not None:
            why = f"it cannot continue: {type(self.broken).__name__}: {self.broken}"
        if self._notified.round and self._notified.ended is None:
            ended = RoundEnded(self._notified.round, id, why, lost=True)
            self._notified = self._notified._replace(ended=ended)
            self._queue.append(ended)
        self.changed.notify_all()

    def _notify(self) -> None:
        with self._notifying:
            while self._queue:
                notification = self._queue.popleft()
                with self.changed:
                    subscribers = tuple(self._subscribers.values())
                for subscriber in subscribers:
                    subscriber(notification)
