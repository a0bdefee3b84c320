"""How long this node may run its workers without hearing more, as the agent knows it.

The rendezvous says until when; the guardian kills the workers then, whatever the agent does. What
is left for the agent is to start none before it knows that they may live: after a pause the lease
that it had is over, and the next one begins with the first beat that is answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic


class Lease:
    """The time until which the workers may run; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._until: float | None = None

    def renew(self, until: float | None) -> None:
        """Note that the workers may run until then, in monotonic seconds; None: without end."""
        with self._changed:
            self._until = until
            self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits ask again whether it is still of use."""
        with self._changed:
            self._changed.notify_all()

    def live(self) -> bool:
        """Whether workers may be started now."""
        with self._changed:
            return self._until is None or monotonic() < self._until

    def wait(self, in_vain: Callable[[], bool]) -> bool:
        """Block until workers may be started, or until that is `in_vain`; returns which."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._until is None or monotonic() < self._until or in_vain()
            )
        return self.live()
