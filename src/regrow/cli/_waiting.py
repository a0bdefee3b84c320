"""Says so when the nodes of a job take long to meet.

An agent that waits for others has nothing to report: no worker runs, and the others may come. For
a quarter of an hour it would look like a program that hangs, and on the host with the mistake (a
wrong endpoint, one host too few) nobody would know what it waits for. So after a while it says so,
once for every time that it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regrow.events import Event

DELAY = 10.0
"""Seconds of waiting before it is said."""

_MET = ("regrow.rendezvous.completed", "regrow.job.finished")


class Waiting:
    """An event sink that says when the agent has waited for other nodes for a while.

    Args:
        say: prints a line; called from a thread of its own.
        where: where the nodes meet, for people.
        delay: seconds before it is said.
    """

    def __init__(self, say: Callable[[str], None], where: str, delay: float = DELAY) -> None:
        self._say = say
        self._line = f"regrow: still waiting for other nodes at {where}"
        self._delay = delay
        self._timer: threading.Timer | None = None

    def __call__(self, event: Event) -> None:
        """Take note of an event of the job."""
        if event.name == "regrow.job.restarting":
            self.begin(float(event.metadata.get("delay_s", 0.0)))
        elif event.name in _MET:
            self.close()

    def begin(self, pause: float = 0.0) -> None:
        """The agent waits from now on, or does nothing for `pause` seconds and then waits."""
        self.close()
        self._timer = threading.Timer(self._delay + pause, self._say, (self._line,))
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Say nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
