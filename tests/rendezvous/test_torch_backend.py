"""torch's stores as a backend: promises that only they need."""

from __future__ import annotations

import socket
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from regrow.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend

from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    get_rendezvous_handler,
)
from regrow.rendezvous.server.hosting import OwnAddress, find_own
from regrow.store import MemoryStore
from regrow.utils import PortReservation

SPAN = timedelta(seconds=PATIENCE)


@pytest.fixture
def port() -> Iterator[int]:
    with PortReservation() as reservation:
        yield reservation.port


def handler(endpoint: str, name: str, **config: Any) -> RendezvousHandler:
    return get_rendezvous_handler(
        RendezvousParameters("c10d", endpoint, "job", 2, 2, local_addr=name, **config)
    )


def test_nodes_meet_in_a_tcp_store_that_the_first_one_serves(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [handler(f"127.0.0.1:{port}", name, store_type="tcp") for name in "ab"]
    assert "has no password" in caplog.text
    joins = [Background(node.next_rendezvous) for node in nodes]
    infos = [join.result() for join in joins]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    waiting = Background(infos[0].store.get, "key")
    infos[1].store.set("key", "value")
    assert waiting.result() == b"value"
    for node in reversed(nodes):
        assert node.shutdown()


@pytest.mark.training
def test_the_node_that_serves_the_store_leaves_last(port: int) -> None:
    program = (
        "import sys; from regrow.rendezvous import *;"
        "node = get_rendezvous_handler(RendezvousParameters('c10d', sys.argv[1], 'job', 2, 2,"
        " local_addr='a', store_type='tcp', is_host=True)); print('serves', flush=True);"
        "node.next_rendezvous(); node.set_closed(); print('closed', flush=True); node.shutdown()"
    )
    endpoint = f"127.0.0.1:{port}"
    with subprocess.Popen(
        [sys.executable, "-c", program, endpoint], stdout=subprocess.PIPE
    ) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"serves\n"
        node = handler(endpoint, "b", store_type="tcp", is_host=False)
        Background(node.next_rendezvous).result()
        assert serving.stdout.readline() == b"closed\n"
        wait_until(node.is_closed, "the close arrives")
        assert serving.poll() is None
        assert node.shutdown()
        assert serving.wait(PATIENCE) == 0


def test_nodes_meet_in_a_file_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    nodes = [handler(path, name, store_type="file") for name in "ab"]
    joins = [Background(node.next_rendezvous) for node in nodes]
    assert [join.result().rank for join in joins] == [0, 1]
    for node in nodes:
        assert node.shutdown()


def test_a_node_that_does_not_serve_names_the_unreachable_address(port: int) -> None:
    # torch is not called before this check, because its thread could abort the process later.
    words = f"could not reach .* 127.0.0.1:{port}: no server accepts connections there: .*refused"
    with pytest.raises(RendezvousConnectionError, match=words):
        handler(f"127.0.0.1:{port}", "a", store_type="tcp", is_host="false", read_timeout="1")


def test_a_server_that_accepts_and_does_not_answer_is_no_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regrow.rendezvous.backends.c10d.torch_c10d.ANSWER", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(RendezvousConnectionError, match=f"{port}: .*not answer") as caught:
            handler(f"127.0.0.1:{port}", "a", store_type="tcp", read_timeout="1")
    assert "could not serve one there" in str(caught.value)
    assert "EADDRINUSE" in str(caught.value)


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.rendezvous.server.hosting.RESOLVE_PAUSES", (0.1, 15.0))
    with pytest.raises(
        RendezvousConnectionError, match=r"no-such-host\.invalid:1: .*, the last of 1 s$"
    ):
        handler("no-such-host.invalid:1", "a", store_type="tcp", read_timeout="1", insecure="1")


def test_a_store_without_a_password_needs_insecure_for_several_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)  # its import would take seconds
    with pytest.raises(RendezvousError, match=r"--rdzv-token-file ~/job.token .* use --insecure"):
        handler("192.0.2.1:1", "a", store_type="tcp")


