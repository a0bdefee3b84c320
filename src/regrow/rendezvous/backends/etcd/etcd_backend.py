"""Rendezvous over etcd: the job survives the loss of any host, and of any one etcd member.

The nodes run the rounds themselves (`peer_driver`). The document is one key. Its fencing token is
the etcd revision at which the key last changed. A transaction compares this token and replaces the
document.

An etcd lease shows that a node is alive. It lasts as long as a node may be silent (`Bounds.lease`).
The clock is the monotonic clock of etcd's leader, and it starts when the last heartbeat arrives
there. A node that sees another node's lease expire also waits for the time that a kill takes
(`etcd_job`). The silent node counts from when it *sent* the heartbeat, and its guardian has killed
its workers by then. So an expired lease means the same as with other backends, where a node waits
that long by its own clock: no worker of the silent node may run any more, and its seat is free. It
does not prove that the node is dead. A new leader of etcd restarts all leases. So if the lost host
ran the leader, the loss is detected later: by the time since the last heartbeat, plus the election.

If etcd receives nothing from a node for the time of a lease, the node loses its seat, as usual.
Two defaults differ here, unless the user sets them. A node sends a heartbeat every half second and
may miss six, which is the same lease of 3 s. So a heartbeat that waits for the election of a new
leader is in time; an election takes one to two seconds with etcd's own defaults.

The keys for certificates in `--rdzv-conf` have several names:

- regrow's: `tls_ca`, `tls_cert`, `tls_key`, set by the flags `--rdzv-tls-...`;
- torch's: `ca_cert`, `ssl_cert`, `ssl_cert_key`;
- torch's older ones: `cacert`, `cert`, `key`.

Every user of a host can read a command line. So the password may also be in a file or in the
environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import ceil
from typing import TYPE_CHECKING

from regrow.rendezvous.backends.etcd.etcd_client import (
    Access,
    EtcdClient,
    EtcdError,
    EtcdTooLarge,
    get,
    put,
    unchanged,
)
from regrow.rendezvous.backends.etcd.etcd_job import LIFE, EtcdJob, EtcdStore, lease_id
from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousUsageError,
)
from regrow.rendezvous.parameters import RendezvousParameters, timeout_option
from regrow.rendezvous.peer.backend import LivenessRendezvousBackend, Token
from regrow.rendezvous.utils import check_host, parse_rendezvous_endpoint
from regrow.store import is_loopback

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

PREFIX = "/torch/elastic/rendezvous"
PORT = 2379
USER, PASSWORD, PASSWORD_FILE = (
    "REGROW_ETCD_USER",
    "REGROW_ETCD_PASSWORD",
    "REGROW_ETCD_PASSWORD_FILE",
)
REACH = 10.0
"""Seconds to reach etcd for the first time; the key `read_timeout` overrides it."""
CALL = 5.0
"""Longest time in seconds that etcd has to answer each later call."""
_LEAVE = 2.0
"""Seconds that etcd has to answer a node that leaves; the node's remaining keys expire with their
leases."""


class EtcdRendezvousBackend(LivenessRendezvousBackend):
    """The document of one job in etcd, and the leases of its nodes.

    Args:
        job: the keys of the job, from `connect_job`.
    """

    def __init__(self, job: EtcdJob) -> None:
        self._job = job
        self._client = job.client
        self._beating: set[str] = set()
        self._shown: set[str] = set()  # nodes that have set their key since their lease began
        self._left: set[str] = set()
        self._reads = 0
        self._renewed = float("-inf")
        self._closed = False

    @property
    def name(self) -> str:
        """See base class."""
        return "etcd"

    @property
    def local_addr(self) -> str:
        """This host's address on the route to etcd, found without a name service."""
        return self._client.local_addr

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class; the result includes every change made before the call."""
        known = self._job.document()
        revision = known.revision if known is not None else 0
        with _errors("to read the state"):
            outcome = self._client.txn(
                # Not "changed after this revision": an etcd that lost its data counts from 1 again.
                [unchanged(self._job.state, revision)],
                [],
                [get(self._job.state)],
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
                [unchanged(self._job.state, revision)],
                [put(self._job.state, state, self._job.lease)],
                [get(self._job.state)],
            )
        if outcome.found and outcome.found[0]:
            pair = outcome.found[0][0]
            mine = outcome.succeeded and pair.value == state
            return pair.value or b"", pair.revision, mine
        return (state, outcome.revision, True) if outcome.succeeded else None

    def heard_state(self) -> tuple[bytes, Token] | None:
        """See base class; when N nodes join, this saves N x N reads."""
        latest = self._job.document(current=True)
        return self.get_state() if latest is None else (latest.value or b"", latest.revision)

    def wait_state(self, token: Token, timeout: float) -> None:
        """See base class."""
        with _errors("to watch the state"):
            self._job.wait(0 if token is None else _revision(token), timeout)

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """See base class."""
        return self._client.within(seconds)

    def beat(self, id: str, count: int, lease: float) -> None:
        """See base class."""
        if id in self._left:
            return
        self._beating.add(id)
        key = f"{self._job.root}nodes/{id}"
        mine = lease_id(key)
        with _errors("to report that this node is alive"), self._client.within(lease):
            # The lease may exist without the key: the call that granted it may have timed out.
            if self._renew(mine) and id in self._shown:
                return
            self._shown.discard(id)
            self._client.grant(ceil(lease), mine)
            self._client.txn([], [put(key, b"%d" % count, mine)])
            self._shown.add(id)
            if id in self._left:  # another thread called `forget` meanwhile
                self._client.revoke(mine)

    def _renew(self, mine: int) -> bool:
        now = time.monotonic()
        ids = [mine] if now - self._renewed < LIFE / 10 else [mine, self._job.lease]
        alive = self._client.renew(ids)
        if len(ids) > 1:
            self._renewed = now
        return alive[0]

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """See base class; returns a new number at each call for a node with a live lease."""
        with _errors("to read the leases of the nodes"):
            alive, _ = self._job.lives()
        self._reads += 1
        return {id: self._reads for id in ids if id in alive}

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Return nodes silent for so long that none of their workers may run, with the reason."""
        with _errors("to read the leases of the nodes"):
            _, ended = self._job.lives()
        reason = "no heartbeat until its lease in etcd expired"
        return {id: reason for id in ids if id in ended}

    def forget(self, id: str) -> None:
        """See base class."""
        self._left.add(id)
        if id in self._beating:
            with _errors("to end the lease of this node"):
                self._client.revoke(lease_id(f"{self._job.root}nodes/{id}"))

    def interrupt(self) -> None:
        """See base class."""
        self._job.interrupt()

    def close(self) -> None:
        """See base class; the last node of a job also deletes the keys of the rounds."""
        if self._closed:
            return
        self._closed = True
        try:
            # If etcd does not answer, the calls would only take _LEAVE seconds.
            if self._beating and not self._client.unreachable:
                with self._client.within(_LEAVE):
                    for id in self._beating - self._left:
                        self.forget(id)
                    self._job.tidy_if_last()
        except (EtcdError, RendezvousError):
            pass  # the remaining keys expire with their leases
        finally:
            self._job.close()


