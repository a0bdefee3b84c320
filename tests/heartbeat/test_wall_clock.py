"""Real workers and a real store, with wall clocks that jump by days at each read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from helpers import jumping_clock
from helpers.heartbeats.beating_workers import ForkServer
from helpers.processes import wait_until
from regrow.heartbeat import messages as messages
from regrow.heartbeat.terms import group_name
from regrow.store import ServerProcess, connect, make_token, start_server

pytestmark = pytest.mark.skipif(not jumping_clock.COMPILER, reason="needs a C compiler")

TOKEN = make_token()
SIZE = 3


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> str:
    return jumping_clock.library(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def fork_server(preload: str) -> Iterator[ForkServer]:
    fork_server = ForkServer(LD_PRELOAD=preload)
    yield fork_server
    fork_server.close()


@pytest.fixture
def server(
    fork_server: ForkServer, preload: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServerProcess]:
    with monkeypatch.context() as brief:
        brief.setenv("LD_PRELOAD", preload)
        service = {messages.NAME: "regrow.heartbeat.service:create"}
        server = start_server(token=TOKEN, services=service)
    with server:
        yield server
        fork_server.clear()


def beating(fork_server: ForkServer, server: ServerProcess, **spec: object) -> list[int]:
    """The pids of workers that have agreed; their clocks jump."""
    where = {"world_size": SIZE, "endpoint": server.endpoint, "token": TOKEN.hex()}
    pids = [fork_server.start(rank=rank, **where, **spec) for rank in range(SIZE)]
    assert all(fork_server.receive("beats", pid=pid)["clock_jumps"] for pid in pids)
    return pids


@pytest.mark.thorough
def test_jumps_of_the_wall_clock_cause_no_failure(
    fork_server: ForkServer, server: ServerProcess
) -> None:
    beating(fork_server, server, period=0.1, timeout=5.0)
    question = messages.encode(messages.GetProgress(group_name()))
    began = time.monotonic()
    with connect(server.endpoint, token=TOKEN) as client:

        def beaten() -> bool:
            asked = time.monotonic()
            table = messages.decode_answer(client.ask(messages.NAME, question, 30.0))
            assert isinstance(table, messages.Table)
            assert all(row.age >= 0 for row in table.rows)
            return all(row.age < asked - began - 0.5 for row in table.rows)

        wait_until(beaten, "all beat half a second later")
    assert fork_server.unread("failed") == []
    assert [line["text"] for line in fork_server.unread("logged")] == []


@pytest.mark.thorough
def test_a_stopped_worker_ends_though_the_wall_clock_jumps(
    fork_server: ForkServer, server: ServerProcess
) -> None:
    pids = beating(fork_server, server, period=0.2, timeout=0.8, failures=2, dies=True)
    # The kernel ends the stopped worker, by timers of the monotonic clock.
    assert {
        clock for pid in [*pids, server.pid] for clock in jumping_clock.clocks_of_timers(pid)
    } == {time.CLOCK_MONOTONIC}
    os.kill(pids[2], signal.SIGSTOP)
    ends = [fork_server.receive("ended", pid=pid)["status"] & 0x7F for pid in pids]
    assert ends == [signal.SIGABRT, signal.SIGABRT, signal.SIGKILL]
    for rank in (0, 1):
        texts = [line["text"] for line in fork_server.unread("logged") if line["rank"] == rank]
        assert "rank 2 is missing: " in texts[-1]
