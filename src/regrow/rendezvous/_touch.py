"""How one node keeps in touch with the others, while it waits and while its workers run.

Three threads, because none of this may wait for the other. One beats: it says once in every
keep-alive interval that the node is alive, and each answer renews the lease under which the node
runs its workers (`_lease`). One follows the rounds, and tells whoever subscribed what concerns
them. One has an eye on the time, since a call can hang: touch is lost when nothing was answered for
as long as a lease lasts. Calls of the node itself (`call`) are made from the caller's thread, and
the answers go the same way as what the follower hears, so there is one latest view.

**A life** is one id of the node. When the others have given the node up it comes back under a new
id, and the thread that followed the old one ends at its next turn; what is still said about the
old life is not heard.

Subscribers are called from these threads, in order, and not while the lock is held. An error that
is not about the connection (a document of another release, a fault in a plug-in) ends the thread,
and is raised by the node's next call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from regrow.rendezvous._errors import RendezvousConnectionError, RendezvousGracefulExitError
from regrow.rendezvous._lease import Lease
from regrow.rendezvous._news import Close, Heard, RoundEnded, Seated, subject
from regrow.rendezvous._waiting import Told, given_up, tidings
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from regrow.rendezvous._driver import Driver, View
    from regrow.rendezvous._news import Event
    from regrow.rendezvous._patience import Bounds
    from regrow.rendezvous._threads import Thread, Threads
    from regrow.rendezvous._waiting import Tidings

    Subscriber = Callable[[object], None]

_TURN = 20.0  # seconds for which the follower is blocked before it asks whether it is still needed

logger = get_logger(__name__)


class Touch:
    """One node's line to the others.

    Args:
        driver: the rounds.
        bounds: how often to beat, and how long a lease lasts.
        patience: seconds in which a beat has to be answered.
        clock: seconds of this node's monotonic clock.
        threads: how to start threads, and whose locks to use.
    """

    def __init__(
        self,
        driver: Driver,
        bounds: Bounds,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
    ) -> None:
        self.changed = threads.Condition()
        """Notified of all that follows; its lock guards it."""
        self.view: View | None = None
        """The latest that was heard about this life."""
        self.lost: str = ""
        """Why nothing can be heard, once that has lasted as long as a lease."""
        self.lost_at: float = 0.0
        """When that was, on the monotonic clock."""
        self.broken: Exception | None = None
        """What ended a thread."""
        self._driver = driver
        self._clock = clock
        self._threading = threads
        self._bounds = bounds
        self._patience = min(patience, bounds.lease)
        self._id = ""
        self._token = 0
        self._told = Told()
        self._stopped = False
        self._beat_now = False
        self._answered = 0.0
        self._beaten = 0.0
        self._trouble = "nobody answers"
        self._lease = Lease(bounds.lease, clock, threads)
        self._parted = 0  # the last round that this node leaves by its own decision
        self._threads: set[Thread] = set()
        self._telling = threads.RLock()
        self._news: deque[Tidings] = deque()
        self._subscribers: dict[object, Subscriber] = {}
        self.keep_lease = self._lease.keep
        """See `PushingRendezvousHandler.keep_lease`."""

    # --- the node's own thread

    def live(self, id: str) -> None:
        """Begin a life: beat for it, and follow it.

        Raises:
            RendezvousGracefulExitError: `stop` was called.
        """
        with self.changed:
            if self._stopped:
                raise RendezvousGracefulExitError("this handler has been shut down")
            first = not self._id
            self._id, self._token, self._told, self.view = id, 0, Told(), None
            self._answered = self._beaten = self._clock()
            self.lost = ""
            self.changed.notify_all()
        self.start(f"rendezvous follower of {id}", lambda: self._follow(id))
        if first:
            self.start("rendezvous keep-alive", self._beat)
            self.start("rendezvous lease", self._watch_time)

    def call(self, event: Event, timeout: float) -> View:
        """Submit an event of this life, and return what is answered.

        Raises:
            RendezvousConnectionError: nobody answered within `timeout` seconds.
        """
        said = self._driver.submit(event, timeout)
        with self.changed:
            self._answer(self._clock())  # however long it took: no lease follows from it
        if not isinstance(event, Close):  # which is no news to a node that has its seat
            self._hear(subject(event), said)
        return said

    def seat(self, seated: Seated) -> None:
        """The node takes its seat: from now on its agent is told about this round."""
        self._lease.begin(seated.round)
        with self.changed:
            self._token, self._told = seated.round, Told(seated.round)
            self._beat_now = True
            self._beaten = self._clock()
            self.changed.notify_all()
            view, failing = self.view, bool(self.lost or self.broken)
            if failing:  # since before it had a seat, so nobody was told
                self._end(seated.id)
        if failing:
            self._driver.end_round_store()
        if view is not None:
            self._hear(seated.id, view)

    def unseat(self) -> None:
        """The node gives its seat up: its agent need not be told about that round any more.

        Except how its end is judged, where the node was told of the end: it may have been told that
        the workers of another node failed, and the cause may turn out to be a third that was lost.
        """
        with self.changed:
            if self._told.ended is None:
                self._told = Told()
        self._driver.end_round_store()

    def part(self, round: int) -> None:
        """The node leaves a round: from now on it confirms no more that others have ended it."""
        with self.changed:
            self._parted = round

    def stop(self, *, wait: bool = True) -> None:
        """End the threads, and wait for them if asked to; beats and news end with them.

        One that is blocked in a plug-in's call is waited for no longer than a beat may take.
        """
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
            threads = self._threads - {self._threading.current_thread()}
        self._driver.end_round_store()
        self._driver.interrupt()
        deadline = self._clock() + self._patience
        for thread in threads if wait else ():
            thread.join(max(deadline - self._clock(), 0.0))

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """See `PushingRendezvousHandler.subscribe`."""
        key = object()
        with self.changed:
            self._subscribers[key] = subscriber

        def stop() -> None:
            with self.changed:
                self._subscribers.pop(key, None)

        return stop

    # --- the threads

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run something in a thread that ends, at the latest, with the calls of the driver."""

        def run() -> None:
            try:
                target()
            except RendezvousGracefulExitError:  # told to stop
                pass
            except Exception as error:  # noqa: BLE001 - raised again by the node's next call
                self._break(error)
            finally:
                with self.changed:
                    self._threads.discard(thread)

        thread = self._threading.Thread(target=run, name=name, daemon=True)
        with self.changed:  # whoever ends the threads finds those that are there started
            self._threads.add(thread)
            thread.start()

    def _follow(self, id: str) -> None:
        troubled: float | None = None
        answered = 0  # the last round of whose end the others know that this node has heard
        while (seen := self._seen(id)) is not None:
            try:
                match seen.news:
                    case RoundEnded(round, by) if self._confirms(round, answered) and by != id:
                        self._driver.submit(Heard(id, round), self._bounds.lease)
                        answered = round
                view = self._driver.follow(id, seen, _TURN)
                if view is not None:
                    self._hear(id, view)
                troubled = None
            except RendezvousConnectionError as error:
                self._trouble = str(error)
                now = self._clock()
                troubled = now if troubled is None else troubled
                if now - troubled >= self._bounds.lease:  # also if its beats are heard
                    self._lose(id)
                self._pause(id, self._bounds.keep_alive / 4)

    def _confirms(self, round: int, answered: int) -> bool:
        return self._token == round > max(answered, self._parted)

    def _seen(self, id: str) -> View | None:
        """Return the latest view of this life, once there is one; None when it is over.

        What is not there before a node has joined looks like what is not there any more after it
        was given up; so nothing is followed before the first answer.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._over(id) or self.view is not None)
            return None if self._over(id) else self.view

    def _beat(self) -> None:
        while True:
            with self.changed:
                if self._stopped:
                    return
                id, token, self._beat_now = self._id, self._token, False
            sent = self._clock()
            pause = self._bounds.keep_alive
            try:
                holds = self._driver.beat(id, token, self._patience)
            except RendezvousConnectionError as error:
                logger.debug("node %s: a beat was not answered: %s", id, error)
                self._trouble = str(error)
                pause /= 4
            else:
                self._renew(id, token, sent, holds)
                if not holds and token:
                    self._hear(id, self._driver.peek(id))
            with self.changed:
                self.changed.wait_for(
                    lambda: self._stopped or self._beat_now,
                    max(sent + pause - self._clock(), 0.0),
                )

    def _watch_time(self) -> None:
        while True:
            with self.changed:
                if self._stopped:
                    return
                left = self._answered + self._bounds.lease - self._clock()
                if left > 0 or self.lost:
                    self.changed.wait(max(left, 0.0) or None)
                    continue
                id = self._id
            self._lose(id)

    def _over(self, id: str) -> bool:
        return self._stopped or self._id != id

    def _pause(self, id: str, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._over(id), seconds)

    # --- what they hear

    def _hear(self, id: str, view: View) -> None:
        with self.changed:
            if self._over(id) or (self.view is not None and view.version < self.view.version):
                return
            self.view = view
            before = self._told
            self._told, news = tidings(before, view, id)
            self._news += news
            over = self._told.ended is not None and before.ended is None
            lapsed = self._told.round if given_up(self._told, view) else 0
            self.changed.notify_all()
        if lapsed:
            self._lease.lapse(lapsed)
        if over:
            self._driver.end_round_store()
        self._tell()

    def _renew(self, id: str, token: int, sent: float, holds: bool) -> None:
        if sent > self._beaten + self._bounds.lease:
            # The lease ran out while this process was stopped, and others may have counted on it.
            self._lose(id)
        self._beaten = sent
        with self.changed:
            if self._over(id):
                return
            self._answer(sent)
        if holds:
            self._lease.renew(token, sent)

    def _answer(self, at: float) -> None:
        """Somebody was there at that time."""
        self._answered = max(self._answered, at)
        if self.lost:
            self.lost = ""
            self.changed.notify_all()

    def _lose(self, id: str) -> None:
        """Nothing was answered for as long as a lease lasts."""
        with self.changed:
            if self._over(id) or self.lost:
                return
            self.lost, self.lost_at = self._trouble, self._clock()
            self._end(id)
        logger.warning("node %s has lost touch with the others: %s", id, self.lost)
        self._driver.end_round_store()
        self._tell()

    def _break(self, error: Exception) -> None:
        with self.changed:
            if self._stopped:
                return
            self.broken = self.broken or error
            self._end(self._id)
        logger.error("node %s cannot follow the rendezvous", self._id, exc_info=error)
        self._driver.end_round_store()
        self._tell()

    def _end(self, id: str) -> None:
        """The round is over for this node, if it has a seat; whoever waits, looks again."""
        why = f"it has lost touch with the others: {self.lost}"
        if self.broken is not None:
            why = f"it cannot go on: {type(self.broken).__name__}: {self.broken}"
        if self._told.round and self._told.ended is None:
            ended = RoundEnded(self._told.round, id, why)
            self._told = self._told._replace(ended=ended)
            self._news.append(ended)
        self.changed.notify_all()

    def _tell(self) -> None:
        with self._telling:
            while self._news:
                news = self._news.popleft()
                for subscriber in self._listening():
                    subscriber(news)

    def _listening(self) -> Iterable[Subscriber]:
        with self.changed:
            return tuple(self._subscribers.values())
