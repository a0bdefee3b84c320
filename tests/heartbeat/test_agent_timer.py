"""Requests of a worker's heartbeat to the timer server of its agent."""

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

from regrow.heartbeat.beats import HeartbeatPlan
from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.failure_policy import FailurePolicy
from regrow.heartbeat.terms import SCOPE, STALLED, TIMER_FILE, bound, lead

PLAN = HeartbeatPlan(1, 2, period=15.0, timeout=5.0, failures=1, start_timeout=20.0)
Read = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """Return the requests in the pipe of a timer server since the last call; no server reads it."""
    path = tmp_path / "timers"
    os.mkfifo(path)
    monkeypatch.setenv(TIMER_FILE, str(path))
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def requests() -> list[dict[str, Any]]:
        try:
            lines = os.read(pipe, 1 << 16).splitlines()
        except BlockingIOError:
            lines = []
        return [json.loads(line) for line in lines if line]

    yield requests
    os.close(pipe)


def test_each_beat_postpones_the_timer_to_shortly_before_the_other_workers_detect_a_loss(
    read: Read,
) -> None:
    policy = FailurePolicy(PLAN)
    policy.arm(20.0)
    policy.arm(0.5)  # the others know already, or nearly
    policy.end()
    armed, late, released = read()
    assert {each["scope_id"] for each in (armed, late, released)} == {SCOPE}
    assert (armed["signal"], armed["pid"]) == (signal.SIGKILL, os.getpid())
    assert armed["monotonic"] - armed["armed"] == pytest.approx(20.0 - lead(20.0, 5.0), abs=1e-3)
    assert late["monotonic"] - late["armed"] == pytest.approx(0.0, abs=1e-3)
    assert released["expiration_time"] < 0


def test_a_change_of_the_wall_clock_moves_no_timer(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle([2e9, 1e9, -1e9])
    monkeypatch.setattr("time.time", lambda: next(times))
    policy = FailurePolicy(PLAN)
    for _ in range(3):
        policy.arm(20.0)
        (armed,) = read()
        assert armed["expiration_time"] >= 0  # or it would be a release
        assert armed["monotonic"] - armed["armed"] == pytest.approx(19.0, abs=1e-3)
    policy.end()


def test_the_stalled_worker_reports_by_a_timer_that_is_due_and_requests_no_signal(
    read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    policy = FailurePolicy(PLAN)
    policy.stalled(Ranks.of([0]), "heartbeat: rank 0 is stalled")
    policy.stalled(Ranks.of([1]), "heartbeat: rank 1 is stalled")
    (request,) = read()
    assert request["scope_id"] == STALLED + "rank 1 is stalled"
    assert request["signal"] == 0
    assert request["monotonic"] <= request["armed"]
    assert not [each for each in caplog.records if each.levelname == "WARNING"], "the agent warns"
    policy.end()


def test_the_agent_monitors_a_worker_from_its_first_beat_until_its_heartbeat_ends(
    read: Read,
) -> None:
    policy = FailurePolicy(PLAN)
    policy.alive()
    assert read() == []
    policy.arm(20.0)
    policy.alive()
    assert len(read()) == 2
    policy.end()
    (released,) = read()
    assert released["expiration_time"] < 0
    policy.alive()
    assert read() == []


def test_without_an_agent_there_is_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMER_FILE, raising=False)
    policy = FailurePolicy(PLAN)
    policy.arm(20.0)
    policy.stalled(Ranks.of([1]), "rank 1 is stalled")
    policy.end()


@given(st.floats(0.1, 1e4), st.floats(0.01, 1e4), st.integers(1, 9))
def test_a_healthy_worker_beats_before_its_agent_expects_it(
    period: float, timeout: float, failures: int
) -> None:
    limit = bound(period, timeout, failures)
    assert period < limit - lead(limit, timeout) < limit
