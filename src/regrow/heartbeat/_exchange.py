"""How the workers reach each other: what a user can plug in, and what the heartbeat makes of it.

An `Exchange` is the smallest thing that every framework has: a sum over all workers. It says who is
there only by coming about. The store's server knows more, since it is connected to everyone: it can
tell who is missing, and that a worker's process has ended, before any exchange is due. So inside,
the heartbeat speaks to a `Meeting`, of which there are two: one is a session with the store
(`_store_exchange`), the other makes beats of a vector that any `Exchange` sums up (`_vector`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from regrow.heartbeat._merge import Beat, Outcome


@runtime_checkable
class Exchange(Protocol):
    """A sum over all workers, by whatever they are connected with."""

    def all_reduce(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        """Return the sums of what all workers give, place by place.

        It is called from one thread, in all workers at about the same time, but in some it may be
        that it is not called at all, or that it had failed before and has to work again now.

        Args:
            vector: this worker's numbers; of the same length in all workers. Each, and each sum,
                fits into 64 bits with a sign.
            timeout: seconds after which it must have returned or raised; not the same each time.

        Raises:
            Exception: whatever it likes, if the sums cannot be had in that time.
        """
        ...


AllReduce = Callable[[Sequence[int], float], Sequence[int]]
"""A plain function is an `Exchange` as well: it is called with the vector and the time-out."""


class Progress(NamedTuple):
    """How far a worker said it is."""

    rank: int
    step: int | None
    """The last step it told with `step`; None if it told none."""
    phase: str | None
    """What it said it is doing; None if it did not."""
    age: float
    """Seconds since it said so, at its last beat."""


class Meeting(Protocol):
    """One worker's way to all others."""

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        """Say what there is to say of this worker, and return what all have said.

        A `leaving` beat is one, too; it may be answered before the others have spoken.

        Args:
            beat: of this worker.
            timeout: seconds after which it must have returned.

        Raises:
            Exception: the exchange failed, as if `Failed` was returned.
        """
        ...

    def leave(self, beat: Beat) -> None:
        """Have a beat that is under way end soon, if that can be; called in another thread.

        Args:
            beat: the `leaving` one of this worker.
        """
        ...

    def listen(self, tell: Callable[[Outcome], None]) -> None:
        """From now on, tell what becomes known between beats and is final, if anything does.

        Args:
            tell: called with `Left` or `Broken`, at most once, from another thread.
        """
        ...

    def table(self, timeout: float) -> list[Progress]:
        """Return how far each worker is that has beaten, by rank; may be called in any thread.

        Args:
            timeout: seconds after which it must have returned.
        """
        ...

    def close(self) -> None:
        """Let go of what was opened for it; there will be no more calls."""
        ...
