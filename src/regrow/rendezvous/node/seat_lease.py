"""The lease of one node's seat, as the node itself counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.node.driver import Threads


class SeatLease:
    """The lease of one node: the time until which its workers may run.

    The lease counts from when a heartbeat was *sent*. The server may have answered it at once, and
    counts the node's silence from then. So a node that gets no answers knows when its lease ends.
    The guardian receives each renewal, and kills the workers at the end of the lease.

    A node that learns of its eviction ends the lease at once, because another node may have its
    seat. No later answer to a heartbeat for that seat renews the lease. The next seat has its own
    lease.

    Args:
        seconds: the length of the lease.
        clock: returns the time of the node's monotonic clock, in seconds.
        threads: provides the locks.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], threads: Threads) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threads.Lock()  # keeps the calls of the subscribers in order
        self._round = 0
        self._lapsed = False
        self._until = 0.0
        self._subscribers: dict[object, Callable[[float], None]] = {}

    def begin(self, round: int) -> None:
        """Start the lease of the seat in another round."""
        with self._lock:
            self._round, self._lapsed = round, False

    def renew(self, round: int, sent: float) -> None:
        """Renew the lease after an answer to a heartbeat for the seat in a round.

        Args:
            round: the round.
            sent: when the heartbeat was sent, in seconds of the node's clock.
        """
        with self._lock:
            if round == self._round and not self._lapsed:
                self._set(max(self._until, sent + self._seconds))

    def lapse(self, round: int) -> None:
        """End the lease now, because the node was evicted from its seat in a round."""
        with self._lock:
            if round == self._round and not self._lapsed:
                self._lapsed = True
                self._set(self._clock())

    def keep(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        """See `PushingRendezvousHandler.keep_lease`."""
        key = object()
        with self._lock:
            renewed(self._until or self._clock())
            self._subscribers[key] = renewed

        def stop() -> None:
            self._subscribers.pop(key, None)

        return stop

    def _set(self, until: float) -> None:
        self._until = until
        for renewed in tuple(self._subscribers.values()):
            renewed(until)
