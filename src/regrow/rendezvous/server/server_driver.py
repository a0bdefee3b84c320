"""One node's driver for rounds that the store server runs.

The server applies the rules (`round_service.py`); this driver holds one node's session with the
server. The node lives as long as the session: when the session is lost, the server removes the node
at once. So after a lost session the driver begins a new one. The server does not know the node in
the new session, and the node rejoins under a new id.

The session itself reconnects a broken connection, within its grace. If no process listens on the
endpoint, and no other agent may serve, the call fails at once. The same holds if a server answers
that does not know the life of this node's job. A silent server may answer later, so a call waits
until its own timeout.

If other agents may take over as server (`successor.py`), the driver knows their addresses from the
answers to heartbeats. When the server is lost, is silent, or does not run the rounds any more, the
driver asks the next address, until the time-out of the call. The node keeps its life, because the
next server knows it.

The keys of a round have a connection of their own, which is opened when they are first used. At the
end of the round the driver closes this connection. That ends all calls that block on the keys, and
no other calls. The keys carry the name of the job's life, so a later job with the same id does
not find them.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous.node.driver import NoAnswerError, Snapshot
from regrow.rendezvous.protocol.messages import Seated, ServersChanged, Voter, subject
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import (
    MOST_SUCCESSORS,
    PROMISE,
    Succession,
    first_voters,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.records import JobRecord
from regrow.rendezvous.server.successor import GRACE_S, Successor, new_voter
from regrow.rendezvous.server.witness_keeper import WitnessKeeper
from regrow.rendezvous.settings import (
    CONNECT,
    EXPLAIN,
    FAREWELL,
    NUDGE,
    SEARCH_PAUSES,
    SEARCH_TURN,
    SESSION_GRACE,
    SPARE_ROUND_TRIPS,
)
from regrow.store import (
    ConnectionState,
    PrefixStore,
    ServiceClient,
    StoreAuthError,
    StoreConnectionError,
    StoreError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
    connect,
    endpoint_of,
    host_of,
)
from regrow.utils import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regrow.rendezvous.node.driver import Report, Threads
    from regrow.rendezvous.protocol.messages import Departed, Event
    from regrow.rendezvous.server.hosting import HostedServer
    from regrow.rendezvous.server.witness_keeper import BallotCell
    from regrow.rendezvous.settings import RendezvousSettings
    from regrow.store import Store, StoreClient, Tls
    from regrow.utils import PortReservation

T = TypeVar("T")
_NOTHING = Snapshot(0, None, 0, None)


class Where(NamedTuple):
    """The server's address, and the credentials to reach it."""

    endpoint: str
    """"host:port", in the form that the user knows."""
    token: bytes
    tls: Tls | None = None
    addr: str | None = None
    """This host's address for the other nodes; None: the address of the connection."""


