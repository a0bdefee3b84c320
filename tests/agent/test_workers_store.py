"""The store that agents provide for the workers of an attempt."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.certificates import self_signed
from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE, wait_until
from regrow.agent import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent.attempt.workers_store import Activation, WorkersStore
from regrow.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from regrow.rendezvous.foreign import adapted
from regrow.rendezvous.server.credentials import INSECURE_TOKEN, Credentials
from regrow.store import (
    STORE_ENV,
    STORE_TLS_ENV,
    STORE_TOKEN_ENV,
    MemoryStore,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    Tls,
    make_token,
    worker_store,
)

ADDR = "127.0.0.1"
TOKEN = make_token()


def provider_of(handler: Any, *, leaving: bool = False) -> WorkersStore:
    """Return the agent's part of the workers' store, in a job with this rendezvous."""
    return WorkersStore(cast(Any, SimpleNamespace(handler=handler, leaving=leaving)))


# --- the job's token


def test_workers_do_not_get_the_token_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    found = {
        name: provider_of(adapted(PlainHandler())).environment(1, ADDR, {name: value})
        for name, value in {
            "REGROW_TOKEN": TOKEN.decode(),
            "REGROW_TOKEN_FILE": str(path),
            "PET_RDZV_TOKEN_FILE": str(path),
        }.items()
    }
    for name, environ in found.items():
        assert name == "REGROW_TOKEN" or environ[name] == ""
        assert TOKEN.decode() not in environ.values()
    # The same for the workers of all nodes, from any source of the job's token.
    (own,) = {environ["REGROW_TOKEN"] for environ in found.values()}
    assert len(own) >= 32
    other = provider_of(adapted(PlainHandler())).environment(1, ADDR, {"REGROW_TOKEN": "x" * 40})
    assert other["REGROW_TOKEN"] != own


def test_workers_do_not_get_the_credentials_of_etcd() -> None:
    outer = {
        "REGROW_ETCD_USER": "job",
        "REGROW_ETCD_PASSWORD": "secret",
        "REGROW_ETCD_PASSWORD_FILE": "/etcd.password",
    }
    blank = dict.fromkeys(outer, "")
    provider = provider_of(adapted(PlainHandler()))
    assert provider.environment(1, ADDR, outer) == blank
    for conf in ("token_file=/job.token", "read_timeout=5, password=secret", "user=job"):
        given = {"PET_RDZV_CONF": conf}
        assert provider.environment(1, ADDR, given) == {"PET_RDZV_CONF": ""}
    assert provider.environment(1, ADDR, {"PET_RDZV_CONF": "last_call_timeout=5"}) == {}


def test_workers_do_not_get_a_token_file_that_cannot_be_read(tmp_path: Path) -> None:
    outer = {"REGROW_TOKEN_FILE": str(tmp_path / "none")}
    assert provider_of(adapted(PlainHandler())).environment(1, ADDR, outer) == {
        "REGROW_TOKEN_FILE": ""
    }


# --- a server that starts with the first connection


class Server:
    """Replaces the process of a server."""

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
    """An activation on a port of its own, and the servers that it has started."""

    def __init__(self, *errors: Exception) -> None:
        self.started: list[Server] = []
        self._connected = threading.Semaphore(0)
        self._errors = list(errors)
        self._guests: list[socket.socket] = []
        listener = socket.create_server((ADDR, 0))
        self.address = listener.getsockname()
        self.activation = Activation(listener, self._start)

    def _start(self, listener: socket.socket) -> Any:
        if self._errors:
            raise self._errors.pop()
        listener.accept()[0].close()  # otherwise the connection would start another server
        self.started.append(Server())
        self._connected.release()
        return self.started[-1]

    def connect(self) -> Server:
        """Connect; return the server that the connection starts."""
        self._guests.append(socket.create_connection(self.address, PATIENCE))
        assert self._connected.acquire(timeout=PATIENCE)
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
    except (ConnectionRefusedError, ConnectionResetError):  # it is closed, or was just closed
        return False
    return True


def test_no_server_starts_without_a_connection() -> None:
    bench = Bench()
    bench.close()
    assert bench.started == []


def test_the_server_starts_with_the_first_connection_and_ends_with_the_attempt() -> None:
    bench = Bench()
    server = bench.connect()
    socket.create_connection(bench.address, PATIENCE).close()  # the server accepts it
    bench.close()
    assert server.closed.is_set()
    assert bench.started == [server]


def test_another_server_starts_with_the_next_connection_after_one_died(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    first = bench.connect()
    os.eventfd_write(first.end, 1)
    assert first.closed.wait(PATIENCE)
    assert len(bench.started) == 1
    assert bench.connect() is not first
    bench.close()
    assert "the workers' store (pid 4711) has ended, and its keys are lost" in caplog.text


def test_a_server_that_is_killed_at_its_start_starts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(*[StoreConnectionError("the store server ended before it served")] * 2)
    bench.connect()
    bench.close()
    assert caplog.text.count("starts again: the store server ended before it served") == 2


def test_a_server_that_cannot_start_is_logged_and_its_socket_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(*[StoreConnectionError("msgspec is not installed")] * 3)
    with suppress(ConnectionError):
        socket.create_connection(bench.address, PATIENCE).close()
    wait_until(lambda: not listens(bench.address), "the socket is closed")
    bench.close()
    assert "no worker can use the workers' store: msgspec is not installed" in caplog.text
    bench.activation.after_fork()  # as a child does that is forked after that


# --- offers between agents, and variables of workers


class Handler:
    """A rendezvous with the members that the workers' store uses."""

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
        self.nodes = [provider_of(Handler(of)) for of in (first, second)]
        for node, provider in enumerate(self.nodes):
            provider.open(self.keys, node, 2, addr)
        self.nodes[1].look_up(self.keys, 1, surely=True)
        self.environments = [provider.environment(2, addr, {}) for provider in self.nodes]
        self.published = self.keys.get("regrow/workers_store/1").decode()

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


