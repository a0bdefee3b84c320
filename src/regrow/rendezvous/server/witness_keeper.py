"""An agent's thread for the witness of a job on two hosts: it confirms and grants in its name.

The rules are in `protocol/witness.py`, and the coordinator's side is in `witness_requests.py`. The
thread has one task at a time. While the agent follows a coordinator, the task is to keep: ask it
for changes, write them into the ballot, and confirm them. When the agent takes over, the task is to
vote: wait until the promise of the witness is over, grant the epoch in the ballot, and send the
grant to the agent's own server. A new task interrupts a question, but no access to a file: a file
server that does not answer delays this thread, and nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.witness import (
    CHECK_S,
    Ballot,
    granting,
    has_promised_since,
    may_follow,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.records import recover
from regrow.store import StoreClosedError, StoreError, endpoint_of
from regrow.utils import get_logger

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from regrow.rendezvous.node.driver import Threads
    from regrow.store import ServiceClient, StoreClient

PAUSE_S: float = 0.1
"""Pause between two looks at a ballot that may change, or two attempts to reach a server."""
REMOVE_S: float = 1.0
"""Longest wait for the removal of a ballot, in seconds."""
ANSWER_S: float = 2 * CHECK_S
"""Longest wait for an answer of the coordinator; it answers after `CHECK_S` seconds at the latest.
"""

logger = get_logger(__name__)


class BallotCell(Protocol):
    """Where a ballot is stored; its text names the place. The methods may block."""

    def read(self) -> tuple[int, Ballot | None]:
        """Return the latest version and the ballot; 0 and None if there is none.

        Raises:
            OSError: the ballot cannot be read.
            ValueError: the stored ballot is damaged, or was not written by an agent of the job.
        """
        ...

    def replace(self, version: int, ballot: Ballot, *, create: bool = False) -> bool:
        """Store a ballot if `version` is still the latest version; return whether it was.

        Args:
            version: as `read` returned it.
            ballot: the new ballot.
            create: whether to store the first version.

        Raises:
            OSError: the ballot cannot be written.
        """
        ...

    def check(self) -> None:
        """Find out whether a ballot can be written, without a new version.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def remove(self) -> None:
        """Remove the ballot, if possible."""
        ...


class Keep(NamedTuple):
    """The task to confirm changes of a coordinator's record."""

    witness: str
    me: str
    """The id of this agent's voter."""
    life: str
    endpoint: str


class Vote(NamedTuple):
    """The task to grant an epoch to this agent."""

    witness: str
    me: Voter
    life: str
    epoch: int
    ended: bool
    """Whether this agent has found that the coordinator has ended."""
    after: tuple[int, int]
    """The epoch of that coordinator, and its latest answer to the witness that this agent knows."""
    promised_until: float
    """When the promise ends that the witness gave with this answer, by the agent's clock."""


