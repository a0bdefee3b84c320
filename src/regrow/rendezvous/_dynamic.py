"""The handler of one node of a job whose nodes come and go.

It says what it wants to the rounds (`_driver`), keeps in touch with them (`_touch`) and waits for
what the two decide (`_waiting`); nothing of the rules of a round is here.

Where this differs from torch's handler of the same name, which it replaces: `next_rendezvous` does
not sleep at its start and asks nobody again and again; who stands by beyond `max_nodes` is told
when a seat is free; a round that loses a member ends for everyone at once, with the cause; and
`num_nodes_waiting` and `is_closed` answer from what was heard last, without a call.

What the bounds are. A call is repeated by the driver until it is answered. A node that has been in
touch gives up `reconnect_timeout` after its lease was over, with RendezvousConnectionError; by then
its workers have long been stopped. A driver that knows better (nobody listens there any more, the
server does not know the job) says so at once.
"""

from __future__ import annotations

import os
import time
import weakref
from logging import getLogger
from typing import TYPE_CHECKING

from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
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
from regrow.rendezvous._settings import RendezvousSettings, RendezvousTimeout, read_settings
from regrow.rendezvous._touch import Touch
from regrow.rendezvous._waiting import Outcome, Reborn, TimedOut, Waiting, judge
from regrow.store import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regrow.rendezvous._backend import RendezvousBackend
    from regrow.rendezvous._driver import Driver, View
    from regrow.rendezvous._news import Event
    from regrow.store import Store
    from regrow.utils import PortReservation

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

log = getLogger(__name__)


