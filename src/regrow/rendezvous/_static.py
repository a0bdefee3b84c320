"""The rendezvous of nodes whose number and ranks the user has fixed.

One node needs nobody: its store is in its own memory, and no port is opened. With several, node
rank 0 runs the store server on the endpoint and the others connect to it, trying again until it is
there or the time is up, so the nodes may be started in any order. Then all meet (`_meeting`), and
node rank 0 tells the others on which port its worker rank 0 will listen.

What the endpoint's port is used for differs from torchrun: there the workers' store listens on it,
here the agents' does, and the workers' is another, agreed anew in every attempt.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from regrow.rendezvous._config import timeout_option
from regrow.rendezvous._credentials import NO_TOKEN, Credentials, credentials
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from regrow.rendezvous.utils import parse_rendezvous_endpoint
from regrow.store import (
    MemoryStore,
    PrefixStore,
    StoreAuthError,
    StoreConnectionError,
    StoreError,
    StoreTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store import ServerProcess, StoreClient, Tls
    from regrow.utils import PortReservation

TIMEOUT = 600.0
_TRY = 2.0  # seconds for one try to connect, between which an interrupt is looked at
_PAUSE = 0.2  # seconds between two tries


class StaticTCPRendezvous(PushingRendezvousHandler):
    """The handler of one of `world_size` nodes.

    Args:
        master_addr: name or address of node rank 0, as the others reach it.
        master_port: of one node: the port for the workers' store, None lets the agent choose; of
            several: the port on which the nodes meet.
        rank: this node's rank, which it keeps.
        world_size: number of nodes.
        run_id: the id of the job.
        timeout: seconds in which all nodes have to come to an attempt.
        token: the job's secret; needed for several nodes.
        tls: their certificates.
    """

    def __init__(
        self,
        master_addr: str,
        master_port: int | None,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: float,
        token: bytes | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout
        self._token = token
        self._tls = tls
        self._interrupted = threading.Event()
        self._server: ServerProcess | None = None
        self._client: StoreClient | None = None
        self._port: PortReservation | None = None

    @property
    def credentials(self) -> Credentials | None:
        """See base class."""
        return None if self._token is None else Credentials(self._token, self._tls)

    def get_backend(self) -> str:
        """See base class."""
        return "static"

    def get_run_id(self) -> str:
        """See base class."""
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._release_port()
        self._check_interrupted()
        return self._alone() if self.world_size == 1 else self._with_others()

    def _alone(self) -> RendezvousInfo:
        where = None
        if self.master_port is not None:
            where = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, MemoryStore()), self.rank, 1, where)

    def _with_others(self) -> RendezvousInfo:
        from regrow.rendezvous._meeting import meet

        deadline = time.monotonic() + self.timeout
        while True:
            client = self._connected(deadline)
            try:
                left = max(deadline - time.monotonic(), 0.001)
                meetings = PrefixStore(f"{self.run_id}/meetings", client)
                attempt = meet(meetings, self.rank, self.world_size, left)
                store = PrefixStore(f"{self.run_id}/{attempt}", client)
                return RendezvousInfo(store, self.rank, self.world_size, self._agree(store))
            except StoreConnectionError as error:
                # Node rank 0, and the server with it, was started again; or this is an interrupt.
                self._disconnect()
                self._check_interrupted()
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(
                        f"node rank {self.rank} lost the store at {self._endpoint()}: {error}"
                    ) from error

    def _agree(self, store: PrefixStore) -> RendezvousStoreInfo:
        port = None
        if self.rank == 0:
            from regrow.utils import PortReservation

            self._port = PortReservation()
            port = self._port.port
        return RendezvousStoreInfo.build(self.rank, store, self.master_addr, port)

    def _connected(self, deadline: float) -> StoreClient:
        if self._client is not None:
            return self._client
        if self._token is None:
            raise RendezvousError(NO_TOKEN)
        if self.rank == 0 and self._server is None:
            self._server = self._serve(self._token)
        self._client = self._connect(self._token, deadline)
        if self._interrupted.is_set():  # while it connected
            self._disconnect()
            self._check_interrupted()
        return self._client

    def _serve(self, token: bytes) -> ServerProcess:
        from regrow.store import start_server

        host = _address_to_listen_on(self.master_addr)
        try:
            return start_server(host, self.master_port or 0, token=token, tls=self._tls)
        except (OSError, StoreError) as error:
            raise RendezvousConnectionError(
                f"node rank 0 cannot serve the store on port {self.master_port} of {host}: {error};"
                f" choose another port with --master-port, on every node"
            ) from error

    def _connect(self, token: bytes, deadline: float) -> StoreClient:
        from regrow.store import connect

        while True:
            self._check_interrupted()
            left = max(deadline - time.monotonic(), 0.001)
            try:
                return connect(
                    self._endpoint(), token=token, timeout=min(left, _TRY), tls=self._tls
                )
            except (StoreConnectionError, StoreTimeout) as error:
                if time.monotonic() + _PAUSE >= deadline:
                    raise RendezvousConnectionError(
                        f"node rank {self.rank} could not reach node rank 0 at {self._endpoint()} "
                        f"within {self.timeout:g} s: {error}"
                    ) from error
            except StoreAuthError as error:  # it would be the same when tried again
                raise RendezvousError(
                    f"node rank {self.rank} may not use the store at {self._endpoint()}: {error}"
                ) from error
            except StoreError as error:
                raise RendezvousConnectionError(
                    f"node rank {self.rank} cannot use the store at {self._endpoint()}: {error}"
                ) from error
            self._interrupted.wait(_PAUSE)

    def _endpoint(self) -> str:
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{host}:{self.master_port}"

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise RendezvousGracefulExitError(f"node rank {self.rank} was told to stop")

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def is_closed(self) -> bool:
        """Return False: nodes whose number is fixed come and go together."""
        return False

    def set_closed(self) -> None:
        """Do nothing: see `is_closed`."""

    def num_nodes_waiting(self) -> int:
        """Return 0: there is no node that has no seat."""
        return 0

    def shutdown(self) -> bool:
        """See base class; on node rank 0 this ends the store server."""
        self._disconnect()
        self._release_port()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        return True

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class; nothing ever happens here that could be told."""
        return lambda: None

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted.set()
        client = self._client
        if client is not None:
            client.close()


