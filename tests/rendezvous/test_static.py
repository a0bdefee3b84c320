"""Nodes whose number and ranks the user has fixed; several meet at a real store server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    get_rendezvous_handler,
)
from regrow.rendezvous._static import StaticTCPRendezvous, _address_to_listen_on
from regrow.store import StoreTimeout
from regrow.utils import PortReservation

LONG = 30.0
TOKEN = b"0123456789abcdef-shared"


def alone(endpoint: str = "", **config: Any) -> StaticTCPRendezvous:
    params = RendezvousParameters("static", endpoint, "job", 1, 1, **{"rank": 0, **config})
    handler = get_rendezvous_handler(params)
    assert isinstance(handler, StaticTCPRendezvous)
    return handler


# --- one node


def test_one_node_needs_no_network_and_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", no_socket)
    monkeypatch.setattr(socket, "getaddrinfo", no_socket)
    handler = alone()
    store, rank, world_size = handler.next_rendezvous()
    assert (rank, world_size) == (0, 1)
    store.set("key", b"value")
    assert handler.shutdown()


def test_one_nodes_port_is_the_given_one_or_left_to_the_agent() -> None:
    given = alone("10.0.0.1:29500").next_rendezvous()
    assert given.bootstrap_store_info == RendezvousStoreInfo("10.0.0.1", 29500)
    assert alone().next_rendezvous().bootstrap_store_info is None
    assert alone("127.0.0.1:0").next_rendezvous().bootstrap_store_info is None


def test_no_key_of_an_older_attempt_is_seen() -> None:
    handler = alone()
    handler.next_rendezvous().store.set("old", b"1")
    assert not handler.next_rendezvous().store.check(["old"])


def test_it_is_never_closed_and_nobody_waits() -> None:
    handler = alone()
    handler.set_closed()
    assert not handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    assert not handler.use_agent_store
    assert (handler.get_backend(), handler.get_run_id()) == ("static", "job")
    handler.subscribe(lambda news: None)()
    handler.next_rendezvous()


def test_an_interrupted_node_starts_no_other_attempt() -> None:
    handler = alone()
    handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="node rank 0 was told to stop"):
        handler.next_rendezvous()


# --- what is asked for


def create(nodes: int = 2, endpoint: str = "host:1", **config: Any) -> StaticTCPRendezvous:
    params = RendezvousParameters("static", endpoint, "job", nodes, nodes, **config)
    handler = get_rendezvous_handler(params)
    assert isinstance(handler, StaticTCPRendezvous)
    return handler


def test_the_configuration_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_TOKEN", TOKEN.decode())
    handler = create(3, "[fe80::1]:29500", rank="2", timeout="90")
    assert (handler.master_addr, handler.master_port) == ("fe80::1", 29500)
    assert (handler.rank, handler.world_size, handler.timeout) == (2, 3, 90.0)
    assert create(rank=0).timeout == 600.0


@pytest.mark.parametrize(
    ("config", "endpoint", "message"),
    [
        ({}, "host:1", "^rank is absent in RendezvousParameters"),
        ({"rank": 2}, "host:1", r"^the node rank 2 must be from 0 to 1: the job has 2 nodes$"),
        ({"rank": -1}, "host:1", "the node rank -1 must be"),
        ({"rank": 0}, " ", "^endpoint is absent in RendezvousParameters"),
        ({"rank": 0}, "host", "^Port is absent in endpoint: host. Try launching with"),
        ({"rank": 0, "timeout": "0"}, "host:1", "'timeout' must be a number of seconds"),
    ],
)
def test_what_is_missing_or_makes_no_sense_is_said(
    config: dict[str, Any], endpoint: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROW_TOKEN", TOKEN.decode())
    with pytest.raises(ValueError, match=message):
        create(2, endpoint, **config)


def test_several_nodes_without_a_token_are_told_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("REGROW_TOKEN", raising=False)
    monkeypatch.delenv("REGROW_TOKEN_FILE", raising=False)
    with pytest.raises(RendezvousError, match=r"regrow token ~/job.token .* --rdzv-token-file "):
        create(rank=0)
    with pytest.raises(RendezvousError, match="REGROW_TOKEN_FILE"):
        StaticTCPRendezvous("127.0.0.1", 1, 0, 2, "job", 1).next_rendezvous()


def test_a_token_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_TOKEN", "short")
    with pytest.raises(RendezvousError, match="the token has 5 bytes"):
        create(rank=0)


@pytest.mark.parametrize(
    ("addr", "listen"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("10.0.0.1", "0.0.0.0"),
        ("node7", "0.0.0.0"),
        ("fe80::1", "::"),
    ],
)
def test_only_loopback_is_listened_on_where_only_this_host_can_be_meant(
    addr: str, listen: str
) -> None:
    assert _address_to_listen_on(addr) == listen


# --- several nodes


class Nodes:
    """Nodes of one job on a port of this host, each joining in a thread of its own."""

    def __init__(self) -> None:
        self.reserved = PortReservation("127.0.0.1")
        self.pool = ThreadPoolExecutor(16)
        self.handlers: list[StaticTCPRendezvous] = []

    def node(
        self, rank: int, size: int = 2, timeout: float = LONG, token: bytes = TOKEN
    ) -> StaticTCPRendezvous:
        port = self.reserved.port
        handler = StaticTCPRendezvous("127.0.0.1", port, rank, size, "job", timeout, token)
        self.handlers.append(handler)
        return handler

    def join(self, *handlers: StaticTCPRendezvous) -> list[RendezvousInfo]:
        futures = [self.pool.submit(handler.next_rendezvous) for handler in handlers]
        return [future.result(LONG) for future in futures]

    def close(self) -> None:
        for handler in reversed(self.handlers):
            handler.interrupt()
            handler.shutdown()
        self.pool.shutdown()
        self.reserved.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def test_nodes_meet_share_a_store_and_agree_on_the_address_in_every_attempt(nodes: Nodes) -> None:
    handlers = [nodes.node(rank, size=3) for rank in range(3)]
    seen = []
    for _ in range(2):
        infos = nodes.join(*reversed(handlers))[::-1]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
        where = infos[0].bootstrap_store_info
        assert where is not None
        assert where.master_addr == "127.0.0.1"
        assert where.master_port not in (0, nodes.reserved.port)
        assert [info.bootstrap_store_info for info in infos] == [where] * 3
        assert not infos[1].store.check(["key"])
        infos[0].store.set("key", b"value")
        assert infos[2].store.get("key") == b"value"
        seen.append(where)
    assert all(handler.shutdown() for handler in reversed(handlers))


def test_the_server_lives_until_node_rank_0_is_shut_down(nodes: Nodes) -> None:
    first, second = nodes.node(0), nodes.node(1)
    nodes.join(first, second)
    server = first._server
    assert server is not None
    assert server.alive()
    second.shutdown()
    assert server.alive()
    first.shutdown()
    assert not server.alive()


def test_nodes_may_be_started_before_node_rank_0(nodes: Nodes) -> None:
    early = nodes.pool.submit(nodes.node(1).next_rendezvous)
    (info,) = nodes.join(nodes.node(0))
    assert (info.rank, early.result(LONG).rank) == (0, 1)


def test_node_rank_0_started_again_meets_the_others_again(nodes: Nodes) -> None:
    first, second = nodes.node(0), nodes.node(1)
    nodes.join(first, second)
    first.shutdown()
    infos = nodes.join(second, nodes.node(0))
    assert sorted(info.rank for info in infos) == [0, 1]


def test_a_missing_node_is_named_when_the_time_is_up(nodes: Nodes) -> None:
    handler = nodes.node(0, size=3)
    handler._connected(time.monotonic() + LONG)
    handler.timeout = 0.2
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"node rank 0 waited .* s for all 3 nodes; missing: node rank 1, 2$",
    ):
        handler.next_rendezvous()


def test_a_node_that_cannot_reach_node_rank_0_says_where_it_looked_and_how_long(
    nodes: Nodes,
) -> None:
    port = nodes.reserved.port
    with pytest.raises(
        RendezvousConnectionError,
        match=rf"node rank 1 could not reach node rank 0 at 127\.0\.0\.1:{port} within 0\.5 s",
    ):
        nodes.node(1, timeout=0.5).next_rendezvous()


def test_a_node_with_another_token_is_refused_at_once(nodes: Nodes) -> None:
    first = nodes.pool.submit(nodes.node(0).next_rendezvous)
    stranger = nodes.node(1, token=b"another token of enough bytes")
    with pytest.raises(RendezvousError, match="node rank 1 may not use the store") as refused:
        stranger.next_rendezvous()
    assert type(refused.value) is RendezvousError  # no loss of infrastructure, to be tried again
    assert not first.done()


def test_a_port_that_is_taken_is_said_with_what_to_do(nodes: Nodes) -> None:
    nodes.reserved.close()
    with (
        socket.create_server(("127.0.0.1", nodes.reserved.port)),
        pytest.raises(
            RendezvousConnectionError,
            match=rf"cannot serve the store on port {nodes.reserved.port} .*--master-port",
        ),
    ):
        nodes.node(0).next_rendezvous()


def interrupt_when(holds: Callable[[], bool], handler: StaticTCPRendezvous) -> None:
    """Interrupt a handler as soon as it is where the test wants it."""
    pause = threading.Event()
    for _ in range(int(LONG / 0.01)):
        if holds():
            handler.interrupt()
            return
        pause.wait(0.01)
    raise AssertionError("it never got there")


def test_an_interrupt_ends_the_wait_for_the_others(nodes: Nodes) -> None:
    handler = nodes.node(0)
    waiting = nodes.pool.submit(handler.next_rendezvous)
    interrupt_when(lambda: handler._client is not None, handler)
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result(LONG)


def test_an_interrupt_ends_the_tries_to_connect(nodes: Nodes) -> None:
    handler = nodes.node(1)
    waiting = nodes.pool.submit(handler.next_rendezvous)
    interrupt_when(waiting.running, handler)
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result(LONG)


def test_a_call_in_the_shared_store_that_nobody_answers_ends_by_its_own_timeout(
    nodes: Nodes,
) -> None:
    infos = nodes.join(nodes.node(0), nodes.node(1))
    with pytest.raises(StoreTimeout):
        infos[0].store.wait(["never"], 0.05)
