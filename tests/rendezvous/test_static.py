"""Jobs with a fixed number of nodes and fixed ranks; several nodes use a real store server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.processes import wait_until
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    get_rendezvous_handler,
)
from regrow.rendezvous.backends.static import StaticTCPRendezvous
from regrow.rendezvous.protocol.messages import RoundEnded
from regrow.store import StoreTimeout
from regrow.utils import PortReservation, host_of

LONG = 30.0
TOKEN = b"0123456789abcdef-shared"


# --- parameters


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
    assert create(rank=1).timeout == 600.0


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
def test_a_missing_or_invalid_option_is_named(
    config: dict[str, Any], endpoint: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROW_TOKEN", TOKEN.decode())
    with pytest.raises(ValueError, match=message):
        create(2, endpoint, **config)


def test_the_error_of_a_missing_token_shows_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("REGROW_TOKEN", raising=False)
    monkeypatch.delenv("REGROW_TOKEN_FILE", raising=False)
    with pytest.raises(RendezvousError, match=r"regrow token ~/job.token .* --rdzv-token-file "):
        create(rank=0)
    with pytest.raises(RendezvousError, match="REGROW_TOKEN_FILE"):
        StaticTCPRendezvous("127.0.0.1", 1, 0, 2, "job", 1).next_rendezvous()


def test_agents_can_use_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGROW_TOKEN", "a secret of this test")
    assert create(rank=1).credentials == (b"a secret of this test", None)


def test_a_token_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_TOKEN", "short")
    with pytest.raises(RendezvousError, match="the token has 5 bytes"):
        create(rank=0)


# --- several nodes


class Nodes:
    """Nodes of one job on a port of this host; each joins in a thread of its own."""

    def __init__(self) -> None:
        self.reserved = PortReservation("127.0.0.1")
        self.pool = ThreadPoolExecutor(16)
        self.handlers: list[StaticTCPRendezvous] = []

    def node(
        self,
        rank: int,
        size: int = 2,
        timeout: float = LONG,
        token: bytes = TOKEN,
        addr: str = "127.0.0.1",
    ) -> StaticTCPRendezvous:
        port = self.reserved.port
        handler = StaticTCPRendezvous(addr, port, rank, size, "job", timeout, token)
        self.handlers.append(handler)
        return handler

    def join(self, *handlers: StaticTCPRendezvous) -> list[RendezvousInfo]:
        futures = [self.pool.submit(handler.next_rendezvous) for handler in handlers]
        return [future.result(LONG) for future in futures]

    def close(self) -> None:
        for handler in reversed(self.handlers):
            handler.interrupt()
            handler.leave("the test is over")
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
    endings = [nodes.pool.submit(handler.shutdown) for handler in handlers]
    assert all(ending.result(LONG) for ending in endings)


def test_workers_get_the_address_of_rank_0_as_the_user_wrote_it(nodes: Nodes) -> None:
    handlers = [nodes.node(0, addr="localhost"), nodes.node(1)]
    infos = nodes.join(*handlers)
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"localhost"}  # type: ignore[union-attr]


def test_nodes_may_be_started_before_node_rank_0(nodes: Nodes) -> None:
    early = nodes.pool.submit(nodes.node(1).next_rendezvous)
    (info,) = nodes.join(nodes.node(0))
    assert (info.rank, early.result(LONG).rank) == (0, 1)


# --- events that affect all nodes


def notifications_of(handler: StaticTCPRendezvous) -> tuple[list[object], threading.Semaphore]:
    """Return a list of the node's future notifications, and a semaphore that counts them."""
    notifications: list[object] = []
    arrived = threading.Semaphore(0)

    def listen(what: object) -> None:
        notifications.append(what)
        arrived.release()

    handler.subscribe(listen)
    return notifications, arrived


def test_a_node_that_is_lost_ends_the_round_and_the_job_for_all(nodes: Nodes) -> None:
    handlers = [nodes.node(rank, size=3) for rank in range(3)]
    nodes.join(*handlers)
    listeners = [notifications_of(handler) for handler in handlers[:2]]
    handlers[2].driver.close(linger=False)  # as the end of its process would
    for (notifications, arrived), handler in zip(listeners, handlers, strict=False):
        assert arrived.acquire(timeout=LONG)
        assert isinstance(notifications[0], RoundEnded)
        with pytest.raises(
            RendezvousConnectionError, match=r"cannot continue without host .*; its nodes are fixed"
        ) as refused:
            nodes.join(handler)
        assert f"without host {host_of(notifications[0].id)}: " in str(refused.value)
    late = nodes.node(2, size=3)
    with pytest.raises(RendezvousConnectionError, match="cannot continue without host"):
        nodes.join(late)


def test_a_node_that_leaves_ends_the_job_for_the_waiting_nodes(nodes: Nodes) -> None:
    first, second = nodes.node(0), nodes.node(1)
    nodes.join(first, second)
    _, arrived = notifications_of(first)
    second.leaving("its agent got SIGTERM")
    assert arrived.acquire(timeout=LONG)
    waiting = nodes.pool.submit(first.next_rendezvous)
    second.leave("its agent got SIGTERM")
    with pytest.raises(RendezvousConnectionError, match="its agent got SIGTERM; its nodes are"):
        waiting.result(LONG)


