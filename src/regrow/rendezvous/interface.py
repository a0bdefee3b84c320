"""The interface between the agent and a rendezvous."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from regrow.rendezvous.protocol.messages import Departed, Judged, Seated
    from regrow.rendezvous.server.credentials import Credentials
    from regrow.store import Store


@dataclass
class RendezvousStoreInfo:
    """The address on which the workers' rank 0 listens; it becomes MASTER_ADDR and MASTER_PORT."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    """Host name or address by which the other nodes reach rank 0."""
    master_port: int
    """TCP port."""

    @staticmethod
    def build(
        rank: int,
        store: Store,
        local_addr: str | None,
        server_port: int | None = None,
    ) -> RendezvousStoreInfo:
        """Agree on the address: rank 0 publishes it in the round's store, the others read it.

        Args:
            rank: this node's rank in the round.
            store: the round's store; it must hold no keys of an older round.
            local_addr: this node's address for the other nodes. None: its full name; this queries
                the name service, which may take seconds.
            server_port: the port; None picks a port that is free now. No process holds that port
                until rank 0 listens. If possible, the caller should hold a port itself
                (`regrow.utils.PortReservation`) and pass it here.

        Raises:
            StoreError: rank 0 did not publish the address within the store's timeout.
        """
        if rank == 0:
            from socket import getfqdn

            from regrow.utils import PortReservation

            with PortReservation() as free:
                port = server_port or free.port
            addr = local_addr or getfqdn()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr.encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port).encode())
            return RendezvousStoreInfo(addr, port)
        return RendezvousStoreInfo(
            store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode(),
            int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RendezvousInfo:
    """The result of a completed round for one node; unpacks as `store, rank, world_size`."""

    store: Store = field(repr=False)
    """The store that the agents of the round share; it hides the keys of other rounds."""
    rank: int
    """This node's rank, from 0."""
    world_size: int
    """The number of nodes in the round."""
    bootstrap_store_info: RendezvousStoreInfo | None
    """The address on which the workers' rank 0 has to listen; None if the agent has to choose."""
    round: int | None = None
    """The round's number, from 1, the same on all nodes: the fencing token of this membership. None
    if the rendezvous has no such number."""
    failures: int | None = None
    """How many worker failures the job has been charged with, on all nodes together. None if each
    agent counts its own failures."""
    departed: tuple[Departed, ...] = field(default=(), repr=False)
    """The nodes of the previous round that are lost or have left, with their ranks in that
    round."""
    successors: tuple[str, ...] = field(default=(), repr=False)
    """Addresses of the first node ranks after 0, at most three."""
    joined: tuple[str, ...] = field(default=(), repr=False)
    """Ids of the first nodes that were not in the previous round, at most 16."""
    first_ranks: tuple[str, ...] = field(default=(), repr=False)
    """Ids of the nodes with the first ranks, at most five."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.store, self.rank, self.world_size))

    @property
    def all_joined(self) -> bool:
        """Whether no node was in the previous round, which was one of an earlier run of the job.

        Also true if so many nodes have joined that `joined` lacks some.
        """
        from regrow.rendezvous.protocol.messages import MOST_JOINED

        return len(self.joined) >= min(self.world_size, MOST_JOINED)


def info_of(seated: Seated, run_id: str, store: Store) -> RendezvousInfo:
    """Return the result of a round for a seated node; `store` holds the keys of all rounds."""
    from regrow.store import PrefixStore

    return RendezvousInfo(
        PrefixStore(f"torch.rendezvous.{run_id}.{seated.round}", store),
        seated.rank,
        seated.world_size,
        RendezvousStoreInfo(seated.leader, seated.port),
        seated.round,
        seated.failures,
        seated.departed,
        seated.successors,
        seated.joined,
        seated.first_ranks,
    )


class RendezvousHandler(ABC):
    """One node's interface to the rendezvous, round after round."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name under which the handler's creator is registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may connect to the round's store as c10d clients (regrow's: never)."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and block until it is complete with this node in it.

        If the node is in a complete round, this call leaves that round and ends it for all nodes.

        Raises:
            RendezvousClosedError: the rendezvous is closed.
            RendezvousConnectionError: the other nodes cannot be reached.
            RendezvousStateError: the shared state is corrupt.
            RendezvousTimeoutError: the round did not form in time.
            RendezvousGracefulExitError: this node is not needed, or was interrupted.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the rendezvous is closed, according to the latest state on this node."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous for all nodes; this is final.

        Raises:
            RendezvousStateError: this node is not a member of the round, so it may not end the job.
            RendezvousError: the other nodes cannot be reached.
        """

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round and would have a seat in it."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the job; only nodes with the same id meet."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous and release its resources.

        A node that is not a member of the round (refused or evicted) leaves without closing.

        Returns:
            Whether closing succeeded.
        """


