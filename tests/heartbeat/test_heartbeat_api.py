"""`start`, `step` and `progress`, and the thread behind them, in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE

from regrow import _progress as board
from regrow import heartbeat
from regrow.heartbeat import HeartbeatFailure, _api, _death, _fate
from regrow.heartbeat._beater import Beater
from regrow.heartbeat._beats import Plan
from regrow.heartbeat._exchange import Progress
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._merge import NO_STEP, Agreed, Beat, Left, Outcome, Standing
from regrow.heartbeat._vector import VectorMeeting
from regrow.heartbeat._world import NAMES, world


@pytest.fixture(autouse=True)
def own_heartbeat(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no heartbeat, no step and no handler behind."""
    monkeypatch.setattr(_api, "_beating", None)
    monkeypatch.setattr(_api, "_step", NO_STEP)
    monkeypatch.setattr(_api, "_phase", "")
    monkeypatch.setattr(_api, "_leave_when_it_ends", lambda: None)
    for pair in NAMES:
        for name in pair:
            monkeypatch.delenv(name, raising=False)
    yield
    if _api._beating is not None:
        _api._beating.beater.leave()


def same(vector: Sequence[int], timeout: float) -> Sequence[int]:
    """The sum over one worker."""
    return vector


class Scripted:
    """An exchange of one worker that fails as often as it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.failing = 0

    def __call__(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        self.calls += 1
        if self.failing:
            self.failing -= 1
            raise ConnectionError("the script says so")
        return vector


class Deaths:
    """Takes the place of the end of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: list[BaseException] = []
        self.died = threading.Event()
        monkeypatch.setattr(_death, "die", self)

    def __call__(self, failure: BaseException) -> None:
        self.of.append(failure)
        self.died.set()


def alone(period: float = 30.0, **options: Any) -> threading.Event:
    return heartbeat.start(period, rank=0, world_size=1, **options)


def test_a_second_start_warns_and_returns_the_same_event(caplog: pytest.LogCaptureFixture) -> None:
    event = alone()
    assert alone() is event
    assert "running already" in caplog.text


def test_one_that_has_stopped_can_be_started_anew() -> None:
    event = alone()
    event.set()
    assert _api._beating is not None
    _api._beating.beater._thread.join(PATIENCE)
    assert heartbeat.progress() == []
    again = alone()
    assert again is not event
    assert not again.is_set()


def test_neither_one_that_has_stopped_nor_one_that_never_met_leaves_timers_behind() -> None:
    before = timers()
    alone().set()
    assert _api._beating is not None
    _api._beating.beater._thread.join(PATIENCE)
    with pytest.raises(HeartbeatFailure):
        alone(exchange=lambda vector, timeout: [])
    assert timers() == before


def timers() -> int:
    """How many of the kernel's this process has."""
    return Path("/proc/self/timers").read_text().count("ClockID")


def test_all_know_how_far_each_is() -> None:
    exchange = Scripted()
    with pytest.raises(RuntimeError, match="no heartbeat was started here"):
        heartbeat.progress()
    heartbeat.step(5, "warm-up")
    heartbeat.step(6)
    alone(exchange=exchange)
    [own] = heartbeat.progress()
    assert (own.rank, own.step, own.phase) == (0, 6, "warm-up")


@pytest.mark.parametrize("n", [-1, 2**53 + 1])
def test_what_is_no_step_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="numbers from 0"):
        heartbeat.step(n)


