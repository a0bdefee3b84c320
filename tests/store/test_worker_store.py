"""The store that a job's workers share without an agent, and its parts."""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.processes import wait_until
from helpers.stores.services import Notebook
from helpers.stores.storing import PATIENCE, Background, ServerThread
from regrow.heartbeat import StoreExchange
from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.merge import Beat, Broken, Outcome
from regrow.store import (
    STORE_ENV,
    STORE_PORT_ENV,
    STORE_TOKEN_ENV,
    Limits,
    StoreAuthError,
    StoreClient,
    StoreError,
    StoreServiceError,
    connect,
    make_token,
    start_server,
    worker_store,
)
from regrow.store.protocol import sockets, wire
from regrow.store.server.machine import Machine
from regrow.store.server.services import Switchboard
from regrow.store.workers import (
    LAUNCHED_SIZE_ENV,
    STORE_TLS_ENV,
    StoreAddress,
    find,
    worker_tls,
)
from regrow.utils import PortReservation

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REGROW_TOKEN")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


# --- its address


def test_the_workers_meet_beside_the_master_port_of_rank_0() -> None:
    assert find(TORCHRUN) == StoreAddress("node0", 29501, False, "it is MASTER_PORT + 1")
    assert find(TORCHRUN | {"RANK": "0"}).serves
    assert find(TORCHRUN | {STORE_PORT_ENV: "1234"}).port == 1234
    assert find(TORCHRUN, rank=0, host="::1", port=7)[:3] == ("::1", 7, True)
    assert find({}, rank=2, host="node9", port=7)[:3] == ("node9", 7, False)


def test_workers_on_one_host_meet_on_its_loopback_address() -> None:
    assert find(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).host == "127.0.0.1"
    assert find(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).host == "node0"
    assert find(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, host="node1").host == "node1"


def test_workers_of_two_hosts_do_not_meet_on_loopback_after_a_wrapper_has_lost_ranks() -> None:
    two_of_four = TORCHRUN | {"WORLD_SIZE": "2", LAUNCHED_SIZE_ENV: "4"}
    assert find(two_of_four | {"LOCAL_WORLD_SIZE": "2"}).host == "node0"
    assert find(two_of_four | {"LOCAL_WORLD_SIZE": "4"}).host == "127.0.0.1"
    eight = two_of_four | {"WORLD_SIZE": "8"}  # another launcher has started since
    assert find(eight | {"LOCAL_WORLD_SIZE": "4"}).host == "node0"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": ""}, f"neither {STORE_ENV} nor RANK is set; .* torchrun.*, or give rank="),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number of at least 0"),
        ({"RANK": "4"}, "no worker has rank 4 in a world of 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number of at least 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is set; .* give host="),
        ({"MASTER_PORT": ""}, "MASTER_PORT is set; .* give port="),
        ({"MASTER_PORT": "65535"}, r"port 65536 \(it is MASTER_PORT \+ 1\): set REGROW_STORE_PORT"),
        ({STORE_PORT_ENV: "x"}, f"{STORE_PORT_ENV}='x' is not a whole number of at least 1"),
    ],
)
def test_the_error_names_the_missing_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(TORCHRUN | environ)


def test_certificates_are_named_by_an_object_of_json() -> None:
    assert worker_tls({}) is None
    assert worker_tls({STORE_TLS_ENV: ""}) is None
    tls = worker_tls({STORE_TLS_ENV: '{"cafile": "ca.pem", "server_hostname": "node0"}'})
    assert tls is not None
    assert (tls.cafile, tls.server_hostname, tls.certfile) == ("ca.pem", "node0", None)
    for wrong in ("ca.pem", '{"ca": "ca.pem"}', "[]"):
        with pytest.raises(
            ValueError, match=f"{STORE_TLS_ENV}=.* is not a JSON object of certfile"
        ):
            worker_tls({STORE_TLS_ENV: wrong})


# --- workers of one host under another launcher


@pytest.fixture
def port() -> Iterator[int]:
    """A port of 127.0.0.1 that no other test gets."""
    with PortReservation("127.0.0.1") as reservation:
        yield reservation.port


