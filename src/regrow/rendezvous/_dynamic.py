"""The handler of one node of a job whose nodes come and go.

This is the side that agents see: torch's names, and what is recorded of each call. What happens
behind it is in `_member`; nothing of the rules of a round is in either.

Where this differs from torch's handler of the same name, which it replaces: `next_rendezvous` does
not sleep at its start and asks nobody again and again; who stands by beyond `max_nodes` is told
when a seat is free; a round that loses a member ends for everyone at once, with the cause; and
`num_nodes_waiting` and `is_closed` answer from what was heard last, without a call.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousInfo,
    info_of,
)
from regrow.rendezvous._config import wanted_rank
from regrow.rendezvous._errors import RendezvousError
from regrow.rendezvous._member import Member
from regrow.rendezvous._parameters import RendezvousParameters
from regrow.rendezvous._settings import (
    KEEP_ALIVE,
    MISSES,
    RendezvousSettings,
    RendezvousTimeout,
    read_settings,
)
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regrow.rendezvous._backend import RendezvousBackend
    from regrow.rendezvous._credentials import Credentials
    from regrow.rendezvous._driver import Driver
    from regrow.rendezvous._news import Judged
    from regrow.store import Store

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

logger = get_logger(__name__)


class DynamicRendezvousHandler(PushingRendezvousHandler):
    """One node's handle on a rendezvous whose nodes come and go.

    Args:
        driver: the rounds, as this node reaches them; the handler closes it.
        settings: the settings of the rendezvous.
        backend: the name under which it was created.
        local_addr: this node's address as the others reach it; None: the one by which it reaches
            the place where the nodes meet.
        node_rank: the rank the node asks for, if any.
        credentials: what the nodes prove to each other, if not only to the place where they meet.
        hears_within: seconds after which the others know of a beat at the latest.
    """

    def __init__(
        self,
        driver: Driver,
        settings: RendezvousSettings,
        *,
        backend: str,
        local_addr: str | None = None,
        node_rank: int | None = None,
        credentials: Credentials | None = None,
        hears_within: float = 0.0,
    ) -> None:
        self._settings = settings
        self._hears_within = hears_within
        self._credentials = credentials
        self._backend = backend
        self._node = Member(driver, settings, local_addr or driver.local_addr, node_rank)
        self._driver = driver
        # Threads keep what they run alive; who forgets the handler has not to go on beating.
        weakref.finalize(self, _abandon, self._node).atexit = False

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Store,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = KEEP_ALIVE,
        keep_alive_max_attempt: int = MISSES,
    ) -> DynamicRendezvousHandler:
        """Create the handler of a node that runs the rounds with the others over a backend.

        Args:
            run_id: the id of the job.
            store: shared by the nodes, for the keys of the rounds; any c10d store.
            backend: holds the rounds.
            min_nodes: the fewest nodes that make a round.
            max_nodes: the most nodes in a round.
            local_addr: this node's address as the others reach it; None: the backend's
                `local_addr` where it has one, else the name of this host.
            timeout: how long the steps may take.
            keep_alive_interval: seconds between two beats; torch's are 5.
            keep_alive_max_attempt: how many beats may fail to come before a node is given up.

        Raises:
            ValueError: the settings make no sense.
        """
        from datetime import timedelta

        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        return over_backend(store, backend, settings, local_addr)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of the rendezvous."""
        return self._settings

    @property
    def bounds(self) -> Mapping[str, float]:
        """See base class."""
        bounds, reconnect = self._settings.bounds, self._settings.reconnect_timeout.total_seconds()
        return {
            "a silent host is given up": bounds.lease + bounds.kill + self._hears_within,
            "workers of a host that is cut off are killed": bounds.lease,
            "a coordinator that cannot be reached ends the job": bounds.lease + reconnect,
        }

    @property
    def credentials(self) -> Credentials | None:
        """See base class."""
        return self._credentials

    def get_backend(self) -> str:
        """See base class."""
        return self._backend

    def get_run_id(self) -> str:
        """See base class."""
        return self._settings.run_id

    # --- rounds

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        node, run_id = self._node, self._settings.run_id
        try:
            node.begin()
            self._record(f"The node '{node.id}' attempts to join the next round of '{run_id}'.")
            seated, store = node.meet()
        except Exception as error:
            node.release_port()
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise
        self._record(
            f"The node '{node.id}' has joined round {seated.round} of the rendezvous '{run_id}' "
            f"as rank {seated.rank} in a world of size {seated.world_size}.",
            rank=seated.rank,
        )
        if seated.rank:
            node.release_port()
        return info_of(seated, run_id, store)

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return self._node.view().waiting

    # --- failures, and leaving

    def report_failure(self, report: str) -> Judged | None:
        """See base class."""
        return self._node.judge(report)

    def fail(self, report: str) -> None:
        """See base class."""
        self._close("its workers failed for good", report)

    def leaving(self, why: str) -> None:
        """See base class."""
        self._node.leaving(why)

    def leave(self, why: str) -> None:
        """See base class."""
        if self._node.done:
            return
        try:
            self._node.leave(why, self._settings.bounds.lease)
        except RendezvousError as error:
            logger.warning("node %s could not say that it leaves: %s", self._node.id, error)
        finally:
            self._node.end(linger=False)

    # --- the end

    def is_closed(self) -> bool:
        """See base class."""
        return self._node.closed or self._node.view().closed

    def set_closed(self) -> None:
        """See base class."""
        try:
            self._close("it closed the rendezvous", "")
        except Exception as error:
            self._record(f"{type(error).__name__}: {error}", "FAILED")
            raise

    def _close(self, why: str, report: str) -> None:
        if self._node.done:
            return
        self._node.close(why, report)
        self._record(
            f"The node '{self._node.id}' has closed the rendezvous '{self._settings.run_id}'.",
            "SUCCEEDED",
        )

    def shutdown(self) -> bool:
        """See base class."""
        if self._node.done:
            return True
        try:
            self._close("it closed the rendezvous", "")
            self._node.leave("it is done", self._settings.timeout.close.total_seconds())
        except RendezvousError as error:
            message = (
                f"The node '{self._node.id}' has failed to shut down the rendezvous "
                f"'{self._settings.run_id}': {type(error).__name__}: {error}"
            )
            self._record(message, "FAILED")
            logger.warning("%s", message)
            return False
        else:
            return True
        finally:
            self._node.end(linger=True)

    # --- being told

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """See base class."""
        return self._node.touch.subscribe(callback)

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See base class."""
        return self._node.touch.keep_lease(renewed)

    def interrupt(self) -> None:
        """See base class."""
        self._node.interrupt()

    def _record(self, message: str, node_state: str = "RUNNING", rank: int | None = None) -> None:
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=self._settings.run_id,
            message=message,
            node_state=events.NodeState[node_state],
            name=type(self).__name__,
            hostname=self._node.addr,
            rank=rank,
        )


def _abandon(node: Member) -> None:
    # The collector may run this in the midst of anything, so it may not wait for a lock.
    threading.Thread(target=lambda: node.end(linger=False, wait=False), daemon=True).start()


def over_backend(
    store: Store,
    backend: RendezvousBackend,
    settings: RendezvousSettings,
    local_addr: str | None = None,
    node_rank: int | None = None,
) -> DynamicRendezvousHandler:
    """Create the handler of a node that runs the rounds with the others over a backend."""
    from regrow.rendezvous._by_nodes import NodesDriver

    return DynamicRendezvousHandler(
        NodesDriver(backend, store, settings),
        settings,
        backend=backend.name,
        local_addr=local_addr,
        node_rank=node_rank,
        hears_within=settings.bounds.keep_alive,  # they look as often as it beats
    )


def create_handler(
    store: Store, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Create the handler of a node that runs the rounds with the others over a backend.

    Args:
        store: shared by the nodes, for the keys of the rounds; any c10d store.
        backend: holds the rounds.
        params: the nodes, and the keys that `read_settings` reads.

    Raises:
        ValueError: the settings make no sense.
    """
    try:
        return over_backend(
            store, backend, read_settings(params), params.local_addr, wanted_rank(params)
        )
    except Exception as error:
        from regrow import events

        events.construct_and_record_rdzv_event(
            run_id=params.run_id,
            message=f"{type(error).__name__}: {error}",
            node_state=events.NodeState.FAILED,
        )
        raise
