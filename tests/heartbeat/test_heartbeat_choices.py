"""What a script can still set of an automatic heartbeat, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import PATIENCE, wait_until
from regrow import heartbeat
from regrow.heartbeat import HeartbeatFailure, Progress, api, death
from regrow.heartbeat.beats import HeartbeatPlan
from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.failure_policy import FailurePolicy
from regrow.heartbeat.merge import (
    NO_STEP,
    Agreed,
    Beat,
    Broken,
    ExchangeFailed,
    Outcome,
    StalledSteps,
    WorkersLeft,
)

STALLED = StalledSteps(1000, Ranks.of([1]), 1, "", 9)


class Others:
    """A `Meeting` with two more workers; the test sets its outcome."""

    def __init__(self) -> None:
        self.outcome: Outcome = ExchangeFailed("rank 2 did not arrive", Ranks.of([2]))
        self.beats = 0
        self.rows = [Progress(rank, None, None, 0.0) for rank in (0, 1)]

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        self.beats += 1
        outcome = self.outcome
        return outcome._replace(token=beat.token) if isinstance(outcome, Agreed) else outcome

    def leave(self, beat: Beat) -> None: ...

    def listen(self, notify: Callable[[Outcome], None]) -> None:
        self.notify = notify

    def table(self, timeout: float) -> list[Progress]:
        return self.rows

    def close(self) -> None: ...


class Deaths:
    """Replaces the end of this process; a test can delay it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, failure: HeartbeatFailure) -> None:
        self.begun.set()
        self.go_on.wait(PATIENCE)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Deaths:
    deaths = Deaths()
    monkeypatch.setattr(death, "die", deaths)
    return deaths


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, deaths: Deaths) -> Iterator[Others]:
    """The other workers of an automatic heartbeat with 20 exchanges a second."""
    others = Others()
    monkeypatch.setattr(api, "running", None)
    monkeypatch.setattr(api, "own_step", NO_STEP)
    monkeypatch.setattr(api, "leave_at_exit", lambda: None)
    monkeypatch.setattr(api, "make_meeting", lambda *_: others)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    api.start_by_itself(0.05)
    yield others
    deaths.go_on.set()
    if api.running is not None:
        api.running.beater.event.set()
    wait_until(
        lambda: "regrow-heartbeat" not in [each.name for each in threading.enumerate()],
        "the thread ends",
    )


def arrive(others: Others) -> None:
    """Let all workers be present from now on, and wait for two exchanges."""
    others.outcome = Agreed(0)
    before = others.beats
    wait_until(lambda: others.beats > before + 1, "all beat")


def timers() -> int:
    """Return the number of kernel timers of this process."""
    return Path("/proc/self/timers").read_text().count("ClockID")


class OnFailure:
    """An `on_failure` that records its calls."""

    def __init__(self) -> None:
        self.failures: list[HeartbeatFailure] = []
        self.first = threading.Event()

    def __call__(self, failure: HeartbeatFailure) -> None:
        self.failures.append(failure)
        self.first.set()


def test_a_script_sets_on_failure_of_an_automatic_heartbeat(
    others: Others, deaths: Deaths, caplog: pytest.LogCaptureFixture
) -> None:
    on_failure = OnFailure()
    failures, failed = on_failure.failures, on_failure.first
    arrive(others)
    before = timers()
    event = heartbeat.start(60, on_failure=on_failure)
    assert "`regrow run --heartbeat` has already started a heartbeat every 0.05 s" in caplog.text
    assert timers() == before - 2  # no kernel timer ends it any more
    assert heartbeat.start(60, on_failure=print) is event
    assert "this call of heartbeat.start is ignored" in caplog.text
    others.notify(Broken("lost", Ranks.of([2])))
    assert failed.wait(PATIENCE)
    assert [failure.kind for failure in failures] == ["lost"]
    assert event.wait(PATIENCE)
    assert not deaths.begun.is_set()


def test_without_on_failure_an_automatic_heartbeat_ends_the_process(
    others: Others, deaths: Deaths
) -> None:
    arrive(others)
    before = timers()
    heartbeat.start(60)
    heartbeat.start(60, on_failure=print)  # a second one, which changes nothing
    assert timers() == before
    others.notify(Broken("lost", Ranks.of([2])))
    assert deaths.begun.wait(PATIENCE)


