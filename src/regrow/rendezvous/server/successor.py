"""An agent's copy of the job's record, its votes, and its turn as server of the rounds.

A thread of the agent asks the server that runs the rounds (the *coordinator*) for the changes of
the record (`copies.py`). When the coordinator is lost, it grants the next epoch to the candidate of
that epoch, with its copy. If this agent is the candidate, it starts a server first, and grants the
epoch like the others. The server takes over when a majority of the voters has granted it the epoch
(`round_service.py`). The rules are in `protocol/succession.py`. On a busy host a new process takes
a second to start. So the next candidate starts its server when the coordinator has been silent for
half of the promise.

The coordinator is lost in one of three cases:

- No process listens at its address any more. Its agent has then ended too, because the agent holds
  the socket, also while it starts another server.
- It was silent for the length of the promise.
- A server says that another voter has granted a newer epoch.

A candidate that does not answer in time loses its turn: the voter grants the next epoch to the
next candidate. The time grows with each turn, also the time for a candidate that does not answer at
all, which may be slow like its host. So all voters meet at one candidate in the end.

An agent that was removed from the voters may have granted epochs that have no meaning any more. It
continues as another voter, under a new id.

While an agent hosts the coordinator, it reports this every second to the servers at the endpoints
of the job. An agent that is started again on such a host serves there, and sends newcomers on. The
other agents with a copy report this too, because the agent beside the coordinator may have ended.
An agent that hosts a server at an endpoint reports to its own server only.

If the job has a witness, each agent with a copy keeps it, and a candidate lets it grant the epoch
too (`witness_keeper.py`).

If the user lists several endpoints, the agents on these hosts elect the first coordinator too: each
asks the others whether the job runs already. If none says so, it grants epoch 1, with the copy of a
job without nodes.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.succession import (
    Position,
    Succession,
    candidate,
    is_quorum,
    is_voter,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.store import (
    ServiceClient,
    StoreClosedError,
    StoreError,
    StoreTimeout,
    endpoint_of,
)
from regrow.utils import Backoff, get_logger

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from regrow.rendezvous.node.driver import Threads
    from regrow.rendezvous.server.records import JobRecord
    from regrow.rendezvous.server.witness_keeper import WitnessKeeper
    from regrow.store import StoreClient

    Open = Callable[[str, float, int], StoreClient]

GRACE_S: Final = 0.1
"""Time for a voter with a broken connection to resume it, in seconds."""
TURN_S: Final = 2.0, 8.0
"""How long a voter waits for the first candidate, and at most for a later one, in seconds."""
SILENT: Final = 3 / 8
"""The part of a turn for which a voter waits for a candidate that does not answer at all."""
RETRY_S: Final = 0.02, 0.1
"""First and longest pause between two attempts to reach a candidate, in seconds."""
REPORT_S: Final = 1.0
"""Pause between two reports of where the rounds are run, in seconds."""
RESIGN_S: Final = 0.5
"""Time for the answer to a voter that resigns, in seconds."""

logger = get_logger(__name__)


def new_voter(host: str, port: int) -> Voter:
    """Return a voter under an id that no other voter of the job has had."""
    return Voter(f"{host}:{port}/{os.urandom(6).hex()}", host, port)


class Successor:
    """Keeps a copy of the job's record, votes, and serves when it is elected.

    Args:
        run_id: the id of the job.
        me: the voter that this agent is.
        promise: how long a voter stands by its promise, in seconds.
        listed: the endpoints of the job.
        hosts: whether this agent hosts a server at one of them.
        open: opens a session with the server at an endpoint.
        serve: starts a server at this agent's port, unless it runs; it returns once the server
            listens.
        elected: called when a coordinator was elected, with its endpoint and its epoch.
        new_client: creates a client of the service from a function that opens a session.
        clock: returns the time of this agent's monotonic clock, in seconds.
        threads: starts threads, and provides the locks.
        listed_as: the endpoint that this agent serves, if the user has listed several.
        begins: if this endpoint is one of the first voters: the record of a job without nodes.
        witness: this agent's keeper of the witness, if the job may have one.
    """

    def __init__(
        self,
        run_id: str,
        me: Voter,
        promise: float,
        listed: Sequence[str],
        *,
        hosts: bool,
        open: Open,
        serve: Callable[[], None],
        elected: Callable[[str, int], None],
        new_client: Callable[[Callable[[float, int], StoreClient]], ServiceClient],
        clock: Callable[[], float],
        threads: Threads,
        listed_as: str = "",
        begins: JobRecord | None = None,
        witness: WitnessKeeper | None = None,
    ) -> None:
        self.me = me
        """The voter that this agent is; another one after the others have given it up."""
        self._run_id = run_id
        self._promise = promise
        self._listed = listed
        self._listed_as = listed_as
        self._hosts = hosts
        self._witness = witness
        self._open = open
        self._serve = serve
        self._elected = elected
        self._new_client = new_client
        self._clock = clock
        self._threading = threads
        self._stop = threads.Event()
        self._lock = threads.Lock()
        self._client: ServiceClient | None = None
        self._asks = ""  # the endpoint of the client
        self._coordinator = listed[0]
        self._known = 0, listed[0]  # epoch and endpoint of the coordinator that the node knows
        self._prepared = hosts  # whether this agent has tried to start its server
        self._thread: threading.Thread | None = None
        self._reporter: threading.Thread | None = None
        self._renewed = False  # whether the thread has to forget what the voter has granted
        self._forget()
        if begins is not None:
            self._records.append(messages.encode(begins))
            self._position, self._succession = Position(0, begins.seq), begins.succession
            self._grant(1, ended=False)

    def _forget(self) -> None:
        self._life = ""
        self._position = Position()
        self._records: list[bytes] = []
        self._succession = Succession()
        self._answer = 0  # the number of the latest answer in this epoch
        self._promised = 0  # the newest epoch that was granted, or that is followed
        self._granted_to = ""  # the voter to which it was granted; empty if it is followed
        self._ended = False  # whether the coordinator of the copy was found to have ended
        self._copied_from = ""
        self._heard_at = self._clock()
        self._turns = Backoff(*TURN_S)

    @property
    def copy(self) -> tuple[Position, Succession]:
        """The position of the copy, and the succession in it."""
        return self._position, self._succession

    def start(self, coordinator: str, epoch: int) -> None:
        """Begin to keep a copy, unless the thread runs.

        Args:
            coordinator: the endpoint at which the rounds are run, as the node knows it.
            epoch: its epoch.
        """
        with self._lock:
            if epoch >= self._known[0]:
                self._known = epoch, coordinator
            if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._coordinator = coordinator
            self._heard_at = self._clock()
            self._thread = self._threading.Thread(
                target=self._run, name="rendezvous successor", daemon=True
            )
            self._thread.start()

    def renew_voter(self) -> None:
        """Vote under another id from now on, if the others have evicted the node meanwhile.

        Only a server with a majority evicts a node. So an epoch that this voter has granted since
        then means nothing any more.
        """
        with self._lock:
            # A first voter may grant before its node joins.
            self._renewed = bool(self._granted_to and self._life)
            if self._renewed:
                self.me = new_voter(self.me.host, self.me.port)

    def stop(self) -> None:
        """Resign, and end the thread."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            thread, client = self._thread, self._client
        if self._witness is not None:
            self._witness.stop()
        if client is not None:
            client.close(0.0)
        if thread is not None:
            thread.join(RESIGN_S)
        if is_voter(self._succession, self.me.id) and not self._granted_to:
            self._resign()

    def _resign(self) -> None:
        request = messages.ResignRequest(self._run_id, self.me.id, self._promised)
        where = self._coordinator
        client = self._new_client(lambda timeout, stop: self._open(where, timeout, stop))
        try:
            client.ask(messages.encode(request), RESIGN_S)
        except StoreError as error:
            logger.debug("the voter %s could not resign: %s", self.me.id, error)
        finally:
            client.close(0.0)

    # --- the thread

    def _run(self) -> None:
        try:
            if self._granted_to:
                self._most_answer()  # the job may run already
            while not self._stop.is_set():
                if self._renewed:
                    self._renewed = False
                    self._forget()
                    self._coordinator = self._known[1]
                if self._granted_to:
                    self._vote()
                elif not self._copy():
                    return
        except StoreClosedError:
            pass
        except Exception:  # the job continues with one voter less
            logger.exception("this agent can no longer take over the rendezvous")
        finally:
            self._close_client()

    def _copy(self) -> bool:
        """Ask the coordinator for changes; return False if no copy is wanted any more."""
        silent_at = self._heard_at + self._promise
        left = silent_at - self._clock()
        prepares_at = silent_at - self._promise / 2
        if prepares := self._is_next and not self._prepared:
            left -= self._promise / 2
        try:
            reply = self._ask(self._coordinator, self._copy_request(), max(left, self._promise / 6))
        except StoreClosedError:
            raise
        except StoreError as error:
            refused = _is_refused(error) and self._coordinator == self._copied_from
            silent = self._clock() >= silent_at
            if prepares and self._clock() >= prepares_at:
                self._start_server()  # takes a while: the coordinator may answer again by then
            if self._may_vote and (refused or silent):
                logger.warning("the host that serves the rendezvous is lost: %s", error)
                self._grant(self._promised + 1, ended=refused)
            else:
                self._coordinator = self._known[1]
                self._stop.wait(RETRY_S[1])
            return True
        match reply:
            case messages.CopyReply():
                return self._take(reply)
            case messages.ElsewhereReply(epoch, endpoint):
                self._go(epoch, endpoint)
            case messages.RefusedReply(text, removed=True):
                logger.info("the voter %s continues under another id: %s", self.me.id, text)
                self.me = new_voter(self.me.host, self.me.port)
                self._forget()
                return False
            case _:
                logger.warning("the voter %s is refused: %s", self.me.id, reply)
                self._stop.wait(self._promise)
        return True

    def _copy_request(self) -> messages.CopyRequest:
        return messages.CopyRequest(
            self._run_id,
            self._life,
            self.me,
            self._hosts,
            self._promised,
            *self._position,
            self._answer,
            self._listed_as,
        )

    @property
    def _votes_as(self) -> str:
        return self.me.id if self._life else self._listed_as

    @property
    def _may_vote(self) -> bool:
        # An agent with a copy may be a new voter that does not know it yet (`elected` does).
        return bool(self._succession.voters) and not self._succession.retired

    @property
    def _is_next(self) -> bool:
        """Whether this agent is the candidate of the next epoch."""
        return self._may_vote and candidate(self._succession, self._promised + 1).id == self.me.id

    def _take(self, reply: messages.CopyReply) -> bool:
        if reply.epoch < self._promised:
            # This server does not know the newer epoch yet; the next request contains it.
            self._stop.wait(RETRY_S[1])
            return True
        records = [bytes(record) for record in reply.records]
        if reply.whole:
            self._records = records
        else:
            self._records += records
        if len(self._records) > messages.MOST_RECORDS:
            self._records = [compacted(self._run_id, self._records)]
        self._life, self._ended, self._copied_from = reply.life, False, self._coordinator
        self._position = Position(reply.epoch, reply.seq)
        self._succession = reply.succession
        self._answer = reply.answer
        self._promised = reply.epoch
        self._heard_at = self._clock()
        self._turns = Backoff(*TURN_S)
        if self._witness is not None:
            self._witness.follow(self.me, self._coordinator, reply)
        self._redirect()
        return reply.wanted

    def _go(self, epoch: int, endpoint: str) -> None:
        """Follow the server to which another one refers, or grant the epoch that it knows."""
        silent = self._clock() >= self._heard_at + self._promise
        if endpoint:
            self._granted_to, self._coordinator = "", endpoint
        elif self._may_vote and (epoch > self._promised or silent):
            self._grant(max(epoch, self._promised + 1), ended=False)
        else:
            self._coordinator = self._known[1]
            self._stop.wait(RETRY_S[1])

    def _grant(self, epoch: int, *, ended: bool) -> None:
        """Grant an epoch; from now on this voter stands by no promise of an older one."""
        self._promised = epoch
        self._granted_to = candidate(self._succession, epoch).id
        self._ended = self._ended or ended
        self._answer = 0

    def _vote(self) -> None:
        """Grant the epoch to its candidate until it serves, or its turn is over."""
        to = candidate(self._succession, self._promised)
        turn = self._turns.next(TURN_S[1])
        deadline = self._clock() + turn
        pauses = Backoff(*RETRY_S)
        if to.id == self._votes_as:
            if not self._start_server():
                self._grant(self._promised + 1, ended=False)
                return
            if self._witness is not None and self._life:
                self._witness.vote(self.me, self._life, self._promised, ended=self._ended)
        request = messages.GrantRequest(
            self._run_id,
            self._life,
            to,
            self._votes_as,
            self._promised,
            *self._position,
            self._succession,
            self._ended,
            self._clock() >= self._heard_at + self._promise,
            tuple(map(Raw, self._records)),
            None if self._life else self.me,
        )
        while (left := deadline - self._clock()) > 0 and not self._stop.is_set():
            if self._renewed:
                return
            try:
                reply = self._ask(endpoint_of(to.host, to.port), request, left, SILENT * turn)
            except StoreClosedError:
                raise
            except StoreError as error:
                if isinstance(error, StoreTimeout):
                    break
                self._stop.wait(pauses.next(left))
                continue
            if isinstance(reply, messages.DoneReply):
                self._follow(to, reply.epoch)
                return
            if isinstance(reply, messages.ElsewhereReply) and (
                reply.endpoint or reply.epoch > self._promised
            ):
                self._go(reply.epoch, reply.endpoint)
                return
            self._stop.wait(pauses.next(left))
        epoch, coordinator = self._known
        if epoch >= self._promised:  # the others have elected a coordinator
            self._go(epoch, coordinator)
        elif self._life or self._most_answer():
            self._grant(self._promised + 1, ended=False)

    def _start_server(self) -> bool:
        """Start this agent's server, unless it runs; return whether it runs."""
        self._prepared = True
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - after any error the next candidate serves
            logger.warning("this agent cannot take over the rendezvous: %s", error)
            return False
        return True

    def _most_answer(self) -> bool:
        """Return whether most of the first voters answer; follow the coordinator if one knows it.

        Until then no candidate can be elected, and each keeps its turn. So the first one is elected
        if all hosts start.
        """
        self._turns = Backoff(*TURN_S)
        voters = self._succession.voters
        answered = {self._listed_as}
        for voter in voters[-1]:
            if voter.id == self._listed_as:
                continue
            endpoint = endpoint_of(voter.host, voter.port)
            try:
                reply = self._ask(endpoint, self._copy_request(), SILENT * TURN_S[0])
            except StoreClosedError:
                raise
            except StoreError:
                continue
            answered.add(voter.id)
            match reply:
                case messages.CopyReply(epoch=epoch):
                    self._go(epoch, endpoint)
                    return False
                case messages.ElsewhereReply(epoch, endpoint) if endpoint:
                    self._go(epoch, endpoint)
                    return False
        return is_quorum(voters, answered)

    def _follow(self, to: Voter, epoch: int) -> None:
        """Follow the coordinator that was elected."""
        # An older epoch if the voter was removed; it learns this with its next request.
        self._promised, self._granted_to, self._ended = max(epoch, self._promised), "", False
        self._coordinator = endpoint_of(to.host, to.port)
        self._heard_at = self._clock()
        self._known = max(self._known, (epoch, self._coordinator))
        self._elected(self._coordinator, epoch)
        if to.id == self._votes_as:
            level = logging.WARNING if self._life else logging.DEBUG
            logger.log(level, "this host runs the rendezvous %r from now on", self._run_id)
        self._redirect()

    def _redirect(self) -> None:
        """Report to servers that nodes may ask by mistake, if there are any."""
        running = self._reporter is not None and self._reporter.is_alive()
        if not running and self._asked_by_mistake():
            self._reporter = self._threading.Thread(
                target=self._report, name="rendezvous redirect", daemon=True
            )
            self._reporter.start()

    def _asked_by_mistake(self) -> list[str]:
        """Return the endpoints to which this agent reports where the rounds are run."""
        here = endpoint_of(self.me.host, self.me.port)
        own = self._listed_as or (self._listed[0] if self._hosts else here)
        if not (self._hosts or self._coordinator in (own, here, *self._listed)):
            return [*self._listed]  # the agent there may have ended
        if self._coordinator in (own, here):
            return [at for at in self._listed if at != own]
        return [own] if self._hosts else []

    def _report(self) -> None:
        """Report where the rounds are run as long as there are servers that do not know it."""
        copies = self._thread
        while not self._stop.is_set() and copies is not None and copies.is_alive():
            servers = self._asked_by_mistake()
            if not servers:
                return
            moved = messages.MovedRequest(self._run_id, self._promised, self._coordinator)
            for at in () if self._granted_to else servers:
                # A session that stays open would keep that server alive.
                client = self._new_client(partial(self._open, at))
                with suppress(StoreError):  # no server is there
                    client.ask(messages.encode(moved), REPORT_S)
                client.close(0.0)
            self._stop.wait(REPORT_S)

    # --- calls

    def _ask(
        self, endpoint: str, request: Any, timeout: float, connect: float | None = None
    ) -> messages.Answer:
        """Ask a server; the connection to it stays open until another one is asked.

        Args:
            endpoint: where the server listens.
            request: the question.
            timeout: time for the answer, in seconds.
            connect: time to connect, in seconds; None: the same.
        """
        with self._lock:
            if self._stop.is_set():
                raise StoreClosedError("the agent leaves")
            client, before = self._client, None
            if client is None or self._asks != endpoint:
                before = client
                client = self._client = self._new_client(
                    lambda timeout, stop: self._open(endpoint, timeout, stop)
                )
                self._asks = endpoint
        if before is not None:
            before.close(0.0)
        client.connect(timeout if connect is None else min(timeout, connect))
        answer: messages.Answer = messages.decode_answer(
            client.ask(messages.encode(request), timeout)
        )
        return answer

    def _close_client(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close(0.0)


def compacted(run_id: str, records: list[bytes]) -> bytes:
    """Return the records of a job as one record."""
    from regrow.rendezvous.server.records import recover

    return messages.encode(recover(records)[run_id])


def _is_refused(error: BaseException | None) -> bool:
    """Return whether an attempt to connect failed because no process listens at the address."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__
    return False
