"""Heartbeats over a store: the worker's side, with a real server."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator

import pytest

import regrow.store
from helpers.jobs.agents import store_servers_below
from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background, CuttingProxy, ServerThread
from regrow.heartbeat import StoreExchange
from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.merge import Agreed, Beat, Broken, ExchangeFailed, Outcome, WorkersLeft
from regrow.heartbeat.service import HeartbeatService
from regrow.heartbeat.store_exchange import LEAVE_S
from regrow.store import (
    STORE_ENV,
    STORE_PORT_ENV,
    ConnectionState,
    StoreClient,
    StoreError,
    StoreTimeout,
    connect,
    make_token,
)
from regrow.utils import PortReservation

TOKEN = 4711


@pytest.fixture
def server() -> Iterator[ServerThread]:
    server = ServerThread(services={"heartbeat": HeartbeatService()})
    yield server
    server.stop()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server wait 30 ms for the other workers, and the worker 30 s for the server."""
    monkeypatch.setattr("regrow.heartbeat.store_exchange.EARLY", 1 - 0.03 / PATIENCE)
    monkeypatch.setattr("regrow.heartbeat.store_exchange.MOST_EARLY", PATIENCE)


def sessions(server: ServerThread) -> list[StoreClient]:
    return [server.connect(session_grace=0.1) for _ in range(2)]


def exchanges(sessions: list[StoreClient]) -> list[StoreExchange]:
    return [StoreExchange(each, rank=rank, world_size=2) for rank, each in enumerate(sessions)]


def pair(server: ServerThread) -> list[StoreExchange]:
    """The exchanges of two workers, each with a session of its own."""
    return exchanges(sessions(server))


def beat(rank: int, joined: bool = True) -> Beat:
    return Beat(rank, TOKEN if joined or rank == 0 else 0, 1000 + rank, joined)


def agree(one: StoreExchange, other: StoreExchange, joined: bool = True) -> None:
    waiting = Background(one.beat, beat(0, joined), PATIENCE)
    assert isinstance(other.beat(beat(1, joined), PATIENCE), Agreed)
    assert waiting.result()._replace(age=0.0) == Agreed(TOKEN)


def test_a_failed_beat_names_the_missing_rank(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    one, _ = pair(server)
    outcome = one.beat(beat(0), PATIENCE)
    assert isinstance(outcome, ExchangeFailed)
    assert outcome.missing == Ranks.of([1])
    assert "rank 1 did not arrive" in outcome.why


def test_the_end_of_a_worker_is_reported_between_beats(server: ServerThread) -> None:
    clients = sessions(server)
    one, other = exchanges(clients)
    agree(one, other, joined=False)
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    one.listen(outcomes.put)
    clients[1].close()
    outcome = outcomes.get(timeout=PATIENCE)
    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.ranks) == ("lost", Ranks.of([1]))


def test_a_leaving_beat_does_not_wait(server: ServerThread) -> None:
    one, other = pair(server)
    agree(one, other)
    left = WorkersLeft(Ranks.of([0]))
    assert one.beat(beat(0)._replace(leaving=True), PATIENCE) == left
    assert other.beat(beat(1), PATIENCE) == left


def test_a_leave_ends_the_beat_in_progress(server: ServerThread) -> None:
    one, other = pair(server)
    agree(one, other)
    waiting = Background(one.beat, beat(0), PATIENCE)
    one.leave(beat(0)._replace(leaving=True))
    assert waiting.result() == WorkersLeft(Ranks.of([0]))


def test_a_leaving_beat_does_not_wait_for_an_unreachable_server() -> None:
    waits = []

    class OutOfReach:
        def ask(self, service: str, body: bytes, timeout: float, nudge: None) -> bytes:
            waits.append(timeout)
            raise StoreTimeout("no answer")

    one = StoreExchange(OutOfReach(), rank=0, world_size=2)  # type: ignore[arg-type]
    with pytest.raises(StoreTimeout):
        one.beat(beat(0)._replace(leaving=True), 100.0)
    assert waits[0] <= LEAVE_S


def test_close_leaves_a_given_store_open_and_its_end_ends_the_listener(
    server: ServerThread,
) -> None:
    clients = sessions(server)
    one, other = exchanges(clients)
    agree(one, other)
    one.listen(lambda outcome: None)
    [listener] = [each for each in threading.enumerate() if each.name == "regrow-heartbeat-listen"]
    one.close()
    clients[0].set("key", b"value")
    with pytest.raises(StoreError, match="this client has closed its connection"):
        one.beat(beat(0), PATIENCE)
    clients[0].close()
    listener.join(PATIENCE)
    assert not listener.is_alive()


def test_a_new_session_replaces_a_lost_one(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats and the question for the end of the group use the new session."""
    proxy = CuttingProxy(server.port)
    port = int(proxy.endpoint.rpartition(":")[2])
    made: list[StoreClient] = []

    def worker_store(rank: int, world_size: int, timeout: float) -> StoreClient:
        made.append(connect(proxy.endpoint, token=server.token, timeout=timeout, session_grace=0.1))
        return made[-1]

    monkeypatch.setattr(regrow.store, "worker_store", worker_store)
    one = StoreExchange(rank=0, world_size=2)
    with monkeypatch.context() as brief:
        hurry(brief)
        assert isinstance(one.beat(beat(0, joined=False), PATIENCE), ExchangeFailed)
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    one.listen(outcomes.put)
    proxy.stop()
    wait_until(lambda: made[0].state is ConnectionState.LOST, "the session is lost")
    proxy = CuttingProxy(server.port, port)
    others = server.connect(session_grace=0.1)
    other = StoreExchange(others, rank=1, world_size=2)
    agree(one, other, joined=False)
    assert len(made) == 2
    others.close()
    assert isinstance(outcomes.get(timeout=PATIENCE), Broken)
    one.close()
    proxy.stop()


def test_rank_0_replaces_a_killed_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(STORE_ENV, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("REGROW_TOKEN", make_token().decode())
    with PortReservation("127.0.0.1") as reservation:
        monkeypatch.setenv(STORE_PORT_ENV, str(reservation.port))
        before = set(store_servers_below(os.getpid()))
        one, other = (StoreExchange(rank=rank, world_size=2) for rank in range(2))
        agree(one, other, joined=False)
        [first] = set(store_servers_below(os.getpid())) - before
        os.kill(first, signal.SIGKILL)
        agree(one, other)
        with pytest.raises(ChildProcessError):  # it was waited for
            os.waitpid(first, os.WNOHANG)
        for each in (one, other):
            each.close()


def test_close_does_not_wait_for_a_session_in_progress(
    monkeypatch: pytest.MonkeyPatch, server: ServerThread
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    clients: list[StoreClient] = []

    def slow(**_: object) -> StoreClient:
        begun.set()
        assert go_on.wait(PATIENCE)
        clients.append(server.connect())
        return clients[-1]

    monkeypatch.setattr(regrow.store, "worker_store", slow)
    exchange = StoreExchange(rank=0, world_size=2, name="job")
    beating = Background(exchange.beat, beat(0), PATIENCE)
    assert begun.wait(PATIENCE)
    Background(exchange.close).result()
    assert beating.running()
    go_on.set()
    with pytest.raises(StoreError, match=r"close\(\) was called"):
        beating.result()
    assert clients[0].state is ConnectionState.CLOSED
