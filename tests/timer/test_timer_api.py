"""A user's server for torch's base class, with the abstract methods only."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from helpers.processes import wait_until
from regrow.timer import RequestQueue, TimerRequest, TimerServer
from regrow.timer.api import ServerTurns
from regrow.timer.rules import SteadyClock

DAY = 86400.0


class PlainQueue(RequestQueue):
    """A user's queue: it blocks for its time-out, and cannot be woken."""

    def __init__(self) -> None:
        self.requests: queue.Queue[TimerRequest] = queue.Queue()

    def put(self, *requests: TimerRequest) -> None:
        for request in requests:
            self.requests.put(request)

    def size(self) -> int:
        return self.requests.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        taken: list[TimerRequest] = []
        try:
            while len(taken) < size:
                taken.append(self.requests.get(timeout=timeout if not taken else 0.001))
        except queue.Empty:
            pass
        return taken


class UsersServer(TimerServer):
    """Written for torch's base class, with attribute names that many servers use."""

    def __init__(self, request_queue: RequestQueue, max_interval: float = 60.0) -> None:
        super().__init__(request_queue, max_interval, daemon=True)
        self.timers: dict[tuple[Any, str], TimerRequest] = {}
        self._timers = self._clock = self._watch = self._deadlines = self._retries = (
            None  # the subclass may use these names
        )
        self.reaped: list[Any] = []
        self.answers: dict[Any, list[bool | Exception]] = defaultdict(list)
        self.reaped_one = threading.Event()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self.timers.pop(key, None)
            else:
                self.timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.timers = {k: r for k, r in self.timers.items() if k[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        expired: dict[Any, list[TimerRequest]] = {}
        for request in self.timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _reap_worker(self, worker_id: Any) -> bool:
        self.reaped.append(worker_id)
        self.reaped_one.set()
        answer = self.answers[worker_id].pop(0) if self.answers[worker_id] else True
        if isinstance(answer, Exception):
            raise answer
        return answer


class Scripted(PlainQueue):
    """A queue that records its time-outs and advances the clock instead of waiting."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks
        self.waits: list[float] = []
        self.paused_for = 0.0

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        self.waits.append(timeout)
        self.clocks.passed += self.paused_for
        self.paused_for = 0.0
        if self.requests.empty():
            self.clocks.passed += timeout
        return super().get(size, 0.0001)


class Clocks:
    """A wall clock that can be set, and a monotonic one."""

    def __init__(self) -> None:
        self.passed = 1000.0
        self.set_to = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.passed

    def wall(self) -> float:
        return self.passed + self.set_to


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def scripted(clocks: Clocks) -> Scripted:
    return Scripted(clocks)


class Turns:
    """The turns of a server with a scripted queue and clock."""

    def __init__(self, server: TimerServer, scripted: Scripted) -> None:
        clock = SteadyClock(scripted.clocks.wall, scripted.clocks.monotonic)
        self.watchdog = ServerTurns(server, scripted, 60.0, clock)

    def __call__(self, count: int) -> None:
        for _ in range(count):
            self.watchdog.turn()


def threads() -> list[threading.Thread]:
    """The threads of servers of users."""
    return [each for each in threading.enumerate() if each.name == "regrow-UsersServer"]


def test_a_users_server_with_a_plain_queue_reaps_at_the_deadline_and_not_by_interval() -> None:
    requests = PlainQueue()
    server = UsersServer(requests, max_interval=1000.0)
    server.start()
    requests.put(TimerRequest("hung", "step", SteadyClock().now() + 0.1))
    requests.put(TimerRequest("fine", "step", SteadyClock().now() + 0.1))
    requests.put(TimerRequest("fine", "step", -1))
    assert server.reaped_one.wait(30)
    wait_until(lambda: not server.timers, "the timers of the reaped worker are cleared")
    assert server.reaped == ["hung"]
    requests.put(TimerRequest("last", "step", -1))  # the queue of a user cannot be woken
    server.stop()


def test_the_thread_ends_at_stop_and_a_new_one_can_be_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = PlainQueue()
    server = UsersServer(requests, max_interval=0.02)
    server.stop()  # not started: nothing to do
    for _ in range(2):
        server.start()
        (thread,) = threads()
        assert thread.daemon
        server.start()
        assert threads() == [thread]
        server.stop()
        assert threads() == []
    assert "ignored this call of start" in caplog.text


def test_a_server_may_be_stopped_in_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = PlainQueue()
    server = UsersServer(requests)
    monkeypatch.setattr(server, "clear_timers", lambda workers: server.stop() if workers else None)
    server.start()
    (thread,) = threads()
    requests.put(TimerRequest("hung", "step", 0.0))
    wait_until(lambda: not thread.is_alive(), "the thread ends")
    assert server.reaped == ["hung"]


def test_it_waits_until_the_next_deadline_and_never_longer_than_max_interval(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    scripted.put(
        TimerRequest(1, "a", clocks.wall() + 100.0), TimerRequest(2, "b", clocks.wall() + 70.0)
    )
    turns(5)
    assert scripted.waits == pytest.approx([60.0, 60.0, 10.0, 30.0, 60.0])
    assert server.reaped == [2, 1]


def test_requests_arrive_untouched_where_no_clock_jumps(
    scripted: Scripted, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    arrived: list[TimerRequest] = []
    monkeypatch.setattr(server, "register_timers", arrived.extend)
    sent = [
        TimerRequest(1, "a", clocks.wall() + 1.5),
        TimerRequest(1, "b", -1),
        TimerRequest(2, "c", 0),
    ]
    scripted.put(*sent)
    turns(1)
    assert all(one is other for one, other in zip(arrived, sent, strict=True))


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_jump_of_the_clock_by_a_day_has_no_effect(
    jump: float, scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    scripted.put(TimerRequest("before", "a", clocks.wall() + 90.0))
    turns(1)
    clocks.set_to += jump
    clocks.passed += 1.0
    scripted.put(TimerRequest("after", "b", clocks.wall() + 40.0))
    scripted.put(TimerRequest("late", "c", clocks.wall() - 1.0))
    scripted.put(TimerRequest("zero", "d", 0.0))  # long ago, and no release
    turns(1)
    assert server.reaped == ["late", "zero"]
    clocks.passed += 39.9
    scripted.put(TimerRequest("other", "d", -1))
    turns(1)
    assert server.reaped == ["late", "zero"]
    turns(1)  # waits for what is left of the 40 seconds
    assert server.reaped == ["late", "zero", "after"]
    assert scripted.waits[-1] == pytest.approx(0.1, abs=1e-3)
    turns(1)
    assert server.reaped == ["late", "zero", "after", "before"]
    assert clocks.passed == pytest.approx(1000.0 + 90.0, abs=1e-3)


def test_a_worker_is_reaped_once_and_all_its_timers_are_cleared(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    now = clocks.wall()
    scripted.put(
        *(TimerRequest(1, f"{n}", now + n) for n in range(4)), TimerRequest(2, "x", now + 9)
    )
    turns(10)
    assert server.reaped == [1, 2]
    assert scripted.waits[:4] == [60.0, 9.0, 60.0, 60.0]  # the cleared timers cause no wake-up


def test_a_worker_that_survives_is_tried_again_with_growing_pauses(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    server.answers[1] = [False] * 4
    scripted.put(TimerRequest(1, "a", clocks.wall() - 1.0))
    turns(5)
    assert server.reaped == [1] * 5
    assert scripted.waits[1:] == pytest.approx([0.0, 0.05, 0.1, 0.2], abs=1e-3)
    assert server.timers == {}


def test_a_stream_of_requests_does_not_make_it_try_more_often(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    server.answers[1] = [False] * 1000
    scripted.put(TimerRequest(1, "a", clocks.wall() - 1.0))
    for _ in range(1000):
        clocks.passed += 0.001
        scripted.put(TimerRequest(2, "b", clocks.wall() + 5.0))
        turns(1)
    assert server.reaped == [1] * 6  # after 0.75 s the sixth time


def test_an_exception_in_reaping_counts_as_reaped(
    scripted: Scripted, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    server.answers["bad"] = [RuntimeError("no such worker")]
    scripted.put(
        TimerRequest("bad", "a", clocks.wall() - 1), TimerRequest("good", "b", clocks.wall() - 1)
    )
    turns(2)
    assert sorted(server.reaped) == ["bad", "good"]
    assert server.timers == {}
    assert "UsersServer._reap_worker('bad') raised" in caplog.text
    assert "no such worker" in caplog.text


def test_a_server_that_is_lenient_about_deadlines_is_not_asked_all_the_time(
    scripted: Scripted, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    strict = server.get_expired_timers
    monkeypatch.setattr(server, "get_expired_timers", lambda deadline: strict(deadline - 100.0))
    scripted.put(TimerRequest(1, "a", clocks.wall() + 10.0))
    turns(4)
    assert scripted.waits == pytest.approx([60.0, 10.0, 60.0, 60.0])
    assert server.reaped == [1]


def test_an_error_does_not_end_the_thread_and_is_retried_with_pauses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = PlainQueue()
    server = UsersServer(requests, max_interval=0.01)
    asked: list[float] = []
    working = server.get_expired_timers

    def failing(deadline: float) -> dict[Any, list[TimerRequest]]:
        asked.append(deadline)
        if len(asked) < 4:
            raise LookupError("the table is gone")
        return working(deadline)

    monkeypatch.setattr(server, "get_expired_timers", failing)
    requests.put(TimerRequest("hung", "step", 0.0))
    server.start()
    assert server.reaped_one.wait(30)
    server.stop()
    assert server.reaped == ["hung"]
    pauses = [record.args for record in caplog.records if "next try" in record.msg]
    assert pauses == [("UsersServer", 0.05), ("UsersServer", 0.1), ("UsersServer", 0.2)]
    assert "the table is gone" in caplog.text


class Late(Scripted):
    """More requests arrive after each batch."""

    def __init__(self, clocks: Clocks, batches: Iterator[list[TimerRequest]]) -> None:
        super().__init__(clocks)
        self.batches = batches

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        taken = super().get(size, timeout)
        self.put(*next(self.batches, []))
        return taken


def test_a_worker_that_released_in_time_is_not_reaped_because_the_server_was_late(
    clocks: Clocks,
) -> None:
    late = [TimerRequest("fine", "step", -1), TimerRequest("fine", "next", clocks.wall() + 50.0)]
    requests = Late(clocks, iter([[each] for each in late]))
    server = UsersServer(requests)
    requests.put(TimerRequest("fine", "step", clocks.wall() - 1), TimerRequest("hung", "step", 0.0))
    Turns(server, requests)(1)
    assert server.reaped == ["hung"]
    assert list(server.timers) == [("fine", "next")]


def test_a_suspended_host_kills_no_healthy_worker(scripted: Scripted, clocks: Clocks) -> None:
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    scripted.put(
        *(TimerRequest(worker, "step", clocks.wall() + 5.0) for worker in ("fine", "hung"))
    )
    turns(1)
    scripted.put(TimerRequest("other", "step", -1))
    scripted.paused_for = 3600.0
    turns(1)
    assert server.reaped == []
    scripted.put(TimerRequest("fine", "step", -1))
    turns(2)
    assert server.reaped == ["hung"]


def test_a_flood_of_late_requests_does_not_save_a_worker(clocks: Clocks) -> None:
    requests = Late(clocks, repeat([TimerRequest("flood", "a", -1)]))
    server = UsersServer(requests)
    requests.put(TimerRequest("hung", "step", clocks.wall() - 1.0))
    Turns(server, requests)(1)
    assert server.reaped == ["hung"]


def test_reapings_are_logged_with_worker_and_scopes(
    scripted: Scripted, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "regrow.timer.api")
    server = UsersServer(scripted)
    turns = Turns(server, scripted)
    server.answers[7] = [False]
    scripted.put(TimerRequest(7, "train.py#42", clocks.wall() - 1.5))
    turns(2)
    assert "timers: ['train.py#42'] of worker 7 expired, the first 1.500 s ago" in caplog.text
    assert "the worker could not be ended; next try in 0.0 s" in caplog.text
    assert "reaped worker 7" in caplog.text


def test_requests_compare_by_content() -> None:
    request = TimerRequest(1, "a", 2.0)
    assert request == TimerRequest(1, "a", 2.0)
    assert request != TimerRequest(2, "a", 2.0)
    assert request != TimerRequest(1, "b", 2.0)
    assert request != TimerRequest(1, "a", 3.0)
    assert request != (1, "a", 2.0)
    assert repr(request) == "TimerRequest(1, 'a', 2.0)"
