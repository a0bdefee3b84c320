"""Interfaces of a backend over which the nodes of a job run the rounds themselves.

Two operations are enough: read a document, and replace it if it has not changed since it was read.
`RendezvousBackend` has these two, with the signatures of torch's rendezvous. The token that both
return is the fencing token of compare-and-set: it names one version of the document, and has no
other meaning.

Everything else is optional, and the class of the backend declares it. With a backend that can be
*watched*, the nodes do not need to poll. A backend that keeps the nodes' *heartbeats* beside the
document saves one write of the document per node and second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Token = Any
"""The name of one version of the state; only the backend compares tokens."""


class RendezvousBackend(ABC):
    """A document that all nodes of a job can read, and replace by compare-and-set.

    Several threads call a backend, one at a time. A `WatchedRendezvousBackend` must accept
    concurrent calls.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the backend is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the document and its token; None if there is no document yet.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
            RendezvousStateError: the content of the backend cannot be the document.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the document if its token is still `token`.

        Args:
            state: the new document.
            token: token of the document to replace; None if there must be no document yet.

        Returns:
            The current document, its token, and whether it is the document from this call. None if
            the backend does not know the result: the caller then keeps its copy and reads again.

        Raises:
            RendezvousConnectionError: the backend cannot be reached; the document may have been
                replaced.
            RendezvousStateError: the content of the backend cannot be the document.
        """


class WatchedRendezvousBackend(RendezvousBackend):
    """A backend that can report changes.

    Several threads call its methods concurrently, and a blocked call delays no other call.
    """

    @abstractmethod
    def wait_state(self, token: Token, timeout: float) -> None:
        """Block until something may have changed.

        The method returns when the token of the document is no longer `token`, or the liveness of a
        node has changed. It also returns after `timeout` seconds, or when `interrupt` is called. An
        early return is allowed; a missed change is not.

        Args:
            token: token of the document that the caller has.
            timeout: in seconds.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Wake all current and later calls of `wait_state`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources and end blocked calls. A second call has no effect."""


class LivenessRendezvousBackend(WatchedRendezvousBackend):
    """A backend that also keeps the nodes' heartbeats, beside the document."""

    @abstractmethod
    def beat(self, id: str, count: int, lease: float) -> None:
        """Report that a node is alive.

        Args:
            id: the node.
            count: number of this heartbeat, from 1.
            lease: in seconds; if no other heartbeat arrives in that time, the backend may delete
                its data about the node.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    @abstractmethod
    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """Return the latest heartbeat of each node; a node without a heartbeat is missing.

        A backend may keep a lease that each heartbeat renews, instead of the count. It then returns
        a different number in each call as long as the lease is alive.

        Args:
            ids: the nodes.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Return the nodes that have ended for certain, with the evidence of the backend.

        An example is a connection that the node's kernel closed. An expired lease is usually no
        evidence, because the node may only be cut off. It is evidence if the lease lasts as long as
        the tolerated silence of a node plus the time to kill its workers. Most backends have no
        such evidence.

        Args:
            ids: the nodes.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """
        return {}

    @abstractmethod
    def forget(self, id: str) -> None:
        """Delete the data about a node that has left.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Return a context that limits the time of the calling thread's calls, in seconds.

        The default has no limit, for backends without such a feature.
        """
        return nullcontext()

    def heard_state(self) -> tuple[bytes, Token] | None:
        """Return the same as `get_state`, but possibly only as new as `wait_state` has seen.

        A backend that receives each new document does not need to read it again for all waiting
        callers. This is valid only if heartbeats are kept apart from the document. Otherwise a
        document that is not read again looks like silent nodes while the backend is cut off.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
            RendezvousStateError: the content of the backend cannot be the document.
        """
        return self.get_state()
