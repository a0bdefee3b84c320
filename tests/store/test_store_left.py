"""A client is freed as soon as its session is over: no part waits for the garbage collector."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background
from regrow.store import (
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreSessionLost,
    StoreTimeout,
    connect,
    make_token,
    start_server,
)
from regrow.utils import PortReservation

PARTS = ("regrow.store.client.", "regrow.store.errors", "regrow.store.calls")
"""Prefixes of the modules that define the parts of a client."""


def parts() -> Counter[str]:
    kinds = (type(each) for each in gc.get_objects())
    # Some types have a descriptor for their module.
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(PARTS))


@pytest.fixture
def before() -> Iterator[Counter[str]]:
    """The parts that exist at the start; the collector frees none until the end."""
    gc.collect()
    gc.disable()
    yield parts()
    gc.enable()


def fails(kind: type[StoreError], call: Callable[..., object], *args: object) -> None:
    """Make a call that fails, and drop its exception."""
    with pytest.raises(kind):
        call(*args)


def assert_freed(before: Counter[str]) -> None:
    """Assert that nothing is left after the threads that are about to end."""
    wait_until(lambda: parts() <= before, lambda: f"all is freed; left: {parts() - before}")


def test_a_client_that_is_closed_while_threads_wait_is_freed(before: Counter[str]) -> None:
    token = make_token()
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token)
        waits = [
            Background(fails, StoreClosedError, client.wait, ["never"], PATIENCE) for _ in range(5)
        ]
        client.set("k", "v")
        assert all(wait.running() for wait in waits)
        client.close()
        for wait in waits:
            wait.result()
        del client
    assert_freed(before)


def test_a_client_that_lost_its_session_is_freed(before: Counter[str]) -> None:
    token = make_token()
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token, session_grace=0.1)
        os.kill(server.pid, signal.SIGKILL)
        fails(StoreSessionLost, client.get, "never")
        client.close()
        del client
    assert_freed(before)


def test_a_client_that_had_to_wait_for_its_server_is_freed(before: Counter[str]) -> None:
    token = make_token()
    with PortReservation() as reserved:
        port = reserved.port
    connecting = Background(connect, f"127.0.0.1:{port}", token=token, timeout=PATIENCE)
    # It has been refused by the time that a process is started.
    with start_server(port=port, token=token):
        connecting.result().close()
        del connecting
    assert_freed(before)


def test_a_client_that_reaches_no_server_is_freed(before: Counter[str]) -> None:
    with PortReservation() as reserved:
        endpoint = f"127.0.0.1:{reserved.port}"
    call = partial(connect, endpoint, token=make_token(), timeout=0.05)
    fails(StoreConnectionError, call)
    assert_freed(before)


def test_a_client_is_freed_while_another_one_of_the_process_is_open() -> None:
    token = make_token()
    with start_server(token=token) as server, connect(server.endpoint, token=token) as other:
        other.set("k", "v")
        gc.collect()
        gc.disable()
        try:
            before = parts()
            client = connect(server.endpoint, token=token)
            fails(StoreTimeout, client.wait, ["never"], 0.01)
            client.close()
            del client
            assert_freed(before)
        finally:
            gc.enable()
