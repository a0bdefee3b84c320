"""Real workers over a real store: a fault of one worker, and its effect on all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from helpers.heartbeats.beating_workers import ForkServer
from helpers.processes import PATIENCE, wait_until
from helpers.stores.storing import CuttingProxy
from regrow.heartbeat import messages as messages
from regrow.heartbeat.terms import group_name
from regrow.store import ServerProcess, StoreClient, connect, make_token, start_server

TOKEN = make_token()
SERVICE = {messages.NAME: "regrow.heartbeat.service:create"}
SIZE = 3
RARELY = {"period": 30.0, "timeout": 20.0}
"""Settings with which the workers learn of a fault between two beats."""
OFTEN = {"period": 0.1, "timeout": 5.0}
"""Settings with many beats; none fails on a busy machine."""
STRICT = {"period": 0.2, "timeout": 0.8, "failures": 2}
"""Settings with which a silent worker is detected soon."""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def server(fork_server: ForkServer) -> Iterator[ServerProcess]:
    with start_server(token=TOKEN, services=SERVICE) as server:
        yield server
        fork_server.clear()


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(int(server.endpoint.rpartition(":")[2]))
    yield proxy
    proxy.stop()


Start = Callable[..., int]


@pytest.fixture
def start(fork_server: ForkServer, server: ServerProcess) -> Start:
    """Start a worker, and return its pid."""

    def start(rank: int, **spec: object) -> int:
        where = {"world_size": SIZE, "endpoint": server.endpoint, "token": TOKEN.hex()}
        return fork_server.start(rank=rank, **{**where, **spec})

    return start


def beating(fork_server: ForkServer, start: Start, **spec: object) -> list[int]:
    """The pids of workers that have agreed."""
    pids = [start(rank, **spec) for rank in range(SIZE)]
    for rank in range(SIZE):
        fork_server.receive("beats", rank=rank)
    return pids


def verdicts(fork_server: ForkServer, *ranks: int) -> set[tuple[str, tuple[int, ...]]]:
    """Return the reports of these ranks about the end."""
    reports = [fork_server.receive("failed", rank=rank) for rank in ranks]
    return {(each["kind"], tuple(each["ranks"])) for each in reports}


def test_a_killed_worker_ends_all_others(fork_server: ForkServer, start: Start) -> None:
    pids = beating(fork_server, start, **RARELY, dies=True)
    os.kill(pids[1], signal.SIGKILL)
    for rank in (0, 2):
        assert fork_server.receive("ended", pid=pids[rank])["status"] & 0x7F == signal.SIGABRT
        text = fork_server.receive("logged", rank=rank)["text"]
        assert "the process of rank 1 ended without leaving the heartbeat" in text


def test_a_stopped_worker_is_missing(fork_server: ForkServer, start: Start) -> None:
    pids = beating(fork_server, start, **STRICT)
    os.kill(pids[2], signal.SIGSTOP)
    assert verdicts(fork_server, 0, 1) == {("missing", (2,))}
    os.kill(pids[2], signal.SIGCONT)
    assert verdicts(fork_server, 2) == {("missing", (2,))}


def test_a_worker_that_holds_the_interpreters_lock_is_missing_and_ends(
    fork_server: ForkServer, start: Start
) -> None:
    pids = [
        start(rank, **STRICT, dies=True, stuck="with the lock" if rank == 1 else "")
        for rank in range(SIZE)
    ]
    ends = [fork_server.receive("ended", pid=pid)["status"] & 0x7F for pid in pids]
    assert ends == [signal.SIGABRT] * SIZE
    for rank in (0, 2):
        texts = [line["text"] for line in fork_server.unread("logged") if line["rank"] == rank]
        assert "rank 1 is missing" in texts[-1]


@pytest.mark.thorough
def test_a_worker_in_native_code_without_the_lock_sends_heartbeats(
    fork_server: ForkServer, server: ServerProcess, start: Start
) -> None:
    for rank in range(SIZE):
        start(rank, **OFTEN, stuck="without" if rank == 1 else "")
    for rank in range(SIZE):
        fork_server.receive("beats", rank=rank)
    with connect(server.endpoint, token=TOKEN) as client:
        all_beat(client)
    assert fork_server.unread("failed") == []


def test_a_worker_that_is_restarted_alone_is_detected(
    fork_server: ForkServer, start: Start
) -> None:
    beating(fork_server, start, **RARELY)
    start(1, **RARELY)
    texts = {
        fork_server.receive("failed", kind="restarted")["text"].partition(": ")[2] for _ in range(4)
    }
    assert {text.split(";")[0] for text in texts} == {
        "rank 1 was restarted while the other workers continued",
        "another process started in place of this one",
        "this process replaces an earlier process, but the other workers had already started their "
        "heartbeats",
    }


def last_output(fork_server: ForkServer, pids: Iterable[int]) -> list[str]:
    """Return the last output of these workers; their heartbeats end them."""
    pids = list(pids)
    ends = [fork_server.receive("ended", pid=pid)["status"] & 0x7F for pid in pids]
    assert ends == [signal.SIGABRT] * len(pids)
    logged = fork_server.unread("logged")
    return [[each["text"] for each in logged if each["pid"] == pid][-1] for pid in pids]


def test_a_worker_that_is_killed_and_quickly_restarted_ends_all_workers(
    fork_server: ForkServer, start: Start
) -> None:
    # The server waits for its session to come back for as long as this takes.
    pids = beating(fork_server, start, **RARELY, dies=True, session_grace=PATIENCE)
    os.kill(pids[1], signal.SIGKILL)
    assert fork_server.receive("ended", pid=pids[1])["status"] == signal.SIGKILL
    new = start(1, **RARELY, dies=True)
    report = fork_server.receive("failed", pid=new)
    assert report["kind"] == "restarted"
    assert "this process replaces an earlier process" in report["text"]
    assert fork_server.receive("ended", pid=new)["status"] == 0  # detected before its first beat
    for words in last_output(fork_server, [pids[0], pids[2]]):
        assert (
            "rank 1 was restarted while the other workers continued; all workers were present"
            in words
        )


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 3])
def test_a_worker_of_another_world_size_ends_all_workers(
    fork_server: ForkServer, start: Start, rank: int
) -> None:
    pids = beating(fork_server, start, **RARELY, dies=True)
    new = start(rank, **RARELY, dies=True, world_size=4)
    report = fork_server.receive("failed", pid=new)
    assert (report["kind"], report["ranks"]) == ("wrong world size", [rank])
    assert fork_server.receive("ended", pid=new)["status"] == 0
    for words in last_output(fork_server, pids):
        assert f"rank {rank} expects another number of workers (4 instead of 3)" in (words)


@pytest.mark.thorough
def test_a_worker_of_another_run_ends_all_workers(
    fork_server: ForkServer, server: ServerProcess, proxy: CuttingProxy, start: Start
) -> None:
    """The worker was stopped while its job restarted, and continues with its old token."""
    old = beating(
        fork_server, start, **OFTEN, dies=True, session_grace=None, endpoint=proxy.endpoint
    )
    os.kill(old[1], signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)  # so that it reports no ends to that worker
    for pid in (old[0], old[2]):
        os.kill(pid, signal.SIGKILL)
        fork_server.receive("ended", pid=pid)
    with start_server(token=TOKEN, services=SERVICE) as another:
        new = beating(fork_server, start, **RARELY, dies=True, endpoint=another.endpoint)
        proxy.lead_to(int(another.endpoint.rpartition(":")[2]))
        os.kill(old[1], signal.SIGCONT)
        texts = last_output(fork_server, [new[0], new[2], new[1], old[1]])
    assert all(
        "rank 1 shows another token, so it belongs to another run" in each for each in texts[:2]
    )
    own = "this process, or another process with rank 1, shows another token, so it belongs to"
    assert all(own in each for each in texts[2:])


def test_a_worker_that_never_starts_is_named(fork_server: ForkServer, start: Start) -> None:
    for rank in (0, 2):
        start(rank, **RARELY, start_timeout=2.0)
    assert verdicts(fork_server, 0, 2) == {("never started", (1,))}


def test_a_worker_that_ends_well_ends_all_heartbeats_without_a_failure(
    fork_server: ForkServer, start: Start
) -> None:
    pids = beating(fork_server, start, **RARELY)
    os.kill(pids[1], signal.SIGUSR1)
    for rank in (0, 2):
        fork_server.receive("over", rank=rank)
    assert [fork_server.receive("ended", pid=pid)["status"] for pid in pids] == [0, 0, 0]
    assert fork_server.unread("failed") == []


def test_a_worker_that_ends_by_an_exception_does_not_leave(
    fork_server: ForkServer, start: Start
) -> None:
    pids = beating(fork_server, start, **RARELY)
    os.kill(pids[1], signal.SIGUSR2)
    assert verdicts(fork_server, 0, 2) == {("lost", (1,))}


def ages(client: StoreClient) -> list[float]:
    """Return the seconds since the last beat of each worker."""
    question = messages.encode(messages.GetProgress(group_name()))
    table = messages.decode_answer(client.ask(messages.NAME, question, 30.0))
    assert isinstance(table, messages.Table)
    return [row.age for row in table.rows]


def all_beat(client: StoreClient) -> None:
    """Wait until all workers have sent another heartbeat."""
    enough = time.monotonic() + 2 * OFTEN["period"]
    wait_until(lambda: time.monotonic() - enough > max(ages(client)), "all beat")


@pytest.mark.thorough
def test_a_worker_that_ends_well_does_not_wait_for_a_missing_one(
    fork_server: ForkServer, server: ServerProcess, start: Start
) -> None:
    pids = beating(fork_server, start, period=0.1, timeout=100.0)
    os.kill(pids[2], signal.SIGSTOP)
    with connect(server.endpoint, token=TOKEN) as client:
        wait_until(lambda: ages(client)[0] > 5 * 0.1, "the first one waits for the last one")
    os.kill(pids[0], signal.SIGUSR1)
    assert fork_server.receive("ended", pid=pids[0])["status"] == 0
    fork_server.receive("over", rank=1)
    assert fork_server.unread("failed") == []


@pytest.mark.thorough
def test_a_short_break_of_a_connection_is_no_failure(
    fork_server: ForkServer, server: ServerProcess, proxy: CuttingProxy, start: Start
) -> None:
    beating(fork_server, start, **OFTEN, endpoint=proxy.endpoint)
    with connect(server.endpoint, token=TOKEN) as client:
        for _ in range(2):
            proxy.cut_now()
            all_beat(client)
    assert fork_server.unread("failed") == []


@pytest.mark.thorough
def test_one_and_two_failed_exchanges_are_no_failure(
    fork_server: ForkServer, server: ServerProcess, proxy: CuttingProxy, start: Start
) -> None:
    """Data of a failed exchange does not count as data of other workers."""
    often = {"period": 0.1, "timeout": 0.2, "failures": 50}
    beating(fork_server, start, **often, endpoint=proxy.endpoint)
    with connect(server.endpoint, token=TOKEN) as client:
        for failures in (1, 2):
            proxy.freeze()
            for rank in range(SIZE):
                line = fork_server.receive("logged", rank=rank)
                while f"failure {failures} of 50" not in line["text"]:
                    line = fork_server.receive("logged", rank=rank)
            proxy.thaw()
            all_beat(client)
    assert fork_server.unread("failed") == []


@pytest.mark.thorough
def test_the_end_of_a_forked_child_is_not_the_end_of_its_worker(
    fork_server: ForkServer, server: ServerProcess, start: Start
) -> None:
    beating(fork_server, start, **OFTEN, forks=True)
    with connect(server.endpoint, token=TOKEN) as client:
        all_beat(client)
    assert fork_server.unread("over") == fork_server.unread("failed") == []
