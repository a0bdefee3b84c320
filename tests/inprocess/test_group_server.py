"""Ranks with a store of the user meet in a store of regrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.stores.storing import Background, ServerThread
from regrow.inprocess.exception import BarrierTimeout, LinkLostError
from regrow.inprocess.group.group_server import group_store
from regrow.inprocess.store import TCPStore
from regrow.store import MemoryStore, StoreConnectionError

Meeting = tuple[TCPStore, str]


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which a launcher has set only the address of rank 0."""
    for name in ("REGROW_STORE", "REGROW_STORE_TOKEN", "LOCAL_WORLD_SIZE", "REGROW_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    server = ServerThread()
    monkeypatch.setenv("REGROW_STORE", server.endpoint)
    monkeypatch.setenv("REGROW_STORE_TOKEN", server.token.decode())
    yield server
    server.stop()


def meetings(given: Any) -> list[Meeting]:
    """Return the meeting of each of two ranks that use the same store."""
    calls = [Background(group_store, given, "group", rank, 2, 30.0) for rank in (1, 0)]
    return [call.result() for call in calls]


def test_without_an_agent_ranks_meet_at_a_server_that_rank_0_starts() -> None:
    (one, name), (other, same) = meetings(MemoryStore())
    assert name == same
    assert one.whereabouts() == other.whereabouts()
    one.set("key", b"value")
    assert other.get("key") == b"value"
    other.close()  # rank 0 leaves the server to the others
    assert one.get("key") == b"value"
    one.close()


def test_after_a_loss_the_ranks_of_two_hosts_do_not_meet_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("REGROW_WORLD_SIZE", "4")  # kept by an earlier call of the wrapper
    for store, _ in meetings(MemoryStore()):
        assert store.whereabouts()[0].startswith("localhost:")
        store.close()


def test_under_an_agent_ranks_meet_in_its_store(agent: ServerThread) -> None:
    (one, name), (other, same) = meetings(MemoryStore())
    assert name == same
    assert [each.whereabouts()[0] for each in (one, other)] == [agent.endpoint] * 2
    for store in (one, other):
        store.close()


def test_groups_that_two_stores_keep_apart_stay_apart_in_the_agents_store(
    agent: ServerThread,
) -> None:
    found = [meeting for _ in range(2) for meeting in meetings(MemoryStore())]
    assert len({name for _, name in found}) == 2
    for store, _ in found:
        store.close()


def test_a_process_that_takes_the_place_of_rank_0_finds_the_others(agent: ServerThread) -> None:
    given = MemoryStore()
    found = [*meetings(given), *meetings(given)]
    assert len({name for _, name in found}) == 1
    for store, _ in found:
        store.close()


def test_a_store_of_ours_is_where_its_ranks_meet(agent: ServerThread) -> None:
    given = TCPStore()
    assert group_store(given, "group", 1, 2, 30.0) == (given, "group")
    given.close()


def test_a_rank_0_that_publishes_nothing_ends_the_wait_of_the_others() -> None:
    with pytest.raises(BarrierTimeout, match=r"rank 0 did not publish within 0\.02 s"):
        group_store(MemoryStore(), "group", 1, 2, 0.02)


class Lost(MemoryStore):
    """A store that cannot be reached."""

    def check(self, keys: Any) -> bool:
        raise StoreConnectionError("it is gone")


def test_a_store_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(LinkLostError, match="store of store_factory cannot be reached: it is gone"):
        group_store(Lost(), "group", 0, 2, 30.0)
