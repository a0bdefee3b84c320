"""One node's connection to the rendezvous: heartbeats, the lease of its workers, notifications.

It has three tasks, and none may delay another. One sends a heartbeat in every keep-alive interval,
and each answer renews the lease of the node's workers (`SeatLease`). One watches the time, because
a call can hang: the connection is lost when no answer came for the time of a lease. All nodes of a
process share the threads of these two (`periodic.py`). The third task has a thread of its own: it
follows the rounds, and notifies the subscribers. Calls of the node itself (`call`) run in the
caller's thread. Their answers are handled like those of the follower, so there is one latest
snapshot.

**A life** is one id of the node. A node that the others have evicted rejoins under a new id. The
thread that followed the old id ends at its next turn, and later answers about the old id are
ignored.

**Starved.** If the process gets no processor time, answers that have arrived are not read, and
heartbeats are late. A node that holds no lease then loses nothing by waiting, and would only add to
the load by joining again. So the time for which the watch was late itself does not count as
silence, and heartbeats get rarer if answers are slow (`beat_pause`). A node whose workers may run
counts every second.

Subscribers are called from these threads, in order, and never while the lock is held. An error that
is not about the connection (a document of another release, a fault in a plug-in) ends the task. The
node's next call raises that error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from regrow.rendezvous.errors import RendezvousConnectionError, RendezvousGracefulExitError
from regrow.rendezvous.node.node_rules import Notified, beat_pause, is_evicted, notifications
from regrow.rendezvous.node.periodic import SHARED, PeriodicTasks
from regrow.rendezvous.node.seat_lease import SeatLease
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
    from regrow.rendezvous.node.periodic import PeriodicTask
    from regrow.rendezvous.protocol.failure_detector import Bounds
    from regrow.rendezvous.protocol.messages import Event, ServerRestarted, ServersChanged
    from regrow.utils import PortReservation

    Subscriber = Callable[[object], None]

T = TypeVar("T")
logger = get_logger(__name__)


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
        """The error that ended a task."""
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
        self._periodic = SHARED if threads is threading else PeriodicTasks(clock, threads)
        self._beats: PeriodicTask | None = None
        self._watch: PeriodicTask | None = None
        self._watch_due = 0.0
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

    def left(self) -> float:
        """Return the seconds until the connection counts as lost if no answer comes; with the lock.

        They may be over before the loss is found, since the watch is a thread like any other.
        """
        return max(self._answered + self._bounds.lease - self._clock(), 0.0)

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
            self._watch_due = self._answered + self._bounds.lease
            self._watch = self._periodic.add(self._guarded(self._watch_time), self._bounds.lease)
            # The others do not know the node before the end of the first interval.
            self._beats = self._periodic.add(self._guarded(self._beat), self._bounds.keep_alive)

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
            self._answered = self._beaten = self._clock()
            self.changed.notify_all()
            snapshot, failing = self.snapshot, bool(self.lost or self.broken)
            if failing:  # no seat until now, so no subscriber was notified
                self._end(seated.id)
        if self._beats is not None:
            self._beats.run_soon()
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
            self.changed.notify_all()
            threads = self._threads - {self._threading.current_thread()}
        tasks = [task for task in (self._beats, self._watch) if task is not None]
        for task in tasks:
            task.end()
        self.release_port()
        self._driver.end_round_store()
        self._driver.interrupt()
        deadline = self._clock() + self._beat_timeout
        ending = [*(thread.join for thread in threads), *(task.join for task in tasks)]
        for join in ending if wait and not lost else ():
            join(max(deadline - self._clock(), 0.0))
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

    # --- the tasks

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run a function in a thread; it ends at the latest when the driver is interrupted."""
        guarded = self._guarded(target)

        def run() -> None:
            try:
                guarded()
            finally:
                with self.changed:
                    self._threads.discard(thread)

        thread = self._threading.Thread(target=run, name=name, daemon=True)
        with self.changed:  # `end` finds each thread either started or not there
            thread.start()
            self._threads.add(thread)

    def _guarded(self, task: Callable[[], T]) -> Callable[[], T | None]:
        """Return the task in a form that raises nothing; None is the result after an error."""

        def run() -> T | None:
            try:
                return task()
            except RendezvousGracefulExitError:  # `end` was called
                pass
            except Exception as error:  # noqa: BLE001 - raised again by the node's next call
                self._fail(error)
            return None

        return run

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

    def _beat(self) -> float | None:
        """Send a heartbeat; return the seconds until the next one."""
        with self.changed:
            if self.done:
                return None
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
        return max(beat_pause(self._bounds, took, answered=answered, leased=leased) - took, 0.0)

    def _watch_time(self) -> float | None:
        """Check whether the connection is lost; return the seconds until the next check."""
        with self.changed:
            if self.done:
                return None
            now = self._clock()
            id, left = self._id, self._answered + self._bounds.lease - now
            starved = now >= self._watch_due + self._bounds.keep_alive
            if self.lost or (starved and not self._may_run_workers()):
                left = self._bounds.lease
        if left <= 0:
            self._lose(id)
            left = self._bounds.lease
        self._watch_due = now + left
        return left

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
