"""Servers and clients for the tests of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.stores.storing import PATIENCE, ServerThread
from regrow.store import Limits, ServerProcess, StoreClient, connect, make_token, start_server


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerThread]]:
    """Return a function that starts servers in threads: `serve(limits=...)`."""
    started: list[ServerThread] = []

    def start(**options: Any) -> ServerThread:
        started.append(ServerThread(**options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def token() -> bytes:
    return make_token()


@pytest.fixture(scope="session")
def server(token: bytes) -> Iterator[ServerProcess]:
    """One server process for all tests of the run; each test uses keys of its own."""
    with start_server(token=token) as process:
        yield process
        assert process.alive(), "a test killed the server"


@pytest.fixture
def join(server: ServerProcess, token: bytes) -> Iterator[Callable[..., StoreClient]]:
    """Return a factory of clients of the common server; they are closed after the test."""
    made: list[StoreClient] = []

    def make(**options: Any) -> StoreClient:
        made.append(connect(server.endpoint, token=token, timeout=PATIENCE, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def small() -> Limits:
    """Limits that are small enough for a test to reach."""
    return Limits(
        key_bytes=64,
        value_bytes=1024,
        frame_bytes=4096,
        keys_per_call=8,
        keys=16,
        total_bytes=8192,
        sessions=4,
        parked=4,
        unconfirmed=8,
        handshakes=4,
        handshake_seconds=1.0,
        outgoing_bytes=1 << 20,
    )
