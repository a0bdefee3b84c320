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

_WAITS = ("regrow.job.started", "regrow.job.restarting")
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
        self._where = where
        self._delay = delay
        self._nodes = ""
        self._timer: threading.Timer | None = None

    def __call__(self, event: Event) -> None:
        """Take note of an event of the job."""
        if event.name == "regrow.job.started":
            self._nodes = str(event.metadata.get("nnodes", 1))
        if event.name in _WAITS and self._nodes not in ("1", "1:1"):
            self.close()
            more = float(event.metadata.get("delay_s", 0.0))  # of a back-off, before it waits
            self._timer = threading.Timer(self._delay + more, self._tell)
            self._timer.daemon = True
            self._timer.start()
        elif event.name in _MET:
            self.close()

    def _tell(self) -> None:
        self._say(
            f"regrow: still waiting for other nodes at {self._where} (the job is of {self._nodes} "
            f"nodes)"
        )

    def close(self) -> None:
        """Say nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
