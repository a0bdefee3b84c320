"""The rendezvous handler of one node, for jobs that nodes may join and leave.

Agents use this interface: it has torch's names, and records an event for each call. The handler
asks for a seat, holds it, loses it, and asks again. The node's connection (`keep_alive`) receives
snapshots of the rounds, and pure functions decide what they mean (`node_rules`). The handler sends
the requests, waits for the outcome, and repeats a request if the outcome is not final.

The handler replaces torch's handler of the same name, and differs in four ways. `next_rendezvous`
does not sleep at its start and does not poll. A node on standby beyond `max_nodes` is notified when
a seat is free. A round that loses a member ends for all nodes at once, with the cause.
`num_nodes_waiting` and `is_closed` answer from the latest snapshot, without a call.

**Time limits.** The driver repeats a call until it is answered. A node that was connected gives up
`reconnect_timeout` after the end of its lease, with RendezvousConnectionError. Its workers were
stopped long before. A driver raises at once if it knows that waiting cannot help: no process
listens at the address any more, or the server does not know the job.

**Lives.** An evicted node rejoins under a new node id, as does a node that gave up on its own and
asks again later.

**Leaving** is reported by a separate thread, so that the node can stop its workers at once, even if
no answer comes. From then on the node no longer confirms that others have ended the round.
Otherwise a failure that the node caused by leaving might get its verdict before the others know
that the node leaves. Later calls wait until that thread is done.

**Ports.** The node reserves a free port before it asks for a seat, and holds it until it asks
again. If it becomes rank 0, the workers of all nodes meet there, and no node has to wait for the
number. Each round has another port, so a worker that is left from an older round disturbs no later
one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from math import inf
from typing import TYPE_CHECKING

from regrow.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from regrow.rendezvous.interface import PushingRendezvousHandler, RendezvousInfo, info_of
from regrow.rendezvous.node.driver import NoAnswerError
from regrow.rendezvous.node.keep_alive import NodeConnection
from regrow.rendezvous.node.node_rules import (
    JobStopped,
    Outcome,
    Rejoin,
    SeatRequest,
    TimedOut,
    end_wait,
)
from regrow.rendezvous.parameters import RendezvousParameters, wanted_rank
from regrow.rendezvous.protocol.messages import (
    JOB_STOPS,
    CloseRendezvous,
    JoinRound,
    Judged,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeRefused,
    RoundClosed,
    RoundEnded,
    Seated,
    SpendRestart,
    WorkersFailed,
)
from regrow.rendezvous.settings import (
    KEEP_ALIVE,
    MISSES,
    OUTLAST_PAUSES,
    TO_END,
    RendezvousSettings,
    RendezvousTimeout,
    read_settings,
)
from regrow.utils import Backoff, get_logger, headline, host_of, node_id, printable, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regrow.rendezvous.node.driver import Driver, Snapshot, Threads
    from regrow.rendezvous.peer.backend import RendezvousBackend
    from regrow.rendezvous.protocol.messages import Event
    from regrow.rendezvous.server.credentials import Credentials
    from regrow.store import Store

logger = get_logger(__name__)


class DynamicRendezvousHandler(PushingRendezvousHandler):
    """One node's handler for a rendezvous that nodes may join and leave.

    Args:
        driver: the rounds, as this node reaches them; the handler closes it.
        settings: the settings of the rendezvous.
        backend: the name under which the handler was created.
        local_addr: this node's address as the other nodes reach it; None: its address on the route
            to the rendezvous.
        node_rank: the rank that the node asks for, if any.
        credentials: the secrets that nodes show to each other; None if they show them only to the
            place that keeps the rounds.
        seen_within: seconds until the other nodes see a heartbeat, at most.
        clock: returns the time of this node's monotonic clock, in seconds.
        threads: starts threads, and provides the locks.
    """

    def __init__(
        self,
        driver: Driver,
        settings: RendezvousSettings,
        *,
        backend: str,
        local_addr: str | None = None,
        node_rank: int | None = None,
        credentials: Credentials | None = None,
        seen_within: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
    ) -> None:
        self.id = ""
        """The node's id in this life; empty before the first, and after the node gave up."""
        self.driver = driver
        """The rounds, as this node reaches them."""
        self.connection = NodeConnection(
            driver, settings.bounds, settings.timeout.heartbeat.total_seconds(), clock, threads
        )
        """The connection of this node, through all of its lives."""
        driver.report_to(self.connection.report)
        self._settings = settings
        self._bounds = settings.bounds
        self._backend = backend
        self._addr = local_addr or driver.local_addr
        self._wanted = node_rank
        self._credentials = credentials
        self._seen_within = seen_within
        self._clock = clock
        self._threading = threads
        self._token = 0
        self._spent_in, self._spent = 0, 0  # a round, and the restarts that this node spent in it
        self._lives = 0
        self._closed = False  # whether this node has closed the rendezvous
        self._others: int | None = None
        self._outlast_s = 0.0
        self._left_as = ""  # its id when it left or gave up
        self._interrupted = False
        self._ending = ""  # the reason of `leave` or `shutdown`, once it was called
        self._calls = 0  # calls of `_call` that run now: the agent's and those of replacements
        self._leaving_sent = threads.Event()
        """Set once the others know that this node is leaving, or the report has failed."""
        self._leaving_sent.set()
        # The node's threads do not keep the handler alive: a node without a handler sends no
        # heartbeats.
        weakref.finalize(self, _abandon, self.connection, os.getpid()).atexit = False

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
        keep_alive_interval: float = KEEP_ALIVE,
        keep_alive_max_attempt: int = MISSES,
    ) -> DynamicRendezvousHandler:
        """Create the handler of a node that runs the rounds with the other nodes over a backend.

        Args:
            run_id: the id of the job.
            store: any c10d store that the nodes share, for the keys of the rounds.
            backend: holds the rounds.
            min_nodes: the smallest number of nodes in a round.
            max_nodes: the largest number of nodes in a round.
            local_addr: this node's address as the other nodes reach it; None: the backend's
                `local_addr` if it has one, else the name of this host.
            timeout: the limits of the steps of a rendezvous.
            keep_alive_interval: seconds between two heartbeats; torch's default is 5.
            keep_alive_max_attempt: the number of heartbeats that a node may miss before its
                eviction.

        Raises:
            ValueError: the settings are invalid.
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
        bounds, reconnect = self._bounds, self._settings.reconnect_timeout.total_seconds()
        return {
            "a silent host counts as lost": bounds.lease + bounds.kill + self._seen_within,
            "workers of a host that is cut off are killed": bounds.lease,
            "a rendezvous that cannot be reached ends the job": bounds.lease + reconnect + TO_END,
        }

    @property
    def host(self) -> str:
        """See base class."""
        return str(host_of(self.id)) if self.id else super().host

    @property
    def max_nodes(self) -> int:
        """See base class."""
        return self._settings.max_nodes

    def is_served_by(self, addr: str) -> bool:
        """See base class."""
        return self.driver.is_served_by(addr)

    @property
    def credentials(self) -> Credentials | None:
        """See base class."""
        return self._credentials

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
            self.begin()
            self._record(f"The node '{self.id}' attempts to join the next round of '{run_id}'.")
            seated, store = self.meet()
        except Exception as error:
            self.connection.release_port()
            self._record(headline(error), "FAILED")
            raise
        self._record(
            f"The node '{self.id}' has joined round {seated.round} of the rendezvous '{run_id}' "
            f"as rank {seated.rank} in a world of size {seated.world_size}.",
            rank=seated.rank,
        )
        if seated.rank:
            self.connection.release_port()
        return info_of(seated, run_id, store)

    def begin(self) -> None:
        """Begin a life, if the node has none."""
        self._check()
        if not self.id:
            self._begin_life()

    def meet(self) -> tuple[Seated, Store]:
        """Leave the round, if the node is in one, and block until it has a seat in the next.

        Returns:
            The seat, and the store of that round.

        Raises:
            RendezvousError: as `RendezvousHandler.next_rendezvous`.
        """
        from regrow.utils import PortReservation

        self._check()
        self.connection.leave_seat()
        self.connection.release_port()
        self.connection.port = port = PortReservation()
        while True:
            node = Node(self.id, self._addr, self._wanted, port.port, self.driver.voter)
            try:
                outcome = self._ask(JoinRound(node, self._token))
            except RendezvousConnectionError:
                raise  # no node can be reached
            except BaseException:
                self._give_up()
                raise
            match outcome:
                case Seated():
                    self._token = outcome.round
                    # Before the end of this round can arrive, because that ends the store that
                    # exists then.
                    store = self.driver.round_store(outcome.round)
                    self.connection.take_seat(outcome)
                    return outcome, store
                case RoundEnded(round):
                    self._token = round
                case Rejoin(why):
                    logger.warning("this node asks for another seat: %s", why)
                    self._begin_life()

    def _ask(self, join: JoinRound) -> Seated | RoundEnded | Rejoin:
        timeout = self._settings.timeout.join.total_seconds()
        waiting = SeatRequest(join.token, timeout)
        is_new = not join.token and self._lives == 1
        while True:
            deadline = waiting.deadline or self._clock() + timeout
            waiting, outcome = self._look(waiting, self._join(join, deadline))
            if is_new and isinstance(outcome, RoundClosed) and not outcome.lost:
                raise RendezvousClosedError(
                    f"the job '{self._settings.run_id}' has ended already (host "
                    f"{host_of(outcome.id)}: {printable(outcome.why)}): give a new job an id "
                    "of its own, with --rdzv-id"
                )
            is_new = False
            if outcome is None:
                waiting, outcome = self._wait(waiting)
            match outcome:
                case RoundClosed():
                    raise self._over(outcome, waiting.standby)
                case JobStopped(by):
                    text = f"this node stood by until the others left: {JOB_STOPS}{by}"
                    raise RendezvousGracefulExitError(text, stopped_by=by)
                case TimedOut():
                    text, departed = self.driver.explain_timeout(self.id, timeout)
                    raise RendezvousTimeoutError(text, departed=departed)
                case Seated() | RoundEnded() | Rejoin():
                    if self._ending:  # another thread may have left before this answer came
                        self._check()
                    return outcome

    def _join(self, join: JoinRound, deadline: float) -> Snapshot:
        """Ask for a seat; ask again if only the answer is late, because a machine is overloaded."""
        while True:
            try:
                return self._call(join)
            except NoAnswerError as error:
                if self.connection.lost or self._clock() >= deadline:
                    raise
                logger.warning("node %s asks for its seat again: %s", self.id, error)

    def _wait(self, waiting: SeatRequest) -> tuple[SeatRequest, Outcome | None]:
        """Wait until the wait is over; None: the connection was lost, so the node asks again."""
        connection = self.connection
        with connection.changed:
            while True:
                self._check()
                if connection.lost:
                    return waiting, None
                if connection.snapshot is not None:
                    waiting, outcome = self._look(waiting, connection.snapshot)
                    if outcome is not None:
                        return waiting, outcome
                deadline = waiting.deadline
                connection.changed.wait(None if deadline is None else deadline - self._clock())

    def _look(self, waiting: SeatRequest, seen: Snapshot) -> tuple[SeatRequest, Outcome | None]:
        """Decide whether the wait is over (`end_wait`); log when this node begins to stand by."""
        after, outcome = end_wait(waiting, seen, self._clock())
        if after.standby and not waiting.standby and outcome is None:
            most = self._settings.max_nodes
            logger.warning("this node stands by: all %s nodes of the job have a seat", most)
        return after, outcome

    def _call(self, event: Event) -> Snapshot:
        """Submit an event; if the connection is lost, wait within the bounds until it is back."""
        reconnect = self._settings.reconnect_timeout.total_seconds()
        with self.connection.changed:
            self._check()
            self._calls += 1  # from here on an interrupt has to end the driver's call
            if self.connection.lost:
                left = self.connection.lost_at + reconnect - self._clock()
                left = max(left, self._bounds.keep_alive)
            else:
                left = self.connection.left() + reconnect
        try:
            return self._submit(event, left)
        finally:
            with self.connection.changed:
                self._calls -= 1
                self.connection.changed.notify_all()

    def _check(self) -> None:
        if self._interrupted:
            raise RendezvousGracefulExitError(f"node {self.id or self._addr} was interrupted")
        if self._ending or self.connection.done:
            raise RendezvousClosedError(
                f"this handler of the rendezvous '{self._settings.run_id}' has been shut down"
            )
        if self.connection.broken is not None:
            raise self.connection.broken

    def _over(self, closed: RoundClosed, standby: bool) -> RendezvousError:
        run_id = self._settings.run_id
        if closed.lost:
            return RendezvousConnectionError(
                f"the rendezvous '{run_id}' cannot continue without host "
                f"{host_of(closed.id)}: {printable(closed.why)}; its nodes are fixed, so no other "
                "node takes that place"
            )
        if standby:
            return RendezvousGracefulExitError(
                f"this node stood by until host {host_of(closed.id)} closed the rendezvous "
                f"'{run_id}': {printable(closed.why)}"
            )
        return RendezvousClosedError(
            f"the rendezvous '{run_id}' is closed: host {host_of(closed.id)}: "
            f"{printable(closed.why)}",
            report=closed.report,
            node=closed.id,
            why=closed.why,
        )

    def _give_up(self) -> None:
        """Give up the wait for a seat, so that the others do not count on this node."""
        self._left_as = self.id
        try:
            answer = self.connection.call(
                LeaveRound(self.id, 0, self._ending or "it gave up"), self._bounds.keep_alive
            )
            if self._others is None:  # else another thread has left meanwhile, with newer data
                self._others = answer.others
        except RendezvousError as error:
            logger.info("node %s could not report that it gave up: %s", self.id, error)
        self.id, self._token = "", 0

    def _begin_life(self) -> None:
        self._lives += 1
        self.driver.new_life()
        self.id, self._token, self._others = self.new_id(self._lives), 0, None
        self.connection.begin_life(self.id)

    def new_id(self, life: int) -> str:
        """Return an id that no other node of the job has had."""
        return node_id(self._addr, life)

    def num_nodes_waiting(self) -> int:
        """See base class.

        A node in an ended round also counts the nodes that have left that round, so it returns at
        least one. An agent that polls this number then restarts its workers with them.
        """
        seen = self._snapshot()
        return max(seen.waiting, int(isinstance(seen.status, RoundEnded) and not seen.closed))

    # --- failures, and leaving

    def report_failure(self, report: str) -> Judged | None:
        """See base class."""
        round, connection = self._token, self.connection
        deadline = self._clock() + self._settings.timeout.join.total_seconds()
        while True:
            seen: Snapshot | None = self._call(WorkersFailed(self.id, round, report))
            while seen is not None:
                if isinstance(seen.status, NodeRefused) or seen.status is None:
                    return None
                if isinstance(seen.status, RoundClosed):
                    raise self._over(seen.status, standby=False)
                if seen.judged is not None and seen.judged.round >= round:
                    return seen.judged if seen.judged.round == round else None
                seen = self._next_snapshot(seen, deadline)
            if connection.lost:
                continue
            raise RendezvousTimeoutError(
                f"this host got no verdict on the failure in round {round} of the rendezvous "
                f"'{self._settings.run_id}' in time: see which of its nodes is stuck"
            )

    def spend_restart(self) -> int | None:
        """See base class."""
        token = self._token
        if token != self._spent_in:
            self._spent_in, self._spent = token, 0
        self._spent += 1
        seen = self._call(SpendRestart(self.id, token, self._spent))
        if not isinstance(seen.status, Seated) or seen.status.round != token:
            raise RendezvousError(
                f"node {self.id} cannot replace a worker: round {token} is over ({seen.status})"
            )
        return seen.failures

    def fail(self, report: str) -> None:
        """See base class."""
        self._close("its workers failed for good", report)

    def _next_snapshot(self, seen: Snapshot, deadline: float) -> Snapshot | None:
        """Wait for a newer snapshot; None: the connection was lost, or the deadline has passed."""
        connection = self.connection
        with connection.changed:
            while True:
                self._check()
                if connection.snapshot is not None and connection.snapshot.version > seen.version:
                    return connection.snapshot
                left = deadline - self._clock()
                if connection.lost or left <= 0:
                    return None
                connection.changed.wait(left)

    def leaving(
        self, why: str, *, full_grace: bool = False, keep: bool = False, until_left: bool = False
    ) -> None:
        """See base class."""
        if not self._token or self.connection.done:
            return
        self.connection.stop_confirming(self._token)
        self._leaving_sent = self._threading.Event()
        leaving = NodeLeaving(self.id, self._token, why, full_grace, keep, until_left)
        sent = self._leaving_sent
        self.connection.start("rendezvous leaving", lambda: self._report_leaving(leaving, sent))

    def _report_leaving(self, leaving: NodeLeaving, sent: threading.Event) -> None:
        try:
            self.connection.call(leaving, self._bounds.keep_alive)
        except RendezvousGracefulExitError:  # the node has left meanwhile
            pass
        except RendezvousError as error:
            logger.info("node %s could not report that it is leaving: %s", leaving.id, error)
        finally:
            sent.set()

    def _submit(self, event: Event, timeout: float) -> Snapshot:
        """Submit an event, after the report that this node is leaving."""
        deadline = self._clock() + timeout
        self._leaving_sent.wait(self._bounds.keep_alive)
        least = min(timeout, self._bounds.keep_alive)
        return self.connection.call(event, max(deadline - self._clock(), least))

    def leave(self, why: str) -> None:
        """See base class."""
        if self.connection.done:
            return
        self._begin_end(why)
        try:
            self._leave(why, self._bounds.lease)
            self._wait_for_others(why)
        except RendezvousError as error:
            # The others see the closed connection, or detect the loss when the lease has expired.
            logger.info("node %s could not report that it leaves: %s", self.id, error)
        finally:
            self.connection.end(linger=False)

    def _leave(self, why: str, limit: float) -> None:
        """Release the node's place, in a round or on standby, within `limit` seconds."""
        if id := self.id:
            self._left_as = id
            self._others = self._submit_last(LeaveRound(id, 0, why), limit).others

    def _begin_end(self, why: str) -> None:
        """End the calls of other threads, so that this node does not join again."""
        with self.connection.changed:
            self._ending = why or "it left"
            self.connection.changed.notify_all()

    def outlast(self, limit: float) -> None:
        """See base class."""
        self._outlast_s = limit

    def _wait_for_others(self, why: str) -> None:
        """Block until the other nodes have left too, after this node has left or given up.

        A node that has left cannot follow the rounds any more, so it asks again at growing pauses.
        """
        deadline = self._clock() + self._outlast_s
        pauses = Backoff(*OUTLAST_PAUSES)
        while self._others and (left := deadline - self._clock()) > 0:
            with self.connection.changed:
                self.connection.changed.wait(pauses.next(left))
            try:
                leave = LeaveRound(self._left_as, 0, why)
                self._others = self._submit_last(leave, self._bounds.keep_alive).others
            except RendezvousError as error:
                logger.info(
                    "node %s cannot learn any more how many nodes are left: %s",
                    self._left_as,
                    error,
                )
                self._others = None

    @property
    def others(self) -> int | None:
        """See base class."""
        return self._others

    @property
    def serves(self) -> bool:
        """See base class."""
        return self.driver.serves

    # --- the end

    def is_closed(self) -> bool:
        """See base class."""
        return self._closed or self._snapshot().closed

    def set_closed(self) -> None:
        """See base class."""
        try:
            self._close("it closed the rendezvous", "")
        except Exception as error:
            self._record(headline(error), "FAILED")
            raise

    def _close(self, why: str, report: str) -> None:
        if self.connection.done:
            return
        refused = f"node {self._addr} has no seat in a round"
        if self.id:
            answer = self._submit_last(CloseRendezvous(self.id, why, report))
            refused = answer.status.why if isinstance(answer.status, NodeRefused) else ""
        if refused:
            raise RendezvousStateError(
                f"node {self.id or self._addr} cannot close the rendezvous "
                f"'{self._settings.run_id}': {refused}"
            )
        self._closed = True
        self._record(
            f"The node '{self.id}' has closed the rendezvous '{self._settings.run_id}'.",
            "SUCCEEDED",
        )

    def _submit_last(self, event: CloseRendezvous | LeaveRound, limit: float = inf) -> Snapshot:
        """Submit the last event of this node, unless its connection is lost.

        A node with a lost connection has sent heartbeats without success for the time of a lease.
        One more attempt would end the job later than the printed bound, and change nothing: the
        others detect the loss.
        """
        if self.connection.lost:
            raise RendezvousConnectionError(self.connection.lost)
        return self._submit(event, min(limit, self._settings.timeout.close.total_seconds()))

    def shutdown(self) -> bool:
        """See base class."""
        if self.connection.done:
            return True
        self._begin_end(why := "it is done")
        linger = True
        try:
            try:
                self._close("it closed the rendezvous", "")
            except RendezvousStateError as error:  # not a member: this node may not end the job
                logger.info("%s", error)
                linger = False
            self._leave(why, self._settings.timeout.close.total_seconds())
        except RendezvousError as error:
            message = (
                f"The node '{self.id}' has failed to shut down the rendezvous "
                f"'{self._settings.run_id}': {headline(error)}"
            )
            self._record(message, "FAILED")
            logger.warning("%s", message)
            return False
        else:
            return True
        finally:
            self.connection.end(linger=linger)

    # --- notifications

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class."""
        return self.connection.subscribe(callback)

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See base class."""
        return self.connection.keep_lease(renewed)

    def _snapshot(self) -> Snapshot:
        """Return the latest snapshot that the node knows."""
        with self.connection.changed:
            seen = self.connection.snapshot
        if seen is None and not self.connection.done:  # the follower has not begun
            timeout = self._settings.timeout.heartbeat.total_seconds()
            seen = self.driver.follow(self.id, None, timeout)
        return seen or self.driver.peek(self.id)

    def interrupt(self) -> None:
        """See base class."""
        with self.connection.changed:
            self._interrupted = True
            self.connection.changed.notify_all()
            if self._calls:
                self.connection.start("rendezvous interrupt", self._cut_short)

    def _cut_short(self) -> None:
        """Interrupt the driver, unless all calls end by themselves, which keeps it usable."""
        with self.connection.changed:
            answered = self.connection.changed.wait_for(
                lambda: not self._calls, self._bounds.keep_alive
            )
        if not answered:
            self.driver.interrupt()


