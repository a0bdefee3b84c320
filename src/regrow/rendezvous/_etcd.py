"""Rendezvous over etcd: any host of the job may be lost, and any one member of the cluster.

The nodes run the rounds themselves (`_by_nodes`): the document is one key, its fencing token the
revision of etcd at which it last changed, and it is replaced by a transaction that compares it.

Whether a node lives is said by a lease of etcd. It lasts as long as the silence that is borne
(`Bounds.lease`), by the monotonic clock of etcd's leader, from the last beat that arrived there;
whoever hears that it has run out waits for the time to kill besides (`_etcd_feed`). The node counts
from when it *sent* the beat, and its guardian has killed its workers by then. So this means what it
means when another node has waited that long by its own clock (`_patience`): nothing may run any
more, and the seat is free. It is no proof that the node is dead. A new leader of etcd lets all
leases begin anew, so the loss of a host that had the leader on it is noticed later, by the time
since the last beat and that of the election.

A node that etcd cannot hear for a lease's time has lost its seat, like any node that is silent. Two
numbers are therefore different here, unless they are given: a beat is sent every half second and
six of them may fail to come, which is the same lease of 3 s, so that a beat that waited for the
election of a new leader (one to two seconds in a cluster with etcd's own defaults) is in time.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from math import ceil
from typing import TYPE_CHECKING

from regrow.rendezvous._backend import LivenessRendezvousBackend, Token
from regrow.rendezvous._config import timeout_option
from regrow.rendezvous._errors import RendezvousConnectionError, RendezvousStateError
from regrow.rendezvous._etcd_answers import EXHAUSTED, INVALID, EtcdError
from regrow.rendezvous._etcd_client import EtcdClient, get, put, unchanged
from regrow.rendezvous._etcd_config import check_credentials, read_access, read_prefix
from regrow.rendezvous._etcd_feed import EtcdFeed
from regrow.rendezvous._etcd_http import EtcdHttp
from regrow.rendezvous._etcd_job import LIFE, EtcdJob
from regrow.rendezvous._etcd_store import EtcdStore
from regrow.rendezvous._parameters import RendezvousParameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regrow.rendezvous._dynamic import DynamicRendezvousHandler

REACH = 10.0
"""Seconds in which etcd has to be reached at first; the key `read_timeout`."""
CALL = 5.0
"""Seconds in which it has to answer from then on, at most."""
INTERVAL = 0.5
"""Seconds between two beats, unless the user says how many."""
MISSES = 6
"""Beats that may fail to come, unless the user says how many."""
_GOODBYE = 2.0
"""Seconds in which etcd has to answer a node that goes; what it leaves ends by its leases."""


class EtcdRendezvousBackend(LivenessRendezvousBackend):
    """The document of one job in etcd, and the lives of its nodes.

    Args:
        job: where its keys are, made by `connect_job`.
    """

    def __init__(self, job: EtcdJob) -> None:
        self._job = job
        self._state = f"{job.root}state"
        self._feed = EtcdFeed(job)
        self._lock = threading.Lock()
        self._leases: dict[str, int | None] = {}
        self._looks = 0
        self._renewed = float("-inf")
        self._closed = False

    @property
    def name(self) -> str:
        """See base class."""
        return "etcd"

    @property
    def local_addr(self) -> str:
        """This host's address on the way to etcd; no name service is asked."""
        with _errors("to connect"):
            return self._job.client.http.local_address()

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class; what it returns is as new as any change that was made before the call."""
        known = self._feed.document()
        revision = known.revision if known is not None else 0
        with _errors("to read the state"):
            outcome = self._job.client.txn(
                # Not "what is newer": an etcd that lost its data counts from 1 again.
                [unchanged(self._state, revision)],
                [],
                [get(self._state)],
                timeout=self._job.timeout,
            )
        if not outcome.succeeded:
            known = next(iter(outcome.found[0]), None)
        return None if known is None else (known.value or b"", known.revision)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class; a change takes effect once, or not at all."""
        revision = 0 if token is None else _revision(token)
        with _errors(f"to write a state of {len(state)} bytes"):
            outcome = self._job.write(
                [unchanged(self._state, revision)],
                [put(self._state, state, self._job.lease)],
                [get(self._state)],
            )
        if outcome.found and outcome.found[0]:
            pair = outcome.found[0][0]
            mine = outcome.succeeded and pair.value == state
            return pair.value or b"", pair.revision, mine
        return (state, outcome.revision, True) if outcome.succeeded else None

    def heard_state(self) -> tuple[bytes, Token] | None:
        """See base class. With N nodes that join, this is what saves N x N reads."""
        heard = self._feed.document(current=True)
        return self.get_state() if heard is None else (heard.value or b"", heard.revision)

    def wait_state(self, token: Token, timeout: float) -> None:
        """See base class."""
        with _errors("to watch the state"):
            self._feed.wait(0 if token is None else _revision(token), timeout)

    def beat(self, id: str, count: int, lease: float) -> None:
        """See base class."""
        with self._lock:
            mine = self._leases.get(id, 0)
        if mine is None:  # it has left
            return
        with _errors("to say that this node is alive"):
            if mine and self._renew(mine, lease):
                return
            mine = secrets.randbits(62) + 1
            self._job.client.grant(ceil(lease), mine, timeout=lease)
            key = f"{self._job.root}nodes/{id}"
            self._job.client.txn([], [put(key, b"%d" % count, mine)], timeout=lease)
            with self._lock:
                left = self._leases.get(id, 0) is None
                self._leases[id] = None if left else mine
            if left:
                self._job.client.revoke(mine, timeout=lease)

    def _renew(self, mine: int, timeout: float) -> bool:
        now = time.monotonic()
        ids = [mine] if now - self._renewed < LIFE / 10 else [mine, self._job.lease]
        alive = self._job.client.renew(ids, timeout=timeout)
        if len(ids) > 1:
            self._renewed = now
        return alive[0]

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """See base class; a node whose lease lives has a new beat whenever one asks."""
        with _errors("to hear of the nodes"):
            alive, _ = self._feed.lives(self._job.timeout)
        self._looks += 1
        return {id: self._looks for id in ids if id in alive}

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Return which nodes have not been heard of for so long that nothing of theirs may run."""
        with _errors("to hear of the nodes"):
            _, ended = self._feed.lives(self._job.timeout)
        why = "nothing was heard of it until its lease in etcd ran out"
        return {id: why for id in ids if id in ended}

    def forget(self, id: str) -> None:
        """See base class."""
        with self._lock:
            mine = self._leases.get(id, 0)
            self._leases[id] = None
        if mine:
            with _errors("to take this node out"):
                self._job.client.revoke(mine, timeout=self._job.timeout)

    def interrupt(self) -> None:
        """See base class."""
        self._feed.interrupt()

    def close(self) -> None:
        """See base class; the last node of a job takes the keys of the rounds along."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            mine = [lease for lease in self._leases.values() if lease]
            lived = bool(self._leases)
            self._leases = dict.fromkeys(self._leases)
        try:
            for lease in mine:
                self._job.client.revoke(lease, timeout=_GOODBYE)
            if lived:
                self._job.tidy_if_last(timeout=_GOODBYE)
        except EtcdError:
            pass  # nobody can be told any more; what is left ends by its lease
        finally:
            self._feed.interrupt()
            self._job.client.http.close()
            self._feed.close()