def test_a_step_is_a_number() -> None:
    with pytest.raises(TypeError):
        heartbeat.step(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"period": 0.0}, "period=0.0: give a number of seconds"),
        ({"period": 1e12}, "give a number of seconds greater than zero, and at most 1000000"),
        ({"period": float("nan")}, "period=nan"),
        ({"timeout": -1.0}, "timeout=-1.0"),
        ({"start_timeout": 0.0}, "start_timeout=0.0"),
        ({"failures": 0}, "failures=0"),
        ({"failures": 2.5}, "failures=2.5: give a whole number"),
        ({"stalled_after": 0}, "stalled_after=0"),
        ({"on_stall": "explode"}, "on_stall='explode': give 'report' or 'fatal'"),
        ({"rank": 1}, "there is no rank 1 in a world of 1"),
        ({"rank": None}, "set RANK and WORLD_SIZE or DTENSOR_CLIENT_ID and DTENSOR_NUM_CLIENTS"),
    ],
)
def test_an_argument_that_makes_no_sense_is_told_so(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        heartbeat.start(**{"period": 30.0, "rank": 0, "world_size": 1, **options})


def test_rank_and_size_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "2")
    monkeypatch.setenv("DTENSOR_NUM_CLIENTS", "3")
    assert world(None, None) == (2, 3)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world(None, None) == (1, 4)
    assert world(3, None) == (3, 4)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE='many' in the environment is not a number"):
        world(None, None)


# --- what is fatal


def test_who_says_what_to_do_is_told_in_the_thread_that_beats() -> None:
    exchange, told = Scripted(), list[tuple[str, HeartbeatFailure]]()

    def on_failure(failure: HeartbeatFailure) -> None:
        told.append((threading.current_thread().name, failure))

    event = alone(
        0.01, timeout=4.0, failures=1, exchange=exchange, on_failure=on_failure, start_timeout=9.0
    )
    exchange.failing = 1
    assert event.wait(PATIENCE)
    [(thread, failure)] = told
    assert (thread, failure.kind) == ("regrow-heartbeat", "no exchange")
    assert "the script says so" in str(failure)


def test_who_is_told_may_start_anew_at_once() -> None:
    exchange, events = Scripted(), list[threading.Event]()
    told = threading.Event()

    def on_failure(failure: HeartbeatFailure) -> None:
        events.append(alone(exchange=same))
        told.set()

    first = alone(
        0.01, timeout=4.0, failures=1, exchange=exchange, on_failure=on_failure, start_timeout=9.0
    )
    exchange.failing = 1
    assert told.wait(PATIENCE)
    assert events[0] is not first
    assert not events[0].is_set()


def test_who_leaves_it_to_the_heartbeat_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()
    alone(0.01, timeout=4.0, failures=1, exchange=exchange, start_timeout=9.0)
    exchange.failing = 1
    assert deaths.died.wait(PATIENCE)
    assert isinstance(deaths.of[0], HeartbeatFailure)


def test_who_raises_instead_of_ending_dies_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()

    def exits(failure: HeartbeatFailure) -> None:
        raise SystemExit(1)  # which ends no more than the thread

    alone(0.01, timeout=4.0, failures=1, exchange=exchange, on_failure=exits, start_timeout=9.0)
    exchange.failing = 1
    assert deaths.died.wait(PATIENCE)
    assert "on_failure raised" in caplog.text


def test_a_worker_that_is_being_stopped_is_left_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()
    monkeypatch.setattr(_death, "is_spared", lambda: True)
    event = alone(0.01, timeout=4.0, failures=1, exchange=exchange, start_timeout=9.0)
    exchange.failing = 1
    assert event.wait(PATIENCE)
    assert deaths.of == []


@pytest.fixture
def in_restarter() -> Iterator[None]:
    """This process restarts in place."""
    board.stand(board.IN_RESTARTER)
    yield
    board.stand(board.STANDS_ALONE)


@pytest.mark.usefixtures("in_restarter")
def test_who_restarts_in_place_leaves_losses_to_the_restarter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()
    event = alone(0.01, timeout=4.0, failures=1, exchange=exchange, start_timeout=9.0)
    exchange.failing = 1
    assert event.wait(PATIENCE)
    assert deaths.of == []
    assert "that is for the restarter in place to see to" in caplog.text


@pytest.mark.usefixtures("in_restarter")
def test_a_stall_that_is_fatal_by_choice_is_so_in_a_restarter_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deaths = Deaths(monkeypatch)
    fate = _fate.Death(Plan(0, 3, 1.0, 1.0, 3, 1.0))
    ranks = Ranks.of([2])
    stall = HeartbeatFailure("stalled", ranks, "x", rank=0, world_size=3, beat=9, seconds=1.0)
    fate.fatal(stall)
    fate.end()
    assert deaths.of == [stall]


