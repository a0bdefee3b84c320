"""The store that agents provide for the workers of an attempt."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from plain_handler import PlainHandler
from processes import PATIENCE, wait_until

from regrow.agent import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent._activation import Activation
from regrow.agent._workers_store import WorkersStore
from regrow.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from regrow.rendezvous._credentials import INSECURE_TOKEN, Credentials
from regrow.store import (
    STORE_ENV,
    STORE_TOKEN_ENV,
    MemoryStore,
    StoreClosedError,
    StoreConnectionError,
    Tls,
    make_token,
    worker_store,
)
from regrow.store._worker import STORE_TLS_ENV

ADDR = "127.0.0.1"
TOKEN = make_token()


# --- a server that is started when somebody comes


class Server:
    """Stands for the process of a server."""

    pid = 4711

    def __init__(self) -> None:
        self.end = os.eventfd(0, os.EFD_CLOEXEC)
        self.closed = threading.Event()

    def fileno(self) -> int:
        return self.end

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.end)
        self.closed.set()


class Bench:
    """An activation on a port of its own, and what it has started."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started: list[Server] = []
        self._came = threading.Semaphore(0)
        self._error = error
        self._guests: list[socket.socket] = []
        listener = socket.create_server((ADDR, 0))
        self.address = listener.getsockname()
        self.activation = Activation(listener, self._start)

    def _start(self, listener: socket.socket) -> Any:
        if self._error is not None:
            raise self._error
        listener.accept()[0].close()  # or it would still be somebody who comes
        self.started.append(Server())
        self._came.release()
        return self.started[-1]

    def come(self) -> Server:
        """Connect; return the server that is started for it."""
        self._guests.append(socket.create_connection(self.address, PATIENCE))
        assert self._came.acquire(timeout=PATIENCE)
        return self.started[-1]

    def close(self) -> None:
        self.activation.close()
        self.activation.join(PATIENCE)
        for guest in self._guests:
            guest.close()
        assert not listens(self.address)


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, PATIENCE).close()
    except (ConnectionRefusedError, ConnectionResetError):  # it is closed, or this very moment was
        return False
    return True


def test_a_server_that_nobody_connects_to_is_not_started() -> None:
    bench = Bench()
    bench.close()
    assert bench.started == []


def test_the_server_starts_with_the_first_connection_and_ends_with_the_attempt() -> None:
    bench = Bench()
    server = bench.come()
    socket.create_connection(bench.address, PATIENCE).close()  # it is the server's now
    bench.close()
    assert server.closed.is_set()
    assert bench.started == [server]


def test_a_server_that_died_is_followed_by_another_when_somebody_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    first = bench.come()
    os.eventfd_write(first.end, 1)
    assert first.closed.wait(PATIENCE)
    assert len(bench.started) == 1
    assert bench.come() is not first
    bench.close()
    assert "the workers' store (pid 4711) has ended, and what it held is lost" in caplog.text


def test_a_server_that_cannot_start_is_said_and_leaves_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(StoreConnectionError("msgspec is not installed"))
    with suppress(ConnectionError):
        socket.create_connection(bench.address, PATIENCE).close()
    wait_until(lambda: not listens(bench.address), "the socket is given back")
    bench.close()
    assert "no worker can use the workers' store: msgspec is not installed" in caplog.text
    bench.activation.disown()  # as a child does that is forked after that


# --- what the agents tell each other, and their workers


class Handler:
    """As much of a rendezvous as the workers' store asks for."""

    def __init__(self, credentials: Credentials | None) -> None:
        self.credentials = credentials

    def get_run_id(self) -> str:
        return "job"


class Round:
    """Two nodes in a round, and the environments that their workers get."""

    def __init__(
        self, first: Credentials | None, second: Credentials | None = None, addr: str = ADDR
    ) -> None:
        self.keys = MemoryStore()
        self.nodes = [WorkersStore(cast("Any", Handler(of))) for of in (first, second)]
        for node, provider in enumerate(self.nodes):
            provider.open(self.keys, node, 2, addr)
        self.nodes[1].look_up(self.keys, 1, surely=True)
        self.environments = [provider.environment(2, addr, {}) for provider in self.nodes]
        self.told = self.keys.get("regrow/workers_store/1").decode()

    def close(self) -> None:
        for provider in self.nodes:
            provider.close()


@pytest.fixture
def meet() -> Iterator[Callable[..., Round]]:
    """Form rounds: `meet(credentials of the first node, of the second)`."""
    rounds: list[Round] = []

    def form(*how: Any, **more: Any) -> Round:
        rounds.append(Round(*how, **more))
        return rounds[-1]

    yield form
    for each in rounds:
        each.close()