class PushingRendezvousHandler(RendezvousHandler):
    """A handler that notifies the agent of changes, so that the agent does not poll.

    All of regrow's own handlers are of this class, and a plug-in's handler may be. `foreign.py`
    adapts any other handler.
    """

    pushes = True
    """Whether `subscribe` reports anything."""

    @abstractmethod
    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """Subscribe to notifications about the current round.

        Args:
            callback: called from any thread; it must neither block nor raise. Its argument is one
                of the following, with the reason as its text:

                - a `RoundEnded`: this node's round ended because of another node, or because the
                  connection to the other nodes was lost;
                - a `NodesWaiting`, a `LeavingAnnounced`;
                - a `RestartSpent`;
                - a `Judged`, only if it corrects the cause of a `RoundEnded`;
                - a `RoundClosed`;
                - a `ServerRestarted`: the store server on this node has ended; the text shows
                  whether another one serves;
                - a `ServersChanged`: another host serves, other hosts may take over, or none may.

        Returns:
            A function that ends the subscription.
        """
        return lambda: None

    @abstractmethod
    def interrupt(self) -> None:
        """End a blocked `next_rendezvous`, and any later one, with RendezvousGracefulExitError.

        Any thread may call this method.
        """

    _addr = ""
    """This node's address in its events; empty: the name of this host."""

    def _record(self, message: str, node_state: str = "RUNNING", rank: int | None = None) -> None:
        """Record an event of this node; see `regrow.events.construct_and_record_rdzv_event`."""
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=self.get_run_id(),
            message=message,
            node_state=events.NodeState[node_state],
            name=type(self).__name__,
            hostname=self._addr,
            rank=rank,
        )

    # Defaults for a rendezvous of one node, or with torch's interface only.

    @property
    def bounds(self) -> Mapping[str, float]:
        """Guaranteed time limits in seconds, by a text that names the event and the reaction."""
        return {}

    @property
    def host(self) -> str:
        """The host of this node, as other nodes name it."""
        from socket import gethostname

        return gethostname()

    @property
    def max_nodes(self) -> int | None:
        """The maximum number of nodes in a round; None: not known."""
        return None

    def is_served_by(self, addr: str) -> bool:
        """Return whether the server of the rendezvous runs on the host with this address."""
        return False

    @property
    def credentials(self) -> Credentials | None:
        """The credentials of this node; None if etcd or the directory handles them."""
        return None

    def report_failure(self, report: str) -> Judged | None:
        """Report to all nodes that this node's workers have failed; block until the verdict.

        This ends the round for all nodes. The next call is `next_rendezvous` or `fail`.

        Args:
            report: description of the failure, for the other nodes to show.

        Returns:
            The verdict. None if each agent decides for itself. Also None if this node's round was
            over already, so that the job is not charged.

        Raises:
            RendezvousError: see `next_rendezvous`.
        """
        return None

    def spend_restart(self) -> int | None:
        """Charge the job with the failure of one worker, which is replaced in the running round.

        Returns:
            How many failures the job has been charged with on all nodes, including this one. None
            if each agent counts its own failures.

        Raises:
            RendezvousError: the round is over, or the other nodes cannot be reached. The job may
                have been charged all the same.
        """
        return None

    def fail(self, report: str) -> None:
        """Close the rendezvous after a final failure, and send the report to all nodes."""
        self.set_closed()

    def leaving(
        self, why: str, *, full_grace: bool = False, keep: bool = False, until_left: bool = False
    ) -> None:
        """Notify all nodes that this node stops its workers and will leave.

        `shutdown` or `leave` follows. This method does not block, because the workers' grace begins
        when it returns. A failed notification is not an error.

        Args:
            why: the reason, for the other nodes to show.
            full_grace: whether the other nodes give their workers the whole `--shutdown-timeout`.
            keep: whether workers that can go on in the next round live on, on the other nodes too.
            until_left: whether the round goes on until this node has left, if enough nodes stay.
        """

    def leave(self, why: str) -> None:
        """Release this node's seat after its workers have ended; the job continues."""

    def outlast(self, limit: float) -> None:
        """Make `leave` block until the other nodes have also left.

        Args:
            limit: seconds after which `leave` assumes that the others continue without this node.
        """

    @property
    def others(self) -> int | None:
        """How many other nodes took part when this node left, or stopped waiting.

        None: not known.
        """
        return None

    @property
    def serves(self) -> bool:
        """Whether the nodes meet at a server that this node has started."""
        return False

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """Report until when this node may run its workers without a further answer.

        A node that cannot renew its lease stops its workers before other nodes may take its seat.

        Args:
            renewed: called with the end of the lease on the monotonic clock (seconds), at once and
                at each extension. It may be called from any thread, and must neither block nor
                raise. The time is in the past before the first heartbeat of a seat is answered, and
                after the seat was lost. Never called if there is no lease.

        Returns:
            A function that ends the reports.
        """
        return lambda: None