def test_a_failure_ends_the_round_for_all_is_charged_once_and_healed_by_the_next(
    nodes: Nodes,
) -> None:
    first, second = nodes.node(0), nodes.node(1)
    nodes.join(first, second)
    notifications, arrived = notifications_of(first)
    judged = second.report_failure("boom")
    assert judged is not None
    assert (judged.charged, judged.failures) == (True, 1)
    assert arrived.acquire(timeout=LONG)
    assert isinstance(notifications[0], RoundEnded)
    assert notifications[0].report == "boom"
    infos = nodes.join(second, first)
    assert [(info.rank, info.round, info.failures) for info in infos] == [(1, 2, 1), (0, 2, 1)]


def test_a_job_that_has_failed_for_good_is_over_for_all_with_one_report(nodes: Nodes) -> None:
    first, second = nodes.node(0), nodes.node(1)
    nodes.join(first, second)
    _, arrived = notifications_of(first)
    second.fail("boom")
    assert arrived.acquire(timeout=LONG)
    assert second.is_closed()
    with pytest.raises(RendezvousClosedError) as closed:
        nodes.join(first)
    assert closed.value.report == "boom"


def test_a_second_node_of_a_rank_is_refused_with_both(nodes: Nodes) -> None:
    first, second = nodes.node(0, size=3), nodes.node(1, size=3)
    waiting = nodes.pool.submit(second.next_rendezvous)
    nodes.pool.submit(first.next_rendezvous)
    wait_until(lambda: second.connection.snapshot is not None, "a snapshot arrives")
    with pytest.raises(RendezvousError, match=r"node rank 1 is used twice.*--node-rank"):
        nodes.join(nodes.node(1, size=3))
    assert not waiting.done()


def test_the_end_of_a_second_node_of_a_rank_is_not_the_end_of_the_job(nodes: Nodes) -> None:
    first, second = nodes.node(0), nodes.node(1)
    nodes.join(first, second)
    third = nodes.node(1)
    with pytest.raises(RendezvousError, match="node rank 1 is used twice"):
        nodes.join(third)
    assert third.shutdown()
    assert not first.is_closed()
    assert second.report_failure("boom") is not None
    assert [info.round for info in nodes.join(second, first)] == [2, 2]


def test_a_node_that_went_while_all_were_awaited_may_come_again(nodes: Nodes) -> None:
    first, second = nodes.node(0, size=3), nodes.node(1, size=3)
    for handler in (first, second):
        nodes.pool.submit(handler.next_rendezvous)
    wait_until(lambda: second.connection.snapshot is not None, "a snapshot arrives")
    second.driver.close(linger=False)
    again, third = nodes.node(1, size=3), nodes.node(2, size=3)
    assert [info.rank for info in nodes.join(again, third)] == [1, 2]


# --- obstacles to a round


def test_a_missing_node_is_named_when_the_time_is_up(nodes: Nodes) -> None:
    handler = nodes.node(0, size=3, timeout=0.5)
    with pytest.raises(
        RendezvousTimeoutError, match=r"waited 0.5 s for all 3 nodes; missing: node rank 1, 2$"
    ):
        handler.next_rendezvous()


def test_the_error_of_an_unreachable_rank_0_has_address_and_time(
    nodes: Nodes,
) -> None:
    port = nodes.reserved.port
    with pytest.raises(
        RendezvousConnectionError,
        match=rf"node rank 1 could not reach node rank 0: .* 127\.0\.0\.1:{port}.* 0\.5 s\)",
    ):
        nodes.node(1, timeout=0.5).next_rendezvous()


def test_a_node_with_another_token_is_refused_at_once(nodes: Nodes) -> None:
    first = nodes.pool.submit(nodes.node(0).next_rendezvous)
    stranger = nodes.node(1, token=b"another token of enough bytes")
    with pytest.raises(RendezvousError, match="token") as refused:
        stranger.next_rendezvous()
    assert type(refused.value) is RendezvousError  # a loss of infrastructure would be retried
    assert not first.done()


def test_the_error_of_a_taken_port_names_the_flag(nodes: Nodes) -> None:
    nodes.reserved.close()
    with (
        socket.create_server(("127.0.0.1", nodes.reserved.port)),
        pytest.raises(
            RendezvousConnectionError,
            match=rf"cannot serve the other nodes on port {nodes.reserved.port} .*--master-port",
        ),
    ):
        nodes.node(0)


def test_an_interrupt_ends_the_wait_for_the_others(nodes: Nodes) -> None:
    handler = nodes.node(0)
    waiting = nodes.pool.submit(handler.next_rendezvous)
    wait_until(lambda: handler.connection.snapshot is not None, "a snapshot arrives")
    handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result(LONG)


def test_an_interrupt_ends_the_tries_to_connect(nodes: Nodes) -> None:
    handler = nodes.node(1)
    waiting = nodes.pool.submit(handler.next_rendezvous)
    wait_until(waiting.running, "the call runs")
    handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result(LONG)


def test_a_call_in_the_shared_store_ends_by_its_own_timeout(
    nodes: Nodes,
) -> None:
    infos = nodes.join(nodes.node(0), nodes.node(1))
    with pytest.raises(StoreTimeout):
        infos[0].store.wait(["never"], 0.05)
