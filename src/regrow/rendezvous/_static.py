"""The rendezvous of nodes whose number and ranks the user has fixed.

One node needs nobody: its store is in its own memory, and no port is opened. Several meet in rounds
as any others do (`_service`, `_dynamic`): node rank 0 serves them on the endpoint, and the others
connect to it, trying again until it is there or the time is up, so the nodes may be started in any
order. What is fixed shows in two places. Each node has the rank that it was given, and a second one
with that rank is refused. And a node that is lost, or leaves, cannot be replaced: the others are
told at once, stop their workers, and are refused another round. A failure of workers is healed in
the next round, of the same nodes, as long as the job's budget lasts.

What the endpoint's port is used for differs from torchrun: there the workers' store listens on it,
here the agents' does, and the workers' is another, agreed anew in every attempt.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from regrow.rendezvous._config import timeout_option
from regrow.rendezvous._credentials import NO_TOKEN, Credentials, credentials
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from regrow.rendezvous._parameters import RendezvousParameters
from regrow.rendezvous.utils import parse_rendezvous_endpoint
from regrow.store import MemoryStore, PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regrow.rendezvous._by_server import ServerDriver
    from regrow.rendezvous._dynamic import DynamicRendezvousHandler
    from regrow.rendezvous._news import Judged
    from regrow.rendezvous._settings import RendezvousSettings
    from regrow.store import Tls

TIMEOUT = 600.0


class StaticTCPRendezvous(PushingRendezvousHandler):
    """The handler of one of `world_size` nodes.

    Args:
        master_addr: name or address of node rank 0, as the others reach it.
        master_port: of one node: the port for the workers' store, None lets the agent choose; of
            several: the port on which the nodes meet.
        rank: this node's rank, which it keeps.
        world_size: number of nodes.
        run_id: the id of the job.
        timeout: seconds in which node rank 0 has to be reached, and in which all nodes have to come
            to an attempt.
        token: the job's secret; needed for several nodes.
        tls: their certificates.
        settings: of the rounds of several nodes; None: the defaults.
        local_addr: name or address of this node, for people; None: the name of this host.

    Raises:
        RendezvousError: several nodes, and no token.
        RendezvousConnectionError: this is node rank 0, and it cannot serve.
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
        settings: RendezvousSettings | None = None,
        local_addr: str | None = None,
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout
        self._interrupted = False
        self._all: DynamicRendezvousHandler | None = None
        if world_size == 1:
            return
        if token is None:
            raise RendezvousError(NO_TOKEN)
        from regrow.rendezvous._dynamic import DynamicRendezvousHandler

        settings = settings or _defaults(run_id, world_size, timeout)
        shared = Credentials(token, tls)
        self._driver = _driver(master_addr, master_port or 0, rank, shared, settings)
        self._reached = False
        self._all = DynamicRendezvousHandler(
            self._driver,
            settings,
            backend="static",
            # The workers get rank 0's as MASTER_ADDR, and torchrun's get it as it was given.
            local_addr=master_addr if rank == 0 else local_addr or socket.gethostname(),
            node_rank=rank,
            credentials=shared,
        )

    @property
    def credentials(self) -> Credentials | None:
        """See base class."""
        return self._all.credentials if self._all else None

    @property
    def bounds(self) -> Mapping[str, float]:
        """See base class."""
        return self._all.bounds if self._all else {}

    def get_backend(self) -> str:
        """See base class."""
        return "static"

    def get_run_id(self) -> str:
        """See base class."""
        return self.run_id

    # --- rounds

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class; RendezvousConnectionError: or a node is lost, so there is no other."""
        if self._all is None:
            return self._alone()
        if not self._reached:
            self._reach()
        return self._all.next_rendezvous()

    def _alone(self) -> RendezvousInfo:
        if self._interrupted:
            raise RendezvousGracefulExitError(f"node rank {self.rank} was told to stop")
        where = None
        if self.master_port is not None:
            where = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, MemoryStore()), self.rank, 1, where)

    def _reach(self) -> None:
        try:
            self._driver.reach(self.timeout)
        except RendezvousConnectionError as error:
            raise RendezvousConnectionError(
                f"node rank {self.rank} could not reach node rank 0: {error}"
            ) from error
        self._reached = True

    def num_nodes_waiting(self) -> int:
        """Return 0: there is no node that has no seat."""
        return 0

    # --- failures, and leaving

    def report_failure(self, report: str) -> Judged | None:
        """See base class."""
        return self._all.report_failure(report) if self._all else None

    def fail(self, report: str) -> None:
        """See base class."""
        if self._all is not None:
            self._all.fail(report)

    def leaving(self, why: str) -> None:
        """See base class."""
        if self._all is not None:
            self._all.leaving(why)

    def leave(self, why: str) -> None:
        """See base class; the others cannot go on."""
        if self._all is not None:
            self._all.leave(why)

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See base class."""
        return self._all.keep_lease(renewed) if self._all else lambda: None

    # --- the end

    def is_closed(self) -> bool:
        """See base class; False for one node, which nobody else could close it for."""
        return self._met() and self._all is not None and self._all.is_closed()

    def set_closed(self) -> None:
        """See base class; of one node, nothing happens."""
        if self._met() and self._all is not None:
            self._all.set_closed()

    def shutdown(self) -> bool:
        """See base class."""
        if self._all is None:
            return True
        if not self._met():  # nobody is there who would have to be told
            self._all.leave("it never met the others")
            return True
        return self._all.shutdown()

    def _met(self) -> bool:
        return self._all is not None and self._reached

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class; nothing ever happens to one node that could be told."""
        return self._all.subscribe(callback) if self._all else lambda: None

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted = True
        if self._all is not None:
            self._all.interrupt()
            if not self._reached:
                self._driver.interrupt()


def _driver(
    addr: str, port: int, rank: int, shared: Credentials, settings: RendezvousSettings
) -> ServerDriver:
    """Return the line to the rounds, which is not connected yet; node rank 0 serves them."""
    from regrow.rendezvous._by_server import ServerDriver
    from regrow.rendezvous._host import settle
    from regrow.rendezvous._line import Where
    from regrow.store._sockets import endpoint_of

    token, tls = shared
    server, reach = None, addr
    if rank == 0:
        server, reach, _, _ = settle(addr, port, token, tls, True)
        if server is None:
            raise RendezvousConnectionError(
                f"node rank 0 cannot serve the other nodes on port {port} of {addr}: somebody "
                f"listens there already; choose another port with --master-port, on every node"
            )
        if tls is not None and reach != addr:
            tls = replace(tls, server_hostname=addr)
    where = Where(endpoint_of(reach, port), token, tls)
    return ServerDriver(where, settings, None, server, fixed=True)


def _defaults(run_id: str, nodes: int, timeout: float) -> RendezvousSettings:
    from datetime import timedelta

    from regrow.rendezvous import _settings

    limits = _settings.RendezvousTimeout(join=timedelta(seconds=timeout))
    beat = timedelta(seconds=_settings.KEEP_ALIVE)
    return _settings.RendezvousSettings(run_id, nodes, nodes, limits, beat, _settings.MISSES)


def create_rdzv_handler(params: RendezvousParameters) -> StaticTCPRendezvous:
    """Create the handler; reads the key `rank`, and those of `read_settings` and of `credentials`.

    Raises:
        ValueError: rank or endpoint is missing or makes no sense.
        RendezvousError: there are several hosts, and no token.
        RendezvousConnectionError: this is node rank 0 of several, and it cannot serve.
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
    if port <= 0 and not alone:
        raise ValueError(
            f"Port is absent in endpoint: {endpoint}. Try launching with --master-port"
        )
    timeout = timeout_option(params, "join_timeout", "timeout", default=TIMEOUT)
    token, tls, settings = None, None, None
    if not alone:
        from regrow.rendezvous._settings import read_settings

        token, tls = credentials(params, addr)
        settings = replace(read_settings(params), min_nodes=params.max_nodes)
    return StaticTCPRendezvous(
        addr,
        port if port > 0 else None,
        rank,
        params.max_nodes,
        params.run_id,
        timeout,
        token,
        tls,
        settings,
        params.local_addr,
    )