def _abandon(connection: NodeConnection, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the node belongs to its parent, and stays in the round
    # The garbage collector may run this at any point, so it must not wait for a lock.
    start_thread(lambda: connection.end(linger=False, wait=False), "rendezvous end")


def over_backend(
    store: Store,
    backend: RendezvousBackend,
    settings: RendezvousSettings,
    local_addr: str | None = None,
    node_rank: int | None = None,
) -> DynamicRendezvousHandler:
    """Create the handler of a node that runs the rounds with the other nodes over a backend."""
    from regrow.rendezvous.peer.peer_driver import NodesDriver

    return DynamicRendezvousHandler(
        NodesDriver(backend, store, settings),
        settings,
        backend=backend.name,
        local_addr=local_addr,
        node_rank=node_rank,
        seen_within=settings.bounds.keep_alive,  # the other nodes check at this interval
    )


def create_handler(
    store: Store, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Create the handler of a node that runs the rounds with the other nodes over a backend.

    Args:
        store: any c10d store that the nodes share, for the keys of the rounds.
        backend: holds the rounds.
        params: the numbers of nodes, and the options that `read_settings` reads.

    Raises:
        ValueError: the settings are invalid.
    """
    try:
        return over_backend(
            store, backend, read_settings(params), params.local_addr, wanted_rank(params)
        )
    except Exception as error:
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=params.run_id,
            message=headline(error),
            node_state=events.NodeState.FAILED,
        )
        raise
