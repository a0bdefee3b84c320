"""The interface between the agent and whatever brings the nodes together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from regrow.rendezvous._credentials import Credentials
    from regrow.rendezvous._news import Judged, Seated
    from regrow.store import Store


@dataclass
class RendezvousStoreInfo:
    """Where the workers' rank 0 listens: what becomes MASTER_ADDR and MASTER_PORT."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    """Host name or address, as the other nodes reach it."""
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
            local_addr: this node's address as the others reach it. None: its full name, which
                asks the name service and may take seconds.
            server_port: the port; None picks one that is free now. Nobody holds it until rank 0
                listens: a caller that can should hold one itself (`regrow.utils.PortReservation`)
                and give it here.

        Raises:
            StoreError: rank 0 did not publish the address within the store's timeout.
        """
        if rank == 0:
            port = server_port or _free_port()
            addr = local_addr or _full_name()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr.encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port).encode())
            return RendezvousStoreInfo(addr, port)
        return RendezvousStoreInfo(
            store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode(),
            int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY)),
        )


class RendezvousInfo:
    """What a node got from a completed round; unpacks as `store, rank, world_size`.

    Args:
        store: the round's store; keys of other rounds cannot be seen in it.
        rank: this node's rank.
        world_size: number of nodes in the round.
        bootstrap_store_info: where the workers' rank 0 is to listen; None when the agent is to
            choose.
        round: the round's number, from 1, the same on all nodes: the fencing token of this
            membership. None where the rendezvous has no such number.
        failures: how many failures of workers the job has been charged with, on all nodes
            together. None where each agent has to count for itself.
    """

    __slots__ = ("_bootstrap_store_info", "_failures", "_rank", "_round", "_store", "_world_size")

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        bootstrap_store_info: RendezvousStoreInfo | None,
        round: int | None = None,
        failures: int | None = None,
    ) -> None:
        self._round = round
        self._failures = failures
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Store:
        """The store that the agents of the round share."""
        return self._store

    @property
    def rank(self) -> int:
        """This node's rank, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of nodes in the round."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where the workers' rank 0 is to listen, or None."""
        return self._bootstrap_store_info

    @property
    def round(self) -> int | None:
        """The round's number, from 1, or None: the fencing token of this membership."""
        return self._round

    @property
    def failures(self) -> int | None:
        """How many failures the job has been charged with, or None."""
        return self._failures

    def __iter__(self) -> Iterator[Any]:
        return iter((self._store, self._rank, self._world_size))

    def __repr__(self) -> str:
        return (
            f"RendezvousInfo(rank={self._rank}, world_size={self._world_size}, "
            f"bootstrap_store_info={self._bootstrap_store_info!r}, round={self._round}, "
            f"failures={self._failures})"
        )


def info_of(seated: Seated, run_id: str, store: Store) -> RendezvousInfo:
    """Return what a node got from a round that seated it; `store` holds the keys of all rounds."""
    from regrow.store import PrefixStore

    return RendezvousInfo(
        PrefixStore(f"torch.rendezvous.{run_id}.{seated.round}", store),
        seated.rank,
        seated.world_size,
        RendezvousStoreInfo(seated.leader, seated.port),
        seated.round,
        seated.failures,
    )


class RendezvousHandler(ABC):
    """One node's way to meet the others, round after round."""

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

        A node that is in a complete round leaves it by this call, and ends it for everyone.

        Raises:
            RendezvousClosedError: the rendezvous is closed.
            RendezvousConnectionError: the other nodes cannot be reached.
            RendezvousStateError: the shared state is corrupt.
            RendezvousTimeoutError: the round did not form on time.
            RendezvousGracefulExitError: this node is not needed, or was interrupted.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the rendezvous is closed, as far as this node has heard."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous for everyone, for good."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round and would have a seat in it."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the job; nodes meet those of the same id only."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous and give back what it holds; return whether that worked."""


class PushingRendezvousHandler(RendezvousHandler):
    """A handler that tells the agent what happens, so that nobody has to ask again and again.

    All of regrow's own handlers are; a plug-in's may be.
    """

    @abstractmethod
    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """Be told when the current round should give way to the next one.

        Args:
            callback: called from whichever thread learns of it; it must neither block nor raise.
                With a `RoundEnded` (of this node's round, by another's doing, or because touch
                with the others was lost), a `NodesWaiting`, a `Judged` (only where it corrects the
                cause of a `RoundEnded`), or a `RoundClosed`; the text of each says why.

        Returns:
            A function that ends the subscription.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End a blocked `next_rendezvous`, and any later one, with RendezvousGracefulExitError.

        Callable from any thread.
        """

    # What a rendezvous of one node, or one that knows no more than torch's, need not do.

    @property
    def bounds(self) -> Mapping[str, float]:
        """What it promises, in seconds: from what happens, as words, to how soon it is acted on."""
        return {}

    @property
    def credentials(self) -> Credentials | None:
        """What nodes prove to each other; None where that is left to the place where they meet."""
        return None

    def report_failure(self, report: str) -> Judged | None:
        """Tell all that this node's workers have failed, and block until that is judged.

        It ends the round for everyone. The next call is `next_rendezvous` or `fail`.

        Args:
            report: what failed, as the other nodes are to show it.

        Returns:
            The judgement; None where each agent judges for itself, and where this node's round
            was over already, so that nobody is charged.

        Raises:
            RendezvousError: as `next_rendezvous`.
        """
        return None

    def fail(self, report: str) -> None:
        """Close the rendezvous because the job has failed for good; tell everyone the report."""
        self.set_closed()

    def leaving(self, why: str) -> None:
        """Tell all that this node stops its workers and will go; `shutdown` or `leave` follows.

        It does not block, since the workers' grace begins when it returns, and failing to tell is
        no error.
        """

    def leave(self, why: str) -> None:
        """Give this node's seat back, now that its workers have ended; the job goes on."""

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """Be told how long this node may run its workers without hearing more.

        Whoever cannot renew its lease stops its workers before others may take their place.

        Args:
            renewed: called with a time on the monotonic clock (seconds), at once and whenever it
                moves on, from any thread; it must neither block nor raise. Before the first beat
                of a seat is answered, and once the seat was given up, the time is over. Never
                called where there is no lease.

        Returns:
            A function that ends it.
        """
        return lambda: None


def _free_port() -> int:
    from regrow.utils import PortReservation

    with PortReservation() as reservation:
        return reservation.port


def _full_name() -> str:
    import socket

    return socket.getfqdn()
