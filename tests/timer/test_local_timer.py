"""The local timer with real processes."""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.processes import PATIENCE, alive, wait_until
from regrow.timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    TimerRequest,
    configure,
    expires,
)

FORK = multiprocessing.get_context("fork")  # a spawned process would only import more
# Python 3.12 and newer warn; the children use no lock that a thread of the parent may hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def requests() -> Any:
    return FORK.Queue()


class WatchedServer(LocalTimerServer):
    """Publishes its timers after each change."""

    timers: dict[int, list[str]] | None = None
    """The scopes, by pid; None: nothing has changed yet."""

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        super().register_timers(timer_requests)
        self._look()

    def clear_timers(self, worker_ids: set[int]) -> None:
        super().clear_timers(worker_ids)
        self._look()

    def _look(self) -> None:
        found = self.get_expired_timers(math.inf)
        self.timers = {pid: [each.scope_id for each in timers] for pid, timers in found.items()}


@pytest.fixture
def server(requests: Any, caplog: pytest.LogCaptureFixture) -> Iterator[WatchedServer]:
    caplog.set_level(logging.INFO, "regrow.timer.api")
    caplog.set_level(logging.INFO, "regrow.timer.local_timer")
    server = WatchedServer(requests, max_interval=1000.0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(requests: Any) -> Iterator[Callable[..., Any]]:
    """Starts processes with timers over the queue; ends all at the end of the test."""
    started: list[Any] = []

    def run(function: Callable[..., None], *args: Any) -> Any:
        process = FORK.Process(target=_run, args=(requests, function, args), daemon=True)
        process.start()
        started.append(process)
        return process

    yield run
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(30)


def _run(requests: Any, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    configure(LocalTimerClient(requests))
    function(*args)


def sleeping(limit: float = 0.5) -> None:
    with expires(limit, scope="sleep"):
        time.sleep(100)


def in_time(count: int) -> None:
    for _ in range(count):
        with expires(30, scope="quick"):
            pass
    with expires(0.2, scope="then"):
        pass


def ended(process: Any) -> int:
    process.join(30)
    assert process.exitcode is not None
    return int(process.exitcode)


def test_a_hung_worker_is_killed_and_its_place_is_logged(
    server: WatchedServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    hung, fine = run(sleeping), run(in_time, 100)
    assert (ended(hung), ended(fine)) == (-signal.SIGKILL, 0)
    wait_until(lambda: f"reaped worker {hung.pid}" in caplog.text, "it is reaped")
    assert f"['sleep'] of worker {hung.pid} expired" in caplog.text
    assert f"killing worker {hung.pid}; location: in sleeping" in caplog.text
    assert str(fine.pid) not in caplog.text


def test_a_worker_that_is_stopped_is_killed_too(
    server: WatchedServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = run(sleeping, 2.0)  # so long that it is stopped before, on a slow machine too
    wait_until(lambda: server.timers == {worker.pid: ["sleep"]}, "its timer is armed")
    os.kill(worker.pid, signal.SIGSTOP)
    assert ended(worker) == -signal.SIGKILL
    assert "location: stopped by a signal" in caplog.text


def test_a_worker_is_killed_though_the_servers_descriptors_are_used_up(
    server: WatchedServer, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    assert ended(run(sleeping)) == -signal.SIGKILL


def test_invalid_items_are_ignored_and_reported_once(
    server: WatchedServer,
    requests: Any,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        for bad in (
            "a string",
            TimerRequest("seven", "step", 1.0),
            TimerRequest(7, 7, 1.0),  # type: ignore[arg-type]
            TimerRequest(7, "step", math.nan),
            TimerRequest(7, "step", "soon"),  # type: ignore[arg-type]
            _Unreadable(),
        ):
            requests.put(bad)
    assert ended(run(sleeping)) == -signal.SIGKILL
    refused = [record.message for record in caplog.records if "ignored an item" in record.message]
    assert len(refused) == 6
    assert any("cannot be unpickled" in message for message in refused)


class _Unreadable:
    """An item that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise RuntimeError("cannot be unpickled")


def test_the_queue_of_a_manager_works_with_time_outs() -> None:
    with FORK.Manager() as manager:
        requests = manager.Queue()
        server = LocalTimerServer(requests, max_interval=0.05)
        server.start()
        process = FORK.Process(target=_run, args=(requests, sleeping, ()), daemon=True)
        process.start()
        assert ended(process) == -signal.SIGKILL
        server.stop()


def test_the_queue_returns_requests_that_arrive_in_time(requests: Any) -> None:
    taken = MultiprocessingRequestQueue(requests)
    assert (taken.size(), taken.get(1, 0.0)) == (0, [])
    sent = [TimerRequest(1, f"{number}", float(number)) for number in range(3)]
    for request in sent:
        requests.put(request)
    assert taken.size() == 3
    assert taken.get(2, 30.0) == sent[:2]
    assert taken.get(5, 0.2) == sent[2:]


def test_the_timers_of_an_ended_worker_are_removed(
    server: WatchedServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    armed = FORK.Event()

    def leaving() -> None:
        expires(1000, scope="begun").__enter__()
        armed.wait()

    worker = run(leaving)
    wait_until(lambda: server.timers == {worker.pid: ["begun"]}, "it is armed")
    armed.set()
    assert ended(worker) == 0
    wait_until(lambda: server.timers == {}, "its timers are gone")
    assert "reaping" not in caplog.text


def test_a_process_that_got_the_pid_of_a_dead_worker_is_not_killed(
    requests: Any,
) -> None:
    worker, stranger = (FORK.Process(target=time.sleep, args=(100,)) for _ in range(2))
    worker.start()
    stranger.start()
    assert worker.pid
    assert stranger.pid
    pidfd = os.pidfd_open(worker.pid)
    server = WatchedServer(requests)
    with pytest.MonkeyPatch.context() as patch:  # as if the worker had had the stranger's pid
        patch.setattr(os, "pidfd_open", lambda pid: pidfd)
        server.register_timers([TimerRequest(stranger.pid, "step", 0.0)])
    worker.kill()
    worker.join(30)
    server.start()
    wait_until(lambda: server.timers == {}, "the timer has expired")
    server.stop()
    assert alive(stranger.pid)
    stranger.kill()
    stranger.join(30)


def test_the_servers_own_process_is_never_killed(
    server: WatchedServer, requests: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = LocalTimerClient(requests)
    client.acquire("mine", time.time() - 1.0)
    wait_until(lambda: "the server's own process has expired" in caplog.text, "it is refused")
    wait_until(lambda: server.timers == {}, "its timers are cleared")


@pytest.mark.parametrize("pid", [0, -1, -3, 2**40, -(2**40)])
def test_an_invalid_pid_kills_no_process(
    pid: int, server: WatchedServer, requests: Any, caplog: pytest.LogCaptureFixture
) -> None:
    requests.put(TimerRequest(pid, "step", 0.0))
    wait_until(lambda: "ignored an item" in caplog.text, "it is refused")
    assert "reaping" not in caplog.text


def test_requests_of_an_ended_worker_arm_no_timer(server: WatchedServer, requests: Any) -> None:
    gone = FORK.Process(target=os._exit, args=(0,))
    gone.start()
    gone.join(30)
    requests.put(TimerRequest(gone.pid, "step", time.time() + 1000))
    requests.put(TimerRequest(os.getpid(), "step", time.time() + 1000))
    wait_until(lambda: bool(server.timers), "both have arrived")
    assert server.timers == {os.getpid(): ["step"]}


def test_threads_of_a_worker_may_use_a_client_at_once(server: WatchedServer, requests: Any) -> None:
    client = LocalTimerClient(requests)

    def work(number: int) -> None:
        for _ in range(200):
            with expires(1000, scope=f"{number % 2}", client=client):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    client.acquire("last", time.time() + 1000)
    wait_until(lambda: server.timers == {os.getpid(): ["last"]}, "all are released")


def test_counted_requests_that_never_arrive_do_not_delay_others(requests: Any) -> None:
    class Counting(MultiprocessingRequestQueue):
        def size(self) -> int:
            return super().size() + 1

    taken = Counting(requests)
    requests.put(TimerRequest(1, "sent", 1.0))
    begin = time.monotonic()
    assert taken.get(taken.size(), 1000.0) == [TimerRequest(1, "sent", 1.0)]
    assert time.monotonic() - begin < PATIENCE


def test_stop_does_not_wait_for_a_request(server: WatchedServer) -> None:
    threads = [each for each in threading.enumerate() if each.name == "regrow-WatchedServer"]
    assert len(threads) == 1
    server.stop()  # `max_interval` is far beyond the time that a test may take
    assert not threads[0].is_alive()


def test_the_example_of_torchs_documentation_works(requests: Any) -> None:
    server = LocalTimerServer(requests)
    now, one, other = time.time(), os.getpid(), os.getppid()
    server.register_timers(
        [
            TimerRequest(one, "late", now - 1),
            TimerRequest(one, "later", now - 0.5),
            TimerRequest(one, "released", now - 2),
            TimerRequest(other, "fine", now + 100),
            TimerRequest(one, "released", -1),
        ]
    )
    assert server.get_expired_timers(now) == {
        one: [TimerRequest(one, "late", now - 1), TimerRequest(one, "later", now - 0.5)]
    }
    server.clear_timers({one})
    assert server.get_expired_timers(now) == {}
    assert server.get_expired_timers(now + 100) == {other: [TimerRequest(other, "fine", now + 100)]}
