"""The generic server: one that a user wrote for torch's base class, with abstract methods only."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from typing import Any

import pytest
from processes import wait_until

from regrow.timer import RequestQueue, TimerRequest, TimerServer
from regrow.timer import _api as api
from regrow.timer._steady import SteadyClock

DAY = 86400.0


class PlainQueue(RequestQueue):
    """The queue of a user: it blocks as long as it may, and nobody can wake it."""

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
    """Written for torch's base class; its attributes are named like many a server's."""

    def __init__(self, request_queue: RequestQueue, max_interval: float = 60.0) -> None:
        super().__init__(request_queue, max_interval, daemon=True)
        self._timers: dict[tuple[Any, str], TimerRequest] = {}
        self._clock = self._watch = self._deadlines = self._retries = None  # its own affair
        self.reaped: list[Any] = []
        self.answers: dict[Any, list[bool | Exception]] = defaultdict(list)
        self.heard = threading.Event()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self._timers = {k: r for k, r in self._timers.items() if k[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        expired: dict[Any, list[TimerRequest]] = {}
        for request in self._timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _reap_worker(self, worker_id: Any) -> bool:
        self.reaped.append(worker_id)
        self.heard.set()
        answer = self.answers[worker_id].pop(0) if self.answers[worker_id] else True
        if isinstance(answer, Exception):
            raise answer
        return answer


class Scripted(PlainQueue):
    """A queue that never waits, but says how long it was to; waiting is time that passes."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks
        self.waits: list[float] = []
        self.stands_still = 0.0

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        self.waits.append(timeout)
        self.clocks.passed += self.stands_still
        self.stands_still = 0.0
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
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(api, "SteadyClock", lambda: SteadyClock(clocks.wall, clocks.monotonic))
    return clocks


@pytest.fixture
def scripted(clocks: Clocks) -> Scripted:
    return Scripted(clocks)


def passes(server: TimerServer, count: int) -> None:
    for _ in range(count):
        server._run_watchdog()


def test_a_users_server_with_a_plain_queue_reaps_at_the_deadline_and_not_by_interval() -> None:
    requests = PlainQueue()
    server = UsersServer(requests, max_interval=1000.0)
    server.start()
    requests.put(TimerRequest("hung", "step", SteadyClock().now() + 0.1))
    requests.put(TimerRequest("fine", "step", SteadyClock().now() + 0.1))
    requests.put(TimerRequest("fine", "step", -1))
    assert server.heard.wait(30)
    wait_until(lambda: not server._timers, "the timers of the reaped worker are cleared")
    assert server.reaped == ["hung"]
    server._max_interval = 0.01  # it need not be waited for: its queue cannot be woken
    server.stop()


def test_the_thread_ends_at_stop_and_a_new_one_can_be_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = PlainQueue()
    server = UsersServer(requests, max_interval=0.02)
    server.stop()  # not started: nothing to do
    for _ in range(2):
        server.start()
        thread = server._watchdog_thread
        assert thread is not None
        assert thread.daemon
        server.start()
        assert server._watchdog_thread is thread
        server.stop()
        wait_until(lambda thread=thread: not thread.is_alive(), "the thread ends")  # type: ignore[misc]
    assert "it is not started again" in caplog.text


def test_a_server_may_be_stopped_by_what_it_does_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = PlainQueue()
    server = UsersServer(requests)
    monkeypatch.setattr(server, "clear_timers", lambda workers: server.stop() if workers else None)
    server.start()
    thread = server._watchdog_thread
    assert thread is not None
    requests.put(TimerRequest("hung", "step", 0.0))
    wait_until(lambda: not thread.is_alive(), "the thread ends")
    assert server.reaped == ["hung"]


def test_it_waits_until_the_next_deadline_and_never_longer_than_max_interval(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted, max_interval=60.0)
    scripted.put(
        TimerRequest(1, "a", clocks.wall() + 100.0), TimerRequest(2, "b", clocks.wall() + 70.0)
    )
    passes(server, 5)
    assert scripted.waits == pytest.approx([60.0, 60.0, 10.0, 30.0, 60.0])
    assert server.reaped == [2, 1]


