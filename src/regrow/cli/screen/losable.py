"""The line that says how many hosts may be lost while the rendezvous continues, and which.

The number of these hosts falls to 0 for a moment when another host takes over, and when the hosts
leave at the end of a job. So a line about 0 hosts is printed only if it stays true for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from regrow.utils import host_of

if TYPE_CHECKING:
    from regrow.events import Event

DELAY_S = 3.0
"""Seconds for which no host may be lost before a line says so; a round forms in less."""

_CHANGES = ("regrow.rendezvous.completed", "regrow.rendezvous.servers")
_OVER = ("regrow.job.stopping", "regrow.job.finished", "regrow.rendezvous.lost")


def losable(data: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Format the line about hosts that may be lost.

    Args:
        data: the fields of the event about servers.
        names: name and address of a host by its address; a host without a name is left out.
    """
    hosts, serving = (
        data.get("may_lose") or 0,
        [data.get("server"), *(data.get("successors") or ())],
    )
    server, *others = (names.get(str(address), str(address)) for address in serving)
    if hosts:
        which = "any one host" if hosts == 1 else f"any {hosts} hosts"
        return (
            f"regrow: the rendezvous survives the loss of {which}, also of {server}, which serves "
            f"it"
        )
    if not others:
        return f"regrow: the rendezvous survives the loss of any host but {server}, which serves it"
    return (
        "regrow: the rendezvous does not survive the loss of one more of the hosts "
        f"{', '.join([server, *others])}; {server} serves it"
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
        self._names: dict[str, str] = {}  # of the hosts with the first ranks, by address
        self._line = ""  # the latest one, with addresses only
        self._timer: threading.Timer | None = None
        self._over = False

    def __call__(self, event: Event) -> str:
        """Receive an event of the job, one at a time; return a line that is to be printed now."""
        if event.name in _OVER:
            self.close()
        elif event.name == "regrow.rendezvous.completed":
            self._nodes = event.metadata.get("group_world_size") or 1
            hosts = map(host_of, event.metadata.get("first_ranks") or ())
            self._names |= {host.address: str(host) for host in hosts}
        elif event.name == "regrow.rendezvous.servers":
            self._latest = event.metadata
        if self._over or event.name not in _CHANGES or not self._latest:
            return ""
        self._cancel()
        from regrow.store import is_loopback

        plain, line = (losable(self._latest, names) for names in ({}, self._names))
        if plain == self._line:
            return ""
        if self._latest.get("may_lose"):
            self._line = plain
            return line
        if not self._line and (self._nodes == 1 or is_loopback(str(self._latest.get("server")))):
            return ""  # there is no other host
        self._timer = threading.Timer(self._delay, self._print, (plain, line))
        self._timer.daemon = True
        self._timer.start()
        return ""

    def close(self) -> None:
        """Print nothing from now on."""
        self._over = True
        self._cancel()

    def _print(self, plain: str, line: str) -> None:
        self._line = plain
        self._say(line)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
