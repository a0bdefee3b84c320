"""Rendezvous over a store of torch, or over any store with the same methods.

The document is one key, `torch.rendezvous.<run id>`, replaced by the store's compare-and-set. Its
value is the document in base64, then a dot and a random suffix. So all values ever written differ,
and the value itself is the fencing token.

This module cannot use the store's own `wait` to watch the document. No other thread can end a
blocked `wait`, and a `wait` that times out writes two lines to the console. So a waiting node polls
the document, at growing pauses.

The connection is cloned, because all threads that share a TCPStore wait for each other. The program
that passed in the store may itself be blocked in a call of it. No call in this module blocks.

`create_backend` creates a store of torch for `--rdzv-conf store_type=tcp` (or `file`). This is for
programs that already have such a store, or must keep it. regrow's own store server is the default.
A TCPStore has no password, so any process that can reach its port can take part in the job. So a
TCPStore for several hosts is refused, unless the user confirms that only the job can reach it.

The first node on the endpoint's host serves the TCPStore. A node learns whether it has to serve by
trying to bind the address, not by comparing names. An address that can be bound belongs to this
host. A node that then finds the port taken connects to the process that holds it. If the endpoint
is a name, the node repeats this check until it reaches a store (`hosting`). The store ends with the
process that serves it. So at the end of a job this process stays until the others have left.

torch makes a reverse DNS lookup of both addresses of every new connection. While the serving
process waits for that answer, it answers no other node. With a slow name service, every node that
joins delays the heartbeats of all others. If the first lookup times out (after 5 s) and is
repeated, the delay is longer than a lease. There are two remedies: names of the hosts in
/etc/hosts, or regrow's own store.
"""

from __future__ import annotations

import binascii
import os
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from regrow.rendezvous.backends.c10d.c10d_handler import DEFAULT_PORT
from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousUsageError,
)
from regrow.rendezvous.peer.backend import LivenessRendezvousBackend, Token
from regrow.rendezvous.protocol.document import unseal
from regrow.rendezvous.protocol.state import watched
from regrow.store import StoreError, family_of, is_loopback
from regrow.utils import LONGEST_S, Backoff, call_in_thread, get_logger, poll_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.parameters import RendezvousParameters
    from regrow.store import Store

T = TypeVar("T")

_NOTHING = b"cmVncm93IGhhcyBub3RoaW5nIGhlcmU="
"""Stands for "no document", because `compare_set` cannot report that a key is missing."""
_PAUSES = 0.005, 0.25, 1.5  # first and longest seconds between two polls, and their growth
READ_TIMEOUT = 60  # seconds
_STAY = 10.0  # seconds for the other nodes to leave a job that is over
# More seconds for the server to identify itself; torch's own limit does not include them.
ANSWER = 2.0
_LEAST = 0.1  # seconds to reach the store; torch treats less than 1 ms as no limit
_PAUSE = 0.05  # seconds between two checks whether the other nodes have left
_ATTEMPT = 2.0  # seconds for one attempt to connect
_PAUSE_TO_CONNECT = 0.1  # seconds between two attempts

logger = get_logger(__name__)


