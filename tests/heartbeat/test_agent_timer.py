"""What a beating worker tells the timer server of its agent."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.heartbeat._agent_timer import TIMER_FILE, AgentTimer, tell_stall
from regrow.heartbeat._death import Deadline
from regrow.heartbeat._terms import SCOPE, STALLED, bound, lead

Read = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """What was asked of the server since the last time, which there is none of but its pipe."""
    path = tmp_path / "timers"
    os.mkfifo(path)
    monkeypatch.setenv(TIMER_FILE, str(path))
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def asked() -> list[dict[str, Any]]:
        try:
            lines = os.read(pipe, 1 << 16).splitlines()
        except BlockingIOError:
            lines = []
        return [json.loads(line) for line in lines if line]

    yield asked
    os.close(pipe)


def test_each_sign_of_life_puts_the_timer_off_to_shortly_before_the_others_know(
    read: Read,
) -> None:
    timer = AgentTimer(20.0, 5.0)
    timer.alive(20.0)
    timer.alive(0.5)  # the others know already, or nearly
    timer.release()
    armed, late, released = read()
    assert {each["scope_id"] for each in (armed, late, released)} == {SCOPE}
    assert (armed["signal"], armed["pid"]) == (signal.SIGKILL, os.getpid())
    assert armed["monotonic"] - armed["armed"] == pytest.approx(20.0 - lead(20.0, 5.0), abs=1e-3)
    assert late["monotonic"] - late["armed"] == pytest.approx(0.0, abs=1e-3)
    assert released["expiration_time"] < 0


def test_a_wall_clock_that_is_set_meanwhile_moves_no_timer(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle([2e9, 1e9, -1e9])
    monkeypatch.setattr("time.time", lambda: next(times))
    timer = AgentTimer(20.0, 5.0)
    for _ in range(3):
        timer.alive(20.0)
        (armed,) = read()
        assert armed["expiration_time"] >= 0  # or it would be a release
        assert armed["monotonic"] - armed["armed"] == pytest.approx(19.0, abs=1e-3)


def test_a_stall_is_a_timer_that_is_due_and_asks_for_no_signal(read: Read) -> None:
    tell_stall("heartbeat: rank 1 beats, but stands still")
    (told,) = read()
    assert told["scope_id"] == STALLED + "rank 1 beats, but stands still"
    assert told["signal"] == 0
    assert told["monotonic"] <= told["armed"]


def test_who_waits_for_the_first_beat_is_not_watched_and_neither_is_who_has_left(
    read: Read,
) -> None:
    deadline = Deadline(1000.0, 300.0)
    deadline.alive()
    assert read() == []
    deadline.arm()
    deadline.alive()
    assert len(read()) == 2
    deadline.disarm()
    (released,) = read()
    assert released["expiration_time"] < 0
    deadline.alive()
    assert read() == []


def test_without_an_agent_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMER_FILE, raising=False)
    timer = AgentTimer(1.0, 0.3)
    timer.alive(1.0)
    timer.release()
    tell_stall("rank 1 stands still")


@given(st.floats(0.1, 1e4), st.floats(0.01, 1e4), st.integers(1, 9))
def test_a_healthy_worker_shows_life_before_its_agent_expects_it(
    period: float, timeout: float, failures: int
) -> None:
    limit = bound(period, timeout, failures)
    assert period < limit - lead(limit, timeout) < limit
