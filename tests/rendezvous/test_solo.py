"""The rendezvous of a job with one node, which needs no network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStoreInfo,
    SoloRendezvousHandler,
    get_rendezvous_handler,
)
from regrow.rendezvous.backends.solo import create_handler
from regrow.rendezvous.backends.static import StaticTCPRendezvous
from regrow.store import StoreClosedError


@pytest.fixture
def handler() -> Iterator[SoloRendezvousHandler]:
    made = SoloRendezvousHandler("job")
    yield made
    made.shutdown()


def test_one_node_forms_a_round_without_other_nodes() -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    for _ in range(3):
        info = handler.next_rendezvous()
        store, rank, world_size = info
        assert (rank, world_size) == (0, 1)
        assert store.num_keys() == 0
        store.set("key", b"value")
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_port > 0
    assert handler.get_run_id() == "job"
    assert not handler.use_agent_store
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()


def test_the_port_of_the_workers_is_bound_and_no_program_can_reach_this_node(
    handler: SoloRendezvousHandler,
) -> None:
    where = handler.next_rendezvous().bootstrap_store_info
    assert where is not None
    assert where.master_addr == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.master_addr, where.master_port))
    handler.shutdown()


def test_a_round_has_a_store_of_its_own_which_ends_with_it(handler: SoloRendezvousHandler) -> None:
    old = handler.next_rendezvous().store
    old.set("old", b"1")
    new = handler.next_rendezvous().store
    with pytest.raises(StoreClosedError):
        old.get("old")
    assert not new.check(["old"])
    handler.leaving("its host is shut down")
    with pytest.raises(StoreClosedError):
        new.check(["old"])


def test_a_failure_is_charged_at_once(handler: SoloRendezvousHandler) -> None:
    info = handler.next_rendezvous()
    assert (info.round, info.failures) == (1, 0)
    judged = handler.report_failure("rank 0 exited with 1")
    assert judged is not None
    assert (judged.round, judged.charged, judged.failures) == (1, True, 1)
    assert judged.cause.report == "rank 0 exited with 1"
    info = handler.next_rendezvous()
    assert (info.round, info.failures) == (2, 1)


def test_a_failure_in_a_round_that_is_over_is_not_charged(handler: SoloRendezvousHandler) -> None:
    handler.next_rendezvous()
    handler.leave("its agent was interrupted")
    assert handler.report_failure("too late") is None
    assert handler.next_rendezvous().failures == 0


def test_a_failure_after_the_rendezvous_was_closed_ends_the_job_with_its_report(
    handler: SoloRendezvousHandler,
) -> None:
    handler.next_rendezvous()
    handler.set_closed()
    with pytest.raises(RendezvousClosedError, match="no round follows because") as closed:
        handler.report_failure("rank 0 exited with 1")
    assert closed.value.report == "rank 0 exited with 1"


def test_after_a_failure_for_good_no_round_follows_and_its_report_is_kept(
    handler: SoloRendezvousHandler,
) -> None:
    handler.next_rendezvous()
    handler.fail("the budget is spent")
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError, match=r"'job' is closed: node 127\.0") as closed:
        handler.next_rendezvous()
    assert closed.value.report == "the budget is spent"


def test_an_interrupted_node_starts_no_other_round(handler: SoloRendezvousHandler) -> None:
    handler.next_rendezvous()
    handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="was interrupted"):
        handler.next_rendezvous()


def test_the_calls_of_a_node_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int | None]] = []

    def record(run_id: str, message: str, node_state: Any, rank: Any = None, **_: Any) -> None:
        assert run_id == "job"
        seen.append((node_state.name, message, rank))

    monkeypatch.setattr("regrow.events.construct_and_record_rdzv_event", record)
    handler = SoloRendezvousHandler("job", local_addr="a")
    handler.next_rendezvous()
    handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    assert [(state, rank) for state, _, rank in seen] == [
        ("RUNNING", None),
        ("RUNNING", 0),
        ("SUCCEEDED", None),
        ("RUNNING", None),
        ("FAILED", None),
    ]
    assert "has joined round 1 as rank 0 in a world of size 1" in seen[1][1]
    assert seen[4][1].startswith("RendezvousClosedError: the rendezvous 'job' is closed")


def test_a_job_of_several_nodes_is_refused() -> None:
    with pytest.raises(RendezvousError, match="the job has 1 to 2 nodes"):
        create_handler(RendezvousParameters("c10d", "host:29400", "job", 1, 2))


@pytest.mark.parametrize(
    "key", ["join_timeout", "timeout", "last_call_timeout", "keep_alive_interval"]
)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", [1]])
def test_an_invalid_timeout_is_refused_with_its_key(key: str, value: Any) -> None:
    config: dict[str, Any] = {key: value}
    params = RendezvousParameters("c10d", "", "job", 1, 1, **config)
    with pytest.raises(ValueError, match=f"'{key}' must be a number of seconds"):
        get_rendezvous_handler(params)


# --- the backend `static`


def static(endpoint: str = "", **config: Any) -> RendezvousHandler:
    params = RendezvousParameters("static", endpoint, "job", 1, 1, **{"rank": 0, **config})
    return get_rendezvous_handler(params)


def test_one_static_node_needs_no_network_and_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", no_socket)
    monkeypatch.setattr(socket, "getaddrinfo", no_socket)
    handler = static()
    store, rank, world_size = handler.next_rendezvous()
    assert (rank, world_size) == (0, 1)
    store.set("key", b"value")
    assert handler.shutdown()


def test_one_nodes_port_is_the_given_one_or_left_to_the_agent() -> None:
    given = static("10.0.0.1:29500").next_rendezvous()
    assert given.bootstrap_store_info == RendezvousStoreInfo("10.0.0.1", 29500)
    assert static().next_rendezvous().bootstrap_store_info is None
    assert static("127.0.0.1:0").next_rendezvous().bootstrap_store_info is None


def test_no_key_of_an_older_attempt_is_seen() -> None:
    handler = static()
    handler.next_rendezvous().store.set("old", b"1")
    assert not handler.next_rendezvous().store.check(["old"])


def test_a_static_node_is_never_closed() -> None:
    handler = static()
    handler.set_closed()
    assert not handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    assert not handler.use_agent_store
    assert (handler.get_backend(), handler.get_run_id()) == ("static", "job")
    assert isinstance(handler, SoloRendezvousHandler)
    assert handler.credentials is None
    handler.subscribe(lambda notification: None)()
    handler.next_rendezvous()


def test_a_static_node_that_is_made_by_its_class_works_the_same() -> None:
    handler = StaticTCPRendezvous("127.0.0.1", None, 0, 1, "job", 5)
    handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match=r"node .* was interrupted"):
        handler.next_rendezvous()