class WitnessKeeper:
    """One agent's keeper of the witness.

    Args:
        run_id: the id of the job.
        promise: how long a voter stands by its promise, in seconds.
        cells: returns where the ballot of a witness is stored, from its id.
        open: opens a session with the server at an endpoint.
        new_client: creates a client of the service from a function that opens a session.
        clock: returns the time of this agent's monotonic clock, in seconds.
        threads: starts threads, and provides the locks.
    """

    def __init__(
        self,
        run_id: str,
        promise: float,
        cells: Callable[[str], BallotCell],
        *,
        open: Callable[[str, float, int], StoreClient],
        new_client: Callable[[Callable[[float, int], StoreClient]], ServiceClient],
        clock: Callable[[], float],
        threads: Threads,
    ) -> None:
        self._run_id, self._promise = run_id, promise
        self._cells, self._open, self._new_client = cells, open, new_client
        self._clock, self._threading = clock, threads
        self._lock = threads.Lock()
        self._changed = threads.Event()
        self._task: Keep | Vote | None = None
        self._client: ServiceClient | None = None
        self._heard: tuple[str, tuple[int, int], float] = "", (0, 0), 0.0
        self._warned = ""
        self._thread: threading.Thread | None = None
        self._over = False

    def follow(self, me: Voter, endpoint: str, reply: messages.CopyReply) -> None:
        """Keep the witness that a coordinator names, if it names one.

        Args:
            me: the voter that this agent is.
            endpoint: where the coordinator serves.
            reply: its answer.
        """
        before = self._heard[0]
        id, answer = reply.witness or ("", 0)
        self._heard = id, (reply.epoch, answer), self._clock()
        self._begin(Keep(id, me.id, reply.life, endpoint) if id else None)
        if before and before != id:  # no majority needs its vote any more
            self._remove(before)

    def vote(self, me: Voter, life: str, epoch: int, *, ended: bool) -> None:
        """Grant an epoch to this agent, once the promise of the witness is over.

        Args:
            me: the voter that this agent is; its server listens.
            life: the life of the job.
            epoch: the epoch.
            ended: whether this agent has found that the coordinator has ended.
        """
        id, after, at = self._heard
        if id:
            self._begin(Vote(id, me, life, epoch, ended, after, at + self._promise))

    def stop(self) -> None:
        """End the thread, without a wait for the directory."""
        self._over = True
        self._begin(None)
        self._changed.set()

    def remove(self) -> None:
        """Remove the ballot, because the job is over."""
        if self._heard[0]:
            self._remove(self._heard[0]).join(REMOVE_S)  # a directory that hangs delays no end

    def _remove(self, id: str) -> threading.Thread:
        thread = self._threading.Thread(
            target=self._cells(id).remove, name="rendezvous ballot", daemon=True
        )
        thread.start()
        return thread

    def _begin(self, task: Keep | Vote | None) -> None:
        with self._lock:
            if task == self._task:
                return
            self._task, client, self._client = task, self._client, None
            start = task is not None and not (self._thread and self._thread.is_alive())
            if start:
                self._thread = self._threading.Thread(
                    target=self._run, name="rendezvous witness", daemon=True
                )
            self._changed.set()
        if client is not None:
            client.close(0.0)
        if start and self._thread is not None:
            self._thread.start()

    # --- the thread

    def _run(self) -> None:
        done: Keep | Vote | None = None
        while True:
            with self._lock:  # a later task, and `stop`, set the event again
                task = self._task
                self._changed.clear()
            if self._over:
                return
            if task is None or task is done:
                self._changed.wait()
                continue
            try:
                if isinstance(task, Keep):
                    self._keep(task)
                else:
                    self._vote(task)
                done = task
            except StoreError as error:  # the agent looks for the server that runs the rounds
                logger.debug("the witness %s: %s", task.witness, error)
                self._changed.wait(PAUSE_S)
            except (OSError, ValueError) as error:
                if task is self._task:
                    self._warn(task, str(error))
                self._changed.wait(CHECK_S if isinstance(task, Keep) else PAUSE_S)
            except Exception:  # the job continues without its witness
                logger.exception("this agent can no longer write for the witness of the job")
                return

    def _warn(self, task: Keep | Vote, why: str) -> None:
        level = logger.debug if why == self._warned else logger.warning
        self._warned = why
        level("this host gets no vote from the witness directory: %s", why)

    def _keep(self, task: Keep) -> None:
        """Confirm changes until there is another task."""
        cell = self._cells(task.witness)
        version, ballot = cell.read()
        checked = 0
        while task is self._task:
            request = self._request(task, ballot, checked)
            reply = self._ask(task, task.endpoint, request, ANSWER_S)
            if not isinstance(reply, messages.CopyReply):
                self._changed.wait(PAUSE_S)  # the agent looks for the server that runs the rounds
                continue
            if ballot is None or reply.checks:
                version, ballot = cell.read()  # the other keeper may have created it
                if ballot is None and not reply.creates:
                    raise ValueError(
                        f"{cell} is not there, although another host has written it. Check that "
                        f"all hosts see the same directory"
                    )
            if not may_follow(ballot, reply.epoch):
                continue  # the next request contains the newer epoch
            if reply.checks:
                cell.check()
                checked = reply.answer
                continue
            after = self._following(ballot, reply)
            if after is None or not cell.replace(version, after, create=reply.creates):
                version, ballot = cell.read()
            else:
                version, ballot, self._warned = version + 1, after, ""

    def _request(self, task: Keep, ballot: Ballot | None, checked: int) -> messages.CopyRequest:
        life, promised, epoch, seq, answer = "", 0, -1, 0, 0
        if ballot is not None:
            life, promised, answer = ballot.life, ballot.promised, ballot.answer
            epoch, seq = ballot.position
        return messages.CopyRequest(
            self._run_id,
            life,
            Voter(task.witness, "", 0),
            False,
            promised,
            epoch,
            seq,
            answer,
            keeper=task.me,
            checked=checked,
        )

    def _following(self, ballot: Ballot | None, reply: messages.CopyReply) -> Ballot | None:
        """Return the ballot with the changes of an answer; None if it lacks earlier ones."""
        records = [bytes(record) for record in reply.records]
        if not reply.whole:
            if ballot is None or ballot.epoch != reply.epoch:
                return None
            records.insert(0, ballot.record)
        job = recover(records).get(self._run_id)
        if job is None or job.seq != reply.seq:
            return None
        record = messages.encode(job)
        return Ballot(reply.life, reply.epoch, "", reply.epoch, reply.seq, reply.answer, record)

    def _vote(self, task: Vote) -> None:
        """Grant the epoch, and send the grant to this agent's server."""
        cell = self._cells(task.witness)
        seen, since = -1, 0.0
        while task is self._task:
            version, ballot = cell.read()
            if ballot is None:
                raise ValueError(f"{cell} is not there any more")
            now = self._clock()
            if version != seen:
                seen, since = version, now
            later = has_promised_since(ballot, *task.after)
            waited = now >= (since + self._promise if later else task.promised_until)
            after = granting(ballot, task.epoch, task.me.id)
            if after is None or ballot.life != task.life:
                return
            if waited or task.ended or after == ballot:
                if after == ballot or cell.replace(version, after):
                    self._send(task, after, waited=waited)
                    return
            else:
                self._changed.wait(PAUSE_S)

    def _send(self, task: Vote, ballot: Ballot, *, waited: bool) -> None:
        job = recover([ballot.record])[self._run_id]
        request = messages.GrantRequest(
            self._run_id,
            task.life,
            task.me,
            task.witness,
            task.epoch,
            *ballot.position,
            job.succession,
            task.ended,
            waited,
            (Raw(ballot.record),),
        )
        while task is self._task:
            with suppress(StoreError):
                at = endpoint_of(task.me.host, task.me.port)
                reply = self._ask(task, at, request, ANSWER_S)
                if not isinstance(reply, messages.RefusedReply):
                    return
                self._warn(task, reply.text)
            self._changed.wait(PAUSE_S)

    def _ask(self, task: Keep | Vote, endpoint: str, request: Any, timeout: float) -> Any:
        with self._lock:
            if task is not self._task:
                raise StoreClosedError("the agent has another task")
            client = self._client
            if client is None:
                client = self._client = self._new_client(
                    lambda timeout, stop: self._open(endpoint, timeout, stop)
                )
        try:
            return messages.decode_answer(client.ask(messages.encode(request), timeout))
        except msgspec.MsgspecError as error:
            raise ValueError(f"the server answered with something else: {error}") from error
