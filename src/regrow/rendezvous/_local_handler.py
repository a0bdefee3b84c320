"""The handlers of nodes that meet in `LocalRounds`; the launcher's one node is the usual case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousInfo,
    info_of,
)
from regrow.rendezvous._config import timeout_option
from regrow.rendezvous._errors import RendezvousError
from regrow.rendezvous._local import LocalRounds, LostTouch
from regrow.rendezvous._news import (
    Close,
    Effect,
    Failed,
    Join,
    Judged,
    Leave,
    Leaving,
    Node,
    NodesWaiting,
    RoundClosed,
    RoundEnded,
)
from regrow.rendezvous._parameters import RendezvousParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous._round import Round
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
        self._addr = local_addr or "127.0.0.1"
        self._wanted = node_rank
        self._id = rounds.new_id(self._addr)
        self._token = 0
        self._ended: RoundEnded | None = None
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
        self._record(f"The node '{self._id}' attempts to join the next round")
        try:
            info = self._join()
        except Exception as error:
            self._release_port()
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise
        self._record(
            f"The node '{self._id}' has joined round {self._token} as rank {info.rank} in a "
            f"world of size {info.world_size}",
            rank=info.rank,
        )
        return info

    def _join(self) -> RendezvousInfo:
        from regrow.utils import PortReservation

        self._release_port()
        self._port = PortReservation()
        while True:
            node = Node(self._id, self._addr, self._wanted, self._port.port)
            join = Join(node, self._token)
            try:
                seated, store = self._rounds.meet(
                    join, self._join_timeout, lambda: self._interrupted
                )
            except LostTouch:
                self._id, self._token = self._rounds.new_id(self._addr), 0
                continue
            self._token = seated.round
            if seated.rank:
                self._release_port()
            return info_of(seated, self.get_run_id(), store)

    def report_failure(self, report: str) -> Judged | None:
        """See base class."""
        failed = Failed(self._id, self._token, report)
        return self._rounds.judge(failed, lambda: self._interrupted)

    def fail(self, report: str) -> None:
        """See base class."""
        self._close("its workers failed for good", report)

    def leaving(self, why: str) -> None:
        """See base class."""
        self._rounds.post(Leaving(self._id, self._token, why))

    def leave(self, why: str) -> None:
        """See base class."""
        self._rounds.post(Leave(self._id, self._token, why))
        self._release_port()

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
        self._close("it closed the rendezvous", "")

    def _close(self, why: str, report: str) -> None:
        self._rounds.post(Close(self._id, why, report))
        self._record(f"The node '{self._id}' has closed the rendezvous", "SUCCEEDED")

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return self._rounds.state.waiting

    def shutdown(self) -> bool:
        """See base class."""
        self.set_closed()
        self._rounds.post(Leave(self._id, self._token))
        self._release_port()
        return True

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class."""

        def listener(news: Effect, before: Round) -> None:
            member = self._id in before.ranks
            match news:
                case RoundEnded(id=by) if member and by != self._id:
                    self._ended = news
                    callback(news)
                case NodesWaiting(waiting=waiting) if member and waiting:
                    callback(news)
                case Judged(cause=cause) if cause.round == self._token:
                    if self._ended is not None and cause != self._ended:
                        callback(news)
                case RoundClosed(id=by) if self._id in before.awaited and by != self._id:
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
        ValueError: a value makes no sense.
    """
    if params.max_nodes != 1:
        raise RendezvousError(
            f"these rounds are in the memory of one process, and the job has {params.min_nodes} to "
            f"{params.max_nodes} nodes"
        )
    join = timeout_option(params, "join_timeout", "timeout", default=JOIN_TIMEOUT)
    if params.config.keys() - {"timeout"}:  # what nobody reads here has to make sense all the same
        from regrow.rendezvous._settings import read_settings

        read_settings(params)
    return LocalRendezvousHandler(
        LocalRounds(params.run_id, params.min_nodes, params.max_nodes),
        backend=params.backend,
        local_addr=params.local_addr,
        join_timeout=join,
    )
