"""What a script may still say of a heartbeat that began by itself, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, wait_until

from regrow import heartbeat
from regrow.heartbeat import HeartbeatFailure, Progress, _api, _death
from regrow.heartbeat._beats import Plan
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._fate import Provisional
from regrow.heartbeat._merge import NO_STEP, Agreed, Beat, Broken, Failed, Left, Outcome, Standing

STILL = Standing(1, Ranks.of([1]), 9, Ranks.of([0]), 5, Ranks.of([1]), 1, "")


class Others:
    """A `Meeting` with two more workers, of whom the test says what becomes of them."""

    def __init__(self) -> None:
        self.outcome: Outcome = Failed("rank 2 did not come", Ranks.of([2]))
        self.beats = 0
        self.rows = [Progress(rank, None, None, 0.0) for rank in (0, 1)]

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        self.beats += 1
        outcome = self.outcome
        return outcome._replace(token=beat.token) if isinstance(outcome, Agreed) else outcome

    def leave(self, beat: Beat) -> None: ...

    def listen(self, tell: Callable[[Outcome], None]) -> None:
        self.tell = tell

    def table(self, timeout: float) -> list[Progress]:
        return self.rows

    def close(self) -> None: ...


class Deaths:
    """Takes the place of the end of this process, which can be held up."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, failure: HeartbeatFailure) -> None:
        self.begun.set()
        self.go_on.wait(PATIENCE)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Deaths:
    deaths = Deaths()
    monkeypatch.setattr(_death, "die", deaths)
    return deaths


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, deaths: Deaths) -> Iterator[Others]:
    """The others of a worker that has begun to beat by itself, and meets them 20 times a second."""
    others = Others()
    monkeypatch.setattr(_api, "_beating", None)
    monkeypatch.setattr(_api, "_step", NO_STEP)
    monkeypatch.setattr(_api, "_leave_when_it_ends", lambda: None)
    monkeypatch.setattr(_api, "_meeting", lambda *_: others)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    _api.start_by_itself(0.05)
    yield others
    deaths.go_on.set()
    beating = _api._beating
    if beating is not None:
        beating.beater.event.set()
        beating.beater._thread.join(PATIENCE)
        assert not beating.beater._thread.is_alive()


def come(others: Others) -> None:
    """All are there from now on, and have beaten together."""
    others.outcome = Agreed(0)
    before = others.beats
    wait_until(lambda: others.beats > before + 1, "all beat")


def timers() -> int:
    """How many of the kernel's this process has."""
    return Path("/proc/self/timers").read_text().count("ClockID")


class Told:
    """What a script is told of, as its `on_failure`."""

    def __init__(self) -> None:
        self.failures: list[HeartbeatFailure] = []
        self.first = threading.Event()

    def __call__(self, failure: HeartbeatFailure) -> None:
        self.failures.append(failure)
        self.first.set()


def test_a_script_says_what_to_do_of_a_heartbeat_that_began_by_itself(
    others: Others, deaths: Deaths, caplog: pytest.LogCaptureFixture
) -> None:
    on_failure = Told()
    failures, failed = on_failure.failures, on_failure.first
    come(others)
    before = timers()
    event = heartbeat.start(60, on_failure=on_failure)
    assert "every 0.05 s, as `regrow run --heartbeat` has it" in caplog.text
    assert timers() == before - 2  # the kernel does not end it any more
    assert heartbeat.start(60, on_failure=print) is event
    assert "this start of another does nothing" in caplog.text
    others.tell(Broken("lost", Ranks.of([2])))
    assert failed.wait(PATIENCE)
    assert [failure.kind for failure in failures] == ["lost"]
    assert event.wait(PATIENCE)
    assert not deaths.begun.is_set()


def test_a_script_that_says_nothing_leaves_it_at_certain_death(
    others: Others, deaths: Deaths
) -> None:
    come(others)
    before = timers()
    heartbeat.start(60)
    heartbeat.start(60, on_failure=print)  # a second one, which changes nothing
    assert timers() == before
    others.tell(Broken("lost", Ranks.of([2])))
    assert deaths.begun.wait(PATIENCE)


