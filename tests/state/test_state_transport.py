"""A transport takes ranks of the job only, and does not wait for a rank that has ended."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from threading import Event

import msgspec
import pytest

from regrow.state import StateError
from regrow.state.transport import SocketTransport, own_host
from regrow.store import MemoryStore

PATIENCE = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def address(store: MemoryStore) -> tuple[str, int, bytes]:
    return msgspec.msgpack.decode(store.get("source/0"), type=tuple[str, int, bytes])


def open_source(
    store: MemoryStore, threads: ThreadPoolExecutor, *targets: int
) -> tuple[SocketTransport, Future[None]]:
    source = SocketTransport(store, 0, PATIENCE)
    return source, threads.submit(source.accept, targets)


def test_each_rank_receives_its_own_messages(threads: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    source, accepted = open_source(store, threads, 1, 2)

    def receive(rank: int) -> bytes:
        into = bytearray(3)
        with SocketTransport(store, rank, PATIENCE) as target:
            target.connect(0)
            target.receive(0, memoryview(into))
        return bytes(into)

    received = [threads.submit(receive, rank) for rank in (2, 1)]
    accepted.result()
    with source:
        source.send(1, memoryview(b"one"))
        source.send(2, memoryview(b"two"))
        assert [each.result() for each in received] == [b"two", b"one"]


def speak(data: bytes) -> Callable[[str, int], None]:
    def run(host: str, port: int) -> None:
        with socket.create_connection((host, port), 30) as stranger:
            stranger.sendall(data)
            stranger.settimeout(30)
            with suppress(ConnectionResetError):
                while stranger.recv(100):  # the source closes the connection
                    pass

    return run


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, bytes(72)])
def test_a_program_without_the_key_is_not_served(data: bytes, threads: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    source, accepted = open_source(store, threads, 1)
    host, port, _ = address(store)
    speak(data)(host, port)
    with SocketTransport(store, 1, PATIENCE) as target:
        target.connect(0)
        accepted.result()
        source.send(1, memoryview(b"one"))
        into = bytearray(3)
        target.receive(0, memoryview(into))
    assert into == b"one"
    source.__exit__(None, None, None)


def test_a_program_at_the_address_that_does_not_know_the_key_is_refused() -> None:
    store = MemoryStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        published = ("127.0.0.1", listener.getsockname()[1], os.urandom(32))
        store.set("source/0", msgspec.msgpack.encode(published))

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(bytes(64))

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            SocketTransport(store, 1, PATIENCE) as target,
            pytest.raises(StateError, match="has not proved that it is rank 0"),
        ):
            target.connect(0)
        thread.join()


def test_a_rank_that_has_ended_is_named(threads: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    source, accepted = open_source(store, threads, 1)
    with SocketTransport(store, 1, PATIENCE) as target:
        target.connect(0)
        accepted.result()
        source.__exit__(None, None, None)
        with pytest.raises(StateError, match="rank 0 does not send its state"):
            target.receive(0, memoryview(bytearray(3)))


def test_a_rank_that_does_not_connect_is_named() -> None:
    source = SocketTransport(MemoryStore(), 0, timedelta(milliseconds=1))
    with pytest.raises(StateError, match="rank 2 has not connected to rank 0"):
        source.accept([2, 3])


def trickle(peer: socket.socket, end: Event) -> bool:
    """Send single bytes until `end`; return whether there were as many as a handshake has."""
    with peer, suppress(ConnectionError):
        for _ in range(72):
            if end.wait(0.2):  # less than a time-out, so that each recv returns in time
                return False
            peer.sendall(b"x")
        return True
    return False


def test_programs_that_send_slowly_do_not_hold_a_rank_after_its_deadline(
    threads: ThreadPoolExecutor,
) -> None:
    ended, strangers = Event(), []

    class Visited(MemoryStore):
        """Connects strangers when a rank has published its address."""

        def set(self, key: str, value: str | bytes, /) -> None:
            super().set(key, value)
            for _ in range(2):
                stranger = socket.create_connection(address(self)[:2], 30)
                strangers.append(threads.submit(trickle, stranger, ended))

    accepted = threads.submit(SocketTransport(Visited(), 0, timedelta(seconds=0.5)).accept, [1])
    accepted.add_done_callback(lambda _: ended.set())
    accepted.exception(30)
    assert not any(each.result() for each in strangers)
    with pytest.raises(StateError, match="rank 1 has not connected to rank 0"):
        accepted.result()


def test_a_message_that_arrives_slowly_has_one_deadline(threads: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    source, accepted = open_source(store, threads, 1)
    with SocketTransport(store, 1, timedelta(seconds=3)) as target:
        target.connect(0)
        accepted.result()
        received = threads.submit(target.receive, 0, memoryview(bytearray(70)))
        for _ in range(70):
            if wait([received], 0.2).done:
                break
            source.send(1, memoryview(b"x"))
        with pytest.raises(StateError, match="rank 0 does not send its state"):
            received.result()
    source.__exit__(None, None, None)


def test_a_host_names_the_address_with_which_it_sends_to_the_first_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_host() == "localhost"  # the others reach this host by the name that they have
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two hosts with one active rank left on each
    assert own_host() == "localhost"
    monkeypatch.delenv("MASTER_ADDR")
    assert own_host() == "127.0.0.1"
