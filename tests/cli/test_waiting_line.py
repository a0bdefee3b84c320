"""The line about a wait for other agents: printed after a while, and only during the wait."""

from __future__ import annotations

import io
import queue
import threading
from typing import Any

import pytest

from helpers.processes import PATIENCE
from regrow.cli.screen.console import Console, Waiting
from regrow.events import Event, EventSource

AT_ONCE, NEVER = 0.0, 3600.0


def event(name: str, **metadata: Any) -> Event:
    return Event(f"regrow.{name}", EventSource.AGENT, metadata={"monotonic": 1.0} | metadata)


MET = event("rendezvous.completed", world_size=2)
RESTARTING = event("job.restarting", delay_s=0.0)


def timers() -> set[threading.Timer]:
    """The timers of this process whose delay runs, without those that are cancelled."""
    threads = threading.enumerate()
    return {t for t in threads if isinstance(t, threading.Timer) and not t.finished.is_set()}


def test_the_line_is_printed_once_for_every_wait() -> None:
    printed: queue.Queue[str] = queue.Queue()
    waiting = Waiting(printed.put, "node0:29400 (c10d)", AT_ONCE)
    line = "regrow: still waiting for other nodes at node0:29400 (c10d)"
    waiting.begin()
    assert printed.get(timeout=PATIENCE) == line
    waiting(MET)
    waiting(RESTARTING)
    assert printed.get(timeout=PATIENCE) == line
    waiting(MET)
    assert printed.empty()


@pytest.mark.parametrize("end", [MET, event("job.finished", state="SUCCEEDED")])
def test_no_line_is_printed_after_the_rendezvous(end: Event) -> None:
    others = timers()
    waiting = Waiting(pytest.fail, "node0", NEVER)
    waiting.begin()
    [timer] = timers() - others
    waiting(end)
    timer.join(PATIENCE)
    assert not timer.is_alive()


def test_the_console_waits_from_its_start_to_its_end_where_there_are_other_nodes() -> None:
    stream, others = io.StringIO(), timers()
    with Console(stream, {}, "node0:29400"):
        [timer] = timers() - others
    timer.join(PATIENCE)
    assert not timer.is_alive()
    assert stream.getvalue() == ""
    with Console(stream, {}):
        assert timers() <= others