def test_a_group_that_does_not_come_about_is_an_exception_and_can_be_tried_again() -> None:
    exchange = Scripted()
    exchange.failing = 1
    with pytest.raises(HeartbeatFailure, match="the script says so") as raised:
        alone(exchange=exchange)
    assert (raised.value.kind, raised.value.beat) == ("no exchange", 0)
    assert not alone(exchange=exchange).is_set()


# --- leaving when the process ends


class Leaver:
    """A beating that writes down that it was told to leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        beating = _api._Beating(self, _api._last_error())  # type: ignore[arg-type]
        monkeypatch.setattr(_api, "_beating", beating)

    def leave(self) -> None:
        self.left += 1


@pytest.mark.parametrize(
    ("error", "leaves"),
    [
        (None, 1),
        (SystemExit(0), 1),
        (SystemExit(None), 1),
        (SystemExit(3), 0),
        (ValueError("x"), 0),
        (KeyboardInterrupt(), 0),
    ],
)
def test_only_who_ends_well_leaves_and_once(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, leaves: int
) -> None:
    """As in a child of multiprocessing: with the exception in hand, and again after that."""
    leaver = Leaver(monkeypatch)
    try:
        if error is not None:
            raise error
        _api._at_exit()
    except BaseException:  # noqa: BLE001 - whatever it is, it is in hand now
        _api._at_exit()
    _api._at_exit()
    assert leaver.left == leaves


def test_who_was_ended_by_an_exception_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    leaver = Leaver(monkeypatch)
    monkeypatch.setattr("sys.last_value", ValueError("x"), raising=False)
    _api._at_exit()
    assert leaver.left == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_starts_has_no_part_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaver = Leaver(monkeypatch)
    with _api._lock:
        child = os.fork()
        if child == 0:
            _api._at_exit()
            os._exit(leaver.left + 2 * _api._lock.locked())
    assert os.waitpid(child, 0)[1] == 0


# --- several workers, in threads


class Hub:
    """An all-reduce among threads, which can be made to fail for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failing = 0
        """How many exchanges are to fail from now on."""
        self.succeeded = 0
        self._given: list[Sequence[int]] = []
        self._sums: Sequence[int] | None = None
        self._changed = threading.Condition()

    def __call__(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        with self._changed:
            number, self._given = self.succeeded, [*self._given, vector]
            if len(self._given) == self.size:
                self._sums = [sum(place) for place in zip(*self._given, strict=True)]
                if self.failing:
                    self.failing -= 1
                    self._sums = None
                self._given = []
                self.succeeded += 1
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self.succeeded > number, timeout):
                self._given.remove(vector)
                raise TimeoutError("not all came")
            if self._sums is None:
                raise ConnectionError("the line is cut")
            return self._sums


class Record:
    """A `Fate` that writes down what would have become of the process."""

    def __init__(self) -> None:
        self.failures: list[HeartbeatFailure] = []
        self.beats = threading.Semaphore(0)
        self.ended = threading.Event()

    def alive(self) -> None: ...

    def arm(self, seconds: float) -> None:
        self.beats.release()

    def stalled(self, standing: Standing, text: str) -> None: ...

    def fatal(self, failure: HeartbeatFailure) -> None:
        self.failures.append(failure)

    def end(self) -> None:
        self.ended.set()


class Crew:
    """Workers in threads that beat by sums of vectors."""

    def __init__(self, size: int = 3) -> None:
        self.hub = Hub(size)
        self.fates = [Record() for _ in range(size)]
        self.beaters = []
        for rank in range(size):
            plan = Plan(rank, size, 0.05, 0.25, failures=3, start_timeout=PATIENCE, patient=True)
            meeting = VectorMeeting(self.hub, size)
            self.beaters.append(Beater(plan, meeting, self.fates[rank], lambda: (NO_STEP, "")))
        for beater in self.beaters:
            beater.start()

    def beat(self, times: int) -> None:
        """Wait until all have beaten so often."""
        for fate in self.fates:
            for _ in range(times):
                assert fate.beats.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("failures", [1, 2])