class ServerDriver:
    """The rounds of one job, as one node reaches them; a `Driver`.

    Args:
        where: how to reach the server.
        settings: the settings of the job.
        timeout: connect at once, within this time in seconds (see `reach`); None: the caller calls
            `reach` before any other method.
        server: the server's process, if this node started it; the driver closes it.
        listed: the endpoints of the job, if there are several.
        fixed: whether no node of the job may be replaced (`Round.fixed`).
        clock: returns the seconds of this node's monotonic clock.
        threads: the module that provides the locks.
        connect: opens a session; `regrow.store.connect`.

    Raises:
        RendezvousError: see `reach`.
    """

    def __init__(
        self,
        where: Where,
        settings: RendezvousSettings,
        timeout: float | None,
        server: HostedServer | None = None,
        *,
        listed: Sequence[tuple[str, int]] = (),
        fixed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
        connect: Callable[..., StoreClient] = connect,
    ) -> None:
        bounds = settings.bounds
        self._where = where
        self._listed = [endpoint_of(*at) for at in listed] or [where.endpoint]
        self._run_id = settings.run_id
        self._settings = messages.JobSettings(
            settings.min_nodes,
            settings.max_nodes,
            bounds.keep_alive,
            bounds.misses,
            bounds.last_call,
            bounds.grace,
            fixed,
            settings.successors,
            bool(settings.witness),
        )
        self._own = {where.endpoint} if server is not None and not listed else set[str]()
        """The endpoints of the server that this node hosts."""
        self.server = server
        """The server's process, if this node hosts it and has not closed it."""
        self._clock = clock
        self._connect = connect
        self._new_client = partial(
            ServiceClient, messages.NAME, clock=clock, new_lock=cast("Any", threads.Lock)
        )
        self._lock = threads.Lock()
        self.life = ""
        """The name of the job's life; empty before the first seat."""
        self._beats = 0
        self._latest: tuple[str, Snapshot] = ("", _NOTHING)
        self._versions = 0  # added to those of the server, so that they grow
        self._seated = False  # whether this node has ever had a seat
        self.reached = False
        """Whether the server has been reached."""
        self._stopped = threads.Event()
        self._threading = threads
        self._promise = PROMISE * bounds.lease
        self._hold = bounds.lease + bounds.kill
        self._epoch = 0
        self._servers = self._listed if listed else []
        """The endpoints of all agents that may serve, first the present one; empty: only one."""
        self._asked_at: dict[str, float] = {}
        """When each of them was asked without success, by this node's clock."""
        self._successor: Successor | None = None
        self._witness: WitnessKeeper | None = None
        self._reserved: PortReservation | None = None
        self._reported = ServersChanged(0, "", (), 0)
        self._report: Report = lambda report: None
        self._client = self._new_client(partial(self._begin, where))
        self._round: ServiceClient | None = None
        self._local_addr = where.addr or ""
        self._rounds_at = self._probed = where
        """The server that runs the rounds, and the one that was connected last."""
        if timeout is not None:
            self.reach(timeout)

    def reach(self, timeout: float) -> None:
        """Connect to the server, which may not run yet.

        Args:
            timeout: in seconds.

        Raises:
            RendezvousConnectionError: the server was not reached within `timeout` seconds.
            RendezvousGracefulExitError: `interrupt` was called.
            RendezvousError: the server refused this node; of several servers, all refused it.
        """
        deadline, left = self._clock() + timeout, timeout
        refusals: dict[str, StoreError] = {}
        while True:
            try:
                client = self._client.connect(left)
                break
            except StoreError as error:
                self._check()
                left = deadline - self._clock() - SEARCH_PAUSES[1]
                if isinstance(error, StoreAuthError):
                    refusals[self._where.endpoint] = error
                    if refusals.keys() >= {*self._servers}:  # a retry would fail in the same way
                        raise RendezvousError(self._unreachable(error)) from error
                if not self._servers or left <= 0:
                    errors = refusals | {self._where.endpoint: error}
                    why = "; ".join(map(str, errors.values()))
                    raise RendezvousConnectionError(self._unreachable(why)) from error
                self._search(self._client)
                self._stopped.wait(SEARCH_PAUSES[1])
        self.reached = True
        self._rounds_at = self._probed
        self._local_addr = self._where.addr or client.local_host

    def find(self, timeout: float) -> None:
        """Wait until a server runs the rounds, if the user has listed several endpoints.

        Args:
            timeout: in seconds.

        Raises:
            RendezvousConnectionError: none runs them within `timeout` seconds.
            RendezvousGracefulExitError: `interrupt` was called.
            RendezvousError: a server refused this node.
        """
        question = messages.BeatRequest(self._run_id, "no node yet", 0, 0)
        reply = self._ask(messages.encode(question), messages.BeatReply, timeout)
        if self.server is not None and self._successor is not None:
            self._successor.start(self._where.endpoint, reply.epoch)

    def may_take_over(
        self,
        host: str,
        port: int,
        serve: Callable[[], HostedServer],
        reserved: PortReservation | None = None,
        listed_as: str = "",
        ballots: Callable[[str], BallotCell] | None = None,
    ) -> None:
        """Let this node's agent keep a copy of the record, and take over as server.

        Args:
            host: this node's address for the other nodes.
            port: the TCP port at which it serves.
            serve: starts a server at that port.
            reserved: holds the port; the driver releases it.
            listed_as: the endpoint that this node serves, if the user has listed several.
            ballots: returns the ballot of a witness from its id, if the job may have one.
        """
        first = first_voters(
            tuple(
                Voter(at, host_of(at), int(at.rpartition(":")[2]))
                for at in self._listed[: 1 + MOST_SUCCESSORS]
            ),
            witness=self._settings.witness,
        )
        begins = None
        if any(voter.id == listed_as for voter in first):
            begins = JobRecord(
                self._run_id,
                "",
                self._settings,
                Round(self._settings.min_nodes, self._settings.max_nodes),
                Succession(voters=(first,)),
            )
        self._own |= {endpoint_of(host, port), listed_as}
        self._reserved = reserved
        if self.server is not None:
            self.server.hold = self._hold

        def open_copies(endpoint: str, timeout: float, stop: int) -> StoreClient:
            return self._open(self._at(endpoint), timeout, stop, grace=GRACE_S)

        if ballots is not None:
            self._witness = WitnessKeeper(
                self._run_id,
                self._promise,
                ballots,
                open=open_copies,
                new_client=self._new_client,
                clock=self._clock,
                threads=self._threading,
            )

        def serve_here() -> None:
            if self.server is None:
                server = serve()
                with self._lock:
                    if not self._stopped.is_set():
                        self.server = server
                if self.server is None:
                    server.close(wait=0.0)
                else:
                    server.on_restart, server.hold = self._report, self._hold

        self._successor = Successor(
            self._run_id,
            new_voter(host, port),
            self._promise,
            self._listed,
            hosts=self.server is not None,
            open=open_copies,
            serve=serve_here,
            elected=lambda endpoint, epoch: self._search(
                self._client, messages.ElsewhereReply(epoch, endpoint)
            ),
            new_client=self._new_client,
            clock=self._clock,
            threads=self._threading,
            listed_as=listed_as,
            begins=begins,
            witness=self._witness,
        )
        # A listed host that is no first voter has no server to ask yet (`find`).
        if self.server is not None and (begins is not None or not listed_as):
            self._successor.start(self._where.endpoint, self._epoch)

    @property
    def serves(self) -> bool:
        """See `Driver`."""
        return self.server is not None and self._where.endpoint in self._own

    @property
    def successor(self) -> Successor | None:
        """This agent's copy of the record, and its votes; None if it may not take over."""
        return self._successor

    def report_to(self, report: Report) -> None:
        """See `Driver`."""
        self._report = report
        if self.server is not None:
            self.server.on_restart = report

    def new_life(self) -> None:
        """See `Driver`."""
        if self._successor is not None:
            self._successor.renew_voter()

    @property
    def voter(self) -> Voter | None:
        """See `Driver`."""
        return None if self._successor is None else self._successor.me

    @property
    def local_addr(self) -> str:
        """See `Driver`."""
        return self._local_addr

    def is_served_by(self, addr: str) -> bool:
        """See `Driver`."""
        return addr in {host_of(self._where.endpoint), host_of(self._rounds_at.endpoint)}

    def submit(self, event: Event, timeout: float) -> Snapshot:
        """See `Driver`."""
        question = messages.submit(self._run_id, self._settings, event, self.life)
        reply = self._ask(question, messages.SnapshotReply, timeout, NUDGE)
        return self._snapshot(subject(event), reply)

    def follow(self, id: str, seen: Snapshot | None, timeout: float) -> Snapshot | None:
        """See `Driver`."""
        question = messages.FollowRequest(
            self._run_id, self._settings, id, messages.mark(seen), self.life
        )
        try:
            reply = self._ask(messages.encode(question), messages.SnapshotReply, timeout)
        except NoAnswerError:
            return None
        return self._snapshot(id, reply)

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """See `Driver`."""
        question = messages.BeatRequest(self._run_id, id, token, self._beats, self._epoch)
        reply = self._ask(
            messages.encode(question), messages.BeatReply, timeout, NUDGE, self._promise
        )
        self._beats += 1
        self._learn(reply)
        self.check_life(reply.life)
        return reply.holds

    def round_store(self, round: int) -> Store:
        """See `Driver`."""
        self.end_round_store()
        client = self._new_client(partial(self._open, self._rounds_at))
        with self._lock:
            self._check()
            self._round = client
        return PrefixStore(f"rounds/{self.life}", cast("Store", _OnFirstUse(client)))

    def end_round_store(self) -> None:
        """See `Driver`."""
        with self._lock:
            client, self._round = self._round, None
        if client is not None:
            client.close(0.0)

    def peek(self, id: str) -> Snapshot:
        """See `Driver`."""
        of, snapshot = self._latest
        return snapshot if of == id else _NOTHING

    def explain_timeout(self, id: str, timeout: float) -> tuple[str, tuple[Departed, ...]]:
        """See `Driver`."""
        question = messages.ExplainRequest(self._run_id, id, timeout)
        try:
            reply = self._ask(messages.encode(question), messages.ExplainReply, EXPLAIN)
        except RendezvousError as error:
            text = f"this host waited {timeout:g} s for other nodes, and cannot name them: {error}"
            return text, ()
        return reply.text, reply.departed

    def interrupt(self) -> None:
        """See `Driver`."""
        with self._lock:
            self._stopped.set()
            client = self._client
        client.close(0.0)
        self.end_round_store()

    def close(self, linger: bool) -> None:
        """See `Driver`; the host of the server waits for the other nodes, or leaves it to them."""
        self.interrupt()
        if self._successor is not None:
            self._successor.stop()
        if self._reserved is not None:
            self._reserved.close()
        last = linger and self.serves
        with self._lock:
            server, self.server = self.server, None
        if server is not None:
            server.close(wait=FAREWELL if linger else 0.0)
        if last and self._witness is not None:
            self._witness.remove()

    # ------------------------------------------------------------------ helpers

    def _begin(self, where: Where, timeout: float, stop: int) -> StoreClient:
        """Begin a session; the server may be missing only the first time, if it is the only one."""
        wait = not (self.reached or self._servers)
        if self._servers:
            timeout = min(timeout, SEARCH_TURN)  # another server may have taken over
        client = self._open(where, timeout, stop, wait_for_server=wait)
        self._probed = _reached(where, client.server)
        return client

    def _open(
        self,
        where: Where,
        timeout: float,
        stop: int,
        *,
        wait_for_server: bool = False,
        grace: float = SESSION_GRACE,
    ) -> StoreClient:
        try:
            return self._connect(
                where.endpoint,
                token=where.token,
                tls=where.tls,
                timeout=timeout,
                session_grace=grace,
                spare_round_trips=SPARE_ROUND_TRIPS,
                refusal_is_final=not wait_for_server,
                # The agent of a server holds its socket, so it has ended too.
                refusal_ends=lambda: bool(self._servers),
                stop=stop,
            )
        except (StoreAuthError, StoreProtocolError) as error:
            if not self.reached:
                raise
            # The server of another job, or another program, listens on that port now.
            raise StoreConnectionError(str(error)) from error

    def _ask(
        self,
        body: bytes,
        kind: type[T],
        timeout: float,
        nudge: float | None = None,
        silent: float | None = None,
    ) -> T:
        """Ask the service; return the answer, which must be a `kind`.

        Args:
            body: the question.
            kind: the type of the answer.
            timeout: in seconds.
            nudge: see `StoreClient.ask`.
            silent: seconds without an answer after which another server is asked, if another may
                have taken over.
        """
        deadline = self._clock() + timeout
        pauses = Backoff(*SEARCH_PAUSES)
        waits_until = 0.0
        while True:
            client, left = self._client, max(deadline - self._clock(), 0.0)
            turn = min(left, silent) if silent and self._servers else left
            try:
                answer = messages.decode_answer(client.ask(body, turn, nudge=nudge))
            except StoreError as error:
                lost = isinstance(error, StoreConnectionError | StoreTimeout)
                if self._stopped.is_set():
                    self._check()
                if client is not self._client:
                    continue  # another thread has found that this server is lost
                # At its own time-out a call has found nothing out about the server.
                if lost and self._others() and deadline - self._clock() > SEARCH_PAUSES[0]:
                    rest = self._promise / 2 if isinstance(error, StoreTimeout) else 0.0
                    self._search(client, rest=rest)
                    # Each of the servers is asked once in such a pause.
                    pause = pauses.next() / max(len(self._servers), 1)
                    self._stopped.wait(min(pause, max(deadline - self._clock(), 0.0)))
                    continue
                if isinstance(error, StoreTimeout) and client.state is ConnectionState.CONNECTED:
                    raise NoAnswerError(self._unreachable(error)) from error
                if lost:
                    raise RendezvousConnectionError(self._unreachable(error)) from error
                raise self._misunderstood(str(error)) from error
            except msgspec.MsgspecError as error:
                raise self._misunderstood(str(error)) from error
            if self._servers and self._is_of_another_job(answer):
                answer = messages.ElsewhereReply(0, "")
            if isinstance(answer, messages.ElsewhereReply):
                left = deadline - self._clock()
                if left <= 0 or (answer.lost and not self._servers):
                    why = "most of the hosts that keep a copy of it are lost"
                    why = why if answer.lost else "that server does not run the rounds now"
                    raise RendezvousConnectionError(self._unreachable(why))
                waits_until = waits_until or self._clock() + self._promise
                if not answer.waits:
                    self._search(client, answer)
                elif self._clock() >= waits_until:  # another server may have its majority
                    self._search(client, rest=self._promise / 2)
                    waits_until = 0.0
                self._stopped.wait(pauses.next(left))
                continue
            if isinstance(answer, messages.RefusedReply):
                raise RendezvousError(answer.text)
            if not isinstance(answer, kind):
                raise self._misunderstood(f"the server answered with {answer!r:.200}")
            self._rounds_at = self._probed
            return answer

    def _is_of_another_job(self, answer: messages.Answer) -> bool:
        """Return whether the server knows no life of the job, or another one."""
        if not self.life:  # a server that begins jobs knows other ones only
            return isinstance(answer, messages.BeatReply) and not answer.life
        return (
            isinstance(answer, messages.BeatReply | messages.SnapshotReply)
            and answer.life != self.life
        )

    def _others(self) -> bool:
        """Return whether there is another server to ask."""
        return bool(self._servers) or self._where.endpoint != self._listed[0]

    def _search(
        self,
        client: ServiceClient,
        elsewhere: messages.ElsewhereReply | None = None,
        rest: float = 0.0,
    ) -> None:
        """Ask another server from now on, unless another thread has changed it already.

        Args:
            client: the client of the server that was asked.
            elsewhere: its answer, if it does not run the rounds.
            rest: seconds for which it is not asked again while there are others; a silent host
                costs time.
        """
        with self._lock:
            if self._client is not client or self._stopped.is_set():
                return
            endpoint, now = self._where.endpoint, self._clock()
            if elsewhere is not None and elsewhere.endpoint:
                self._epoch = max(self._epoch, elsewhere.epoch)
                after = elsewhere.endpoint
                if not self._seated:
                    # The node waits in another life of the job, begun by mistake, whose versions
                    # mean nothing in the real one.
                    self.life, self._versions = "", self._latest[1].version
            else:
                self._asked_at[endpoint] = now + rest
                servers = self._servers or self._listed
                others = [server for server in servers if server != endpoint]
                after = min(others or [endpoint], key=lambda at: self._asked_at.get(at, 0.0))
            if after == endpoint:
                return
            self._where = self._at(after)
            self._client = self._new_client(partial(self._begin, self._where))
        if client.state is ConnectionState.CONNECTED:
            # Before the end of the session, so that the server does not take it for that of a node.
            with suppress(StoreError):
                client.ask(messages.encode(messages.TurnRequest(self._run_id)), 0.0)
        client.close(0.0)

    def _at(self, endpoint: str) -> Where:
        """Return how to reach a server of the job at another endpoint; certificates stay valid."""
        where = self._where
        tls = where.tls
        if tls is not None and tls.server_hostname is None:
            tls = replace(tls, server_hostname=host_of(where.endpoint))
        return where._replace(endpoint=endpoint, tls=tls)

    def _learn(self, reply: messages.BeatReply) -> None:
        """Learn which agents may serve."""
        if reply.epoch < self._epoch:
            return
        self._epoch = reply.epoch
        self._servers = [endpoint_of(voter.host, voter.port) for voter in reply.servers]
        if not self._servers and len(self._listed) > 1:
            self._servers = self._listed
        alone = reply.holds and self._settings.max_nodes > 1 and not self._settings.fixed
        if reply.servers or self._reported.server or alone:
            server = self._reported.server or host_of(self._rounds_at.endpoint)
            hosts = [voter.host for voter in reply.servers] or [server]
            changed = ServersChanged(reply.epoch, hosts[0], tuple(hosts[1:]), reply.may_lose)
            if changed != self._reported:
                self._reported = changed
                self._report(changed)
        if reply.keeps_copy and self._successor is not None:
            self._successor.start(self._where.endpoint, self._epoch)

    def _snapshot(self, id: str, reply: messages.SnapshotReply) -> Snapshot:
        self.check_life(reply.life)
        try:
            snapshot = messages.read_snapshot(reply)
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._misunderstood(str(error)) from error
        snapshot = snapshot._replace(version=snapshot.version + self._versions)
        if snapshot.status is not None and not self.life:
            self.life = reply.life
        self._seated = self._seated or isinstance(snapshot.status, Seated)
        of, last = self._latest
        if of != id or snapshot.version >= last.version:  # answers may arrive out of order
            self._latest = id, snapshot
        return snapshot

    def check_life(self, life: str) -> None:
        """Raise RendezvousConnectionError if an answer is from another life of the job."""
        if self.life and life != self.life:
            raise RendezvousConnectionError(
                f"the server at {self._where.endpoint} does not know the job {self._run_id!r} any "
                f"more: the server was restarted, or it deleted a job without nodes. Start the job "
                f"again; it continues from its last checkpoint"
            )

    def _check(self) -> None:
        if self._stopped.is_set():
            raise RendezvousGracefulExitError(
                f"this node's wait for the rendezvous {self._run_id!r} was interrupted"
            )

    def _unreachable(self, why: object) -> str:
        where = self._where.endpoint
        return f"the rendezvous {self._run_id!r} cannot be reached at {where}: {why}"

    def _misunderstood(self, why: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"this node does not understand the server at {self._where.endpoint}: {why}. "
            f"Run the same release of regrow on all nodes"
        )


class _OnFirstUse:
    """Proxy for a session with the server; the first call begins the session.

    If the session is lost because the server was replaced, the next call begins another session. A
    call in progress is not repeated, because its awaited key may be lost with the session.
    """

    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        session = self._client.connect(CONNECT)
        if session.state is ConnectionState.SUSPENDED:
            try:
                session.num_keys()  # waits until the session is resumed, or lost
            except StoreSessionLost:
                session = self._client.connect(CONNECT)
        return getattr(session, name)


def _reached(where: Where, server: str) -> Where:
    """Return the same server by its address, so that later rounds need no name service."""
    tls = where.tls
    if tls is not None and tls.server_hostname is None:
        tls = replace(tls, server_hostname=host_of(where.endpoint))
    return where._replace(endpoint=server, tls=tls)
