"""Stores of torch's as the place where the nodes meet: `--rdzv-conf store_type=tcp` (or `file`).

They are there for programs that have one already, or must not change; regrow's own store server is
the default. There is no password on a TCPStore: whoever can reach its port can take part in the
job. So one for several hosts is refused unless the user says that nobody else can.

The TCPStore is served by the first node on the endpoint's host, which is found out by binding and
not by comparing names: an address that can be bound is this host's, and whoever then finds the
port taken connects to who has it. Where the endpoint is a name, that is found out again while no
store is reached (`_host`). The store ends with the process that serves it, so that one stays
at the end of a job until the others have left.

torch asks the name service for the names of both ends of every new connection, and while the
serving process waits for that answer, it answers nobody else. Where the name service is slow, every
node that comes so holds up the beats of all others, for longer than a lease if it has to be asked
twice (5 s). Names of the hosts in /etc/hosts avoid it; so does regrow's own store.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from regrow.rendezvous._c10d import DEFAULT_PORT
from regrow.rendezvous._envelope import unseal
from regrow.rendezvous._errors import RendezvousConnectionError, RendezvousError
from regrow.rendezvous._round import watched
from regrow.rendezvous._torch_c10d import C10dRendezvousBackend
from regrow.store._own_secret import is_loopback
from regrow.utils import get_logger
from regrow.utils._limits import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous._dynamic import DynamicRendezvousHandler
    from regrow.rendezvous._parameters import RendezvousParameters
    from regrow.store import Store

READ_TIMEOUT = 60  # seconds
_STAY = 10.0  # seconds for the other nodes to leave a job that is over
_ANSWER = 2.0  # seconds more for the server to say that it is one, of which torch takes no note
_LEAST = 0.1  # seconds to reach the store; torch takes less than 1 ms for no limit at all
_PAUSE = 0.05  # between two looks whether they have

logger = get_logger(__name__)


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Create a store of torch's, and the backend over it.

    Args:
        params: the configuration keys are `store_type` ("tcp", the default, or "file", whose path
            is the endpoint), `read_timeout` (seconds for a call of a TCPStore, and for reaching it,
            default 60) and `is_host` (whether this process serves the TCPStore; found out when it
            is not given).

    Raises:
        ValueError: an option makes no sense.
        RendezvousError: the store is one for several hosts, and `insecure` was not said.
        RendezvousConnectionError: it cannot be reached.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError(
            f"Invalid store type given. Currently only supports file and tcp. Got {kind!r}."
        )
    if kind == "file":
        store = _file_store(params)
        return C10dRendezvousBackend(store, params.run_id), store
    store, serves = _tcp_store(params)
    backend = _ServingBackend if serves else C10dRendezvousBackend
    return backend(store, params.run_id), store


class _ServingBackend(C10dRendezvousBackend):
    """The backend of the node whose process serves the store to the others."""

    _closed = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            deadline = time.monotonic() + _STAY
            while self._others_leave() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
        except RendezvousError as error:
            logger.warning("cannot see whether the other nodes have left: %s", error)
        super().close()

    def _others_leave(self) -> bool:
        """Return whether the job is over and nodes are still about to leave it."""
        found = self.get_state()
        if found is None:
            return False
        state = unseal(found[0]).state
        return state.closed is not None and bool(watched(state))


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create the handler of a node that meets the others in a store of torch's.

    Raises:
        ValueError: an option makes no sense.
        RendezvousError: the store cannot be reached.
    """
    from regrow.rendezvous._dynamic import create_handler

    backend, store = create_backend(params)
    return create_handler(store, backend, params)


def _tcp_store(params: RendezvousParameters) -> tuple[Store, bool]:
    """Return the store, and whether this process serves it."""
    from torch.distributed import TCPStore

    from regrow.rendezvous._host import Tries, find_own
    from regrow.rendezvous.utils import parse_rendezvous_endpoint

    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    if not (is_loopback(host) or params.get_as_bool("insecure")):
        raise RendezvousError(
            f"the TCPStore at {host}:{port} has no password, so whoever reaches it could take part "
            f"in the job. Start every node without store_type=tcp, and with --rdzv-token-file "
            f"~/job.token (made once by: regrow token ~/job.token). Where nobody else can reach "
            f"the hosts, --insecure does without"
        )
    timeout = params.get_as_int("read_timeout", READ_TIMEOUT)
    if timeout is None or timeout <= 0:
        raise ValueError(
            f"The read timeout must be a positive integer. Got {params.get('read_timeout')!r}."
        )
    timeout = min(timeout, LONGEST_S)
    asked = params.get_as_bool("is_host")
    tries, taken = Tries(host, asked, timeout), ""
    while True:
        here = find_own(host, port) is not None if asked is None else asked
        hosts, limit = here and not taken, max(tries.next(here=here), _LEAST)
        began = time.monotonic()
        try:
            store = _within(
                limit + _ANSWER,
                partial(
                    TCPStore,
                    host,
                    port,
                    is_master=hosts,
                    multi_tenant=bool(asked),  # several nodes of one process are all told to serve
                    wait_for_workers=False,
                    timeout=timedelta(seconds=limit),
                ),
            )
        except (OSError, RuntimeError, ValueError) as error:
            if hosts and asked is None:  # another node on this host was faster
                taken = f", and could not serve one there: {error}".rstrip(".")
                continue
            if not tries.last:
                time.sleep(max(began + limit - time.monotonic(), 0.0))
                continue
            raise RendezvousConnectionError(
                f"the connection to the C10d store has failed: this node could not "
                f"{'serve' if hosts else 'reach'} a TCPStore at {host}:{port}: "
                f"{str(error).rstrip('.')}{tries.before}{taken}"
            ) from error
        store.set_timeout(timedelta(seconds=timeout))
        if hosts:
            logger.warning(
                "this process serves torch's TCPStore at %s:%s, which has no password: whoever "
                "reaches that port can take part in the job. Without store_type=tcp regrow's own "
                "store is used, which has one",
                host,
                port,
            )
        return store, hosts


def _within(seconds: float, make: Callable[[], Store]) -> Store:
    """Make a store in a thread: torch waits for ever for whoever takes a connection and is mute."""
    made: SimpleQueue[Store | Exception] = SimpleQueue()

    def run() -> None:
        try:
            made.put(make())
        except Exception as error:  # noqa: BLE001 - raised below
            made.put(error)

    threading.Thread(target=run, name="regrow-tcp-store", daemon=True).start()
    try:
        found = made.get(timeout=seconds)
    except Empty:
        raise TimeoutError("what listens there takes connections and does not answer") from None
    if isinstance(found, Exception):
        raise found
    return found


def _file_store(params: RendezvousParameters) -> Store:
    from torch.distributed import FileStore

    path = params.endpoint
    if not path:
        import tempfile

        try:
            file, path = tempfile.mkstemp()
        except OSError as error:
            raise RendezvousError(
                f"the file for the C10d store cannot be created: {error}"
            ) from error
        os.close(file)
    try:
        # A FileStore tries to open its file for minutes and does not say what is wrong.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        store: Store = FileStore(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(
            f"the connection to the C10d store has failed: {path} cannot be used: {error}"
        ) from error
    return store
