"""The line that says how many hosts may be lost, also the one that serves the rendezvous."""

from __future__ import annotations

import io
import queue
import threading
from typing import Any

import pytest

from helpers.processes import PATIENCE
from regrow.cli.screen.console import Console
from regrow.cli.screen.losable import LosableHosts, losable
from regrow.events import Event, EventSource

AT_ONCE, NEVER = 0.0, 3600.0
SURVIVES = "regrow: the rendezvous survives the loss of {}, also of 10.0.0.1, which serves it"
ANY_BUT = "regrow: the rendezvous survives the loss of any host but 10.0.0.1, which serves it"
NO_MORE = (
    "regrow: the rendezvous does not survive the loss of one more of the hosts 10.0.0.1, 10.0.0.2; "
    "10.0.0.1 serves it"
)


def event(name: str, **metadata: Any) -> Event:
    return Event(f"regrow.{name}", EventSource.AGENT, metadata={"monotonic": 1.0} | metadata)


def timers() -> set[threading.Timer]:
    """The timers of this process whose delay runs, without those that are cancelled."""
    threads = threading.enumerate()
    return {t for t in threads if isinstance(t, threading.Timer) and not t.finished.is_set()}


def servers(**metadata: Any) -> Event:
    known = {"epoch": 0, "server": "10.0.0.1", "successors": ["10.0.0.2"]}
    return event("rendezvous.servers", **known | metadata)


def completed(nodes: int) -> Event:
    return event("rendezvous.completed", group_world_size=nodes)


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"may_lose": 0}, NO_MORE),
        ({"may_lose": 0, "successors": []}, ANY_BUT),
        ({"may_lose": 1}, SURVIVES.format("any one host")),
        ({"may_lose": 2}, SURVIVES.format("any 2 hosts")),
    ],
)
def test_the_line_says_how_many_hosts_may_be_lost(known: dict[str, Any], line: str) -> None:
    assert losable(servers(**known).metadata, {}) == line
    names = {"10.0.0.1": "node1 (10.0.0.1)", "10.0.0.2": "node2 (10.0.0.2)"}
    named = line.replace("10.0.0.1", names["10.0.0.1"]).replace("10.0.0.2", names["10.0.0.2"])
    assert losable(servers(**known).metadata, names) == named
    assert named != line


def test_a_line_follows_when_no_host_may_be_lost_any_more() -> None:
    printed: queue.Queue[str] = queue.Queue()
    hosts = LosableHosts(printed.put, AT_ONCE)
    assert hosts(completed(3)) == ""
    assert hosts(servers(may_lose=1)) == SURVIVES.format("any one host")
    assert hosts(servers(may_lose=0)) == ""
    assert printed.get(timeout=PATIENCE) == NO_MORE
    assert hosts(servers(may_lose=0, successors=[])) == ""
    assert printed.get(timeout=PATIENCE) == ANY_BUT
    assert hosts(servers(may_lose=1)) == SURVIVES.format("any one host")


def test_a_state_that_does_not_last_is_not_printed() -> None:
    others = timers()
    hosts = LosableHosts(pytest.fail, NEVER)
    hosts(completed(3))
    lines = [hosts(servers(may_lose=number)) for number in (0, 1, 0, 1)]
    assert lines == ["", SURVIVES.format("any one host"), "", ""]
    assert timers() == others


def test_a_job_of_one_host_has_no_other_to_lose() -> None:
    printed: queue.Queue[str] = queue.Queue()
    hosts = LosableHosts(printed.put, AT_ONCE)
    hosts(completed(1))
    others = timers()
    hosts(servers(may_lose=0, successors=[]))
    assert timers() == others
    hosts(servers(may_lose=0, successors=[], server="127.0.0.1"))
    hosts(completed(2))
    assert timers() == others
    hosts(servers(may_lose=0, successors=[]))
    assert printed.get(timeout=PATIENCE) == ANY_BUT


def test_a_host_is_named_once_its_name_is_known_and_no_line_is_repeated_for_that() -> None:
    hosts, ids = LosableHosts(pytest.fail, NEVER), ["10.0.0.1/7/ab1/node1", "10.0.0.2/8/cd1/node2"]
    assert hosts(servers(may_lose=1)) == SURVIVES.format("any one host")
    assert hosts(event("rendezvous.completed", group_world_size=3, first_ranks=ids)) == ""
    named = SURVIVES.format("any 2 hosts").replace("10.0.0.1", "node1 (10.0.0.1)")
    assert hosts(servers(may_lose=2)) == named


@pytest.mark.parametrize("over", ["job.stopping", "job.finished", "rendezvous.lost"])
def test_a_job_that_ends_prints_no_line_when_its_hosts_leave(over: str) -> None:
    others = timers()
    hosts = LosableHosts(pytest.fail, NEVER)
    hosts(completed(3))
    hosts(servers(may_lose=0))
    hosts(event(over))
    assert hosts(servers(may_lose=1)) == ""
    hosts(servers(may_lose=0))
    assert timers() == others


def test_the_console_prints_the_line_where_it_greets() -> None:
    stream = io.StringIO()
    with Console(stream, {"REGROW_VERBOSE": "0"}, "node0:29400") as console:
        console(servers(may_lose=1))
    assert stream.getvalue() == ""
    with Console(stream, {}, "node0:29400") as console:
        console(servers(may_lose=1))
    assert "survives the loss of any one host" in stream.getvalue()
