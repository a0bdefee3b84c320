"""The lease under which a node runs its workers, and who is told of it.

It counts from when a beat was *sent*: whoever answered it may have done so at once, and counts the
silence from then. So a node that gets no answer knows when its lease ends without asking anyone.
Its workers are killed then, by another process that was told of each renewal; this one only finds
out what to do next.

A node that hears that it was given up ends the lease at once, since its seat may be another's
already. No answer to a beat for that seat moves it on again; the next seat has a lease of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous._threads import Threads


class Lease:
    """Until when the workers of one node may run.

    Args:
        seconds: for which it lasts.
        clock: seconds of the node's monotonic clock.
        threads: whose locks to use.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], threads: Threads) -> None:
        self._seconds = seconds
        self._clock = clock
        self._telling = threads.Lock()  # what the keepers are told is told in order
        self._round = 0
        self._given_up = False
        self._until = 0.0
        self._keepers: dict[object, Callable[[float], None]] = {}

    def begin(self, round: int) -> None:
        """The node has a seat in another round: it is that one's lease from now on."""
        with self._telling:
            self._round, self._given_up = round, False

    def renew(self, round: int, sent: float) -> None:
        """A beat for the seat in a round was answered; `sent`: when it was sent, by the clock."""
        with self._telling:
            if round == self._round and not self._given_up:
                self._until = max(self._until, sent + self._seconds)
                self._tell()

    def lapse(self, round: int) -> None:
        """The seat in a round was given up, so the workers in it may run no longer."""
        with self._telling:
            if round == self._round and not self._given_up:
                self._given_up, self._until = True, self._clock()
                self._tell()

    def keep(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See `PushingRendezvousHandler.keep_lease`."""
        key = object()
        with self._telling:
            renewed(self._until or self._clock())
            self._keepers[key] = renewed

        def stop() -> None:
            self._keepers.pop(key, None)

        return stop

    def _tell(self) -> None:
        for renewed in tuple(self._keepers.values()):
            renewed(self._until)
