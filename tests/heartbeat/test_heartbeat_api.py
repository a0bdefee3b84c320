"""`start`, `step` and `progress`, and the thread behind them, in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import PATIENCE, wait_until
from regrow import _progress as board
from regrow import heartbeat
from regrow.heartbeat import HeartbeatFailure, api, death
from regrow.heartbeat.beater import Beater
from regrow.heartbeat.beats import HeartbeatPlan
from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.failure_policy import FailurePolicy
from regrow.heartbeat.merge import NO_STEP, Agreed, Beat, Outcome, Progress, WorkersLeft
from regrow.heartbeat.terms import NAMES, world
from regrow.heartbeat.vector_exchange import VectorMeeting


@pytest.fixture(autouse=True)
def own_heartbeat(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no heartbeat, no step and no handler behind."""
    monkeypatch.setattr(api, "running", None)
    monkeypatch.setattr(api, "own_step", NO_STEP)
    monkeypatch.setattr(api, "own_phase", "")
    monkeypatch.setattr(api, "leave_at_exit", lambda: None)
    for pair in NAMES:
        for name in pair:
            monkeypatch.delenv(name, raising=False)
    yield
    api.leave()


def same(vector: Sequence[int], timeout: float) -> Sequence[int]:
    """The sum over one worker."""
    return vector


class Scripted:
    """An exchange of one worker that fails the given number of times."""

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
    """Replaces the end of this process, and records its reasons."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: list[BaseException] = []
        self.died = threading.Event()
        monkeypatch.setattr(death, "die", self)

    def __call__(self, failure: BaseException) -> None:
        self.of.append(failure)
        self.died.set()


def alone(period: float = 30.0, **options: Any) -> threading.Event:
    return heartbeat.start(period, rank=0, world_size=1, **options)


def test_a_second_start_warns_and_returns_the_same_event(caplog: pytest.LogCaptureFixture) -> None:
    event = alone()
    assert alone() is event
    assert "already runs a heartbeat" in caplog.text


def test_a_stopped_heartbeat_can_be_started_again() -> None:
    event = alone()
    event.set()
    wait_until(lambda: heartbeat.progress() == [], "it is over")
    again = alone()
    assert again is not event
    assert not again.is_set()


def test_an_ended_heartbeat_leaves_no_kernel_timers() -> None:
    before = timers()
    alone().set()
    wait_until(lambda: heartbeat.progress() == [] and timers() == before, "it is over")
    with pytest.raises(HeartbeatFailure):
        alone(exchange=lambda vector, timeout: [])
    assert timers() == before


def timers() -> int:
    """Return the number of kernel timers of this process."""
    return Path("/proc/self/timers").read_text().count("ClockID")


def test_progress_returns_the_step_and_the_phase() -> None:
    exchange = Scripted()
    with pytest.raises(RuntimeError, match="no heartbeat was started in this process"):
        heartbeat.progress()
    heartbeat.step(5, "warm-up")
    heartbeat.step(6)
    alone(exchange=exchange)
    [own] = heartbeat.progress()
    assert (own.rank, own.step, own.phase) == (0, 6, "warm-up")


@pytest.mark.parametrize("n", [-1, 2**53 + 1])
def test_an_invalid_step_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="give a number from 0"):
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
        ({"rank": 1}, "rank 1 is not in a world of 1"),
        ({"rank": None}, "set RANK and WORLD_SIZE or DTENSOR_CLIENT_ID and DTENSOR_NUM_CLIENTS"),
    ],
)
def test_an_invalid_argument_is_refused(options: dict[str, Any], why: str) -> None:
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


# --- fatal failures


def test_on_failure_is_called_in_the_heartbeats_thread() -> None:
    exchange, failures = Scripted(), list[tuple[str, HeartbeatFailure]]()

    def on_failure(failure: HeartbeatFailure) -> None:
        failures.append((threading.current_thread().name, failure))

    event = alone(
        0.01, timeout=4.0, failures=1, exchange=exchange, on_failure=on_failure, start_timeout=9.0
    )
    exchange.failing = 1
    assert event.wait(PATIENCE)
    [(thread, failure)] = failures
    assert (thread, failure.kind) == ("regrow-heartbeat", "no exchange")
    assert "the script says so" in str(failure)


def test_on_failure_may_start_a_new_heartbeat() -> None:
    exchange, events = Scripted(), list[threading.Event]()
    called = threading.Event()

    def on_failure(failure: HeartbeatFailure) -> None:
        events.append(alone(exchange=same))
        called.set()

    first = alone(
        0.01, timeout=4.0, failures=1, exchange=exchange, on_failure=on_failure, start_timeout=9.0
    )
    exchange.failing = 1
    assert called.wait(PATIENCE)
    assert events[0] is not first
    assert not events[0].is_set()


def test_without_on_failure_the_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()
    alone(0.01, timeout=4.0, failures=1, exchange=exchange, start_timeout=9.0)
    exchange.failing = 1
    assert deaths.died.wait(PATIENCE)
    assert isinstance(deaths.of[0], HeartbeatFailure)


def test_a_process_dies_if_on_failure_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()

    def exits(failure: HeartbeatFailure) -> None:
        raise SystemExit(1)  # ends only the thread

    alone(0.01, timeout=4.0, failures=1, exchange=exchange, on_failure=exits, start_timeout=9.0)
    exchange.failing = 1
    assert deaths.died.wait(PATIENCE)
    assert "on_failure raised" in caplog.text


def test_a_worker_that_its_agent_stops_keeps_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()
    monkeypatch.setattr(death, "is_being_stopped", lambda: True)
    event = alone(0.01, timeout=4.0, failures=1, exchange=exchange, start_timeout=9.0)
    exchange.failing = 1
    assert event.wait(PATIENCE)
    assert deaths.of == []


@pytest.fixture
def in_wrapper() -> Iterator[None]:
    """This process is in an in-process wrapper."""
    board.set_restart_state(board.IN_WRAPPER)
    yield
    board.set_restart_state(board.NOT_IN_WRAPPER)


@pytest.mark.usefixtures("in_wrapper")
def test_a_wrapper_handles_lost_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths, exchange = Deaths(monkeypatch), Scripted()
    event = alone(0.01, timeout=4.0, failures=1, exchange=exchange, start_timeout=9.0)
    exchange.failing = 1
    assert event.wait(PATIENCE)
    assert deaths.of == []
    assert "in-process restart handles this" in caplog.text


@pytest.mark.usefixtures("in_wrapper")
def test_a_fatal_stall_is_fatal_in_a_wrapper_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deaths = Deaths(monkeypatch)
    policy = FailurePolicy(HeartbeatPlan(0, 3, 1.0, 1.0, 3, 1.0))
    ranks = Ranks.of([2])
    stall = HeartbeatFailure("stalled", ranks, "x", rank=0, world_size=3, beat=9, seconds=1.0)
    policy.fatal(stall)
    policy.end()
    assert deaths.of == [stall]


def test_a_failed_start_raises_and_can_be_repeated() -> None:
    exchange = Scripted()
    exchange.failing = 1
    with pytest.raises(HeartbeatFailure, match="the script says so") as raised:
        alone(exchange=exchange)
    assert (raised.value.kind, raised.value.beat) == ("no exchange", 0)
    assert not alone(exchange=exchange).is_set()


# --- leaving when the process ends


class Leaver:
    """A heartbeat that counts the calls of `leave`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        beating = api.Running(self, api.last_error())  # type: ignore[arg-type]
        monkeypatch.setattr(api, "running", beating)

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
def test_only_a_worker_that_ends_well_leaves_and_only_once(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, leaves: int
) -> None:
    """As in a child of multiprocessing: during the exception, and again after it."""
    leaver = Leaver(monkeypatch)
    try:
        if error is not None:
            raise error
        api.leave()
    except BaseException:  # noqa: BLE001 - any exception of the parameters
        api.leave()
    api.leave()
    assert leaver.left == leaves


