"""One node's way through the rounds: it asks for a seat, has it, loses it, and asks again.

What the node wants is said by its agent, through the handler (`_dynamic`); what it hears comes
from its line to the others (`_touch`); what follows from that is decided in `_waiting`. Here is
what is left: to ask, to wait for what comes of it, and to ask again where the answer is not final.

**How long.** A call is repeated by the driver until it is answered. A node that has been in touch
gives up `reconnect_timeout` after its lease was over, with RendezvousConnectionError; by then its
workers have long been stopped. A driver that knows better (nobody listens there any more, the
server does not know the job) says so at once.

**Lives.** Who was given up comes back as another node, under a new id. So does who gave up by
itself, and asks again later.

**Leaving** is said by a thread of its own, so that the node can stop its workers at once, also when
nobody answers. From then on it no longer confirms that it has heard of the round's end, or a
failure that its going has caused might be judged before it was heard to go; and what it says after
that waits until the thread is done.

**Ports.** The node holds a free port from before it asks until it asks again: if it becomes rank
0, the workers of all nodes meet there, and nobody has to wait to be told. It is another one for
every round, so what a worker of an older round left on it disturbs nobody.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from regrow.rendezvous._errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from regrow.rendezvous._news import (
    Close,
    Failed,
    Join,
    Judged,
    Leave,
    Leaving,
    Node,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._touch import Touch
from regrow.rendezvous._waiting import Outcome, Reborn, TimedOut, Waiting, judge
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous._driver import Driver, View
    from regrow.rendezvous._news import Event
    from regrow.rendezvous._settings import RendezvousSettings
    from regrow.rendezvous._threads import Event as ThreadEvent
    from regrow.rendezvous._threads import Threads
    from regrow.store import Store
    from regrow.utils import PortReservation

logger = get_logger(__name__)


class Member:
    """One node, for all of its lives.

    Args:
        driver: the rounds, as this node reaches them; it is closed with the node.
        settings: the settings of the rendezvous.
        addr: this node's address as the others reach it.
        wanted: the rank the node asks for, if any.
        clock: seconds of this node's monotonic clock.
        threads: how to start threads, and whose locks to use.
    """

    def __init__(
        self,
        driver: Driver,
        settings: RendezvousSettings,
        addr: str,
        wanted: int | None,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
    ) -> None:
        self.id = ""
        """Of this life; empty before the first, and after the node gave up."""
        self.addr = addr
        self.done = False
        """Whether everything was given back."""
        self.closed = False
        """Whether this node has closed the rendezvous."""
        self.port: PortReservation | None = None
        """The port it holds."""
        patience = settings.timeout.heartbeat.total_seconds()
        self.touch = Touch(driver, settings.bounds, patience, clock, threads)
        self._driver = driver
        self._clock = clock
        self._threading = threads
        self._settings = settings
        self._bounds = settings.bounds
        self._wanted = wanted
        self._token = 0
        self._lives = 0
        self._interrupted = False
        self._calling = False
        self._said = threads.Event()
        """That it is leaving, or that this could not be said."""
        self._said.set()

    def begin(self) -> None:
        """Begin a life, if the node has none."""
        self._check()
        if not self.id:
            self._begin_life()

    # --- a seat

    def meet(self) -> tuple[Seated, Store]:
        """Leave the round, if the node is in one, and block until it has a seat in the next.

        Returns:
            The seat, and the store of that round.

        Raises:
            RendezvousError: as `RendezvousHandler.next_rendezvous`.
        """
        from regrow.utils import PortReservation

        self._check()
        self.touch.unseat()
        self.release_port()
        self.port = PortReservation()
        while True:
            node = Node(self.id, self.addr, self._wanted, self.port.port)
            try:
                outcome = self._ask(Join(node, self._token))
            except RendezvousConnectionError:
                raise  # nobody there to be told
            except BaseException:
                self._give_up()
                raise
            match outcome:
                case Seated():
                    self._token = outcome.round
                    # Before its end can be heard, which ends the store that is there by then.
                    store = self._driver.round_store(outcome.round)
                    self.touch.seat(outcome)
                    return outcome, store
                case RoundEnded(round):
                    self._token = round
                case Reborn(why):
                    logger.warning("node %s comes back as a new one: %s", self.id, why)
                    self._begin_life()

    def _ask(self, join: Join) -> Seated | RoundEnded | Reborn:
        timeout = self._settings.timeout.join.total_seconds()
        waiting = Waiting(join.token, timeout)
        while True:
            said = self._call(join)
            waiting, outcome = judge(waiting, said, self._clock())
            if outcome is None:
                waiting, outcome = self._wait(waiting)
            match outcome:
                case RoundClosed():
                    raise self._over(outcome, waiting.standby)
                case TimedOut():
                    raise RendezvousTimeoutError(self._explain(timeout))
                case Seated() | RoundEnded() | Reborn():
                    return outcome

    def _wait(self, waiting: Waiting) -> tuple[Waiting, Outcome | None]:
        """Wait for the end of a wait; None: touch was lost, and everyone has to be asked anew."""
        touch = self.touch
        with touch.changed:
            while True:
                self._check()
                if touch.lost:
                    return waiting, None
                if touch.view is not None:
                    waiting, outcome = judge(waiting, touch.view, self._clock())
                    if outcome is not None:
                        return waiting, outcome
                deadline = waiting.deadline
                touch.changed.wait(None if deadline is None else deadline - self._clock())

    def _call(self, event: Event) -> View:
        """Submit an event, however long it takes to get in touch again within the bounds."""
        reconnect = self._settings.reconnect_timeout.total_seconds()
        with self.touch.changed:
            self._check()
            self._calling = True  # from here on an interrupt has to end the driver's call
            lost_at = self.touch.lost_at if self.touch.lost else None
        if lost_at is None:
            left = self._bounds.lease + reconnect
        else:
            left = max(lost_at + reconnect - self._clock(), self._bounds.keep_alive)
        try:
            return self._say(event, left)
        finally:
            with self.touch.changed:
                self._calling = False
                self.touch.changed.notify_all()

    def _check(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError(f"node {self.id or self.addr} was told to stop")
        if self.done:
            raise RendezvousClosedError(
                f"this handler of the rendezvous '{self._settings.run_id}' has been shut down"
            )
        if self.touch.broken is not None:
            raise self.touch.broken

    def _over(self, closed: RoundClosed, standby: bool) -> RendezvousError:
        run_id = self._settings.run_id
        if closed.lost:
            return RendezvousConnectionError(
                f"the rendezvous '{run_id}' cannot go on without node {closed.id}: {closed.why}; "
                f"its nodes are fixed, so no other takes its place"
            )
        if standby:
            return RendezvousGracefulExitError(
                f"node {self.id} stood by until the rendezvous '{run_id}' was closed: "
                f"node {closed.id}: {closed.why}"
            )
        error = RendezvousClosedError(
            f"the rendezvous '{run_id}' is closed: node {closed.id}: {closed.why}"
        )
        error.report = closed.report
        return error

    def _explain(self, timeout: float) -> str:
        explain = getattr(self._driver, "explain_timeout", None)
        if explain is not None:
            return str(explain(self.id, timeout))
        least = self._settings.min_nodes
        return (
            f"the rendezvous '{self._settings.run_id}': node {self.id} waited {timeout:g} s for "
            f"a seat in a round of at least {least} node{'s' if least != 1 else ''}"
        )

    def _give_up(self) -> None:
        """Take back that this node wants a seat, so that nobody counts on it."""
        try:
            self.touch.call(Leave(self.id, 0, "it gave up"), self._bounds.keep_alive)
        except RendezvousError as error:
            logger.info("node %s could not say that it gave up: %s", self.id, error)
        self.id, self._token = "", 0

    def _begin_life(self) -> None:
        self.id, self._token = self._new_id(), 0
        self.touch.live(self.id)

    def _new_id(self) -> str:
        self._lives += 1
        # Containers on one host may share address and process id, so these are not enough.
        return f"{self.addr}/{os.getpid()}/{os.urandom(3).hex()}{self._lives}"

    def release_port(self) -> None:
        """Give the port back."""
        port, self.port = self.port, None
        if port is not None:
            port.close()

    # --- failures, and leaving

    def judge(self, report: str) -> Judged | None:
        """See `PushingRendezvousHandler.report_failure`."""
        round, touch = self._token, self.touch
        deadline = self._clock() + self._settings.timeout.join.total_seconds()
        while True:
            said: View | None = self._call(Failed(self.id, round, report))
            while said is not None:
                if isinstance(said.news, Refused) or said.news is None:
                    return None
                if said.judged is not None and said.judged.round >= round:
                    return said.judged if said.judged.round == round else None
                if isinstance(said.news, RoundClosed):
                    raise self._over(said.news, standby=False)
                said = self._next_view(said, deadline)
            if touch.lost:
                continue
            raise RendezvousTimeoutError(
                f"node {self.id} has waited in vain for a judgement of the failure in round "
                f"{round} of the rendezvous '{self._settings.run_id}'"
            )

    def _next_view(self, seen: View, deadline: float) -> View | None:
        """Wait for a view that is newer; None: touch was lost, or the time is up."""
        touch = self.touch
        with touch.changed:
            while True:
                self._check()
                if touch.view is not None and touch.view.version > seen.version:
                    return touch.view
                left = deadline - self._clock()
                if touch.lost or left <= 0:
                    return None
                touch.changed.wait(left)

    def leaving(self, why: str) -> None:
        """See `PushingRendezvousHandler.leaving`."""
        if not self._token or self.done:
            return
        self.touch.part(self._token)
        self._said = self._threading.Event()
        leaving, said = Leaving(self.id, self._token, why), self._said
        self.touch.start("rendezvous leaving", lambda: self._say_leaving(leaving, said))

    def _say_leaving(self, leaving: Leaving, said: ThreadEvent) -> None:
        try:
            self.touch.call(leaving, self._bounds.keep_alive)
        except RendezvousGracefulExitError:  # it has left meanwhile
            pass
        except RendezvousError as error:
            logger.warning("node %s could not say that it is leaving: %s", leaving.id, error)
        finally:
            said.set()

    def _say(self, event: Event, timeout: float) -> View:
        """Submit an event, after what this node has said before."""
        self._said.wait(self._bounds.keep_alive)
        return self.touch.call(event, timeout)

    def leave(self, why: str, limit: float) -> None:
        """Give the node's place back, wherever it is.

        Raises:
            RendezvousError: nobody was reached within `limit` seconds.
        """
        if self.id:
            self._say(Leave(self.id, 0, why), min(limit, self._time_to_close()))

    # --- the end

    def close(self, why: str, report: str) -> None:
        """Close the rendezvous for all.

        Raises:
            RendezvousError: nobody was reached in time.
        """
        self._say(Close(self.id or self.addr, why, report), self._time_to_close())
        self.closed = True

    def _time_to_close(self) -> float:
        if self.touch.lost:  # and was not found again by who had longer
            return self._bounds.keep_alive
        return self._settings.timeout.close.total_seconds()

    def end(self, *, linger: bool, wait: bool = True) -> None:
        """Give everything back; `linger` as `Driver.close`, `wait` as `Touch.stop`."""
        if self.done:
            return
        self.done = True
        self.release_port()
        self.touch.stop(wait=wait)
        self._driver.close(linger)

    def view(self) -> View:
        """Return what the node has to believe, as far as it has heard."""
        with self.touch.changed:
            seen = self.touch.view
        if seen is None and not self.done:  # nobody follows yet
            timeout = self._settings.timeout.heartbeat.total_seconds()
            seen = self._driver.follow(self.id, None, timeout)
        return seen or self._driver.peek(self.id)

    def interrupt(self) -> None:
        """See `PushingRendezvousHandler.interrupt`."""
        with self.touch.changed:
            self._interrupted = True
            self.touch.changed.notify_all()
            if self._calling:
                self.touch.start("rendezvous interrupt", self._cut_short)

    def _cut_short(self) -> None:
        """End a call that nobody answers; one that is about to end leaves the way to say more."""
        with self.touch.changed:
            answered = self.touch.changed.wait_for(
                lambda: not self._calling, self._bounds.keep_alive
            )
        if not answered:
            self._driver.interrupt()
