"""One node's driver over a real store server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest

from helpers.stores.storing import PATIENCE, Background, CuttingProxy
from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    JoinRound,
    LeaveRound,
    Node,
    NodeRefused,
    Placed,
    RoundEnded,
    Seated,
    ServersChanged,
    WorkersFailed,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.hosting import SERVICES
from regrow.rendezvous.server.server_driver import ServerDriver, Where
from regrow.rendezvous.settings import RendezvousSettings, RendezvousTimeout
from regrow.store import (
    ServerProcess,
    StoreClient,
    StoreClosedError,
    connect,
    make_token,
    start_server,
)
from regrow.utils import PortReservation

TOKEN = make_token()
KEEP_ALIVE = timedelta(seconds=100)
"""Long, so that nodes send no heartbeats except in tests of heartbeats."""


def settings(min_nodes: int = 2, max_nodes: int = 2, run_id: str = "job") -> RendezvousSettings:
    timeout = RendezvousTimeout(last_call=timedelta(seconds=0.1))
    return RendezvousSettings(run_id, min_nodes, max_nodes, timeout, KEEP_ALIVE, 3)


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    """One server for all tests that leave it intact; each test uses a job of its own."""
    with start_server(token=TOKEN, services=SERVICES) as server:
        yield server


@pytest.fixture
def own() -> Iterator[ServerProcess]:
    """A server for a test that damages it."""
    with start_server(token=TOKEN, services=SERVICES) as server:
        yield server


Meet = Callable[..., ServerDriver]


@pytest.fixture
def drive(request: pytest.FixtureRequest) -> Iterator[Meet]:
    """Return a factory of drivers for this test's job; they are closed after the test."""
    with ExitStack() as made:

        def make(endpoint: str, min_nodes: int = 2, max_nodes: int = 2) -> ServerDriver:
            chosen = settings(min_nodes, max_nodes, request.node.name)
            driver = ServerDriver(Where(endpoint, TOKEN), chosen, PATIENCE)
            made.callback(driver.close, linger=False)
            return driver

        yield make


@pytest.fixture
def pair(shared: ServerProcess, drive: Meet) -> tuple[ServerDriver, ServerDriver]:
    """The drivers of two nodes, a and b, in a complete round."""
    return seated(drive, shared.endpoint)


def seated(drive: Meet, *endpoints: str) -> tuple[ServerDriver, ServerDriver]:
    a, b = drive(endpoints[0]), drive(endpoints[-1])
    a.submit(join("a"), PATIENCE)
    b.submit(join("b"), PATIENCE)
    return a, b


def join(name: str, token: int = 0) -> JoinRound:
    return JoinRound(Node(name, f"{name}.host", None, 4000), token)


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def snapshot_of(driver: ServerDriver, id: str, seen: Snapshot | None = None) -> Snapshot:
    view = driver.follow(id, seen, PATIENCE)
    assert view is not None, "no snapshot arrived"
    return view


def test_nodes_meet_and_each_receives_its_seat(shared: ServerProcess, drive: Meet) -> None:
    a, b = drive(shared.endpoint), drive(shared.endpoint)
    forming = a.submit(join("a"), PATIENCE)
    assert forming.status == Placed("a", "forming")
    waiting = Background(a.follow, "a", forming, PATIENCE)
    last = b.submit(join("b"), PATIENCE)
    first = waiting.result()
    assert isinstance(first.status, Seated)
    assert isinstance(last.status, Seated)
    assert (first.status.rank, last.status.rank) == (0, 1)
    assert first.status.digest == last.status.digest
    assert a.peek("a") == first
    assert a.peek("somebody") == Snapshot(0, None, 0, None)


