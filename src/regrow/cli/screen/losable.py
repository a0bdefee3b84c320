"""The line that says how many hosts may be lost while the rendezvous continues, and which.

The number of these hosts falls to 0 for a moment when another host takes over, and when the hosts
leave at the end of a job. So a line about 0 hosts is printed only if it stays true for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.events import Event

DELAY_S = 3.0
"""Seconds for which no host may be lost before a line says so; a round forms in less."""

_CHANGES = ("regrow.rendezvous.completed", "regrow.rendezvous.servers")
_OVER = ("regrow.job.stopping", "regrow.job.finished", "regrow.rendezvous.lost")


def losable(data: Mapping[str, Any]) -> str:
    """Format the line about hosts that may be lost, from the event about servers."""
    hosts, server, others = data.get("may_lose") or 0, data.get("server"), data.get("successors")
    if hosts:
        which = "any one host" if hosts == 1 else f"any {hosts} hosts"
        return (
            f"regrow: the rendezvous survives the loss of {which}, also of {server}, which serves "
            f"it"
        )
    if not others:
        return f"regrow: the rendezvous survives the loss of any host but {server}, which serves it"
    return (
        f"regrow: the rendezvous does not survive the loss of one more of the hosts {server} "
        f"(which serves it), {', '.join(map(str, others))}"
    )


class LosableHosts:
    """Event sink that prints which hosts may be lost, at the start and after each change.

    Args:
        say: prints a line about 0 hosts; runs in a thread of its own.
        delay: seconds for which no host may be lost before a line says so.
    """

    def __init__(self, say: Callable[[str], None], delay: float = DELAY_S) -> None:
        self._say, self._delay = say, delay
        self._nodes = 1
        self._latest: Mapping[str, Any] = {}
        self._line = ""  # the latest one
        self._timer: threading.Timer | None = None
        self._over = False

    def __call__(self, event: Event) -> str:
        """Receive an event of the job, one at a time; return a line that is to be printed now."""
        if event.name in _OVER:
            self.close()
        elif event.name == "regrow.rendezvous.completed":
            self._nodes = event.metadata.get("group_world_size") or 1
        elif event.name == "regrow.rendezvous.servers":
            self._latest = event.metadata
        if self._over or event.name not in _CHANGES or not self._latest:
            return ""
        self._cancel()
        from regrow.store import is_loopback

        line = losable(self._latest)
        if line == self._line:
            return ""
        if self._latest.get("may_lose"):
            self._line = line
            return line
        if not self._line and (self._nodes == 1 or is_loopback(str(self._latest.get("server")))):
            return ""  # there is no other host
        self._timer = threading.Timer(self._delay, self._print, (line,))
        self._timer.daemon = True
        self._timer.start()
        return ""

    def close(self) -> None:
        """Print nothing from now on."""
        self._over = True
        self._cancel()

    def _print(self, line: str) -> None:
        self._line = line
        self._say(line)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