def create_rdzv_handler(params: RendezvousParameters) -> StaticTCPRendezvous:
    """Create the handler; reads the keys `rank` and `timeout`, and those of the credentials.

    Raises:
        ValueError: rank or endpoint is missing or makes no sense.
        RendezvousError: there are several hosts, and no token.
    """
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError(
            "rank is absent in RendezvousParameters. Try add --node-rank to the cmd request"
        )
    if not 0 <= rank < params.max_nodes:
        raise ValueError(
            f"the node rank {rank} must be from 0 to {params.max_nodes - 1}: the job has "
            f"{params.max_nodes} node{'s' if params.max_nodes != 1 else ''}"
        )
    endpoint = params.endpoint.strip()
    alone = params.max_nodes == 1
    if not endpoint and not alone:
        raise ValueError(
            "endpoint is absent in RendezvousParameters. "
            "Try add --master-port and --master-addr to the cmd request"
        )
    addr, port = parse_rendezvous_endpoint(endpoint or "127.0.0.1", -1)
    if port == -1 and not alone:
        raise ValueError(
            f"Port is absent in endpoint: {endpoint}. Try launching with --master-port"
        )
    token, tls = (None, None) if alone else credentials(params, addr)
    return StaticTCPRendezvous(
        addr,
        port if port > 0 else None,
        rank,
        params.max_nodes,
        params.run_id,
        timeout_option(params, "timeout", default=TIMEOUT),
        token,
        tls,
    )


def _address_to_listen_on(addr: str) -> str:
    """Loopback when only this host can be meant; else every address, whatever names it has."""
    if addr == "localhost" or addr.startswith("127."):
        return "127.0.0.1"
    if addr == "::1":
        return addr
    return "::" if ":" in addr else "0.0.0.0"