def _revision(token: Token) -> int:
    """Return the revision in a token; -1, which never matches, if it is not an etcd token."""
    return token if type(token) is int and token > 0 else -1


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Convert etcd errors into rendezvous errors."""
    try:
        yield
    except EtcdTooLarge as error:
        raise RendezvousStateError(f"failed {what}: {error}") from error
    except EtcdError as error:
        raise RendezvousConnectionError(f"failed {what}: {error}") from error


def connect_job(params: RendezvousParameters) -> EtcdJob:
    """Create a job's connection to the etcd cluster in the parameters; sends no request yet.

    Raises:
        ValueError: an option is invalid.
        RendezvousError: see `check_credentials`.
    """
    timeout = timeout_option(params, "read_timeout", default=REACH)
    access = read_access(params, os.environ)
    check_credentials(access, params)
    return EtcdJob(EtcdClient(access, timeout), read_prefix(params), params.run_id)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Create the backend, and the store that its rounds use.

    Raises:
        ValueError: an option is invalid.
        RendezvousConnectionError: the endpoint is no usable etcd; the text names each attempt and
            its answer.
    """
    job = connect_job(params)
    try:
        with _errors("to reach etcd"):
            job.client.txn([], [get(job.root)])
    except BaseException:
        job.close()
        raise
    job.client.timeout = min(job.client.timeout, CALL)
    return EtcdRendezvousBackend(job), EtcdStore(job)


def read_prefix(params: RendezvousParameters) -> str:
    """Return the common prefix of the keys of all jobs, from `etcd_prefix`.

    Raises:
        ValueError: the prefix is empty.
    """
    prefix = str(params.get("etcd_prefix", PREFIX)).strip().rstrip("/")
    if not prefix:
        raise ValueError(
            "The rendezvous configuration option 'etcd_prefix' is empty or '/': give a prefix such "
            "as '/regrow', because regrow deletes keys by this prefix."
        )
    return prefix