def test_a_worker_that_an_exception_ended_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    leaver = Leaver(monkeypatch)
    monkeypatch.setattr("sys.last_value", ValueError("x"), raising=False)
    api.leave()
    assert leaver.left == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_forked_during_a_start_has_no_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaver = Leaver(monkeypatch)
    with api.lock:
        child = os.fork()
        if child == 0:
            api.leave()
            os._exit(leaver.left + 2 * api.lock.locked())
    assert os.waitpid(child, 0)[1] == 0


# --- several workers, in threads


class Hub:
    """An all-reduce among threads; a test can let it fail for all threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failing = 0
        """Number of the next exchanges that fail."""
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


class Record(FailurePolicy):
    """A policy that records failures and ends no process."""

    def __init__(self) -> None:
        super().__init__(HeartbeatPlan(0, 1, 1.0, 1.0, 3, 1.0), lambda failure: None)
        self.failures: list[HeartbeatFailure] = []
        self.beats = threading.Semaphore(0)
        self.ended = threading.Event()

    def alive(self) -> None: ...

    def arm(self, seconds: float) -> None:
        self.beats.release()

    def stalled(self, ranks: Ranks, text: str) -> None: ...

    def fatal(self, failure: HeartbeatFailure) -> None:
        self.failures.append(failure)

    def end(self) -> None:
        self.ended.set()


class ThreadedWorkers:
    """Workers in threads that exchange heartbeats by sums of vectors."""

    def __init__(self, size: int = 3) -> None:
        self.hub = Hub(size)
        self.policies = [Record() for _ in range(size)]
        self.beaters = []
        for rank in range(size):
            plan = HeartbeatPlan(
                rank, size, 0.05, 0.25, failures=3, start_timeout=PATIENCE, patient=True
            )
            meeting = VectorMeeting(self.hub, size)
            self.beaters.append(Beater(plan, meeting, self.policies[rank], lambda: (NO_STEP, "")))
        for beater in self.beaters:
            beater.start()

    def beat(self, times: int) -> None:
        """Wait until all workers have sent this number of heartbeats."""
        for policy in self.policies:
            for _ in range(times):
                assert policy.beats.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("failures", [1, 2])
def test_all_workers_survive_one_and_two_failed_exchanges(failures: int) -> None:
    workers = ThreadedWorkers()
    workers.beat(2)
    workers.hub.failing = failures
    workers.beat(4)
    assert workers.hub.failing == 0
    assert [policy.failures for policy in workers.policies] == [[], [], []]
    workers.beaters[0].leave()


def test_the_third_failed_exchange_in_a_row_is_fatal_for_all_workers() -> None:
    workers = ThreadedWorkers()
    workers.beat(1)
    workers.hub.failing = 3
    for policy in workers.policies:
        assert policy.ended.wait(PATIENCE)
        [failure] = policy.failures
        assert failure.kind == "no exchange"
        assert "the line is cut" in str(failure)


def test_an_error_in_the_heartbeats_thread_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listen(self: VectorMeeting, notify: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(VectorMeeting, "listen", listen)
    [policy] = ThreadedWorkers(1).policies
    assert policy.ended.wait(PATIENCE)
    [failure] = policy.failures
    assert "can't start new thread" in str(failure)


def test_all_stop_when_one_leaves_in_its_last_exchange() -> None:
    workers = ThreadedWorkers()
    workers.beat(1)
    workers.beaters[1].event.set()
    for policy, beater in zip(workers.policies, workers.beaters, strict=True):
        assert policy.ended.wait(PATIENCE)
        assert policy.failures == []
        assert beater.event.wait(PATIENCE)


# --- stalls


@pytest.mark.parametrize(("rank", "level"), [(0, "WARNING"), (1, "INFO"), (2, "WARNING")])
def test_the_stalled_rank_and_rank_0_log_a_stall_as_a_warning(
    rank: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="regrow.heartbeat.failure_policy")
    plan = HeartbeatPlan(rank, 3, 1.0, 1.0, 3, 1.0)
    FailurePolicy(plan, lambda failure: None).stalled(Ranks.of([2]), "rank 2 is stalled")
    [record] = caplog.records
    assert (record.levelname, record.message) == (level, "rank 2 is stalled")


def test_a_stall_is_reported_unless_the_script_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    plans: list[HeartbeatPlan] = []
    starts: list[Callable[[], threading.Event]] = [
        lambda: heartbeat.start(30),
        lambda: api.start_by_itself(30),
        lambda: heartbeat.start(30, stalled_after=None),
    ]
    for start in starts:
        start()
        assert api.running is not None
        plans.append(api.running.beater.plan)
        api.leave()
    assert [plan.stalled_after for plan in plans] == [30, 30, None]
    assert not any(plan.stall_is_fatal for plan in plans)


class FirstMeeting:
    """A meeting that answers the first beat only when the worker leaves."""

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()
        self.received: list[Beat] = []

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        if beat.leaving:
            self.received.append(beat)
            return WorkersLeft(Ranks.of([beat.rank]))
        self.asked.set()
        assert self.over.wait(PATIENCE)
        return Agreed(7)

    def leave(self, beat: Beat) -> None:
        self.received.append(beat)
        self.over.set()

    def listen(self, notify: Callable[[Outcome], None]) -> None: ...

    def table(self, timeout: float) -> list[Progress]:
        return []

    def close(self) -> None: ...


def test_a_worker_that_leaves_during_its_first_beat_notifies_the_others() -> None:
    meeting = FirstMeeting()
    plan = HeartbeatPlan(1, 2, 9.0, 9.0, failures=3, start_timeout=PATIENCE, patient=True)
    beater = Beater(plan, meeting, Record(), lambda: (NO_STEP, ""))
    beater.start()
    assert meeting.asked.wait(PATIENCE)
    beater.leave()
    assert not beater.alive
    assert [beat.leaving for beat in meeting.received] == [True, True]


def test_a_process_that_replaces_another_one_takes_no_part_in_the_running_heartbeat(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(board.INCARNATION_ENV, "1")
    event = heartbeat.start(60, rank=0, world_size=2, start_timeout=0.1)
    assert event.is_set(), "as after the end of the heartbeat"
    assert heartbeat.progress() == []
    assert "it sends no heartbeat" in caplog.text
    with pytest.raises(ValueError, match="period"):
        heartbeat.start(-1, rank=0, world_size=2)
