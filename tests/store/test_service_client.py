"""A client of a service starts a new session when its session is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from helpers.processes import wait_until
from helpers.stores.services import Notebook
from helpers.stores.storing import PATIENCE, Background, ServerThread
from regrow.store import (
    ServiceClient,
    StoreClient,
    StoreClosedError,
    StoreConnectionError,
    StoreSessionLost,
    StoreTimeout,
    connect,
)

Serve = Callable[..., ServerThread]


@pytest.fixture
def server(serve: Serve) -> ServerThread:
    return serve(services={"book": Notebook()})


def connecting(
    server: ServerThread, made: list[StoreClient]
) -> Callable[[float, int], StoreClient]:
    def begin(seconds: float, stop: int) -> StoreClient:
        made.append(
            connect(
                server.endpoint, token=server.token, timeout=seconds, stop=stop, session_grace=0.05
            )
        )
        return made[-1]

    return begin


def test_the_first_question_starts_the_session_of_later_ones(server: ServerThread) -> None:
    made: list[StoreClient] = []
    client = ServiceClient("book", connecting(server, made))
    assert client.session is None
    assert client.ask(b"echo:1", PATIENCE) == b"echo:1"
    assert client.ask(b"echo:2", PATIENCE) == b"echo:2"
    assert made == [client.session]
    client.close()


def test_a_question_is_asked_over_a_new_session_when_the_old_one_is_lost(serve: Serve) -> None:
    books = Notebook(), Notebook()
    old = ServerThread(services={"book": books[0]})
    new = serve(services={"book": books[1]}, token=old.token)
    servers = [old, new]
    client = ServiceClient("book", lambda _, stop: servers.pop(0).connect(session_grace=0.05))
    asked = Background(client.ask, b"park:x", PATIENCE)
    wait_until(lambda: bool(books[0].parked), "the service parks the question")
    old.stop()
    wait_until(lambda: bool(books[1].parked), "the service parks the question")
    with new.connect() as other:
        other.ask("book", b"answer:x", PATIENCE)
    assert asked.result() == b"woken:x"
    client.close()


def test_the_body_of_a_question_may_depend_on_the_remaining_seconds(
    server: ServerThread,
) -> None:
    client = ServiceClient("book", connecting(server, []))
    answer = client.ask(lambda left: b"echo:%d" % (0 < left <= PATIENCE), PATIENCE)
    assert answer == b"echo:1"
    client.close()


def test_a_session_that_was_given_is_neither_replaced_nor_closed() -> None:
    server = ServerThread(services={"book": Notebook()})
    with server.connect() as given:
        client = ServiceClient("book", connecting(server, []), session=given)
        assert client.ask(b"echo:x", PATIENCE) == b"echo:x"
        client.close()
        with pytest.raises(StoreClosedError):
            client.ask(b"echo:x", PATIENCE)
        given.set("key", b"it is open")
    with server.connect(session_grace=0.05) as given:
        client = ServiceClient("book", connecting(server, []), session=given)
        server.stop()
        with pytest.raises(StoreSessionLost):
            client.ask(b"echo:x", PATIENCE)


def test_a_new_session_must_be_reached_within_its_own_bound(server: ServerThread) -> None:
    bounds: list[float] = []

    def out_of_reach(seconds: float, stop: int) -> StoreClient:
        bounds.append(seconds)
        raise StoreConnectionError("out of reach")

    client = ServiceClient("book", out_of_reach, connect_within=5.0, clock=lambda: 0.0)
    with pytest.raises(StoreConnectionError, match="out of reach"):
        client.ask(b"echo:x", PATIENCE)
    assert bounds == [5.0]


def test_the_wait_for_another_thread_counts_towards_the_time_to_connect() -> None:
    now, bounds = 0.0, list[float]()

    class Taken:
        """A lock that another thread holds for 4 s, in the time of the test."""

        def acquire(self, *, timeout: float) -> bool:
            nonlocal now
            now += 4.0
            return True

        def release(self) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *exc: object) -> None: ...

    def out_of_reach(seconds: float, stop: int) -> StoreClient:
        bounds.append(seconds)
        raise StoreConnectionError("out of reach")

    client = ServiceClient(
        "book", out_of_reach, clock=lambda: now, new_lock=lambda: cast("Any", Taken())
    )
    with pytest.raises(StoreConnectionError, match="out of reach"):
        client.connect(5.0)
    assert bounds == [1.0]


def test_threads_that_ask_at_once_share_one_session(server: ServerThread) -> None:
    made: list[StoreClient] = []
    client = ServiceClient("book", connecting(server, made))
    start = threading.Barrier(4)

    def ask() -> bytes:
        start.wait(PATIENCE)
        return client.ask(b"echo:x", PATIENCE)

    asked = [Background(ask) for _ in range(4)]
    assert [each.result() for each in asked] == [b"echo:x"] * 4
    assert len(made) == 1
    client.close()


def test_close_ends_an_attempt_to_connect_and_every_later_one() -> None:
    accepted = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and answers nothing

        def begin(seconds: float, stop: int) -> StoreClient:
            accepted.set()
            endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
            return connect(endpoint, token=b"x" * 16, timeout=seconds, stop=stop)

        client = ServiceClient("book", begin)
        asked = Background(client.ask, b"echo:x", PATIENCE)
        assert accepted.wait(PATIENCE)
        with pytest.raises(StoreTimeout, match="another thread has been connecting"):
            client.ask(b"echo:x", 0.01)
        client.close()
        with pytest.raises(StoreClosedError):
            asked.result()
        assert client.closed
        with pytest.raises(StoreClosedError):
            client.connect(PATIENCE)
