"""The background thread, which all store clients of a process share."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from helpers.descriptors import open_files
from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background
from regrow.store import (
    ConnectionState,
    StoreClient,
    connect,
    make_token,
    start_server,
)
from regrow.store.client.background import serve

Join = Callable[..., StoreClient]


def test_the_clients_of_a_process_share_one_thread_which_ends_with_the_last(join: Join) -> None:
    threads, files = set(threading.enumerate()), open_files()

    def started() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - threads]
        return [name for name in names if name.startswith("regrow-store")]

    clients = [join() for _ in range(40)]
    assert len(started()) <= 1
    waiting = [Background(client.wait, [f"key {i}"]) for i, client in enumerate(clients)]
    for i in range(len(clients)):
        clients[0].set(f"key {i}", b"")
    for waits in waiting:
        waits.result()
    for client in clients:
        client.close()
    wait_until(lambda: set(threading.enumerate()) <= threads, "the threads end")
    wait_until(lambda: open_files() <= files, "the descriptors are closed")


def test_a_client_that_reconnects_does_not_delay_the_others(join: Join) -> None:
    token = make_token()
    other = join()
    with ExitStack() as stack:
        server = stack.enter_context(start_server(token=token))
        client = stack.enter_context(connect(server.endpoint, token=token, session_grace=PATIENCE))
        waits = Background(other.wait, ["key"])  # the background thread reads its answer
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: client.state is ConnectionState.SUSPENDED, "the connection is lost")
        join().set("key", b"")
        waits.result()
        assert client.state is ConnectionState.SUSPENDED


def test_a_forked_child_has_a_background_thread_of_its_own(join: Join) -> None:
    client = join()
    with warnings.catch_warnings():  # newer Pythons warn about such forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            own = join()
            waits = Background(own.wait, ["from the parent"])
            own.set("from the child", b"")
            waits.result()
            own.close()
            code = 0
        finally:
            os._exit(code)
    client.wait(["from the child"])
    client.set("from the parent", b"")
    assert os.waitpid(pid, 0)[1] == 0
    assert client.check(["from the parent"])


def test_an_unexpected_error_of_one_client_ends_that_client_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def __init__(self) -> None:
            self.failed = threading.Event()

        def on_ready(self, fd: int) -> None:
            raise AssertionError("it has no connection")

        def attend(self) -> None:
            raise ZeroDivisionError

        def fail(self, error: Exception) -> None:
            assert isinstance(error, ZeroDivisionError)
            self.failed.set()

    first, second = Broken(), Broken()
    thread = serve(first)
    assert serve(second) is thread
    for client in (first, second):
        thread.attend(client)
        assert client.failed.wait(PATIENCE)
        thread.leave(client)
    assert "a client of the store fails" in caplog.text
