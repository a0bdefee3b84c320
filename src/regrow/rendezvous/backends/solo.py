"""The rendezvous of a job of one node.

No other node can join, leave or fail, so the whole state is in memory. It opens no port, asks no
name service, and never blocks. For the agent, rounds, restarts and closing work as with many nodes.
Rounds are numbered from 1, the job counts its failures, and closing is final.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regrow.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousUsageError,
)
from regrow.rendezvous.interface import (
    PushingRendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from regrow.rendezvous.parameters import static_rank, timeout_option
from regrow.rendezvous.utils import parse_rendezvous_endpoint
from regrow.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.parameters import RendezvousParameters
    from regrow.rendezvous.protocol.messages import Judged
    from regrow.utils import PortReservation


class SoloRendezvousHandler(PushingRendezvousHandler):
    """The handler of the only node of a job.

    Args:
        run_id: the id of the job.
        backend: the name under which the handler was created.
        local_addr: the node's address, for MASTER_ADDR.
    """

    def __init__(
        self, run_id: str, *, backend: str = "c10d", local_addr: str | None = None
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._addr = local_addr or "127.0.0.1"
        self._id = f"{self._addr}/{os.getpid()}/1"
        self._round = 0
        self._failures = 0
        self._store: MemoryStore | None = None
        """The keys of the running round; None between rounds."""
        self._port: PortReservation | None = None
        """Reserves the port for the workers' rank 0, so that no other program takes it."""
        self._closed: tuple[str, str] | None = None
        """Why the job is over, and the report of its failure if it has failed."""
        self._interrupted = False

    @property
    def max_nodes(self) -> int:
        """See base class."""
        return 1

    def get_backend(self) -> str:
        """See base class."""
        return self._backend

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._record(f"The node '{self._id}' attempts to join the next round")
        self._end_round()
        error: RendezvousError | None = None
        if self._interrupted:
            error = RendezvousGracefulExitError(f"node {self._id} was interrupted")
        elif self._closed is not None:
            error = self._closed_error(*self._closed)
        if error is not None:
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise error
        self._round += 1
        self._store = MemoryStore()
        self._record(
            f"The node '{self._id}' has joined round {self._round} as rank 0 in a world of size 1",
            rank=0,
        )
        return RendezvousInfo(
            self._store,
            0,
            1,
            self._workers_address(),
            self._round,
            self._failures,
        )

    def _workers_address(self) -> RendezvousStoreInfo | None:
        """Return the address for the workers' rank 0 to listen on; None: the agent chooses it."""
        from regrow.utils import PortReservation

        self._port = PortReservation()
        return RendezvousStoreInfo(self._addr, self._port.port)

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def report_failure(self, report: str) -> Judged | None:
        """See base class; charged at once, because no other node can be the cause."""
        from regrow.rendezvous.protocol.messages import Judged, RoundEnded

        if self._store is None:
            return None
        if self._closed is not None:
            why = f"its workers failed, and no round follows because {self._closed[0]}"
            self._close(why, report)
            raise self._closed_error(why, report)
        self._end_round()
        self._failures += 1
        cause = RoundEnded(self._round, self._id, "its workers failed", report)
        return Judged(self._round, True, self._failures, cause)

    def spend_restart(self) -> int | None:
        """See base class."""
        self._failures += 1
        return self._failures

    def fail(self, report: str) -> None:
        """See base class."""
        self._close("its workers failed for good", report)

    def leaving(
        self, why: str, *, full_grace: bool = False, keep: bool = False, until_left: bool = False
    ) -> None:
        """See base class."""
        self._end_round()

    def leave(self, why: str) -> None:
        """See base class."""
        self._end_round()

    def is_closed(self) -> bool:
        """See base class."""
        return self._closed is not None

    def set_closed(self) -> None:
        """See base class."""
        if self._closed is None:
            self._close("it closed the rendezvous", "")

    def _close(self, why: str, report: str) -> None:
        self._closed = why, report
        if report:
            self._end_round()
        self._record(f"The node '{self._id}' has closed the rendezvous", "SUCCEEDED")

    def _closed_error(self, why: str, report: str) -> RendezvousClosedError:
        return RendezvousClosedError(
            f"the rendezvous '{self._run_id}' is closed: node {self._id}: {why}",
            report=report,
            node=self._id,
            why=why,
        )

    def shutdown(self) -> bool:
        """See base class."""
        self.set_closed()
        self._end_round()
        return True

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class; never notifies, because there is no other node."""
        return lambda: None

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted = True

    def _end_round(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
        if self._port is not None:
            self._port.close()
            self._port = None


class StaticSoloRendezvousHandler(SoloRendezvousHandler):
    """The handler of the only node of a job with the backend `static`; never closes, as in torch.

    Args:
        run_id: the id of the job.
        master_addr: name or address on which the workers' rank 0 listens.
        master_port: the port for the workers' rank 0; None: the agent chooses address and port.
    """

    def __init__(self, run_id: str, master_addr: str, master_port: int | None) -> None:
        super().__init__(run_id, backend="static")
        self._where = None
        if master_port is not None:
            self._where = RendezvousStoreInfo(master_addr, master_port)

    def _workers_address(self) -> RendezvousStoreInfo | None:
        return self._where

    def _close(self, why: str, report: str) -> None:
        pass


def create_handler(params: RendezvousParameters) -> SoloRendezvousHandler:
    """Create the handler of a job of one node, for the backends `c10d` and `static`.

    It accepts the options of these backends.

    Raises:
        RendezvousUsageError: the job has several nodes.
        ValueError: an option is invalid.
    """
    if params.max_nodes != 1:
        raise RendezvousUsageError(
            f"this rendezvous is in the memory of one process, and the job has {params.min_nodes} "
            f"to {params.max_nodes} nodes"
        )
    # No limit applies here, but a wrong value is an error on one node as on several.
    timeout_option(params, "join_timeout", "timeout", default=1.0)
    if params.backend == "static":
        static_rank(params)
        addr, port = parse_rendezvous_endpoint(params.endpoint.strip() or "127.0.0.1", -1)
        return StaticSoloRendezvousHandler(params.run_id, addr, port if port > 0 else None)
    if params.config.keys() - {"timeout", "shutdown_timeout"}:
        from regrow.rendezvous.settings import read_settings

        read_settings(params)
    return SoloRendezvousHandler(
        params.run_id, backend=params.backend, local_addr=params.local_addr
    )