def test_the_store_of_a_round_is_reached_without_asking_the_name_service(
    shared: ServerProcess, drive: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = drive(shared.endpoint.replace("127.0.0.1", "localhost"))

    def fails(*args: object, **options: object) -> None:
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    store = a.round_store(1)
    store.set("key", b"value")
    assert store.get("key") == b"value"


def test_a_server_that_is_gone_behind_a_proxy_that_is_not_is_out_of_reach(
    own: ServerProcess, drive: Meet
) -> None:
    a = drive(own.endpoint)
    port = int(own.endpoint.rpartition(":")[2])
    own.close()
    with socket.create_server(("127.0.0.1", port)) as proxy:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    proxy.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(RendezvousConnectionError, match="it closed the connection"):
            a.beat("a", 1, PATIENCE)
        proxy.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_following_blocks_until_something_is_new(pair: tuple[ServerDriver, ServerDriver]) -> None:
    a, b = pair
    seen = snapshot_of(a, "a")
    assert a.follow("a", seen, 0.01) is None
    waiting = Background(a.follow, "a", seen, PATIENCE)
    assert a.beat("a", 1, PATIENCE)  # while it waits
    b.submit(WorkersFailed("b", 1, "report"), PATIENCE)
    assert waiting.result().status == RoundEnded(1, "b", "its workers failed", "report")


def test_a_heartbeat_returns_whether_the_seat_is_still_held(
    pair: tuple[ServerDriver, ServerDriver],
) -> None:
    a, b = pair
    assert a.beat("a", 1, PATIENCE)
    b.submit(LeaveRound("b", 1), PATIENCE)
    assert a.beat("a", 1, PATIENCE)  # the others still wait for it
    assert not b.beat("b", 1, PATIENCE)
    assert not b.beat("a", 1, PATIENCE)  # the seat of another node


def test_an_agent_reports_that_no_other_host_may_serve(
    pair: tuple[ServerDriver, ServerDriver],
) -> None:
    reports: list[object] = []
    pair[0].report_to(reports.append)
    for _ in range(2):
        assert pair[0].beat("a", 1, PATIENCE)
    assert reports == [ServersChanged(0, "127.0.0.1", (), 0)]


def test_an_agent_that_is_alone_reports_no_servers(own: ServerProcess, drive: Meet) -> None:
    alone = drive(own.endpoint, 1, 1)
    alone.report_to(lambda report: pytest.fail(str(report)))
    alone.submit(join("a"), PATIENCE)
    alone.follow("a", None, PATIENCE)
    assert alone.beat("a", 1, PATIENCE)


def test_a_stale_token_is_refused(pair: tuple[ServerDriver, ServerDriver]) -> None:
    _, b = pair
    b.submit(LeaveRound("b", 1), PATIENCE)
    assert isinstance(b.submit(join("b", 1), PATIENCE).status, NodeRefused)


def test_a_node_that_closes_its_driver_is_lost_at_once(
    pair: tuple[ServerDriver, ServerDriver],
) -> None:
    a, b = pair
    waiting = Background(a.follow, "a", snapshot_of(a, "a"), PATIENCE)
    b.close(linger=False)
    b.close(linger=False)
    assert waiting.result().status == RoundEnded(1, "b", "it closed its connection", lost=True)


NODE = """
import signal, sys
from datetime import timedelta
from regrow.rendezvous.server.server_driver import ServerDriver, Where
from regrow.rendezvous.protocol.messages import JoinRound, Node
from regrow.rendezvous.settings import RendezvousSettings, RendezvousTimeout
endpoint, token, run_id = sys.argv[1:]
settings = RendezvousSettings(run_id, 2, 2, RendezvousTimeout(), timedelta(seconds=100), 3)
driver = ServerDriver(Where(endpoint, token.encode()), settings, 30)
driver.submit(JoinRound(Node("b", "b.host")), 30)
print("joined", flush=True)
signal.pause()
"""


def test_a_node_whose_process_is_killed_is_lost_at_once(
    shared: ServerProcess, drive: Meet, request: pytest.FixtureRequest
) -> None:
    a = drive(shared.endpoint)
    seen = a.submit(join("a"), PATIENCE)
    args = [shared.endpoint, TOKEN.decode(), request.node.name]
    command = [sys.executable, "-c", NODE, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"joined\n"  # unread answers would reset the connection
        while not isinstance(seen.status, Seated):
            seen = snapshot_of(a, "a", seen)
        waiting = Background(a.follow, "a", seen, PATIENCE)
        node.kill()
    assert waiting.result().status == RoundEnded(1, "b", "its connection broke", lost=True)


def test_a_connection_that_breaks_and_comes_back_costs_nothing(
    shared: ServerProcess, drive: Meet
) -> None:
    proxy = CuttingProxy(int(shared.endpoint.rpartition(":")[2]))
    a, b = seated(drive, shared.endpoint, proxy.endpoint)
    waiting = Background(b.follow, "b", snapshot_of(b, "b"), PATIENCE)
    for _ in range(3):
        proxy.cut_now()
        assert b.beat("b", 1, PATIENCE)
    a.submit(WorkersFailed("a", 1, "report"), PATIENCE)
    assert waiting.result().status == RoundEnded(1, "a", "its workers failed", "report")
    proxy.stop()


def test_a_node_that_was_away_too_long_has_no_status(shared: ServerProcess, drive: Meet) -> None:
    proxy = CuttingProxy(port_of(shared.endpoint))
    port = port_of(proxy.endpoint)
    a, b = seated(drive, shared.endpoint, proxy.endpoint)
    waiting = Background(a.follow, "a", snapshot_of(a, "a"), PATIENCE)
    gone = Background(b.follow, "b", snapshot_of(b, "b"), PATIENCE)
    proxy.stop()
    assert waiting.result().status == RoundEnded(1, "b", "its connection broke", lost=True)
    with pytest.raises(RendezvousConnectionError, match="Connection refused"):
        gone.result()
    # The connection works again.
    proxy = CuttingProxy(port_of(shared.endpoint), port)
    assert snapshot_of(b, "b").status is None
    assert not b.beat("b", 1, PATIENCE)
    assert b.submit(join("b, again"), PATIENCE).status == Placed("b, again", "forming")
    proxy.stop()


def test_a_node_that_timed_out_learns_which_nodes_are_missing(
    shared: ServerProcess, drive: Meet
) -> None:
    a = drive(shared.endpoint)
    a.submit(join("a"), PATIENCE)
    text, departed = a.explain_timeout("a", 600)
    assert "1 of at least 2 nodes: a" in text
    assert departed == ()
    a.interrupt()
    text, departed = a.explain_timeout("a", 600)
    assert "this host waited 600 s for other nodes, and cannot name them" in text
    assert departed == ()


# --- without a server


def test_a_server_that_is_gone_is_reported_at_once(own: ServerProcess, drive: Meet) -> None:
    a, b = seated(drive, own.endpoint)
    waiting = Background(a.follow, "a", snapshot_of(a, "a"), 10 * PATIENCE)
    own.close()
    with pytest.raises(RendezvousConnectionError, match="Connection refused"):
        waiting.result()
    with pytest.raises(RendezvousConnectionError, match=own.endpoint):
        b.beat("b", 1, 10 * PATIENCE)


def test_a_server_that_was_started_again_does_not_know_the_job(
    own: ServerProcess, drive: Meet
) -> None:
    a, _ = seated(drive, own.endpoint)
    own.close()
    port = int(own.endpoint.rpartition(":")[2])
    with start_server(port=port, token=TOKEN, services=SERVICES):
        for call in (
            lambda: a.beat("a", 1, PATIENCE),
            lambda: a.follow("a", None, PATIENCE),
            lambda: a.submit(EndConfirmed("a", 1), PATIENCE),
        ):
            with pytest.raises(RendezvousConnectionError, match="does not know the job"):
                call()


def test_the_search_for_the_next_server_passes_over_that_of_another_job(
    own: ServerProcess,
) -> None:
    with start_server(token=make_token(), services=SERVICES) as foreign, ExitStack() as made:
        listed = [("127.0.0.1", port_of(server.endpoint)) for server in (own, foreign)]
        driver = ServerDriver(Where(own.endpoint, TOKEN), settings(), PATIENCE, listed=listed)
        made.callback(driver.close, linger=False)
        own.close()
        with pytest.raises(RendezvousConnectionError):
            driver.find(1.0)
        searching = Background(driver.find, PATIENCE)
        with start_server(port=port_of(own.endpoint), token=TOKEN, services=SERVICES) as again:
            begin(made, again.endpoint)
            searching.result()


def begin(made: ExitStack, endpoint: str) -> ServerDriver:
    """Let node a join the job at a server."""
    driver = ServerDriver(Where(endpoint, TOKEN), settings(), PATIENCE)
    made.callback(driver.close, linger=False)
    driver.submit(join("a"), PATIENCE)
    return driver


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_refused_connection_ends_a_session_if_another_host_may_have_taken_over(
    shared: ServerProcess, hosts: int
) -> None:
    ends: list[Callable[[], bool]] = []

    def spy(endpoint: str, *, refusal_ends: Callable[[], bool], **options: Any) -> StoreClient:
        ends.append(refusal_ends)
        return connect(endpoint, **options)

    listed = [("127.0.0.1", port_of(shared.endpoint)), ("10.0.0.1", 1)][:hosts]
    where = Where(shared.endpoint, TOKEN)
    driver = ServerDriver(
        where, settings(), PATIENCE, listed=listed if hosts > 1 else (), connect=spy
    )
    driver.close(linger=False)
    assert [end() for end in ends] == [hosts > 1]


@pytest.mark.parametrize("token", [make_token(), TOKEN], ids=["its own token", "the same token"])
def test_a_newcomer_passes_over_the_server_of_another_job(own: ServerProcess, token: bytes) -> None:
    with start_server(token=token, services=SERVICES) as foreign, ExitStack() as made:
        a = begin(made, own.endpoint)
        listed = [("127.0.0.1", port_of(server.endpoint)) for server in (foreign, own)]
        b = ServerDriver(Where(foreign.endpoint, TOKEN), settings(), PATIENCE, listed=listed)
        made.callback(b.close, linger=False)
        b.find(PATIENCE)
        b.submit(join("b"), PATIENCE)
        forming = Snapshot(0, Placed("a", "forming"), 0, None)
        assert isinstance(snapshot_of(a, "a", forming).status, Seated)


def test_a_refusal_is_reported_if_no_other_listed_server_is_there(own: ServerProcess) -> None:
    with start_server(token=make_token(), services=SERVICES) as foreign:
        listed = [("127.0.0.1", port_of(server.endpoint)) for server in (foreign, own)]
        own.close()
        refused = f"{foreign.endpoint}: the server refused"
        with pytest.raises(RendezvousConnectionError, match=refused):
            ServerDriver(Where(foreign.endpoint, TOKEN), settings(), 1.0, listed=listed)


def test_a_newcomer_that_all_listed_servers_refuse_has_the_wrong_token(own: ServerProcess) -> None:
    with start_server(token=TOKEN, services=SERVICES) as other:
        listed = [("127.0.0.1", port_of(server.endpoint)) for server in (own, other)]
        where = Where(own.endpoint, make_token())
        with pytest.raises(RendezvousError, match="refused the token") as refused:
            ServerDriver(where, settings(), PATIENCE, listed=listed)
        assert type(refused.value) is RendezvousError


def test_the_search_for_the_next_server_passes_over_a_host_with_an_impossible_name(
    own: ServerProcess,
) -> None:
    listed = [("127.0.0.1", port_of(own.endpoint)), ("node..cluster", 29400)]
    with ExitStack() as made:
        driver = ServerDriver(Where(own.endpoint, TOKEN), settings(), PATIENCE, listed=listed)
        made.callback(driver.close, linger=False)
        own.close()
        with pytest.raises(RendezvousConnectionError):
            driver.find(1.0)


def test_a_silent_server_is_waited_for(own: ServerProcess, drive: Meet) -> None:
    a, _ = seated(drive, own.endpoint)
    os.kill(own.pid, signal.SIGSTOP)
    with pytest.raises(RendezvousConnectionError, match="no answer from the store"):
        a.beat("a", 1, 0.1)
    slow = Background(a.beat, "a", 1, PATIENCE)
    os.kill(own.pid, signal.SIGCONT)
    assert slow.result()
    assert isinstance(snapshot_of(a, "a").status, Seated)


def test_a_missing_server_is_an_error_with_its_endpoint() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RendezvousConnectionError, match=rf"{endpoint}.*tried for 0\.05 s"):
            ServerDriver(Where(endpoint, TOKEN), settings(), 0.05)


def test_a_node_without_the_right_token_is_refused(shared: ServerProcess) -> None:
    where = Where(shared.endpoint, make_token())
    with pytest.raises(RendezvousError, match="refused the token"):
        ServerDriver(where, settings(), PATIENCE)


def test_a_store_that_runs_no_rounds_is_not_understood(drive: Meet) -> None:
    with start_server(token=TOKEN) as plain:
        driver = drive(plain.endpoint)
        with pytest.raises(RendezvousStateError, match="no service 'rendezvous'; it has: none"):
            driver.beat("a", 0, PATIENCE)


def test_a_job_of_other_sizes_is_refused_with_both(
    pair: tuple[ServerDriver, ServerDriver], shared: ServerProcess, drive: Meet
) -> None:
    other = drive(shared.endpoint, 1, 4)
    with pytest.raises(RendezvousError, match=r"nodes 2:2, and this node has 1:4"):
        other.submit(join("c"), PATIENCE)


def test_a_server_of_another_release_is_not_understood(
    pair: tuple[ServerDriver, ServerDriver],
) -> None:
    a, _ = pair
    reply = messages.SnapshotReply(a.life, 1, "Promoted", b"\xc0", 0, None, False)  # type: ignore[arg-type]
    with pytest.raises(RendezvousStateError, match="'Promoted' is not a status"):
        a._snapshot("a", reply)


# --- close


def test_an_interrupt_ends_blocked_calls_and_later_ones(
    pair: tuple[ServerDriver, ServerDriver],
) -> None:
    a, _ = pair
    waiting = Background(a.follow, "a", snapshot_of(a, "a"), PATIENCE)
    a.interrupt()
    a.interrupt()
    for call in (waiting.result, lambda: a.beat("a", 1, PATIENCE)):
        with pytest.raises(RendezvousGracefulExitError):
            call()


def test_an_interrupt_ends_a_call_that_connects(own: ServerProcess, drive: Meet) -> None:
    a, _ = seated(drive, own.endpoint)
    port = int(own.endpoint.rpartition(":")[2])
    own.close()
    with socket.create_server(("127.0.0.1", port)) as silent:  # accepts connections, never answers
        waiting = Background(a.follow, "a", None, 10 * PATIENCE)
        connection, _ = silent.accept()
        a.interrupt()
        with pytest.raises(RendezvousGracefulExitError):
            waiting.result()
        connection.close()


def test_the_address_of_a_node_is_that_of_its_connection(
    pair: tuple[ServerDriver, ServerDriver], shared: ServerProcess
) -> None:
    assert pair[0].local_addr == "127.0.0.1"
    where = Where(shared.endpoint, TOKEN, addr="known.to.others")
    driver = ServerDriver(where, settings(), PATIENCE)
    assert driver.local_addr == "known.to.others"
    driver.close(linger=False)


# --- the keys of a round


def test_a_wait_ends_with_its_round(pair: tuple[ServerDriver, ServerDriver]) -> None:
    a, _ = pair
    store = a.round_store(1)
    waiting = Background(store.wait, ["never"], PATIENCE)
    store.set("k", "v")  # it is connected
    a.end_round_store()
    a.end_round_store()
    with pytest.raises(StoreClosedError):
        waiting.result()
    with pytest.raises(StoreClosedError):
        store.get("k")
    assert a.beat("a", 1, PATIENCE)
    assert a.round_store(2).check(["nothing"]) is False


def test_a_store_that_was_never_used_can_be_ended(pair: tuple[ServerDriver, ServerDriver]) -> None:
    a, _ = pair
    store = a.round_store(1)
    a.end_round_store()
    with pytest.raises(StoreClosedError):
        store.get("k")


def test_a_new_life_of_a_job_finds_no_keys_of_the_old_one(own: ServerProcess, drive: Meet) -> None:
    a, _ = seated(drive, own.endpoint)
    a.round_store(1).set("k", "old")
    with connect(own.endpoint, token=TOKEN) as client:
        assert client.get(f"rounds/{a.life}/k") == b"old"
    assert len(a.life) == 12


def test_the_farewell_of_nodes_of_an_earlier_server_does_not_close_the_new_job(
    drive: Meet,
) -> None:
    with PortReservation("127.0.0.1") as port:
        with start_server("127.0.0.1", port.port, token=TOKEN, services=SERVICES) as server:
            a, b = seated(drive, server.endpoint)
        with start_server("127.0.0.1", port.port, token=TOKEN, services=SERVICES) as server:
            for old, id in ((a, "a"), (b, "b")):  # the first runs before any node joins
                with pytest.raises(RendezvousConnectionError, match="does not know the job"):
                    old.submit(CloseRendezvous(id), PATIENCE)
                new = drive(server.endpoint)
                assert new.submit(join(f"new {id}"), PATIENCE).closed is False
            assert isinstance(new.peek("new b").status, Seated)
