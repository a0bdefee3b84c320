"""Rendezvous for a fixed number of nodes with fixed ranks.

A single node needs no other process: its store is in its own memory, and no port is opened. Several
nodes meet in rounds like those of any other backend (`round_service`, `handler`). Node rank 0
serves the rounds on the endpoint. The other nodes try to connect until it answers or the timeout is
over, so the nodes may be started in any order.

Fixed nodes differ in two ways. Each node has the rank that the user gave it, and a second node with
that rank is refused. And no node can replace a node that is lost or leaves. The others are notified
at once, stop their workers, and are refused another round. A failure of workers leads to the next
round, with the same nodes, while the job's budget lasts.

The port of the endpoint has another use than in torchrun. There, the workers' store listens on it.
Here, the agents' store does, and the nodes agree on another port for the workers' store in every
attempt.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from regrow.rendezvous.backends.c10d.c10d_handler import way_to
from regrow.rendezvous.backends.solo import SoloRendezvousHandler, StaticSoloRendezvousHandler
from regrow.rendezvous.backends.solo import create_handler as create_solo
from regrow.rendezvous.errors import RendezvousConnectionError, RendezvousUsageError
from regrow.rendezvous.node.handler import DynamicRendezvousHandler
from regrow.rendezvous.parameters import RendezvousParameters, static_rank, timeout_option
from regrow.rendezvous.server.credentials import NO_TOKEN, Credentials, credentials
from regrow.rendezvous.settings import JOIN, RendezvousSettings, RendezvousTimeout, read_settings
from regrow.rendezvous.utils import parse_rendezvous_endpoint

if TYPE_CHECKING:
    from regrow.rendezvous.interface import RendezvousInfo
    from regrow.rendezvous.server.server_driver import ServerDriver
    from regrow.store import Tls


class StaticTCPRendezvous(DynamicRendezvousHandler):
    """The handler of one of `world_size` nodes.

    Args:
        master_addr: name or address of node rank 0, as the other nodes reach it.
        master_port: with several nodes, the port of the rendezvous. With one node, the port of the
            workers' store; None lets the agent choose.
        rank: this node's rank, which never changes.
        world_size: number of nodes; with 1, the constructor returns a
            `StaticSoloRendezvousHandler`.
        run_id: the id of the job.
        timeout: seconds in which node rank 0 has to be reached, and in which all nodes have to join
            an attempt.
        token: the job's secret; required with several nodes.
        tls: the certificates of the nodes.
        settings: settings of the rounds of several nodes; None: the defaults.
        local_addr: name or address of this node, for people; None: the name of this host.

    Raises:
        RendezvousUsageError: there are several nodes and no token.
        RendezvousConnectionError: this is node rank 0, and it cannot serve.
    """

    def __new__(
        cls,
        master_addr: str,
        master_port: int | None,
        rank: int,
        world_size: int,
        run_id: str,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Return a handler without a server if the world size is 1."""
        if world_size == 1:
            return StaticSoloRendezvousHandler(run_id, master_addr, master_port)
        return super().__new__(cls)

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
        settings: RendezvousSettings | None = None,
        local_addr: str | None = None,
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout
        if token is None:
            raise RendezvousUsageError(NO_TOKEN)
        if settings is None:
            limits = RendezvousTimeout(join=timedelta(seconds=timeout))
            settings = RendezvousSettings(run_id, world_size, world_size, limits)
        shared = Credentials(token, tls)
        self._server_driver = _driver(master_addr, master_port or 0, rank, shared, settings)
        super().__init__(
            self._server_driver,
            settings,
            backend="static",
            # Workers get the address of rank 0 as MASTER_ADDR; torchrun also passes it on as given.
            local_addr=master_addr if rank == 0 else local_addr or socket.gethostname(),
            node_rank=rank,
            credentials=shared,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class; RendezvousConnectionError also means that a node is lost for good."""
        if not self._server_driver.reached:
            try:
                self._server_driver.reach(self.timeout)
            except RendezvousConnectionError as error:
                raise RendezvousConnectionError(
                    f"node rank {self.rank} could not reach node rank 0: {error}"
                ) from error
        return super().next_rendezvous()

    def is_closed(self) -> bool:
        """See base class."""
        return self._server_driver.reached and super().is_closed()

    def interrupt(self) -> None:
        """See base class."""
        super().interrupt()
        if not self._server_driver.reached:
            self._server_driver.interrupt()


def _driver(
    addr: str, port: int, rank: int, shared: Credentials, settings: RendezvousSettings
) -> ServerDriver:
    """Return a driver that is not connected yet; on node rank 0, start serving the rounds."""
    from regrow.rendezvous.server.hosting import MeetingPlace, settle
    from regrow.rendezvous.server.server_driver import ServerDriver

    place = MeetingPlace(None, addr, None, False)
    if rank == 0:
        place = settle(addr, port, *shared, True)
        if place.server is None:
            raise RendezvousConnectionError(
                f"node rank 0 cannot serve the other nodes on port {port} of {addr}: another "
                f"process listens there; choose another port with --master-port, on every node"
            )
    where = way_to(place, addr, port, shared)
    return ServerDriver(where, settings, None, place.server, fixed=True)


def create_handler(
    params: RendezvousParameters,
) -> StaticTCPRendezvous | SoloRendezvousHandler:
    """Create the handler of one node of the backend `static`.

    Reads the option `rank`, and those of `read_settings` and of `credentials`.

    Args:
        params: the nodes, the endpoint and the options.

    Raises:
        ValueError: rank or endpoint is missing or invalid.
        RendezvousUsageError: there are several hosts, and no token.
        RendezvousConnectionError: this is node rank 0 of several, and it cannot serve.
    """
    if params.max_nodes == 1:
        return create_solo(params)
    rank = static_rank(params)
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "endpoint is absent in RendezvousParameters: give --master-addr and --master-port"
        )
    addr, port = parse_rendezvous_endpoint(endpoint, -1)
    if port <= 0:
        raise ValueError(
            f"Port is absent in endpoint: {endpoint}. Try launching with --master-port"
        )
    timeout = timeout_option(params, "join_timeout", "timeout", default=JOIN)
    token, tls = credentials(params, addr)
    settings = replace(read_settings(params), min_nodes=params.max_nodes)
    return StaticTCPRendezvous(
        addr,
        port,
        rank,
        params.max_nodes,
        params.run_id,
        timeout,
        token,
        tls,
        settings,
        params.local_addr,
    )