class DynamicRendezvousHandler(PushingRendezvousHandler):
    """One node's handle on a rendezvous whose nodes come and go.

    Args:
        driver: the rounds, as this node reaches them; the handler closes it.
        settings: the settings of the rendezvous.
        backend: the name under which it was created.
        local_addr: this node's address as the others reach it; None: the one by which it reaches
            the place where the nodes meet.
        node_rank: the rank the node asks for, if any.
    """

    def __init__(
        self,
        driver: Driver,
        settings: RendezvousSettings,
        *,
        backend: str,
        local_addr: str | None = None,
        node_rank: int | None = None,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._backend = backend
        self._addr = local_addr or driver.local_addr
        self._node_rank = node_rank
        self._bounds = settings.bounds
        self._touch = Touch(driver, self._bounds, settings.timeout.heartbeat.total_seconds())
        self._id = ""
        self._token = 0
        self._lives = 0
        self._ports: list[PortReservation] = []  # one at most
        self._interrupted = False
        self._calling = False
        self._closed = False
        self._done = False
        # Threads keep what they run alive; who forgets the handler has not to go on beating.
        weakref.finalize(self, _abandon, driver, self._touch, self._ports).atexit = False

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Store,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """Create the handler of a node that runs the rounds with the others over a backend.

        Args:
            run_id: the id of the job.
            store: shared by the nodes, for the keys of the rounds; any c10d store.
            backend: holds the rounds.
            min_nodes: the fewest nodes that make a round.
            max_nodes: the most nodes in a round.
            local_addr: this node's address as the others reach it; None: the backend's
                `local_addr` where it has one, else the name of this host.
            timeout: how long the steps may take.
            keep_alive_interval: seconds between two beats.
            keep_alive_max_attempt: how many beats may fail to come before a node is given up.

        Raises:
            ValueError: the settings make no sense.
        """
        from datetime import timedelta

        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        return over_backend(store, backend, settings, local_addr)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of the rendezvous."""
        return self._settings

    @property
    def bounds(self) -> Mapping[str, float]:
        """See base class."""
        lease, reconnect = self._bounds.lease, self._settings.reconnect_timeout.total_seconds()
        return {
            "a silent host is given up": lease + self._bounds.kill,
            "workers of a host that is cut off are killed": lease,
            "a coordinator that cannot be reached ends the job": lease + reconnect,
        }

    def get_backend(self) -> str:
        """See base class."""
        return self._backend

    def get_run_id(self) -> str:
        """See base class."""
        return self._settings.run_id

    # --- rounds

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        run_id = self._settings.run_id
        try:
            if not self._id:
                self._begin_life()
            self._record(f"The node '{self._id}' attempts to join the next round of '{run_id}'.")
            seated = self._meet()
        except Exception as error:
            self._release_port()
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise
        self._record(
            f"The node '{self._id}' has joined round {seated.round} of the rendezvous '{run_id}' "
            f"as rank {seated.rank} in a world of size {seated.world_size}.",
            rank=seated.rank,
        )
        if seated.rank:
            self._release_port()
        return RendezvousInfo(
            PrefixStore(
                f"torch.rendezvous.{run_id}.{seated.round}", self._driver.round_store(seated.round)
            ),
            seated.rank,
            seated.world_size,
            RendezvousStoreInfo(seated.leader, seated.port),
            seated.round,
            seated.failures,
        )

    def _meet(self) -> Seated:
        from regrow.utils import PortReservation

        self._check()
        self._touch.unseat()
        self._release_port()
        port = PortReservation()
        self._ports.append(port)
        while True:
            node = Node(self._id, self._addr, self._node_rank, port.port)
            try:
                outcome = self._ask_for_a_seat(Join(node, self._token))
            except RendezvousConnectionError:
                raise  # nobody there to be told
            except BaseException:
                self._give_up()
                raise
            match outcome:
                case Seated():
                    self._token = outcome.round
                    self._touch.seat(outcome)
                    return outcome
                case RoundEnded(round):
                    self._token = round
                case Reborn(why):
                    log.warning("node %s comes back as a new one: %s", self._id, why)
                    self._begin_life()

    def _ask_for_a_seat(self, join: Join) -> Seated | RoundEnded | Reborn:
        timeout = self._settings.timeout.join.total_seconds()
        waiting = Waiting(join.token, timeout)
        while True:
            said = self._call(join)
            waiting, outcome = judge(waiting, said, time.monotonic())
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
        touch = self._touch
        with touch.changed:
            while True:
                if touch.view is not None:
                    waiting, outcome = judge(waiting, touch.view, time.monotonic())
                    if outcome is not None:
                        return waiting, outcome
                self._check()
                if touch.lost:
                    return waiting, None
                deadline = waiting.deadline
                touch.changed.wait(None if deadline is None else deadline - time.monotonic())

    def _call(self, event: Event) -> View:
        """Submit an event, however long it takes to get in touch again within the bounds."""
        reconnect = self._settings.reconnect_timeout.total_seconds()
        with self._touch.changed:
            self._check()
            self._calling = True  # from here on an interrupt has to end the driver's call
            lost_at = self._touch.lost_at if self._touch.lost else None
        if lost_at is None:
            left = self._bounds.lease + reconnect
        else:
            left = max(lost_at + reconnect - time.monotonic(), self._bounds.keep_alive)
        try:
            return self._touch.call(event, left)
        finally:
            with self._touch.changed:
                self._calling = False
                self._touch.changed.notify_all()

    def _check(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError(f"node {self._id or self._addr} was told to stop")
        if self._done:
            raise RendezvousClosedError(
                f"this handler of the rendezvous '{self._settings.run_id}' has been shut down"
            )
        if self._touch.broken is not None:
            raise self._touch.broken

    def _over(self, closed: RoundClosed, standby: bool) -> RendezvousError:
        run_id = self._settings.run_id
        if standby:
            return RendezvousGracefulExitError(
                f"node {self._id} stood by until the rendezvous '{run_id}' was closed: "
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
            return str(explain(self._id, timeout))
        least = self._settings.min_nodes
        return (
            f"the rendezvous '{self._settings.run_id}': node {self._id} waited {timeout:g} s for "
            f"a seat in a round of at least {least} node{'s' if least != 1 else ''}"
        )

    def _give_up(self) -> None:
        """Take back that this node wants a seat, so that nobody counts on it."""
        try:
            self._touch.call(Leave(self._id, 0, "it gave up"), self._bounds.keep_alive)
        except RendezvousError as error:
            log.info("node %s could not say that it gave up: %s", self._id, error)

    def _begin_life(self) -> None:
        self._lives += 1
        # Containers on one host may share address and process id, so these are not enough.
        self._id = f"{self._addr}/{os.getpid()}/{os.urandom(3).hex()}{self._lives}"
        self._token = 0
        self._touch.live(self._id)

    def _release_port(self) -> None:
        while self._ports:
            self._ports.pop().close()

    # --- failures, and leaving

    def report_failure(self, report: str) -> Judged | None:
        """See base class."""
        round, touch = self._token, self._touch
        deadline = time.monotonic() + self._settings.timeout.join.total_seconds()
        while True:
            said: View | None = self._call(Failed(self._id, round, report))
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
                f"node {self._id} has waited in vain for a judgement of the failure in round "
                f"{round} of the rendezvous '{self._settings.run_id}'"
            )

    def _next_view(self, seen: View, deadline: float) -> View | None:
        """Wait for a view that is newer; None: touch was lost, or the time is up."""
        touch = self._touch
        with touch.changed:
            while True:
                self._check()
                if touch.view is not None and touch.view.version > seen.version:
                    return touch.view
                left = deadline - time.monotonic()
                if touch.lost or left <= 0:
                    return None
                touch.changed.wait(left)

    def fail(self, report: str) -> None:
        """See base class."""
        self._close("its workers failed for good", report)

    def leaving(self, why: str) -> None:
        """See base class."""
        if not self._token:
            return
        try:
            self._touch.call(Leaving(self._id, self._token, why), self._bounds.keep_alive)
        except RendezvousError as error:
            log.warning("node %s could not say that it is leaving: %s", self._id, error)

    def leave(self, why: str) -> None:
        """See base class."""
        if self._done:
            return
        try:
            if self._id:
                limit = min(self._bounds.lease, self._time_to_close())
                self._touch.call(Leave(self._id, 0, why), limit)
        except RendezvousError as error:
            log.warning("node %s could not say that it leaves: %s", self._id, error)
        finally:
            self._end(linger=False)

    # --- the end

    def is_closed(self) -> bool:
        """See base class."""
        return self._closed or self._look().closed

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return self._look().waiting

    def _look(self) -> View:
        with self._touch.changed:
            seen = self._touch.view
        if seen is None and not self._done:  # nobody follows yet
            timeout = self._settings.timeout.heartbeat.total_seconds()
            seen = self._driver.follow(self._id, None, timeout)
        return seen or self._driver.peek(self._id)

    def set_closed(self) -> None:
        """See base class."""
        try:
            self._close("it closed the rendezvous", "")
        except Exception as error:
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise

    def _close(self, why: str, report: str) -> None:
        if self._done:
            return
        self._touch.call(Close(self._id or self._addr, why, report), self._time_to_close())
        self._closed = True
        self._record(
            f"The node '{self._id}' has closed the rendezvous '{self._settings.run_id}'.",
            "SUCCEEDED",
        )

    def shutdown(self) -> bool:
        """See base class."""
        if self._done:
            return True
        try:
            self._close("it closed the rendezvous", "")
            if self._id:
                self._touch.call(Leave(self._id), self._time_to_close())
        except RendezvousError as error:
            message = (
                f"The node '{self._id}' has failed to shut down the rendezvous "
                f"'{self._settings.run_id}': {type(error).__name__}: {error}"
            )
            self._record(message, "FAILED")
            log.warning("%s", message)
            return False
        else:
            return True
        finally:
            self._end(linger=True)

    def _time_to_close(self) -> float:
        if self._touch.lost:  # and was not found again by who had longer
            return self._bounds.keep_alive
        return self._settings.timeout.close.total_seconds()

    def _end(self, linger: bool) -> None:
        self._done = True
        self._release_port()
        self._touch.stop()
        self._driver.close(linger)

    # --- being told

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class."""
        return self._touch.subscribe(callback)

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See base class."""
        return self._touch.keep_lease(renewed)

    def interrupt(self) -> None:
        """See base class."""
        with self._touch.changed:
            self._interrupted = True
            self._touch.changed.notify_all()
            if self._calling:
                self._touch.start("rendezvous interrupt", self._cut_short)

    def _cut_short(self) -> None:
        """End a call that nobody answers; one that is about to end leaves the way to say more."""
        with self._touch.changed:
            answered = self._touch.changed.wait_for(
                lambda: not self._calling, self._bounds.keep_alive
            )
        if not answered:
            self._driver.interrupt()

    def _record(self, message: str, node_state: str = "RUNNING", rank: int | None = None) -> None:
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=self._settings.run_id,
            message=message,
            node_state=events.NodeState[node_state],
            name=type(self).__name__,
            hostname=self._addr,
            rank=rank,
        )


def _abandon(driver: Driver, touch: Touch, ports: list[PortReservation]) -> None:
    touch.stop(wait=False)
    driver.close(linger=False)
    for port in ports:
        port.close()


def over_backend(
    store: Store,
    backend: RendezvousBackend,
    settings: RendezvousSettings,
    local_addr: str | None = None,
    node_rank: int | None = None,
) -> DynamicRendezvousHandler:
    """Create the handler of a node that runs the rounds with the others over a backend."""
    from regrow.rendezvous._by_nodes import NodesDriver

    driver = NodesDriver(backend, store, settings)
    return DynamicRendezvousHandler(
        driver, settings, backend=backend.name, local_addr=local_addr, node_rank=node_rank
    )


def create_handler(
    store: Store, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Create the handler of a node that runs the rounds with the others over a backend.

    Args:
        store: shared by the nodes, for the keys of the rounds; any c10d store.
        backend: holds the rounds.
        params: the nodes, and the keys that `read_settings` reads.

    Raises:
        ValueError: the settings make no sense.
    """
    try:
        return over_backend(
            store, backend, read_settings(params), params.local_addr, params.get_as_int("rank")
        )
    except Exception as error:
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=params.run_id,
            message=f"{type(error).__name__}: {error}",
            node_state=events.NodeState.FAILED,
        )
        raise