def test_a_script_that_is_slower_than_a_whole_other_worker_does_not_wait_for_that_one(
    others: Others, caplog: pytest.LogCaptureFixture
) -> None:
    come(others)
    others.tell(Left(Ranks.of([1])))
    beater = (_api._beating or pytest.fail("it has not begun")).beater
    assert beater.event.wait(PATIENCE)
    beats = others.beats
    event = heartbeat.start(60, on_failure=print, start_timeout=PATIENCE)
    assert event is beater.event
    assert "is over already, as rank 1 left in peace" in caplog.text
    assert others.beats == beats


def test_a_script_may_begin_anew_when_it_has_been_told_that_a_heartbeat_is_over(
    others: Others,
) -> None:
    come(others)
    first = heartbeat.start(60)
    others.tell(Left(Ranks.of([1])))
    assert first.wait(PATIENCE)
    second = heartbeat.start(60)
    assert second is not first
    assert not second.is_set()


def test_who_is_dying_already_is_not_called_back(deaths: Deaths) -> None:
    fate = Provisional(Plan(0, 3, 1.0, 1.0, 3, 1.0))
    failure = HeartbeatFailure("lost", Ranks.of([2]), "x", rank=0, world_size=3, beat=1, seconds=1)
    dying = threading.Thread(target=fate.fatal, args=(failure,))
    dying.start()
    assert deaths.begun.wait(PATIENCE)
    called: list[HeartbeatFailure] = []
    assert not fate.hand_over(called.append)
    deaths.go_on.set()
    dying.join(PATIENCE)
    assert called == []
    fate.end()


def test_an_on_failure_that_raises_is_death_here_as_well(deaths: Deaths) -> None:
    fate = Provisional(Plan(0, 3, 1.0, 1.0, 3, 1.0))
    failure = HeartbeatFailure("lost", Ranks.of([2]), "x", rank=0, world_size=3, beat=1, seconds=1)

    def exits(failure: HeartbeatFailure) -> None:
        raise SystemExit(1)

    assert fate.hand_over(exits)
    deaths.go_on.set()
    fate.fatal(failure)
    assert deaths.begun.is_set()
    fate.end()


@pytest.mark.parametrize(
    ("options", "kinds"),
    [({"stalled_after": 5, "on_stall": "fatal"}, ["stalled"]), ({"stalled_after": None}, [])],
)
def test_a_script_says_what_it_thinks_of_standing_still(
    others: Others, options: dict[str, Any], kinds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    on_failure = Told()
    failures, failed = on_failure.failures, on_failure.first
    come(others)
    event = heartbeat.start(60, on_failure=on_failure, **options)
    come(others)
    others.outcome = Agreed(0, STILL._replace(still=1000))
    if kinds:
        assert failed.wait(PATIENCE)
    else:
        before = others.beats
        wait_until(lambda: others.beats > before + 3, "it goes on")
        event.set()
    assert [failure.kind for failure in failures] == kinds
    assert "stand" not in "".join(r.message for r in caplog.records if r.levelname == "WARNING")


def test_a_script_says_for_how_long_it_waits_for_the_others(others: Others) -> None:
    for _ in range(2):  # it may be tried again
        with pytest.raises(HeartbeatFailure, match=r"rank 2 did not come within 0\.05 s") as raised:
            heartbeat.start(60, start_timeout=0.05)
        assert (raised.value.kind, raised.value.ranks) == ("never started", (2,))
    come(others)
    assert not heartbeat.start(60, start_timeout=0.05).is_set()


def test_who_waits_for_the_others_goes_on_when_all_are_there(others: Others) -> None:
    others.outcome = Agreed(0)
    assert not heartbeat.start(60, start_timeout=PATIENCE).is_set()
    assert others.beats


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((0, 1, 2), "all came, but never at the same time"),
        ((), "OSError: the store is gone"),
    ],
)
def test_that_nobody_knows_who_is_missing_is_said_as_well(
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
