"""The local timer, with real processes: who is killed, who is not, and what wakes the server."""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from processes import PATIENCE, alive, wait_until

from regrow.timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    TimerRequest,
    configure,
    expires,
)
from regrow.timer import _local as local
from regrow.timer import _local_client as local_client

FORK = multiprocessing.get_context("fork")  # of what a spawned process would import, nothing counts
# Python 3.12 and newer warn; the children use none of what a thread of the parent may have locked.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def requests() -> Any:
    return FORK.Queue()


@pytest.fixture
def server(requests: Any, caplog: pytest.LogCaptureFixture) -> Iterator[LocalTimerServer]:
    caplog.set_level(logging.INFO, "regrow.timer._api")
    caplog.set_level(logging.INFO, local.__name__)
    server = LocalTimerServer(requests, max_interval=1000.0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(requests: Any) -> Iterator[Callable[..., Any]]:
    """Starts processes whose timers are those of the queue; none is left behind."""
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


def sleeping() -> None:
    with expires(0.5, scope="sleep"):
        time.sleep(100)


def holding_the_gil() -> None:
    with expires(0.1, scope="native"):
        re.match("(a+)+b", "a" * 60)  # years, in C


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


def test_a_hung_worker_is_killed_and_the_log_says_where_it_stood(
    server: LocalTimerServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    hung, fine = run(sleeping), run(in_time, 100)
    assert (ended(hung), ended(fine)) == (-signal.SIGKILL, 0)
    wait_until(lambda: f"reaped worker {hung.pid}" in caplog.text, "it is reaped")
    assert (
        f"the timers ['sleep'] of process {hung.pid} have expired; it is in sleeping" in caplog.text
    )
    assert str(fine.pid) not in caplog.text


def test_a_native_call_that_holds_the_gil_from_the_begin_of_the_block_is_found_out(
    server: LocalTimerServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    hung = run(holding_the_gil)
    assert ended(hung) == -signal.SIGKILL
    assert "called by holding_the_gil" in caplog.text


def test_a_worker_that_is_stopped_is_killed_too(
    server: LocalTimerServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def stopping() -> None:
        with expires(0.1):
            os.kill(os.getpid(), signal.SIGSTOP)

    assert ended(run(stopping)) == -signal.SIGKILL
    assert "it is stopped by a signal" in caplog.text


def test_a_worker_that_ends_takes_its_timers_along(
    server: LocalTimerServer, run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def leaving() -> None:
        expires(1000).__enter__()

    assert ended(run(leaving)) == 0
    wait_until(lambda: not server._arrivals._pidfds and not len(server._timers), "they are gone")
    assert "reaping" not in caplog.text


def test_a_process_that_got_the_pid_of_a_dead_worker_is_not_killed(
    server: LocalTimerServer, requests: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # The server holds a descriptor of the process that sent the request, and finds that one ended.
    worker = FORK.Process(target=time.sleep, args=(100,), daemon=True)
    worker.start()
    assert worker.pid is not None
    requests.put(TimerRequest(worker.pid, "step", time.time() + 1000))
    wait_until(lambda: len(server._timers) > 0, "the timer is armed")
    server._arrivals._bury(server._arrivals._pidfds[worker.pid])
    assert server._reap_worker(worker.pid)
    assert alive(worker.pid)
    worker.kill()
    worker.join(30)


def test_the_servers_own_process_is_never_killed(
    server: LocalTimerServer, requests: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = LocalTimerClient(requests)
    client.acquire("mine", time.time() - 1.0)
    wait_until(lambda: "own process, which is not killed" in caplog.text, "it is refused")
    wait_until(lambda: not len(server._timers), "its timers are cleared")


@pytest.mark.parametrize("pid", [0, -1, -3, 2**40, -(2**40)])
def test_what_is_no_pid_of_a_process_kills_nobody(pid: int, requests: Any) -> None:
    server = LocalTimerServer(requests)
    server._arrivals._watch(pid)
    assert server._reap_worker(pid)


def test_a_worker_is_killed_though_the_servers_descriptors_are_used_up(
    server: LocalTimerServer, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    assert ended(run(sleeping)) == -signal.SIGKILL


def test_the_last_words_of_a_worker_that_is_gone_arm_nothing(
    server: LocalTimerServer, requests: Any
) -> None:
    gone = FORK.Process(target=os._exit, args=(0,))
    gone.start()
    gone.join(30)
    requests.put(TimerRequest(gone.pid, "step", time.time() + 1000))
    requests.put(TimerRequest(os.getpid(), "step", time.time() + 1000))
    wait_until(lambda: len(server._timers) == 1, "both have come")
    assert list(server._timers.workers()) == [os.getpid()]


def test_what_is_no_request_is_left_out_and_reported_once(
    server: LocalTimerServer,
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
    refused = [record.message for record in caplog.records if "left out" in record.message]
    assert len(refused) == 6
    assert any("cannot be unpickled" in message for message in refused)


class _Unreadable:
    """A message that nobody can read."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise RuntimeError("cannot be unpickled")


def test_a_worker_is_killed_though_it_holds_the_queues_lock_and_others_can_go_on(
    server: LocalTimerServer,
    requests: Any,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stuck() -> None:
        with expires(0.1):
            requests._wlock.acquire()
            time.sleep(100)

    assert ended(run(stuck)) == -signal.SIGKILL
    wait_until(lambda: "it is freed" in caplog.text, "the lock is freed")
    assert ended(run(sleeping)) == -signal.SIGKILL


def test_a_worker_that_dies_with_the_queues_lock_does_not_take_the_others_along(
    server: LocalTimerServer,
    requests: Any,
    run: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def dying() -> None:
        expires(1000).__enter__()
        requests._wlock.acquire()
        os._exit(7)

    assert ended(run(dying)) == 7
    wait_until(lambda: "it is freed" in caplog.text, "the lock is freed")
    assert ended(run(in_time, 10)) == 0
    wait_until(lambda: requests.qsize() == 0, "all has come")


def test_a_worker_that_died_with_the_queues_lock_before_it_was_known_leaves_it_free(
    requests: Any, run: Callable[..., Any]
) -> None:
    def dying() -> None:
        expires(1000).__enter__()
        requests._wlock.acquire()
        os._exit(7)

    assert ended(run(dying)) == 7
    server = LocalTimerServer(requests)
    server.start()
    try:
        assert requests._wlock.acquire(timeout=PATIENCE)
        requests._wlock.release()
    finally:
        server.stop()


def test_a_burst_into_a_queue_that_nobody_reads_costs_the_training_nothing_and_is_not_lost(
    requests: Any,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(local_client, "PATIENCE", 0.01)
    client = LocalTimerClient(requests)
    for number in range(3000):
        client.acquire(f"scope {number % 50}", time.time() + 1000)
        client.release(f"scope {number % 50}")
    client.acquire("last", time.time() + 1000)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not read its queue" in caplog.text
    server = LocalTimerServer(requests, max_interval=1000.0)
    server.start()
    wait_until(lambda: not client._unsent, "all is sent once the server reads")
    wait_until(lambda: requests.qsize() == 0, "all is read")
    server.stop()
    assert [r.scope_id for r in server._timers.due(math.inf)[os.getpid()]] == ["last"]


def test_a_program_whose_server_reads_nothing_can_exit(
    requests: Any, run: Callable[..., Any]
) -> None:
    assert ended(run(in_time, 1000)) == 0


def test_a_request_that_finds_no_room_when_the_thread_is_done_is_not_lost(
    requests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_client, "PATIENCE", 0.01)
    client = LocalTimerClient(requests)
    sent, late = client._sent, list[TimerRequest]()

    def interrupted(patience: float) -> bool:
        done = sent(patience)
        if done and threading.current_thread() is client._sender and not late:
            late.append(TimerRequest(os.getpid(), "late", 1e12))
            client._unsent["late"] = late[0]
        return done

    monkeypatch.setattr(client, "_sent", interrupted)
    with requests._wlock:
        client.acquire("first", 1e12)
    wait_until(lambda: len(late) == 1 and not client._unsent, "all is sent")
    found = MultiprocessingRequestQueue(requests).get(2, 1)
    assert [request.scope_id for request in found] == ["first", "late"]


def test_without_a_thread_to_be_had_the_training_goes_on(
    requests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(local_client, "PATIENCE", 0.01)
    client = LocalTimerClient(requests)
    with requests._wlock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        client.acquire("first", 1e12)
    client.acquire("second", 1e12)
    found = MultiprocessingRequestQueue(requests).get(2, 1)
    assert [request.scope_id for request in found] == ["first", "second"]


def test_what_a_parent_could_not_send_is_not_sent_by_its_child(
    requests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_client, "PATIENCE", 0.0)
    monkeypatch.setattr(LocalTimerClient, "_send_later", lambda self: None)
    client = LocalTimerClient(requests)
    with requests._wlock:
        client.acquire("the parent's", time.time() + 1000)
    child = FORK.Process(target=client.release, args=("the child's",))
    child.start()
    assert ended(child) == 0
    assert [request.scope_id for request in MultiprocessingRequestQueue(requests).get(2, 0.01)] == [
        "the child's"
    ]


def test_threads_of_a_worker_may_use_a_client_at_once(requests: Any) -> None:
    client = LocalTimerClient(requests)
    server = LocalTimerServer(requests, max_interval=1000.0)
    server.start()

    def work(number: int) -> None:
        for _ in range(200):
            with expires(1000, scope=f"{number % 2}", client=client):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wait_until(lambda: requests.qsize() == 0 and not len(server._timers), "all are released")
    server.stop()
    assert not client._unsent


def test_a_request_may_come_while_a_thread_looks_for_the_first_that_is_not_sent(
    requests: Any,
) -> None:
    class Crowded(dict[str, TimerRequest]):
        """Gets another request while it is looked through."""

        def values(self) -> Any:
            values = iter(super().values())
            self["from another thread"] = TimerRequest(os.getpid(), "from another thread", 2.0)
            return values

    client = LocalTimerClient(requests)
    client._unsent = Crowded()
    client.acquire("step", 1.0)
    sent = MultiprocessingRequestQueue(requests).get(1, 30.0)
    assert sent[0].scope_id == "step"


def test_a_long_scope_still_fits_into_one_write(requests: Any) -> None:
    client = LocalTimerClient(requests)
    for end in "ab":
        client.acquire("\N{ROCKET}" * 5000 + end, 1.0)
        client.release("\N{ROCKET}" * 5000 + end)
    sent = MultiprocessingRequestQueue(requests).get(4, 30.0)
    assert [request.expiration_time for request in sent] == [1.0, -1, 1.0, -1]
    assert sent[0].scope_id == sent[1].scope_id != sent[2].scope_id == sent[3].scope_id
    assert len(sent[0].scope_id.encode()) < 3900


def test_stop_ends_the_wait_at_once(server: LocalTimerServer) -> None:
    thread = server._watchdog_thread
    assert thread is not None
    server.stop()  # max_interval is far beyond the time that a test may take
    assert not thread.is_alive()


def test_the_queue_of_a_manager_works_with_time_outs() -> None:
    with FORK.Manager() as manager:
        requests = manager.Queue()
        server = LocalTimerServer(requests, max_interval=0.05)
        server.start()
        process = FORK.Process(target=_run, args=(requests, sleeping, ()), daemon=True)
        process.start()
        assert ended(process) == -signal.SIGKILL
        server.stop()


def test_the_queue_gives_what_there_is_or_what_comes_in_time(requests: Any) -> None:
    taken = MultiprocessingRequestQueue(requests)
    assert (taken.size(), taken.get(1, 0.0)) == (0, [])
    sent = [TimerRequest(1, f"{number}", float(number)) for number in range(3)]
    for request in sent:
        requests.put(request)
    assert taken.size() == 3
    assert taken.get(2, 30.0) == sent[:2]
    assert taken.get(5, 0.2) == sent[2:]


def test_a_server_of_timers_is_used_as_torchs_is(requests: Any) -> None:
    server = LocalTimerServer(requests)
    now = time.time()
    server.register_timers(
        [
            TimerRequest(1, "late", now - 1),
            TimerRequest(1, "later", now - 0.5),
            TimerRequest(1, "released", now - 2),
            TimerRequest(2, "fine", now + 100),
            TimerRequest(1, "released", -1),
        ]
    )
    assert server.get_expired_timers(now) == {
        1: [TimerRequest(1, "late", now - 1), TimerRequest(1, "later", now - 0.5)]
    }
    server.clear_timers({1})
    assert server.get_expired_timers(now) == {}
    assert server.get_expired_timers(now + 100) == {2: [TimerRequest(2, "fine", now + 100)]}