def _revision(token: Token) -> int:
    """Return the revision that a token names; -1, which is never, where it is none of ours."""
    return token if type(token) is int and token > 0 else -1


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Turn what etcd says into what a rendezvous raises."""
    try:
        yield
    except EtcdError as error:
        if error.code in (INVALID, EXHAUSTED) and "large" in str(error):
            raise RendezvousStateError(
                f"failed {what}: {error}; etcd takes 1.5 MB a request unless it is started with "
                "another --max-request-bytes"
            ) from error
        raise RendezvousConnectionError(f"failed {what}: {error}") from error


def connect_job(params: RendezvousParameters) -> EtcdJob:
    """Return the place of a job in the etcd that the parameters name; nothing is asked yet.

    Raises:
        ValueError: a value makes no sense.
        RendezvousError: as `check_credentials`.
    """
    timeout = min(timeout_option(params, "read_timeout", default=REACH), CALL)
    access = read_access(params, os.environ)
    check_credentials(access, params)
    return EtcdJob(EtcdClient(EtcdHttp(access)), read_prefix(params), params.run_id, timeout)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Make the backend, and the store that its rounds use.

    Raises:
        ValueError: a value makes no sense.
        RendezvousConnectionError: the endpoint is no etcd that can be used; the text says what was
            tried and what was answered.
    """
    job = connect_job(params)
    try:
        with _errors("to reach etcd"):
            reach = timeout_option(params, "read_timeout", default=REACH)
            job.client.txn([], [get(job.root)], timeout=reach)
    except BaseException:
        job.client.http.close()
        raise
    return EtcdRendezvousBackend(job), EtcdStore(job)


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create the handler of a node that meets the others in etcd.

    Raises:
        ValueError: a value makes no sense.
        RendezvousConnectionError: the endpoint is no etcd that can be used.
    """
    from regrow.rendezvous._dynamic import create_handler as create

    chosen = copy(params)
    if not {"keep_alive_interval", "keep_alive_max_attempt"} & params.config.keys():
        beats = {"keep_alive_interval": INTERVAL, "keep_alive_max_attempt": MISSES}
        chosen.config = {**params.config, **beats}
    backend, store = create_backend(params)
    try:
        return create(store, backend, chosen)
    except BaseException:
        backend.close()
        raise
