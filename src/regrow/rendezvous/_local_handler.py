"""The handlers of nodes that meet in `LocalRounds`; the launcher's one node is the usual case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from regrow.rendezvous._config import timeout_option
from regrow.rendezvous._errors import RendezvousError
from regrow.rendezvous._local import LAST_CALL_TIMEOUT, LocalRounds, LostTouch
from regrow.rendezvous._news import Close, Join, Leave, NodesWaiting, RoundEnded, Seated
from regrow.store import PrefixStore, StoreClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regrow.utils import PortReservation

JOIN_TIMEOUT = 600.0  # seconds


class LocalRendezvousHandler(PushingRendezvousHandler):
    """One node's handle on `LocalRounds`.

    Args:
        rounds: the rounds of the job.
        backend: the name under which it was created.
        local_addr: the node's address, for MASTER_ADDR.
        node_rank: the rank the node asks for, if any.
        join_timeout: seconds in which a round has to form.
    """

    def __init__(
        self,
        rounds: LocalRounds,
        *,
        backend: str = "c10d",
        local_addr: str | None = None,
        node_rank: int | None = None,
        join_timeout: float = JOIN_TIMEOUT,
    ) -> None:
        self._rounds = rounds
        self._backend = backend
        self._join_timeout = join_timeout
        self._node = rounds.new_node(local_addr or "127.0.0.1", node_rank)
        self._token = 0
        self._interrupted = False
        self._port: PortReservation | None = None

    def get_backend(self) -> str:
        """See base class."""
        return self._backend

    def get_run_id(self) -> str:
        """See base class."""
        return self._rounds.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._record(f"The node '{self._node.id}' attempts to join the next round")
        try:
            info = self._join()
        except Exception as error:
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise
        self._record(
            f"The node '{self._node.id}' has joined round {self._token} as rank {info.rank} in a "
            f"world of size {info.world_size}",
            rank=info.rank,
        )
        return info

    def _join(self) -> RendezvousInfo:
        self._release_port()
        while True:
            try:
                seated, store = self._rounds.meet(
                    Join(self._node, self._token), self._join_timeout, lambda: self._interrupted
                )
            except LostTouch:
                self._node = self._rounds.new_node(self._node.addr, self._node.wanted)
                self._token = 0
                continue
            self._token = seated.round
            prefixed = PrefixStore(f"torch.rendezvous.{self.get_run_id()}.{seated.round}", store)
            try:
                where = self._agree_on_port(seated, prefixed)
            except StoreClosedError:  # the round is over already: on to the next
                continue
            return RendezvousInfo(prefixed, seated.rank, seated.world_size, where)

    def _agree_on_port(self, seated: Seated, store: PrefixStore) -> RendezvousStoreInfo:
        port = None
        if seated.rank == 0:
            from regrow.utils import PortReservation

            self._port = PortReservation()
            port = self._port.port
        return RendezvousStoreInfo.build(seated.rank, store, seated.leader, port)

    def _record(self, message: str, node_state: str = "RUNNING", rank: int | None = None) -> None:
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=self.get_run_id(),
            message=message,
            node_state=events.NodeState[node_state],
            name=type(self).__name__,
            rank=rank,
        )

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def is_closed(self) -> bool:
        """See base class."""
        return self._rounds.state.closed is not None

    def set_closed(self) -> None:
        """See base class."""
        self._rounds.post(Close(self._node.id))
        self._record(f"The node '{self._node.id}' has closed the rendezvous", "SUCCEEDED")

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return self._rounds.state.waiting

    def shutdown(self) -> bool:
        """See base class."""
        self.set_closed()
        self._rounds.post(Leave(self._node.id, self._token))
        self._release_port()
        return True

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class."""

        def listener(news: RoundEnded | NodesWaiting, ranks: Mapping[str, int]) -> None:
            if self._node.id not in ranks:
                return
            if isinstance(news, RoundEnded) and news.id == self._node.id:
                return  # its own doing
            if isinstance(news, NodesWaiting) and news.waiting == 0:
                return
            callback(news)

        return self._rounds.listen(listener)

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted = True
        self._rounds.wake()


def create_handler(params: RendezvousParameters) -> LocalRendezvousHandler:
    """Create the handler of a world of one node; takes the keys of torch's dynamic rendezvous.

    Raises:
        RendezvousError: the job has more nodes than one.
        ValueError: a timeout is no positive number of seconds.
    """
    if params.max_nodes != 1:
        raise RendezvousError(
            f"the rendezvous '{params.backend}' is for one node in this release, and the job has "
            f"{params.min_nodes} to {params.max_nodes}; for several nodes use the backend 'static' "
            f"with --node-rank, --master-addr and --master-port"
        )
    rounds = LocalRounds(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        last_call=timeout_option(params, "last_call_timeout", default=LAST_CALL_TIMEOUT),
    )
    return LocalRendezvousHandler(
        rounds,
        backend=params.backend,
        local_addr=params.local_addr,
        join_timeout=timeout_option(params, "join_timeout", "timeout", default=JOIN_TIMEOUT),
    )
