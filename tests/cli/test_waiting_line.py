"""That an agent waits for others is said after a while, and only while it is so."""

from __future__ import annotations

import io
import queue
import threading
from typing import Any

import pytest
from processes import PATIENCE

from regrow.cli._console import Console
from regrow.cli._waiting import Waiting
from regrow.events import Event, EventSource

AT_ONCE, NEVER = 0.0, 3600.0


def event(name: str, **metadata: Any) -> Event:
    return Event(f"regrow.{name}", EventSource.AGENT, metadata={"monotonic": 1.0} | metadata)


MET = event("rendezvous.completed", world_size=2)
RESTARTING = event("job.restarting", delay_s=0.0)


def timer_of(waiting: Waiting | None) -> threading.Timer:
    assert waiting is not None
    assert waiting._timer is not None
    return waiting._timer


def test_it_is_said_once_for_every_time_that_it_waits() -> None:
    said: queue.Queue[str] = queue.Queue()
    waiting = Waiting(said.put, "node0:29400 (c10d)", AT_ONCE)
    line = "regrow: still waiting for other nodes at node0:29400 (c10d)"
    waiting.begin()
    assert said.get(timeout=PATIENCE) == line
    waiting(MET)
    waiting(RESTARTING)
    assert said.get(timeout=PATIENCE) == line
    waiting(MET)
    assert said.empty()


@pytest.mark.parametrize("end", [MET, event("job.finished", state="SUCCEEDED")])
def test_nothing_is_said_any_more_when_they_have_met(end: Event) -> None:
    waiting = Waiting(pytest.fail, "node0", NEVER)
    waiting.begin()
    timer = timer_of(waiting)
    waiting(end)
    timer.join(PATIENCE)
    assert not timer.is_alive()


def test_the_console_waits_from_its_start_to_its_end_where_there_are_other_nodes() -> None:
    stream = io.StringIO()
    with Console(stream, {}, "node0:29400") as console:
        timer = timer_of(console._waiting)
    timer.join(PATIENCE)
    assert not timer.is_alive()
    assert stream.getvalue() == ""
    assert Console(stream, {})._waiting is None
