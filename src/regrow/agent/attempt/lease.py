"""`Lease`: how long the workers of this host may run, as the agent knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic


class Lease:
    """The time until which the workers may run, as the agent knows it; thread-safe.

    The rendezvous sets the time. The guardian kills the workers at that time, whether the agent
    runs or not. The agent itself checks the lease only before it starts workers: after a pause the
    old lease has expired, and the next one starts with the agent's first confirmed heartbeat.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._until: float | None = None

    def renew(self, until: float | None) -> None:
        """Let the workers run until `until` (monotonic seconds); None means no limit."""
        with self._changed:
            self._until = until
            self._changed.notify_all()

    def wake(self) -> None:
        """Let each thread in `wait` check its condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, pointless: Callable[[], bool]) -> bool:
        """Block until the lease is valid or `pointless` is true; return whether it is valid."""
        with self._changed:
            self._changed.wait_for(lambda: self._live() or pointless())
            return self._live()

    def _live(self) -> bool:
        return self._until is None or monotonic() < self._until