def test_all_nodes_make_the_same_token_of_theirs_and_none_of_it_travels(
    meet: Callable[..., Round],
) -> None:
    shared = Credentials(TOKEN, None)
    seen = set()
    for _ in range(2):
        round = meet(shared, shared)
        one, other = round.environments
        assert one == other
        assert one[STORE_ENV].startswith(f"{ADDR}:")
        token = one[STORE_TOKEN_ENV]
        assert token not in round.told
        assert TOKEN.decode() not in round.told + token
        seen.add(token)
    assert len(seen) == 2


@pytest.mark.parametrize("credentials", [None, Credentials(INSECURE_TOKEN, None)])
def test_where_agents_have_no_secret_the_rounds_store_carries_the_token(
    meet: Callable[..., Round], credentials: Credentials | None
) -> None:
    round = meet(credentials, credentials)
    one, other = round.environments
    assert one == other
    assert one[STORE_TOKEN_ENV] in round.told


def test_a_node_that_cannot_serve_tells_the_others_why_and_no_job_is_lost(
    meet: Callable[..., Round], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(host: str, port: int) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("regrow.store._sockets.listen", full)
    round = meet(None)
    assert round.environments == [{}, {}]
    why = "the workers get no store (REGROW_STORE): node rank 0 cannot serve one: "
    assert [r.getMessage() for r in caplog.records] == [f"{why}[Errno 24] Too many open files"] * 2


def test_a_node_without_the_token_of_the_first_gives_its_workers_no_store(
    meet: Callable[..., Round], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = meet(Credentials(TOKEN, None), None).environments
    assert STORE_ENV in one
    assert other == {}
    assert "node rank 0 has a token or certificates, and this node has none" in caplog.text


def test_an_agent_of_another_kind_offers_nothing_and_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = WorkersStore(cast("RendezvousHandler", Handler(None)))
    provider.open(MemoryStore(), 1, 2, ADDR)
    provider.look_up(MemoryStore(), 1, surely=True)
    assert provider.environment(2, ADDR, {}) == {}
    assert "the agent of node rank 0 has offered none" in caplog.text


def test_what_the_others_cannot_be_told_the_first_nodes_workers_are_not_told_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Poor(MemoryStore):
        def multi_set(self, *args: Any, **options: Any) -> None:
            raise RuntimeError("multiSet not implemented")

    provider = WorkersStore(cast("RendezvousHandler", Handler(None)))
    provider.open(Poor(), 0, 2, ADDR)
    assert provider.environment(2, ADDR, {}) == {}
    provider.close()
    assert "(REGROW_STORE): multiSet not implemented" in caplog.text


def test_a_round_that_is_over_is_not_taken_for_a_store_that_is_missing() -> None:
    keys = MemoryStore()
    session = keys.session()
    session.close()
    provider = WorkersStore(cast("RendezvousHandler", Handler(None)))
    with pytest.raises(StoreClosedError):
        provider.open(session, 0, 2, ADDR)
    with pytest.raises(StoreClosedError):
        provider.look_up(session, 1, surely=True)
    provider.close()


def test_workers_take_nothing_over_from_a_job_in_which_their_agent_is_a_worker() -> None:
    provider = WorkersStore(cast("RendezvousHandler", Handler(None)))
    provider.open(MemoryStore(), 1, 2, ADDR)
    outer = {STORE_ENV: "unix:/another", STORE_TOKEN_ENV: "of another", "HOME": "/"}
    assert provider.environment(2, ADDR, outer) == {STORE_ENV: "", STORE_TOKEN_ENV: ""}


def test_one_node_opens_no_port_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    provider = WorkersStore(cast("RendezvousHandler", Handler(None)))
    for _ in range(2):  # the second attempt takes the first one's away
        provider.open(MemoryStore(), 0, 1, None)
        found = provider.environment(1, ADDR, {})
        (directory,) = tmp_path.iterdir()
        assert found[STORE_ENV] == f"unix:{directory}/store"
        assert directory.stat().st_mode & 0o777 == 0o700
    provider.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RendezvousGracefulExitError):  # an attempt that began as the agent ended
        provider.open(MemoryStore(), 0, 1, None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_whose_name_is_too_long_for_a_socket_costs_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    provider = WorkersStore(cast("RendezvousHandler", Handler(None)))
    provider.open(MemoryStore(), 0, 1, None)
    assert provider.environment(1, ADDR, {})[STORE_ENV].startswith("127.0.0.1:")
    provider.close()
    assert list(long.iterdir()) == []


# --- certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Make self-signed certificates: `certificates("IP:127.0.0.1")`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")

    def make(names: str) -> Tls:
        folder = tmp_path_factory.mktemp("tls")
        key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
        subprocess.run(
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "
            f"{key} -out {cert} -days 2 -subj /CN=node -addext subjectAltName={names}".split(),
            check=True,
            capture_output=True,
        )
        return Tls(cert, key, cert)

    return make


def test_workers_reach_a_server_whose_certificate_is_for_another_name_than_their_address(
    meet: Callable[..., Round],
    certificates: Callable[[str], Tls],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls = certificates("DNS:node0.example,DNS:node0")
    shared = Credentials(TOKEN, tls)
    one, other = meet(shared, shared).environments
    assert one == other
    shown = json.loads(one[STORE_TLS_ENV])
    assert (shown["cafile"], shown["server_hostname"]) == (tls.cafile, "node0.example")
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    with worker_store(timeout=PATIENCE) as client:
        assert client.characteristics.encrypted
        client.set("k", "v")


def test_a_certificate_for_the_address_needs_no_other_name(
    meet: Callable[..., Round], certificates: Callable[[str], Tls]
) -> None:
    shared = Credentials(TOKEN, certificates(f"DNS:node0,IP:{ADDR}"))
    one, _ = meet(shared, shared).environments
    assert json.loads(one[STORE_TLS_ENV])["server_hostname"] is None


def test_a_certificate_that_others_would_refuse_is_not_served_with(
    meet: Callable[..., Round],
    certificates: Callable[[str], Tls],
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, foreign = certificates("DNS:node0"), certificates("DNS:ca")
    refused = Credentials(TOKEN, Tls(own.certfile, own.keyfile, foreign.cafile))
    missing = Credentials(TOKEN, Tls(cafile=own.cafile))
    for credentials, why in ((refused, "would refuse the certificate"), (missing, "give every")):
        caplog.clear()
        assert meet(credentials, credentials).environments == [{}, {}]
        assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
        assert caplog.text.count(why) == 2


# --- agents as users write them


class Agent(SimpleElasticAgent):
    """Notes what its workers would find, and is done."""

    def __init__(self, store: MemoryStore, rank: int, nodes: int) -> None:
        self.found: dict[str, str] = {}
        handler = PlainHandler(round=(store, rank, nodes))  # the reference's bare triple
        super().__init__(
            WorkerSpec("r", 1, handler, entrypoint="train", local_addr=ADDR, monitor_interval=0.01)
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.found = dict(worker_group.store_environment)
        return {0: 1}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        pass

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.SUCCEEDED, {w.global_rank: None for w in worker_group.workers})

    def _shutdown(self, *_: object, **__: object) -> None:
        pass


class SelfRanked(Agent):
    """Waits for nobody to have its ranks, so the offer of the first node may be later."""

    def _assign_worker_ranks(self, store: Any, group_rank: int, *_: object) -> list[Any]:
        from regrow.agent import Worker

        return [Worker(0, group_rank, group_rank, 2, 2)]


@pytest.mark.parametrize("kind", [Agent, SelfRanked])
def test_a_subclass_with_a_plug_ins_bare_triple_finds_the_store_in_its_worker_group(
    kind: type[Agent],
) -> None:
    store = MemoryStore(PATIENCE)
    agents = [kind(store, rank, 2) for rank in range(2)]
    late = threading.Thread(target=agents[1].run)
    late.start()
    agents[0].run()
    late.join(PATIENCE)
    assert not late.is_alive()
    assert agents[0].found == agents[1].found
    assert set(agents[0].found) == {STORE_ENV, STORE_TOKEN_ENV}


def test_an_agent_takes_its_store_down_when_it_ends() -> None:
    before = set(threading.enumerate())
    agent = Agent(MemoryStore(), 0, 1)
    agent.run()
    path = agent.found[STORE_ENV].removeprefix("unix:")
    assert not os.path.exists(path)
    assert "regrow-workers-store" not in {t.name for t in set(threading.enumerate()) - before}


def test_the_address_of_the_workers_store_is_that_of_worker_rank_0() -> None:
    agent = Agent(MemoryStore(), 0, 2)
    store = agent.get_worker_group().spec.rdzv_handler.round[0]  # type: ignore[attr-defined]
    store.set("torchelastic/role_info/1", b'{"role": "r", "rank": 1, "local_world_size": 1}')
    info = RendezvousInfo(store, 0, 2, RendezvousStoreInfo("127.0.0.1", 1), 1, 0)
    handler = agent.get_worker_group().spec.rdzv_handler
    handler.next_rendezvous = lambda: info  # type: ignore[method-assign]
    agent._exit_barrier_timeout = 0.01
    agent.run()
    assert agent.found[STORE_ENV].startswith("127.0.0.1:")