def test_a_late_start_does_not_wait_for_a_worker_that_has_left(
    others: Others, caplog: pytest.LogCaptureFixture
) -> None:
    arrive(others)
    others.notify(WorkersLeft(Ranks.of([1])))
    beater = (api.running or pytest.fail("it has not begun")).beater
    assert beater.event.wait(PATIENCE)
    beats = others.beats
    event = heartbeat.start(60, on_failure=print, start_timeout=PATIENCE)
    assert event is beater.event
    assert "has ended, because rank 1 left" in caplog.text
    assert others.beats == beats


def test_a_script_may_start_a_new_heartbeat_after_the_first_one_ended(
    others: Others,
) -> None:
    arrive(others)
    first = heartbeat.start(60)
    others.notify(WorkersLeft(Ranks.of([1])))
    assert first.wait(PATIENCE)
    second = heartbeat.start(60)
    assert second is not first
    assert not second.is_set()


def test_on_failure_comes_too_late_for_a_dying_process(deaths: Deaths) -> None:
    policy = FailurePolicy(HeartbeatPlan(0, 3, 1.0, 1.0, 3, 1.0))
    failure = HeartbeatFailure("lost", Ranks.of([2]), "x", rank=0, world_size=3, beat=1, seconds=1)
    dying = threading.Thread(target=policy.fatal, args=(failure,))
    dying.start()
    assert deaths.begun.wait(PATIENCE)
    called: list[HeartbeatFailure] = []
    assert not policy.hand_over(called.append)
    deaths.go_on.set()
    dying.join(PATIENCE)
    assert called == []
    policy.end()


def test_a_process_dies_if_a_late_on_failure_raises(deaths: Deaths) -> None:
    policy = FailurePolicy(HeartbeatPlan(0, 3, 1.0, 1.0, 3, 1.0))
    failure = HeartbeatFailure("lost", Ranks.of([2]), "x", rank=0, world_size=3, beat=1, seconds=1)

    def exits(failure: HeartbeatFailure) -> None:
        raise SystemExit(1)

    assert policy.hand_over(exits)
    deaths.go_on.set()
    policy.fatal(failure)
    assert deaths.begun.is_set()
    policy.end()


@pytest.mark.parametrize(
    ("options", "kinds"),
    [({"stalled_after": 5, "on_stall": "fatal"}, ["stalled"]), ({"stalled_after": None}, [])],
)
def test_a_script_sets_the_stall_rule_of_an_automatic_heartbeat(
    others: Others, options: dict[str, Any], kinds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    on_failure = OnFailure()
    failures, failed = on_failure.failures, on_failure.first
    arrive(others)
    event = heartbeat.start(60, on_failure=on_failure, **options)
    arrive(others)
    others.outcome = Agreed(0, STALLED)
    if kinds:
        assert failed.wait(PATIENCE)
    else:
        before = others.beats
        wait_until(lambda: others.beats > before + 3, "it goes on")
        event.set()
    assert [failure.kind for failure in failures] == kinds
    assert "stand" not in "".join(r.message for r in caplog.records if r.levelname == "WARNING")


def test_a_script_limits_its_wait_for_the_other_workers(others: Others) -> None:
    for _ in range(2):  # it may be tried again
        with pytest.raises(
            HeartbeatFailure, match=r"rank 2 did not arrive within 0\.05 s"
        ) as raised:
            heartbeat.start(60, start_timeout=0.05)
        assert (raised.value.kind, raised.value.ranks) == ("never started", (2,))
    arrive(others)
    assert not heartbeat.start(60, start_timeout=0.05).is_set()


def test_a_script_continues_when_all_workers_have_arrived(others: Others) -> None:
    others.outcome = Agreed(0)
    assert not heartbeat.start(60, start_timeout=PATIENCE).is_set()
    assert others.beats


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((0, 1, 2), "all workers arrived, but never at the same time"),
        ((), "OSError: the store is gone"),
    ],
)
def test_unknown_missing_ranks_are_reported_as_no_exchange(
    others: Others, rows: Sequence[int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(timeout: float) -> list[Progress]:
        if not rows:
            raise OSError("the store is gone")
        return [Progress(rank, None, None, 0.0) for rank in rows]

    monkeypatch.setattr(others, "table", table)
    with pytest.raises(HeartbeatFailure) as raised:
        heartbeat.start(60, start_timeout=0.05)
    assert raised.value.kind == "no exchange"
    assert why in str(raised.value)