class C10dRendezvousBackend(LivenessRendezvousBackend):
    """The document and the heartbeats of one job in a c10d store.

    Args:
        store: a c10d store, or a regrow store.
        run_id: the id of the job.
        serves: whether this process serves the store to the other nodes. If so, `close` waits until
            they have left a job that is over, for at most 10 s.

    Raises:
        RendezvousConnectionError: the store cannot be reached.
        ValueError: the run id is empty.
    """

    def __init__(self, store: Store, run_id: str, *, serves: bool = False) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._key = f"torch.rendezvous.{run_id}"
        self._interrupted = threading.Event()
        self._given = store
        self._serves = serves
        self._store = self._call(lambda: _own_connection(store))
        self._value()

    @property
    def name(self) -> str:
        """See base class."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        return self._decode(self._value())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        known = token if isinstance(token, bytes) else b"a token of another backend"
        old = _NOTHING if token is None else known
        mine = b"%b.%b" % (b64encode(state), os.urandom(8).hex().encode())
        value = self._call(lambda: self._store.compare_set(self._key, old, mine))
        now = self._decode(value)
        return None if now is None else (*now, value == mine)

    def wait_state(self, token: Token, timeout: float) -> None:
        """See base class."""
        old = token or _NOTHING
        backoff = Backoff(*_PAUSES, jitter=0.5)
        poll_until(lambda: self._value() != old, backoff, timeout, self._interrupted)

    def beat(self, id: str, count: int, lease: float) -> None:
        """See base class."""
        self._call(lambda: self._store.set(self._beat_of(id), str(count)))

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """See base class."""
        # Adding 0 is the only way to read a key that may be missing without blocking.
        counts = {id: self._call(lambda: self._store.add(self._beat_of(id), 0)) for id in ids}  # noqa: B023
        return {id: count for id, count in counts.items() if count}

    def forget(self, id: str) -> None:
        """See base class."""
        self._call(lambda: self._store.delete_key(self._beat_of(id)))

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted.set()

    def close(self) -> None:
        """See base class; the store that was passed in stays open."""
        self._interrupted.set()
        if self._serves:
            self._serves = False
            pause = Backoff(_PAUSE, _PAUSE)
            try:
                poll_until(self._others_have_left, pause, _STAY, threading.Event())
            except RendezvousError as error:
                logger.warning(
                    "ending without knowing whether the other nodes have left: %s", error
                )

    def _others_have_left(self) -> bool:
        """Return whether the job continues, or no node still has to leave it."""
        found = self.get_state()
        state = unseal(found[0]).state if found else None
        return state is None or state.closed is None or not watched(state)

    def _beat_of(self, id: str) -> str:
        return f"{self._key}/beat/{id}"

    def _value(self) -> bytes:
        # `get` would block on a store that was emptied.
        return self._call(lambda: self._store.compare_set(self._key, "", _NOTHING))

    def _decode(self, value: bytes) -> tuple[bytes, Token] | None:
        if value == _NOTHING:
            return None
        try:
            return b64decode(value.partition(b".")[0], validate=True), value
        except binascii.Error as error:
            raise RendezvousStateError(
                f"the state of the rendezvous is corrupt: the key {self._key!r} of "
                f"{type(self._given).__name__} is not in base64 ({error}); it begins with "
                f"{value[:60]!r}"
            ) from error

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (OSError, RuntimeError, StoreError, ValueError) as error:
            raise RendezvousConnectionError(
                f"the connection to the C10d store of the rendezvous ({type(self._given).__name__},"
                f" key {self._key!r}) has failed: {error}"
            ) from error


def _own_connection(store: Store) -> Store:
    """Return a handle on the store that does not wait for the calls of other handles."""
    clone = getattr(store, "clone", None)
    if clone is None:  # a store of regrow, where a blocked call delays no other, or an old torch's
        return store
    try:
        own: Store = clone()
    except RuntimeError:  # a store in Python without a clone, or one whose next call fails as well
        return store
    return own


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Create a store of torch, and the backend over it.

    Args:
        params: the options are `store_type`, `read_timeout` and `is_host`. `store_type` is "tcp"
            (the default) or "file"; the path of the file is the endpoint. `read_timeout` limits a
            call of a TCPStore, and the time to reach it, in seconds, default 60. `is_host` sets
            whether this process serves the TCPStore; without it, the process finds out.

    Raises:
        ValueError: an option is invalid.
        RendezvousUsageError: the store is for several hosts, and `insecure` is not set.
        RendezvousConnectionError: the store cannot be reached.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError(
            f"Invalid store type given. Currently only supports file and tcp. Got {kind!r}."
        )
    store, serves = (_file_store(params), False) if kind == "file" else _tcp_store(params)
    return C10dRendezvousBackend(store, params.run_id, serves=serves), store


def _tcp_store(params: RendezvousParameters) -> tuple[Store, bool]:
    """Return the store, and whether this process serves it."""
    from regrow.rendezvous.server.hosting import Tries, find_own
    from regrow.rendezvous.utils import parse_rendezvous_endpoints

    host, port = parse_rendezvous_endpoints(params.endpoint, DEFAULT_PORT)[0]  # it has no voters
    if not (is_loopback(host) or params.get_as_bool("insecure")):
        raise RendezvousUsageError(
            f"the TCPStore at {host}:{port} has no password, so any process that reaches it could "
            f"take part in the job. Start every node without store_type=tcp, and with "
            f"--rdzv-token-file ~/job.token (made once by: regrow token ~/job.token). If only this "
            f"job can reach the hosts, use --insecure"
        )
    timeout = params.get_as_int("read_timeout", READ_TIMEOUT)
    if timeout is None or timeout <= 0:
        raise ValueError(
            f"The read timeout must be a positive integer. Got {params.get('read_timeout')!r}."
        )
    from torch.distributed import TCPStore  # here, because the import takes seconds

    timeout = min(timeout, LONGEST_S)
    is_host = params.get_as_bool("is_host")
    literal = family_of(host) is not None
    tries, taken = Tries(timeout), ""
    while True:
        here = find_own(host, port, tries.look_up) is not None if is_host is None else is_host
        certain = here or literal or is_host is not None
        hosts, limit = here and not taken, max(tries.next(certain=certain), _LEAST)
        ends = time.monotonic() + limit
        try:
            if not hosts:
                _await_listener(host, port, limit)
                limit = max(ends - time.monotonic(), _LEAST)
            store = _within(
                limit + ANSWER,
                partial(
                    TCPStore,
                    host,
                    port,
                    is_master=hosts,
                    multi_tenant=bool(is_host),  # several nodes of one process may serve
                    wait_for_workers=False,
                    timeout=timedelta(seconds=limit),
                ),
            )
        except (OSError, RuntimeError, ValueError) as error:
            if hosts and is_host is None:  # another node on this host was faster
                taken = f", and could not serve one there: {error}".rstrip(".")
                continue
            if not tries.last:
                time.sleep(max(ends - time.monotonic(), 0.0))
                continue
            raise RendezvousConnectionError(
                f"the connection to the C10d store has failed: this node could not "
                f"{'serve' if hosts else 'reach'} a TCPStore at {host}:{port}: "
                f"{str(error).rstrip('.')}{tries.before}{taken}"
            ) from error
        store.set_timeout(timedelta(seconds=timeout))
        if hosts:
            logger.warning(
                "torch's TCPStore at %s:%s has no password: any process that reaches this port can "
                "take part in the job. regrow's own store (without store_type=tcp) has a password",
                host,
                port,
            )
        return store, hosts


def _await_listener(host: str, port: int, seconds: float) -> None:
    """Block until a server accepts connections at the address.

    torch must not connect before that, for two reasons. It connects in a thread of its own, which
    aborts the process if it still tries when the interpreter shuts down. And torch does not report
    the cause.

    Args:
        host: name or address of the server.
        port: TCP port.
        seconds: limit of the wait.

    Raises:
        OSError: no server accepts a connection in that time; has the error of the last attempt.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), max(min(left, _ATTEMPT), _LEAST)):
                return
        except OSError as error:
            if left <= _PAUSE_TO_CONNECT:
                raise OSError(f"no server accepts connections there: {error}") from error
        time.sleep(_PAUSE_TO_CONNECT)


def _within(seconds: float, make: Callable[[], Store]) -> Store:
    """Create a store in a thread, with a limit in seconds.

    torch has no limit of its own: it waits for a server that accepts the connection and never
    answers.
    """
    try:
        return call_in_thread(make, "regrow-tcp-store").result(seconds)
    except TimeoutError:
        raise TimeoutError("the server there accepts connections and does not answer") from None


def _file_store(params: RendezvousParameters) -> Store:
    import tempfile

    from torch.distributed import FileStore

    path = params.endpoint or os.path.join(tempfile.mkdtemp(prefix="regrow-"), "store")
    try:
        # A FileStore tries to open its file for minutes, and does not report the cause of a
        # failure.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        store: Store = FileStore(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(
            f"the connection to the C10d store has failed: {path} cannot be used: {error}"
        ) from error
    return store