def test_all_nodes_derive_the_same_token_and_do_not_publish_it(
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
        assert token not in round.published
        assert TOKEN.decode() not in round.published + token
        seen.add(token)
    assert len(seen) == 2


@pytest.mark.parametrize("credentials", [None, Credentials(INSECURE_TOKEN, None)])
def test_without_a_secret_of_the_agents_the_token_is_in_the_rounds_store(
    meet: Callable[..., Round], credentials: Credentials | None
) -> None:
    round = meet(credentials, credentials)
    one, other = round.environments
    assert one == other
    assert one[STORE_TOKEN_ENV] in round.published


def test_a_node_that_cannot_serve_publishes_the_reason_and_the_job_continues(
    meet: Callable[..., Round], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(host: str, port: int) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("regrow.store.listen", full)
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


def test_the_offer_of_an_agent_of_another_kind_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = provider_of(Handler(None))
    provider.open(MemoryStore(), 1, 2, ADDR)
    provider.look_up(MemoryStore(), 1, surely=True)
    assert provider.environment(2, ADDR, {}) == {}
    assert "the agent of node rank 0 offered none" in caplog.text


def test_no_workers_get_a_store_whose_offer_cannot_be_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Poor(MemoryStore):
        def multi_set(self, *args: Any, **options: Any) -> None:
            raise RuntimeError("multiSet not implemented")

    provider = provider_of(Handler(None))
    provider.open(Poor(), 0, 2, ADDR)
    assert provider.environment(2, ADDR, {}) == {}
    provider.close()
    assert "(REGROW_STORE): multiSet not implemented" in caplog.text


def test_the_end_of_the_round_is_raised_and_not_logged() -> None:
    keys = MemoryStore()
    session = keys.session()
    session.close()
    provider = provider_of(Handler(None))
    with pytest.raises(StoreClosedError):
        provider.open(session, 0, 2, ADDR)
    with pytest.raises(StoreClosedError):
        provider.look_up(session, 1, surely=True)
    provider.close()


def test_workers_do_not_inherit_the_store_of_an_outer_job() -> None:
    provider = provider_of(Handler(None))
    provider.open(MemoryStore(), 1, 2, ADDR)
    outer = {STORE_ENV: "unix:/another", STORE_TOKEN_ENV: "of another", "HOME": "/"}
    assert provider.environment(2, ADDR, outer) == {STORE_ENV: "", STORE_TOKEN_ENV: ""}


def test_one_node_opens_no_port_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    provider = provider_of(Handler(None))
    for _ in range(2):  # the second attempt takes the first one's away
        provider.open(MemoryStore(), 0, 1, None)
        found = provider.environment(1, ADDR, {})
        (directory,) = tmp_path.iterdir()
        assert found[STORE_ENV] == f"unix:{directory}/store"
        assert directory.stat().st_mode & 0o777 == 0o700
    provider.close()
    assert list(tmp_path.iterdir()) == []
    leaving = provider_of(Handler(None), leaving=True)
    with pytest.raises(RendezvousGracefulExitError):  # an attempt that began as the agent ended
        leaving.open(MemoryStore(), 0, 1, None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_whose_name_is_too_long_for_a_socket_costs_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    provider = provider_of(Handler(None))
    provider.open(MemoryStore(), 0, 1, None)
    assert provider.environment(1, ADDR, {})[STORE_ENV].startswith("127.0.0.1:")
    provider.close()
    assert list(long.iterdir()) == []


def test_a_directory_that_cannot_be_written_costs_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc")
    provider = provider_of(Handler(None))
    provider.open(MemoryStore(), 0, 1, None)
    assert provider.environment(1, ADDR, {})[STORE_ENV].startswith("127.0.0.1:")
    provider.close()


# --- certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Make self-signed certificates: `certificates("IP:127.0.0.1")`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")

    def make(names: str) -> Tls:
        return self_signed(tmp_path_factory.mktemp("tls"), names)

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
    assert (shown["cafile"], shown["digest"]) == (tls.cafile, tls.certificate_digest())
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    with worker_store(timeout=PATIENCE) as client:
        client.set("k", "v")
    monkeypatch.delenv(STORE_TLS_ENV)
    with pytest.raises(StoreError, match=r"not a regrow store|does not speak"):
        worker_store(timeout=0.3)  # the server answers no client without TLS


def test_a_certificate_that_no_server_can_have_is_not_offered(
    meet: Callable[..., Round],
    certificates: Callable[[str], Tls],
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, foreign = certificates("DNS:node0"), certificates("DNS:ca")
    mismatched = Credentials(TOKEN, Tls(own.certfile, foreign.keyfile, own.cafile))
    missing = Credentials(TOKEN, Tls(cafile=own.cafile))
    for credentials, why in ((mismatched, "key values mismatch"), (missing, "give every")):
        caplog.clear()
        assert meet(credentials, credentials).environments == [{}, {}]
        assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
        assert caplog.text.lower().count(why) == 2


# --- agents as users write them


class Agent(SimpleElasticAgent):
    """Records the environments that its workers would get, and succeeds."""

    def __init__(
        self, store: MemoryStore, rank: int, nodes: int, exit_barrier_timeout: float = 300
    ) -> None:
        self.found: dict[str, str] = {}
        handler = PlainHandler(round=(store, rank, nodes))  # the reference's bare triple
        super().__init__(
            WorkerSpec("r", 1, handler, entrypoint="train", local_addr=ADDR, monitor_interval=0.01),
            exit_barrier_timeout,
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
    """Computes its ranks without an exchange, so the offer of node rank 0 may be later."""

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


def test_an_agent_closes_the_workers_store_when_it_ends() -> None:
    before = set(threading.enumerate())
    agent = Agent(MemoryStore(), 0, 1)
    agent.run()
    path = agent.found[STORE_ENV].removeprefix("unix:")
    assert not os.path.exists(path)
    assert "regrow-workers-store" not in {t.name for t in set(threading.enumerate()) - before}


def test_the_address_of_the_workers_store_is_that_of_worker_rank_0() -> None:
    agent = Agent(MemoryStore(), 0, 2, exit_barrier_timeout=0.01)
    store = agent.get_worker_group().spec.rdzv_handler.round[0]  # type: ignore[attr-defined]
    store.set("torchelastic/role_info/1", b'{"role": "r", "rank": 1, "local_world_size": 1}')
    info = RendezvousInfo(store, 0, 2, RendezvousStoreInfo("127.0.0.1", 1), 1, 0)
    handler = agent.get_worker_group().spec.rdzv_handler
    handler.next_rendezvous = lambda: info  # type: ignore[method-assign]
    agent.run()
    assert agent.found[STORE_ENV].startswith("127.0.0.1:")
