"""The line between a worker and the store's server."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator

import pytest
from storing import PATIENCE, Background, CuttingProxy, ServerThread, eventually

import regrow.store
from regrow.heartbeat import Exchange, StoreExchange, _store_exchange
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._merge import Agreed, Beat, Broken, Failed, Left, Outcome
from regrow.heartbeat._service import HeartbeatService
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
    """The server waits 30 ms for the others, and the worker half a minute for the server."""
    monkeypatch.setattr(_store_exchange, "EARLY", 1 - 0.03 / PATIENCE)
    monkeypatch.setattr(_store_exchange, "MOST_EARLY", PATIENCE)


def pair(server: ServerThread) -> list[StoreExchange]:
    """The exchanges of two workers, each with a session of its own."""
    return [
        StoreExchange(server.connect(session_grace=0.1), rank=rank, world_size=2)
        for rank in range(2)
    ]


def beat(rank: int, joined: bool = True) -> Beat:
    return Beat(rank, TOKEN if joined or rank == 0 else 0, 1000 + rank, joined)


def agree(one: StoreExchange, other: StoreExchange, joined: bool = True) -> None:
    waiting = Background(one.beat, beat(0, joined), PATIENCE)
    assert isinstance(other.beat(beat(1, joined), PATIENCE), Agreed)
    assert waiting.result()._replace(age=0.0) == Agreed(TOKEN)


def test_it_is_an_exchange_that_sums_up_anything(server: ServerThread) -> None:
    one, other = pair(server)
    assert isinstance(one, Exchange)
    for number in (1, 2):
        waiting = Background(one.all_reduce, [number, 2**40], PATIENCE)
        assert other.all_reduce([10, 1], PATIENCE) == [number + 10, 2**40 + 1]
        assert waiting.result() == [number + 10, 2**40 + 1]


def test_a_sum_that_does_not_come_about_says_who_was_missing(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    one, _ = pair(server)
    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        one.all_reduce([1], PATIENCE)


def test_a_beat_that_does_not_come_about_says_who_was_missing(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    one, _ = pair(server)
    outcome = one.beat(beat(0), PATIENCE)
    assert isinstance(outcome, Failed)
    assert outcome.missing == Ranks.of([1])
    assert "rank 1 did not come" in outcome.why


def test_the_end_of_a_worker_is_heard_between_beats(server: ServerThread) -> None:
    one, other = pair(server)
    agree(one, other, joined=False)
    heard: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    one.listen(heard.put)
    assert other._client is not None
    other._client.close()
    outcome = heard.get(timeout=PATIENCE)
    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.ranks) == ("lost", Ranks.of([1]))


def test_a_goodbye_does_not_wait_for_anybody(server: ServerThread) -> None:
    one, other = pair(server)
    agree(one, other)
    left = Left(Ranks.of([0]))
    assert one.beat(beat(0)._replace(leaving=True), PATIENCE) == left
    assert other.beat(beat(1), PATIENCE) == left


def test_a_beat_that_is_under_way_ends_when_its_worker_leaves(server: ServerThread) -> None:
    one, other = pair(server)
    agree(one, other)
    waiting = Background(one.beat, beat(0), PATIENCE)
    one.leave(beat(0)._replace(leaving=True))
    assert waiting.result() == Left(Ranks.of([0]))


def test_a_goodbye_does_not_wait_for_a_server_that_is_out_of_reach() -> None:
    waits = []

    class OutOfReach:
        def ask(self, service: str, body: bytes, timeout: float) -> bytes:
            waits.append(timeout)
            raise StoreTimeout("no answer")

    one = StoreExchange(OutOfReach(), rank=0, world_size=2)  # type: ignore[arg-type]
    with pytest.raises(StoreTimeout):
        one.beat(beat(0)._replace(leaving=True), 100.0)
    assert waits[0] <= _store_exchange.FAREWELL


def test_a_store_that_was_given_is_left_open_and_nobody_listens_there_any_more(
    server: ServerThread,
) -> None:
    one, other = pair(server)
    agree(one, other)
    one.listen(lambda outcome: None)
    [listener] = [each for each in threading.enumerate() if each.name == "regrow-heartbeat-news"]
    one.close()
    listener.join(PATIENCE)
    assert not listener.is_alive()
    assert one._client is not None
    one._client.set("key", b"value")
    with pytest.raises(StoreError, match="was closed"):
        one.beat(beat(0), PATIENCE)


def test_a_session_that_is_lost_is_followed_by_a_new_one(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For beats, and for hearing what ends the group, of which the first one knew nothing yet."""
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
        assert isinstance(one.beat(beat(0, joined=False), PATIENCE), Failed)
    heard: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    one.listen(heard.put)
    proxy.stop()
    eventually(lambda: made[0].state is ConnectionState.LOST)
    proxy = CuttingProxy(server.port, port)
    other = StoreExchange(server.connect(session_grace=0.1), rank=1, world_size=2)
    agree(one, other, joined=False)
    assert len(made) == 2
    assert other._client is not None
    other._client.close()
    assert isinstance(heard.get(timeout=PATIENCE), Broken)
    one.close()
    proxy.stop()


def test_a_server_that_is_killed_is_replaced_by_rank_0_and_the_beating_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(STORE_ENV, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("REGROW_TOKEN", make_token().decode())
    with PortReservation("127.0.0.1") as reservation:
        monkeypatch.setenv(STORE_PORT_ENV, str(reservation.port))
        one, other = (StoreExchange(rank=rank, world_size=2) for rank in range(2))
        agree(one, other, joined=False)
        assert one._client is not None
        assert one._client._server is not None
        first = one._client._server.pid
        os.kill(first, signal.SIGKILL)
        agree(one, other)
        with pytest.raises(ChildProcessError):  # it is nobody's any more
            os.waitpid(first, os.WNOHANG)
        for each in (one, other):
            each.close()