def read_access(params: RendezvousParameters, environment: Mapping[str, str]) -> Access:
    """Read the endpoint and the security options; `REGROW_ETCD_*` replace missing options.

    Raises:
        ValueError: an option is invalid, or a file cannot be read. No text shows a password.
    """
    schemes, endpoints = _endpoints(params.endpoint)
    ca = _first(params, "tls_ca", "ca_cert", "cacert")
    cert = _first(params, "tls_cert", "ssl_cert", "cert")
    key = _first(params, "tls_key", "ssl_cert_key", "key")
    protocol = _first(params, "protocol")
    if protocol:
        schemes.add(protocol)
    elif not schemes:
        schemes.add("https" if ca or cert or key else "http")
    if len(schemes) > 1 or not schemes <= {"http", "https"}:
        raise ValueError(
            f"All members of etcd must have the same protocol, 'http' or 'https'. Got "
            f"{', '.join(sorted(schemes))} from the endpoint '{params.endpoint}' and the "
            "rendezvous configuration option 'protocol'."
        )
    secure = "https" in schemes
    if not secure and (ca or cert or key):
        raise ValueError(
            "The rendezvous configuration options for certificates need 'protocol=https'. Got "
            "'http'."
        )
    user = _first(params, "user") or environment.get(USER, "")
    password = _password(params, environment)
    if bool(user) != bool(password):
        has, lacks = ("user", "password") if user else ("password", "user")
        raise ValueError(
            f"etcd was given a {has} and no {lacks}: set the rendezvous configuration options "
            f"'user' and 'password_file', or {USER} and {PASSWORD} or {PASSWORD_FILE}."
        )
    return Access(endpoints, _context(ca, cert, key) if secure else None, user, password)


def check_credentials(access: Access, params: RendezvousParameters) -> None:
    """Refuse an etcd on another host if this job has no credentials for it.

    Raises:
        RendezvousUsageError: there is no user, no certificate and no key `insecure`.
    """
    shown = access.user or _first(params, "tls_cert", "ssl_cert", "cert")
    if shown or params.get_as_bool("insecure"):
        return
    if all(is_loopback(host) for host, _ in access.endpoints):
        return
    raise RendezvousUsageError(
        f"neither a user nor a certificate is set for the etcd at {params.endpoint}, so any "
        f"process that reaches it could take part in the job. Set {USER} and {PASSWORD_FILE}, or "
        f"start every node with --rdzv-tls-ca CA --rdzv-tls-cert CERT --rdzv-tls-key KEY. If only "
        f"this job can reach etcd, use --insecure"
    )


def _endpoints(text: str) -> tuple[set[str], tuple[tuple[str, int], ...]]:
    schemes: set[str] = set()
    found: dict[tuple[str, int], None] = {}
    if "@" in (text or ""):  # the text does not show the endpoint: it may contain a password
        raise ValueError(
            "The endpoint of etcd names a user. Set the rendezvous configuration options 'user' "
            f"and 'password_file', or {USER} and {PASSWORD} or {PASSWORD_FILE}."
        )
    for part in (text or "").split(","):
        scheme, separator, rest = part.strip().partition("://")
        if separator:
            schemes.add(scheme)
        host, port = parse_rendezvous_endpoint(rest.rstrip("/") if separator else scheme, PORT)
        check_host(host)
        found[host, port] = None
    return schemes, tuple(found)


def _first(params: RendezvousParameters, *names: str) -> str:
    return next((str(value) for name in names if (value := params.get(name))), "")


def _password(params: RendezvousParameters, environment: Mapping[str, str]) -> str:
    password, file = _first(params, "password"), _first(params, "password_file")
    if not password and not file:
        password, file = environment.get(PASSWORD, ""), environment.get(PASSWORD_FILE, "")
    if password or not file:
        return password
    from regrow.store import StoreAuthError, read_secret

    try:
        password = read_secret(file).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError, StoreAuthError) as error:
        raise ValueError(f"the file of etcd's password, {file!r}: {error}") from error
    if not password:
        raise ValueError(f"the file of etcd's password, {file!r}, is empty")
    return password


def _context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    from regrow.store import Tls

    if key and not cert:
        raise ValueError(
            f"etcd was given a private key ({key!r}) and no certificate that it belongs to: set "
            "the rendezvous configuration option 'ssl_cert'."
        )
    try:
        return Tls(cert or None, key or None, ca or None).client_context()
    except OSError as error:  # includes SSLError
        files = ", ".join(repr(file) for file in (ca, cert, key) if file)
        raise ValueError(f"certificates for etcd cannot be loaded ({files}): {error}") from error