def test_one_and_two_failed_exchanges_are_survived_by_all(failures: int) -> None:
    crew = Crew()
    crew.beat(2)
    crew.hub.failing = failures
    crew.beat(4)
    assert crew.hub.failing == 0
    assert [fate.failures for fate in crew.fates] == [[], [], []]
    crew.beaters[0].leave()


def test_the_third_in_a_row_is_fatal_for_all() -> None:
    crew = Crew()
    crew.beat(1)
    crew.hub.failing = 3
    for fate in crew.fates:
        assert fate.ended.wait(PATIENCE)
        [failure] = fate.failures
        assert failure.kind == "no exchange"
        assert "the line is cut" in str(failure)


def test_a_thread_that_cannot_go_on_does_not_end_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listen(self: VectorMeeting, tell: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(VectorMeeting, "listen", listen)
    [fate] = Crew(1).fates
    assert fate.ended.wait(PATIENCE)
    [failure] = fate.failures
    assert "can't start new thread" in str(failure)


def test_all_stop_when_one_leaves_in_its_last_exchange() -> None:
    crew = Crew()
    crew.beat(1)
    crew.beaters[1].event.set()
    for fate, beater in zip(crew.fates, crew.beaters, strict=True):
        assert fate.ended.wait(PATIENCE)
        assert fate.failures == []
        assert beater.event.wait(PATIENCE)


# --- standing still


@pytest.mark.parametrize(("rank", "level"), [(0, "WARNING"), (1, "INFO"), (2, "WARNING")])
def test_that_one_stands_still_is_said_loud_by_it_and_rank_0(
    rank: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=_fate.__name__)
    plan = Plan(rank, 3, 1.0, 1.0, 3, 1.0)
    standing = Standing(1, Ranks.of([2]), 9, Ranks.of([0, 1]), 5, Ranks.of([2]), 1, "")
    _fate.Callback(plan, lambda failure: None).stalled(standing, "rank 2 stands still")
    [record] = caplog.records
    assert (record.levelname, record.message) == (level, "rank 2 stands still")


def test_a_stall_is_reported_unless_that_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def begin(plan: Plan, *_: object) -> Beater:
        plans.append(plan)
        meeting = VectorMeeting(same, plan.size)
        return Beater(plan, meeting, Record(), lambda: (NO_STEP, ""))

    monkeypatch.setattr(_api, "_begin", begin)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    heartbeat.start(1)
    _api.start_by_itself(1)
    heartbeat.start(1, stalled_after=None)
    assert [plan.stalled_after for plan in plans] == [30, 30, None]
    assert not any(plan.stall_is_fatal for plan in plans)


class FirstMeeting:
    """Others that have met this worker, which does not hear of it before it leaves."""

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()
        self.said: list[Beat] = []

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        if beat.leaving:
            self.said.append(beat)
            return Left(Ranks.of([beat.rank]))
        self.asked.set()
        assert self.over.wait(PATIENCE)
        return Agreed(7)

    def leave(self, beat: Beat) -> None:
        self.said.append(beat)
        self.over.set()

    def listen(self, tell: Callable[[Outcome], None]) -> None: ...

    def table(self, timeout: float) -> list[Progress]:
        return []

    def close(self) -> None: ...


def test_who_leaves_in_its_first_beat_says_so_as_the_others_may_have_met_it() -> None:
    meeting = FirstMeeting()
    plan = Plan(1, 2, 9.0, 9.0, failures=3, start_timeout=PATIENCE, patient=True)
    beater = Beater(plan, meeting, Record(), lambda: (NO_STEP, ""))
    beater.start()
    assert meeting.asked.wait(PATIENCE)
    beater.leave()
    assert not beater.alive
    assert [beat.leaving for beat in meeting.said] == [True, True]
