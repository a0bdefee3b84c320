"""The line that says how many hosts may be lost, also the one that serves the rendezvous."""

from __future__ import annotations

import io
from typing import Any

import pytest

from regrow.cli.screen.console import Console, losable
from regrow.events import Event, EventSource

SURVIVES = "regrow: the rendezvous survives the loss of {}, also of 10.0.0.1, which serves it"


def servers(**metadata: Any) -> Event:
    known = {"monotonic": 1.0, "epoch": 0, "server": "10.0.0.1", "successors": ["10.0.0.2"]}
    return Event("regrow.rendezvous.servers", EventSource.AGENT, metadata=known | metadata)


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (0, ""),
        (
            1,
            SURVIVES.format("any one host"),
        ),
        (
            2,
            SURVIVES.format("any 2 hosts"),
        ),
    ],
)
def test_the_line_says_how_many_hosts_may_be_lost(hosts: int, line: str) -> None:
    assert losable(servers(may_lose=hosts).metadata) == line


def test_the_console_prints_the_line_where_it_greets() -> None:
    stream = io.StringIO()
    with Console(stream, {"REGROW_VERBOSE": "0"}, "node0:29400") as console:
        console(servers(may_lose=1))
    assert stream.getvalue() == ""
    with Console(stream, {}, "node0:29400") as console:
        console(servers(may_lose=1))
    assert "survives the loss of any one host" in stream.getvalue()