@pytest.fixture
def worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> Iterator[Callable[..., StoreClient]]:
    """Return a function that connects as a worker, `worker(rank)`, in torchrun's environment."""
    for name in (*VARIABLES, STORE_ENV, STORE_TOKEN_ENV, STORE_TLS_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(STORE_PORT_ENV, str(port))
    made: list[StoreClient] = []

    def be(rank: int, **how: object) -> StoreClient:
        how = {"timeout": PATIENCE} | how
        made.append(worker_store(rank=rank, **how))  # type: ignore[arg-type]
        return made[-1]

    yield be
    for client in made:
        client.close()


FIRST = """
import signal
from regrow.heartbeat import StoreExchange
from regrow.heartbeat.merge import Beat
from regrow.store import worker_store
store = worker_store(rank=0)
store.set("from", "rank 0")
print("serving", flush=True)
StoreExchange(store, rank=0, world_size=2, name="lives").beat(Beat(0, 1, 1, False), 30)
signal.pause()
"""


def test_rank_0_serves_and_the_others_learn_of_its_death(
    worker: Callable[..., StoreClient],
) -> None:
    early = Background(worker, 1)  # it waits for rank 0
    with subprocess.Popen([sys.executable, "-c", FIRST], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"serving\n"
        other = early.result()
        assert other.get("from") == b"rank 0"
        exchange = StoreExchange(other, rank=1, world_size=2, name="lives")
        exchange.beat(Beat(1, 0, 2, False), PATIENCE)
        ends: queue.Queue[Outcome] = queue.Queue()
        exchange.listen(ends.put)
        first.kill()
        end = ends.get(timeout=PATIENCE)
        assert isinstance(end, Broken)
        assert (end.kind, end.ranks) == ("lost", Ranks.of([0]))
    again = worker(0)  # there is a server, so another rank 0 starts none
    assert again.get("from") == b"rank 0"
    with pytest.raises(StoreServiceError, match="'nonesuch'; it has: heartbeat, inprocess"):
        again.ask("nonesuch", b"", PATIENCE)
    with pytest.raises(StoreAuthError, match=f"refused the token.* set {STORE_PORT_ENV} to a free"):
        worker(2, token=make_token())


def stranger(port: int, hangs_up: bool) -> socket.socket:
    """Start a program that is no store: it stays silent, or hangs up at the first message."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1)

    if hangs_up:
        threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hangs_up", [True, False])
def test_another_program_on_the_port_is_an_error_with_advice(
    worker: Callable[..., StoreClient], port: int, rank: int, hangs_up: bool
) -> None:
    listener = stranger(port, hangs_up)
    what = "closed the connection at the first message" if hangs_up else "did not answer"
    with pytest.raises(StoreError, match=f"{what}.*TCPStore.*{port}.*set {STORE_PORT_ENV} to a"):
        worker(rank, timeout=0.3)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_rank_0_waits_for_a_port_that_is_about_to_be_free(
    worker: Callable[..., StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()
    listen = sockets.listen

    def noted(host: str, port: int) -> socket.socket:
        try:
            return listen(host, port)
        finally:
            tried.set()

    monkeypatch.setattr(sockets, "listen", noted)
    with socket.socket() as ending:  # it no longer listens, but has not ended
        ending.bind(("127.0.0.1", 0))
        monkeypatch.setenv(STORE_PORT_ENV, str(ending.getsockname()[1]))
        coming = Background(worker, 0)
        assert tried.wait(PATIENCE)
        assert coming.running()
    coming.result().set("k", "v")


def test_a_port_that_is_held_without_a_listener_is_a_clear_error(
    worker: Callable[..., StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as far, socket.socket() as near:
        near.connect(far.getsockname())
        port = near.getsockname()[1]
        monkeypatch.setenv(STORE_PORT_ENV, str(port))
        why = rf"cannot listen on port {port} for 127\.0\.0\.1: it is in use, and no program"
        with pytest.raises(StoreError, match=f"{why}.*set {STORE_PORT_ENV} to a free"):
            worker(0, timeout=0.2)


def test_a_token_is_needed_where_others_can_reach_the_port(
    worker: Callable[..., StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.9.8.7")
    with pytest.raises(StoreAuthError, match=r"at 10\.9\.8\.7\. Make one, once: regrow token"):
        worker(1)


def test_the_agents_store_is_used_unless_host_or_port_is_given(
    worker: Callable[..., StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = make_token()
    server = ServerThread(token=token)
    monkeypatch.setenv(STORE_ENV, server.endpoint)
    monkeypatch.setenv(STORE_TOKEN_ENV, token.decode())
    monkeypatch.delenv("MASTER_ADDR")
    worker(5).set("k", "v")
    with pytest.raises(ValueError, match="MASTER_ADDR is set"):
        worker(5, port=server.port)
    worker(5, host="127.0.0.1", port=server.port, token=token).close()
    server.stop()


# --- its parts


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_the_start_time_of_a_server_does_not_lengthen_a_workers_grace(
    family: socket.AddressFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = make_token()
    with socket.socket(family) as listener:
        listener.bind(str(tmp_path / "store") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv(STORE_ENV, sockets.endpoint_of_socket(listener))
        monkeypatch.setenv(STORE_TOKEN_ENV, token.decode())
        waiting = Background(worker_store, timeout=PATIENCE)
        select.select([listener], [], [], PATIENCE)
        with start_server(listener=listener, token=token):
            client = waiting.result()
            # The server alone takes longer to start than six round trips of this host.
            assert 0.05 <= client.session_grace < 0.1
            client.close()


def test_a_server_that_a_worker_starts_gets_no_variables_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGROW_HEARTBEAT", "1")
    monkeypatch.setenv("NOTED", "yes")
    with start_server(token=make_token()) as server:
        environ = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    assert b"NOTED=yes" in environ
    assert b"REGROW_HEARTBEAT=1" not in environ


def test_a_server_takes_over_a_socket_and_all_its_connections(tmp_path: Path) -> None:
    path, token = str(tmp_path / "store"), make_token()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        waiting = Background(connect, f"unix:{path}", token=token, timeout=PATIENCE)
        services = {"book": "nonesuch:create"}
        with start_server(listener=listener, token=token, on_demand=services) as server:
            assert server.endpoint == f"unix:{path}"
            with waiting.result() as client, pytest.raises(StoreServiceError, match="No module"):
                client.ask("book", b"", PATIENCE)
    assert os.path.exists(path)  # only its owner removes it


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("localhost", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("node0", {"::", "0.0.0.0"}),
        ("", {"::", "0.0.0.0"}),
        ("203.0.113.7", {"::", "0.0.0.0"}),  # an address for documentation, of no host
    ],
)
def test_it_listens_as_narrowly_as_the_address_allows(host: str, bound: set[str]) -> None:
    with sockets.listen(host, 0) as listener:
        assert listener.getsockname()[0] in bound
        with pytest.raises(OSError, match="in use"):
            sockets.listen(host, listener.getsockname()[1])
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), PATIENCE).close()


def test_the_servers_kernel_probes_the_hosts_of_its_clients(
    serve: Callable[..., ServerThread],
) -> None:
    server = serve()
    with server.connect():
        wait_until(lambda: server.sessions() == 1, "one session")
        (session,) = server.server.machine.sessions.values()
        assert session.link is not None
        sock = session.link.transport.get_extra_info("socket")
        of_tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp] == [5, 2, 3]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 11_000


class Lazy:
    """A machine that loads its services on demand."""

    def __init__(self, **services: str) -> None:
        self.log: list[str] = []
        self.board = Switchboard({}, Limits(), lambda: 0.0, self.log.append, services)
        self.machine = Machine(lambda: os.urandom(16), Limits(), self.board)
        self.session, _ = self.machine.open(wire.Hello(b"", 5.0, "test"))

    def deadline(self) -> float | None:
        return self.board.deadline

    def ask(self, service: str, id: int, text: str) -> list[object]:
        answers = self.machine.handle(self.session, wire.Ask(id, service, text.encode()))
        return [message for _, message in answers]


def test_the_first_question_loads_a_service_on_demand_and_it_receives_all_events() -> None:
    lazy = Lazy(book="helpers.stores.services:Notebook", other="helpers.stores.services:Notebook")
    assert lazy.deadline() is None
    assert lazy.ask("book", 1, "echo:x") == [wire.Done(1, b"echo:x")]
    lazy.ask("book", 2, "park:a")
    lazy.machine.handle(lazy.session, wire.Cancel(2))
    lazy.ask("book", 3, "alarm:5")
    assert lazy.deadline() == 5.0
    lazy.board.due(5.0)
    lazy.machine.suspend(lazy.session)
    lazy.machine.resume(lazy.session)
    lazy.machine.end(lazy.session, "it ended")
    [(name, book)] = lazy.board.services.items()
    assert name == "book"
    assert isinstance(book, Notebook)
    calls = ["echo:x", "park:a", "cancelled", "alarm:5", "due", "suspended", "resumed"]
    assert book.calls == [*calls, "ended: it ended"]


@pytest.mark.parametrize("module", ["is_missing", "is_broken"])
def test_a_service_that_cannot_be_loaded_refuses_only_its_own_questions(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    (tmp_path / "is_broken.py").write_text(
        f"with open({str(count)!r}, 'a') as count:\n    count.write('x')\n1 / 0"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lazy = Lazy(bad=f"{module}:create", book="helpers.stores.services:Notebook")
    for id in (1, 2):
        (refused,) = lazy.ask("bad", id, "anything")
        assert isinstance(refused, wire.Failed)
        assert f"the service '{module}:create' cannot be loaded: " in refused.message
    assert not count.exists() or count.read_text() == "x"  # not tried again
    assert lazy.ask("book", 3, "echo:x") == [wire.Done(3, b"echo:x")]
    lazy.machine.suspend(lazy.session)
    lazy.machine.resume(lazy.session)
    lazy.machine.end(lazy.session)
    assert lazy.log == []