def test_a_host_serves_as_soon_as_its_name_resolves_to_it(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that has just started is such a host."""
    unknown = [host := "localhost"] * 2

    def found(host: str, port: int, look_up: float) -> OwnAddress | None:
        return None if unknown and unknown.pop() else find_own(host, port, look_up)

    monkeypatch.setattr("regrow.rendezvous.server.hosting.RESOLVE_PAUSES", (0.05, 15.0))
    monkeypatch.setattr("regrow.rendezvous.server.hosting.find_own", found)
    params = RendezvousParameters("c10d", f"{host}:{port}", "job", 2, 2, store_type="tcp")
    _, store = create_backend(params)
    _, other = create_backend(params)
    assert [store.timeout, other.timeout] == [timedelta(seconds=60)] * 2
    store.set("k", "v")
    assert other.get("k") == b"v"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"store_type": "mpi"}, "Invalid store type given. .* Got 'mpi'"),
        ({"store_type": "tcp", "read_timeout": "0"}, "read timeout must be a positive integer"),
        ({"store_type": "tcp", "read_timeout": "x"}, "read_timeout"),
        ({"store_type": "tcp", "is_host": "maybe"}, "is_host"),
    ],
)
def test_invalid_options_are_refused(config: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        handler("127.0.0.1:1", "a", **config)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "absent" / "store")
    params = RendezvousParameters("c10d", path, "job", 1, 2, store_type="file")
    with pytest.raises(RendezvousConnectionError, match=path):
        create_backend(params)


def test_the_document_is_where_and_how_torch_has_it() -> None:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, "job")
    assert backend.name == "c10d"
    backend.set_state(b"\x00document")
    value = store.get("torch.rendezvous.job")
    assert b64decode(value.partition(b".")[0]) == b"\x00document"
    store.set("torch.rendezvous.job", "YWJj")
    state, token = backend.get_state() or pytest.fail("there is no document")
    assert state == b"abc"
    assert backend.set_state(b"next", token) is not None
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(store, "")


def test_a_document_that_is_not_base64_is_named() -> None:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, "job")
    store.set("torch.rendezvous.job", "not base64")
    with pytest.raises(RendezvousStateError, match=r"torch\.rendezvous\.job.*not base64"):
        backend.get_state()


def test_a_store_that_was_emptied_blocks_no_call() -> None:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, "job")
    _, token, _ = backend.set_state(b"first") or pytest.fail("not set")
    store.delete_key("torch.rendezvous.job")
    assert backend.set_state(b"second", token) is not None
    assert backend.get_state() is None


class Frail:
    """A c10d store; its writer is killed between the document and the version."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        if not key.endswith("/version"):
            self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("delete_prefix", "session", "close"):
            raise AttributeError(name)
        return getattr(self._store, name)


def test_a_change_is_seen_though_its_writer_was_killed_before_it_notified() -> None:
    store: Any = Frail(MemoryStore())
    backend = C10dRendezvousBackend(store, "job")
    waiting = Background(backend.wait_state, None, 3600.0)
    C10dRendezvousBackend(store, "job").set_state(b"first")
    waiting.result()


def test_a_program_that_is_blocked_in_its_store_delays_no_heartbeat() -> None:
    from torch.distributed import TCPStore

    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SPAN)
    store = TCPStore("127.0.0.1", served.port, is_master=False, timeout=SPAN)
    backend = C10dRendezvousBackend(store, "job")
    blocked = Background(store.get, "late")
    for count in range(1, 4):
        backend.beat("node", count, 3.0)
        assert backend.beats(["node"]) == {"node": count}
        assert backend.get_state() is None
    assert blocked.running()
    served.set("late", "1")
    assert blocked.result() == b"1"


def test_a_store_written_in_python_may_be_given() -> None:
    from torch.distributed import Store as TorchStore

    class Mine(TorchStore):  # type: ignore[misc] # torch is not followed by mypy
        def __init__(self) -> None:
            super().__init__()
            self._store = MemoryStore()

        def set(self, key: str, value: Any) -> None:
            self._store.set(key, value)

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            return self._store.compare_set(key, expected, desired)

    backend = C10dRendezvousBackend(Mine(), "job")
    assert backend.set_state(b"first") is not None
    assert (backend.get_state() or pytest.fail("there is no document"))[0] == b"first"
