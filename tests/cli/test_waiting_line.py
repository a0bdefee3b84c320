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


STARTED = event("job.started", nnodes="2:4")
MET = event("rendezvous.completed", world_size=2)
RESTARTING = event("job.restarting", delay_s=0.0)


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_it_is_said_once_for_every_time_that_it_waits() -> None:
    said: queue.Queue[str] = queue.Queue()
    waiting = Waiting(said.put, "node0:29400 (c10d)", AT_ONCE)
    for happened in (STARTED, MET, RESTARTING, MET):
        waiting(happened)
        if happened is not MET:
            assert said.get(timeout=PATIENCE) == (
                "regrow: still waiting for other nodes at node0:29400 (c10d) (the job is of 2:4 "
                "nodes)"
            )
    assert said.empty()


@pytest.mark.parametrize("end", [MET, event("job.finished", state="SUCCEEDED")])
def test_nothing_is_said_any_more_when_they_have_met(end: Event) -> None:
    waiting = Waiting(pytest.fail, "node0", NEVER)
    waiting(STARTED)
    (timer,) = timers()
    waiting(end)
    timer.join(PATIENCE)
    assert not timer.is_alive()


def test_a_job_of_one_node_waits_for_nobody() -> None:
    waiting = Waiting(pytest.fail, "node0", AT_ONCE)
    for nnodes in (1, "1", "1:1"):
        waiting(event("job.started", nnodes=nnodes))
    assert timers() == []


def test_the_console_has_no_patience_left_at_its_end() -> None:
    stream = io.StringIO()
    with Console(stream, {}, "node0:29400") as console:
        console(STARTED)
        (timer,) = timers()
    timer.join(PATIENCE)
    assert not timer.is_alive()
    assert stream.getvalue() == ""
    with Console(stream, {}) as console:
        console(STARTED)
        assert timers() == []