def test_requests_arrive_untouched_where_no_clock_jumps(
    scripted: Scripted, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = UsersServer(scripted)
    arrived: list[TimerRequest] = []
    monkeypatch.setattr(server, "register_timers", arrived.extend)
    sent = [
        TimerRequest(1, "a", clocks.wall() + 1.5),
        TimerRequest(1, "b", -1),
        TimerRequest(2, "c", 0),
    ]
    scripted.put(*sent)
    server._run_watchdog()
    assert all(one is other for one, other in zip(arrived, sent, strict=True))


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_by_a_day_reaps_nobody_and_spares_nobody(
    jump: float, scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted, max_interval=60.0)
    scripted.put(TimerRequest("before", "a", clocks.wall() + 90.0))
    server._run_watchdog()
    clocks.set_to += jump
    clocks.passed += 1.0
    scripted.put(TimerRequest("after", "b", clocks.wall() + 40.0))
    scripted.put(TimerRequest("late", "c", clocks.wall() - 1.0))
    scripted.put(TimerRequest("zero", "d", 0.0))  # long ago, and no release
    passes(server, 1)
    assert server.reaped == ["late", "zero"]
    clocks.passed += 39.9
    scripted.put(TimerRequest("other", "d", -1))
    passes(server, 1)
    assert server.reaped == ["late", "zero"]
    passes(server, 1)  # waits for what is left of the 40 seconds
    assert server.reaped == ["late", "zero", "after"]
    assert scripted.waits[-1] == pytest.approx(0.1, abs=1e-3)
    passes(server, 1)
    assert server.reaped == ["late", "zero", "after", "before"]
    assert clocks.passed == pytest.approx(1000.0 + 90.0, abs=1e-3)


def test_a_worker_is_reaped_once_and_all_its_timers_are_cleared(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    now = clocks.wall()
    scripted.put(
        *(TimerRequest(1, f"{n}", now + n) for n in range(4)), TimerRequest(2, "x", now + 9)
    )
    passes(server, 10)
    assert server.reaped == [1, 2]
    assert scripted.waits[:4] == [60.0, 9.0, 60.0, 60.0]  # the cleared timers wake nobody


def test_a_worker_that_survives_is_tried_again_with_growing_pauses(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    server.answers[1] = [False] * 4
    scripted.put(TimerRequest(1, "a", clocks.wall() - 1.0))
    passes(server, 5)
    assert server.reaped == [1] * 5
    assert scripted.waits[1:] == pytest.approx([0.0, 0.05, 0.1, 0.2], abs=1e-3)
    assert server._timers == {}


def test_a_stream_of_requests_does_not_make_it_try_more_often(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    server.answers[1] = [False] * 1000
    scripted.put(TimerRequest(1, "a", clocks.wall() - 1.0))
    for _ in range(1000):
        clocks.passed += 0.001
        scripted.put(TimerRequest(2, "b", clocks.wall() + 5.0))
        server._run_watchdog()
    assert server.reaped == [1] * 6  # after 0.75 s the sixth time


def test_an_exception_in_reaping_counts_as_reaped(
    scripted: Scripted, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    server = UsersServer(scripted)
    server.answers["bad"] = [RuntimeError("no such worker")]
    scripted.put(
        TimerRequest("bad", "a", clocks.wall() - 1), TimerRequest("good", "b", clocks.wall() - 1)
    )
    passes(server, 2)
    assert sorted(server.reaped) == ["bad", "good"]
    assert server._timers == {}
    assert "UsersServer._reap_worker('bad') raised" in caplog.text
    assert "no such worker" in caplog.text


def test_a_server_that_is_lenient_about_deadlines_is_not_asked_all_the_time(
    scripted: Scripted, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = UsersServer(scripted, max_interval=60.0)
    strict = server.get_expired_timers
    monkeypatch.setattr(server, "get_expired_timers", lambda deadline: strict(deadline - 100.0))
    scripted.put(TimerRequest(1, "a", clocks.wall() + 10.0))
    passes(server, 4)
    assert scripted.waits == pytest.approx([60.0, 10.0, 60.0, 60.0])
    assert server.reaped == [1]


def test_an_error_does_not_end_the_thread_and_does_not_run_it_hot(
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
    assert server.heard.wait(30)
    server.stop()
    assert server.reaped == ["hung"]
    pauses = [record.args for record in caplog.records if "could not look after" in record.msg]
    assert pauses == [("UsersServer", 0.05), ("UsersServer", 0.1), ("UsersServer", 0.2)]
    assert "the table is gone" in caplog.text


def test_what_is_done_before_reaping_may_fail(
    scripted: Scripted,
    clocks: Clocks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = UsersServer(scripted)
    monkeypatch.setattr(server, "_before_reaping", lambda expired: 1 / 0)
    scripted.put(TimerRequest("hung", "step", clocks.wall() - 1.0))
    server._run_watchdog()
    assert server.reaped == ["hung"]
    assert "ZeroDivisionError" in caplog.text


def test_a_worker_that_released_in_time_is_not_reaped_because_the_server_was_late(
    scripted: Scripted, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = UsersServer(scripted)
    late = [
        [TimerRequest("fine", "step", -1)],
        [TimerRequest("fine", "next", clocks.wall() + 50.0)],
    ]
    monkeypatch.setattr(server, "_late_requests", lambda: late.pop(0) if late else [])
    scripted.put(TimerRequest("fine", "step", clocks.wall() - 1), TimerRequest("hung", "step", 0.0))
    server._run_watchdog()
    assert server.reaped == ["hung"]
    assert list(server._timers) == [("fine", "next")]


def test_a_host_that_stood_still_costs_no_healthy_worker_its_life(
    scripted: Scripted, clocks: Clocks
) -> None:
    server = UsersServer(scripted)
    scripted.put(*(TimerRequest(who, "step", clocks.wall() + 5.0) for who in ("fine", "hung")))
    passes(server, 1)
    scripted.put(TimerRequest("other", "step", -1))
    scripted.stands_still = 3600.0
    passes(server, 1)
    assert server.reaped == []
    scripted.put(TimerRequest("fine", "step", -1))
    passes(server, 2)
    assert server.reaped == ["hung"]


def test_a_flood_of_late_requests_does_not_save_a_worker(
    scripted: Scripted, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = UsersServer(scripted)
    monkeypatch.setattr(server, "_late_requests", lambda: [TimerRequest("flood", "a", -1)])
    scripted.put(TimerRequest("hung", "step", clocks.wall() - 1.0))
    server._run_watchdog()
    assert server.reaped == ["hung"]


def test_what_happens_is_logged_with_the_worker_and_its_scopes(
    scripted: Scripted, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, api.__name__)
    server = UsersServer(scripted)
    server.answers[7] = [False]
    scripted.put(TimerRequest(7, "train.py#42", clocks.wall() - 1.5))
    passes(server, 2)
    assert "reaping worker 7: ['train.py#42'] expired, the first 1.500 s ago" in caplog.text
    assert "worker 7 could not be reaped; next try in 0.0 s" in caplog.text
    assert "reaped worker 7" in caplog.text


def test_requests_compare_by_what_they_ask_for() -> None:
    request = TimerRequest(1, "a", 2.0)
    assert request == TimerRequest(1, "a", 2.0)
    assert request != TimerRequest(2, "a", 2.0)
    assert request != TimerRequest(1, "b", 2.0)
    assert request != TimerRequest(1, "a", 3.0)
    assert request != (1, "a", 2.0)
    assert repr(request) == "TimerRequest(1, 'a', 2.0)"
