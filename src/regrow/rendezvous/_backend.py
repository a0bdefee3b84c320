"""What the nodes of a job need of a place where they run the rounds themselves.

Two operations are enough: read a document, and replace it if it is still the one that was read.
That is `RendezvousBackend`, as code written for torch's rendezvous has it. The token that both
return is the fencing token of compare-and-set: it names one version of the document, and means
nothing else.

Everything further is optional, and is said by the class. A backend that can be *watched* spares
the nodes from asking again and again. One that keeps the nodes' *beats* beside the document spares
it from being rewritten every second by every node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Token = Any
"""Names one version of the state; compared by the backend only."""


class RendezvousBackend(ABC):
    """A document that all nodes of a job can read, and replace by compare-and-set.

    A backend is called by several threads; unless it is also a `WatchedRendezvousBackend`, by one
    at a time.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which the backend is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the document and its token; None when there is none yet.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
            RendezvousStateError: what is there cannot be the document.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the document if its token is still `token`.

        Args:
            state: the new document.
            token: of the document that it replaces; None when there must be none yet.

        Returns:
            The document as it is now, its token, and whether it is the one given here. None when
            the backend cannot say: the caller keeps what it has, and reads again.

        Raises:
            RendezvousConnectionError: the backend cannot be reached; the document may have been
                replaced.
            RendezvousStateError: what is there cannot be the document.
        """


class WatchedRendezvousBackend(RendezvousBackend):
    """A backend that can say when something has changed.

    Its methods are called by several threads at once, and a blocked one holds up no other.
    """

    @abstractmethod
    def wait_state(self, token: Token, timeout: float) -> None:
        """Block until there may be something new.

        It returns when the document's token is no longer `token`, when something about the nodes'
        lives has changed, after `timeout` seconds, or when `interrupt` is called. To return too
        early is allowed, to miss something is not.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Wake every `wait_state`, now and later."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; blocked calls end. To close again does nothing."""


class LivenessRendezvousBackend(WatchedRendezvousBackend):
    """A backend that also keeps the nodes' signs of life, beside the document."""

    @abstractmethod
    def beat(self, id: str, count: int, lease: float) -> None:
        """Say that a node is alive.

        Args:
            id: the node.
            count: numbers its beats, from 1.
            lease: seconds; without another beat in that time, what is kept for the node may be
                dropped.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    @abstractmethod
    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """Return the latest beat of each node; one of which there is none is missing.

        A backend that does not keep the count, but a lease that each beat renews, returns another
        number each time as long as the lease lives.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    @abstractmethod
    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Return which nodes the backend itself knows to have ended, and how it knows.

        Their connection was closed by their kernel, for example. A lease that ran out proves no
        such thing, the node may only be cut off; unless the lease lasts for as long as a node's
        silence is borne, and the time to kill its workers. Most backends know of none.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    @abstractmethod
    def forget(self, id: str) -> None:
        """Drop what is kept for a node that has left.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
        """

    def heard_state(self) -> tuple[bytes, Token] | None:
        """Return what `get_state` does, though it may be only as new as what `wait_state` has seen.

        A backend that is sent each new document need not read it again for all who have waited.
        This is for beats that are kept apart: those in a document that is not read look like
        silence while the backend is cut off.

        Raises:
            RendezvousConnectionError: the backend cannot be reached.
            RendezvousStateError: what is there cannot be the document.
        """
        return self.get_state()
