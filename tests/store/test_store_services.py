"""Services: protocols that a server runs besides keys."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.processes import wait_until
from helpers.stores.services import Notebook
from helpers.stores.storing import PATIENCE, Background, CuttingProxy, ServerThread
from regrow.store import (
    Limits,
    StoreClient,
    StoreClosedError,
    StoreConnectionError,
    StoreLimitError,
    StoreProtocolError,
    StoreServiceError,
    StoreTimeout,
    connect,
    make_token,
    start_server,
)
from regrow.store.keyspace import Query
from regrow.store.protocol import wire
from regrow.store.server.machine import Machine, ServerSession
from regrow.store.server.services import Switchboard

Serve = Callable[..., ServerThread]


# --- the routing, without a socket


class Desk:
    """A machine with a notebook as its only service, and a clock that the test sets."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.book = Notebook()
        limits = limits or Limits()
        self.board = Switchboard({"book": self.book}, limits, lambda: self.now, self.log.append)
        numbers = count(1)
        self.machine = Machine(lambda: b"session %d" % next(numbers), limits, self.board)

    def join(self, resume: bytes = b"") -> ServerSession:
        return self.machine.open(wire.Hello(resume, 5.0, "test"))[0]

    def ask(self, session: ServerSession, id: int, text: str) -> list[tuple[ServerSession, object]]:
        return list(self.machine.handle(session, wire.Ask(id, "book", text.encode())))


def test_a_question_is_answered_at_once_or_when_there_is_an_answer() -> None:
    desk = Desk()
    waiting, other = desk.join(), desk.join()
    assert desk.ask(waiting, 1, "echo:x") == [(waiting, wire.Done(1, b"echo:x"))]
    assert desk.ask(waiting, 2, "park:a") == []
    assert desk.ask(other, 1, "answer:a") == [
        (other, wire.Done(1, b"1")),
        (waiting, wire.Done(2, b"woken:a")),
    ]
    assert not waiting.asked


def test_a_parked_question_can_be_cancelled() -> None:
    desk = Desk()
    session = desk.join()
    desk.ask(session, 1, "park:a")
    cancelled = desk.machine.handle(session, wire.Cancel(1))
    assert cancelled == [(session, wire.Failed(1, "cancelled", ""))]
    assert desk.machine.handle(session, wire.Cancel(1)) == []
    assert not desk.book.parked


def test_a_question_is_asked_again_after_the_connection_was_lost() -> None:
    desk = Desk()
    session, other = desk.join(), desk.join()
    desk.ask(session, 1, "park:a")
    desk.machine.suspend(session)
    assert desk.ask(other, 1, "answer:a") == [(other, wire.Done(1, b"0"))]
    desk.machine.resume(desk.join(session.id))
    assert desk.ask(session, 1, "park:a") == []
    assert desk.ask(other, 2, "answer:a")[1] == (session, wire.Done(1, b"woken:a"))
    assert desk.book.calls[1:3] == ["suspended", "answer:a"]
    assert "resumed" in desk.book.calls


def test_a_service_receives_no_events_of_sessions_that_never_asked_it() -> None:
    desk = Desk()
    session = desk.join()
    desk.machine.suspend(session)
    desk.machine.resume(session)
    desk.machine.end(session)
    assert desk.book.calls == []


@pytest.mark.parametrize("bye", [True, False])
def test_a_service_receives_the_reason_of_the_end_of_a_session(bye: bool) -> None:
    desk = Desk()
    session = desk.join()
    desk.ask(session, 1, "park:a")
    if bye:
        desk.machine.handle(session, wire.Bye(2))
    else:
        desk.machine.end(session)
    why = "it closed its connection" if bye else "its connection broke"
    assert desk.book.calls == ["park:a", f"ended: {why}"]


def test_a_question_to_a_missing_service_is_refused_with_the_existing_ones() -> None:
    desk = Desk()
    session = desk.join()
    [(_, answer)] = desk.machine.handle(session, wire.Ask(1, "other", b""))
    assert answer == wire.Failed(1, "service", "this store has no service 'other'; it has: book")


def test_an_exception_in_a_service_fails_only_the_question() -> None:
    desk = Desk()
    one, other = desk.join(), desk.join()
    desk.ask(other, 1, "park:a")
    [(_, answer)] = desk.ask(one, 1, "raise")
    assert answer == wire.Failed(
        1, "service", "the service 'book' failed: ZeroDivisionError: a mistake"
    )
    assert "Traceback" in desk.log[0]
    assert desk.ask(one, 2, "answer:a")[1] == (other, wire.Done(1, b"woken:a"))


def test_a_service_that_fails_at_its_deadline_is_not_called_for_a_second() -> None:
    desk = Desk()
    desk.ask(desk.join(), 1, "alarm:1")
    desk.book.raise_when_due = True
    desk.board.due(1.0)
    assert desk.board.deadline == 2.0
    assert desk.board.due(1.5) == []
    desk.book.raise_when_due = False
    assert desk.board.due(2.0) == []
    assert desk.book.calls == ["alarm:1", "due", "due"]


def test_questions_and_answers_are_limited() -> None:
    desk = Desk(Limits(key_bytes=64, value_bytes=1024, frame_bytes=2200, parked=2))
    session = desk.join()
    [(_, refused)] = desk.ask(session, 1, "echo:" + "x" * 1024)
    assert isinstance(refused, wire.Failed)
    assert (refused.kind, "1029 bytes" in refused.message) == ("limit", True)
    [(_, refused)] = desk.ask(session, 2, "long:3000")
    assert isinstance(refused, wire.Failed)
    assert "the answer of the service 'book' has 3000 bytes" in refused.message
    desk.ask(session, 3, "park:a")
    desk.machine.handle(session, wire.Read(4, Query("wait", ("k",))))
    for full in (
        desk.ask(session, 5, "park:b"),
        desk.machine.handle(session, wire.Read(6, Query("multi_get", ("k",)))),
    ):
        [(_, answer)] = full
        assert isinstance(answer, wire.Failed)
        assert "2 calls of this client are blocked already" in answer.message


def test_an_id_in_use_breaks_the_protocol() -> None:
    desk = Desk()
    session = desk.join()
    desk.ask(session, 1, "park:a")
    with pytest.raises(StoreProtocolError, match="request id 1 is already in use"):
        desk.machine.handle(session, wire.Read(1, Query("multi_get", ("k",))))


TALK = ["park:a", "park:b", "answer:a", "answer:b", "echo:", "raise", "refuse"]
WORDS = [*TALK, "lose", "return", "cancel", "end"]
STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(WORDS)), max_size=60)


@given(STEPS)
def test_every_question_gets_one_answer_and_no_question_stays_parked(
    steps: list[tuple[int, str]],
) -> None:
    desk = Desk()
    clients = [desk.join() for _ in range(3)]
    asked: list[dict[int, str]] = [{} for _ in clients]
    here = [True] * 3
    ids = count(1)

    def settle(sent: list[tuple[ServerSession, object]]) -> None:
        for session, answer in sent:
            assert isinstance(answer, wire.Done | wire.Failed)
            del asked[clients.index(session)][answer.id]  # one answer, to the client that asked

    for number, word in steps:
        session = clients[number]
        if session.ended:
            continue
        match word:
            case "lose" if here[number]:
                here[number] = False
                settle(list(desk.machine.suspend(session)))
            case "return" if not here[number]:
                here[number] = True
                settle(list(desk.machine.resume(session)))
                for id, text in list(asked[number].items()):
                    settle(desk.ask(session, id, text))
            case "cancel" if here[number] and asked[number]:
                settle(list(desk.machine.handle(session, wire.Cancel(min(asked[number])))))
            case "end":
                asked[number].clear()
                settle(list(desk.machine.end(session)))
            case "lose" | "return" | "cancel":
                pass
            case _ if here[number]:
                id = next(ids)
                asked[number][id] = word
                settle(desk.ask(session, id, word))
    parked = {(clients[n], id) for n in range(3) if here[n] for id in asked[n]}
    assert desk.book.parked.keys() == parked
    for session in clients:
        desk.machine.end(session)
    assert not desk.book.parked


# --- over sockets


def shaken(
    server: ServerThread, grace: float = 0.0, resume: bytes = b"", source: str = "127.0.0.1"
) -> tuple[socket.socket, wire.Welcome]:
    """Return a raw connection after the handshake, and its Welcome."""
    path = server.endpoint.removeprefix("unix:")
    if path != server.endpoint:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE)
        sock.connect(path)
    else:
        sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE, (source, 0))
    stream = sock.makefile("rb")
    nonce = bytes(wire.NONCE)
    sock.sendall(wire.PREAMBLE + nonce)
    theirs = stream.read(wire.OPENING)[len(wire.PREAMBLE) :]
    sock.sendall(wire.prove(server.token, "client", nonce, theirs))
    sock.sendall(wire.frame(wire.Hello(resume, grace, "a raw client")))
    stream.read(1 + wire.PROOF)
    welcome = wire.decode_welcome(stream.read(int.from_bytes(stream.read(wire.HEADER), "big")))
    assert isinstance(welcome, wire.Welcome)
    return sock, welcome


@pytest.fixture
def book() -> Notebook:
    return Notebook()


@pytest.fixture
def server(serve: Serve, book: Notebook) -> ServerThread:
    return serve(services={"book": book})


@pytest.fixture
def client(server: ServerThread) -> Iterator[StoreClient]:
    with server.connect() as client:
        yield client


def test_a_parked_question_delays_no_other_call(
    server: ServerThread, client: StoreClient, book: Notebook
) -> None:
    waiting = Background(client.ask, "book", b"park:a", PATIENCE)
    wait_until(lambda: bool(book.parked), "the service parks the question")
    client.set("k", "v")
    assert client.ask("book", b"echo:x", PATIENCE) == b"echo:x"
    assert waiting.running()
    client.ask("book", b"answer:a", PATIENCE)
    assert waiting.result() == b"woken:a"


def test_a_timed_out_question_is_cancelled(client: StoreClient, book: Notebook) -> None:
    with pytest.raises(StoreTimeout) as caught:
        client.ask("book", b"park:a", 0.01)
    assert caught.value.applied == "unknown"
    wait_until(lambda: "cancelled" in book.calls, "the service is called")
    assert not book.parked


def test_a_question_survives_a_broken_connection(server: ServerThread, book: Notebook) -> None:
    proxy = CuttingProxy(server.port)
    with connect(proxy.endpoint, token=server.token, timeout=PATIENCE) as client:
        waiting = Background(client.ask, "book", b"park:a", PATIENCE)
        wait_until(lambda: bool(book.parked), "the service parks the question")
        proxy.cut_now()
        wait_until(
            lambda: "resumed" in book.calls and bool(book.parked), "the question is repeated"
        )
        assert client.ask("book", b"answer:a", PATIENCE) == b"1"
        assert waiting.result() == b"woken:a"
    proxy.stop()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_a_service_learns_whether_the_client_closed_its_connection(
    server: ServerThread, book: Notebook, reset: bool, source: str
) -> None:
    sock, _ = shaken(server, source=source)
    sock.sendall(wire.frame(wire.Ask(1, "book", b"park:a")))
    wait_until(lambda: bool(book.parked), "the service parks the question")
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    # The server has 127.0.0.1. A device on the route from another address may reset connections.
    closed = not reset or source == "127.0.0.1"
    ended = "ended" if closed else "ended, not closed"
    wait_until(lambda: book.calls[-1] == f"{ended}: its connection broke", "the service is called")


@pytest.mark.parametrize("unix", [False, True])
def test_a_process_of_this_host_that_dies_with_answers_unread_has_closed_its_connection(
    serve: Serve, book: Notebook, tmp_path: Path, unix: bool
) -> None:
    path = {"path": str(tmp_path / "store")} if unix else {}
    server = serve(services={"book": book}, **path)
    sock, _ = shaken(server)
    for id, text in enumerate((b"echo:x", b"park:a"), 1):
        sock.sendall(wire.frame(wire.Ask(id, "book", text)))
    wait_until(lambda: bool(book.parked), "the service parks the question")
    assert sock.recv(1, socket.MSG_PEEK)  # the answer is there, so the kernel resets
    sock.close()
    wait_until(lambda: book.calls[-1] == "ended: its connection broke", "the service is called")


@pytest.mark.parametrize("unix", [False, True])
def test_an_answer_to_a_dead_process_of_this_host_reveals_its_end(
    serve: Serve, book: Notebook, tmp_path: Path, unix: bool
) -> None:
    path = {"path": str(tmp_path / "store")} if unix else {}
    server = serve(services={"book": book}, **path)
    sock, _ = shaken(server)
    sock.sendall(wire.frame(wire.Ask(1, "book", b"park:a")))
    wait_until(lambda: bool(book.parked), "the service parks the question")
    book.actions["close"] = sock.close  # in the server's thread, just before it answers
    other, _ = shaken(server)
    # In one write: between two writes, the server would notice the end by itself.
    both = (wire.Ask(id, "book", text) for id, text in enumerate((b"do:close", b"answer:a"), 1))
    other.sendall(b"".join(map(wire.frame, both)))
    wait_until(lambda: book.calls[-1] == "ended: its connection broke", "the service is called")
    other.close()


def test_disconnecting_a_client_does_not_count_as_its_end(
    server: ServerThread, book: Notebook
) -> None:
    sock, _ = shaken(server)
    sock.sendall(wire.frame(wire.Ask(1, "book", b"park:a")))
    sock.sendall((1 << 31).to_bytes(wire.HEADER, "big"))
    over = "ended, not closed: it broke the protocol of the store"
    wait_until(lambda: book.calls[-1:] == [over], "the session ends")
    sock.close()


def test_a_question_with_nudge_is_followed_by_small_messages_until_its_answer(
    server: ServerThread, client: StoreClient
) -> None:
    proxy = CuttingProxy(server.port)
    with connect(proxy.endpoint, token=server.token, timeout=PATIENCE) as hurried:
        waiting = Background(hurried.ask, "book", b"park:a", PATIENCE, nudge=0.001)
        proxy.cut_after(60, "down")  # more than the answer has
        wait_until(lambda: proxy.cuts >= 1, "the proxy cuts the connection")
        proxy.cut_nothing()
        assert waiting.running()

        def answered() -> bool:
            # The first answer may go to a cut connection that the server still considers open.
            client.ask("book", b"answer:a", PATIENCE)
            return not waiting.running()

        wait_until(answered, "the question is answered")
        assert waiting.result() == b"woken:a"
    proxy.stop()


def test_refusals_reach_the_caller(client: StoreClient) -> None:
    with pytest.raises(StoreServiceError, match="it does not want to"):
        client.ask("book", b"refuse", PATIENCE)
    with pytest.raises(StoreServiceError, match="ZeroDivisionError"):
        client.ask("book", b"raise", PATIENCE)
    with pytest.raises(StoreServiceError, match="no service 'shelf'; it has: book"):
        client.ask("shelf", b"", PATIENCE)
    with pytest.raises(StoreLimitError, match=r"Limits\.value_bytes"):
        client.ask("book", bytes((16 << 20) + 1), PATIENCE)
    assert client.ask("book", b"echo:", PATIENCE) == b"echo:"


def test_closing_a_client_ends_its_questions(client: StoreClient, book: Notebook) -> None:
    waiting = Background(client.ask, "book", b"park:a", PATIENCE)
    wait_until(lambda: bool(book.parked), "the service parks the question")
    client.close()
    with pytest.raises(StoreClosedError):
        waiting.result()
    wait_until(lambda: book.calls[-1] == "ended: it closed its connection", "the service is called")


def test_a_service_is_called_when_it_is_due(client: StoreClient, book: Notebook) -> None:
    client.ask("book", b"alarm:0.01", PATIENCE)
    wait_until(lambda: book.calls[-1] == "due", "the service is called")
    client.ask("book", b"alarm:100", PATIENCE)
    client.ask("book", b"alarm:0.01", PATIENCE)  # an earlier one is noticed
    wait_until(lambda: book.calls[-1] == "due", "the service is called")


def test_data_that_arrived_while_the_server_was_stopped_comes_before_the_deadline(
    server: ServerThread, client: StoreClient, book: Notebook
) -> None:
    # It stops at the worst place: after it polled its sockets, before it reads the clock.
    stopped, go_on = threading.Event(), threading.Event()
    selector = server.loop._selector  # type: ignore[attr-defined]
    select = selector.select

    def look(timeout: float | None = None) -> object:
        found = select(timeout)
        due = book.deadline is not None and time.monotonic() >= book.deadline
        if due and not found and server.server.alarm is not None:  # which has not rung yet
            stopped.set()
            assert go_on.wait(PATIENCE)
        return found

    sock, _ = shaken(server)
    selector.select = look
    for _ in range(100):  # something else may happen at the very moment
        client.ask("book", b"alarm:0.05", PATIENCE)
        if stopped.wait(0.5):
            break
    sock.sendall(wire.frame(wire.Ask(1, "book", b"echo:late")))
    go_on.set()
    wait_until(lambda: book.calls[-2:] == ["echo:late", "due"], "both are handled")
    sock.close()


def test_a_client_that_reconnects_after_a_pause_of_the_server_keeps_its_session(
    server: ServerThread, book: Notebook
) -> None:
    loop = server.loop
    sock, welcome = shaken(server, grace=10.0)
    sock.sendall(wire.frame(wire.Ask(1, "book", b"echo:")))
    wait_until(lambda: book.calls == ["echo:"], "the service is called")
    sock.close()
    wait_until(lambda: "suspended" in book.calls, "the service is called")
    # To a server that was stopped, it is suddenly much later.
    true_time, jumped = loop.time, threading.Event()
    loop.call_soon_threadsafe(setattr, loop, "time", lambda: true_time() + 100.0)
    loop.call_soon_threadsafe(loop.call_later, 0.1, jumped.set)
    assert jumped.wait(PATIENCE)
    sock, again = shaken(server, resume=welcome.session)
    sock.close()
    assert again.session == welcome.session
    assert not [call for call in book.calls if call.startswith("ended")]


def test_a_server_process_that_cannot_load_a_service_reports_the_error() -> None:
    for where, why in (
        ("regrow.nowhere:create", "No module named 'regrow.nowhere'"),
        ("regrow.store:nothing", "has no attribute 'nothing'"),
        ("regrow.store", 'not named "module:function"'),
    ):
        with pytest.raises(StoreConnectionError, match=why):
            start_server(token=make_token(), services={"a": where})


@pytest.mark.parametrize("body", [b"\x92\x12\x01", b"\x94\x12\x01\xa1a\xa1b", b"\x94\x12\x00\xa1a"])
def test_a_malformed_question_ends_only_its_own_connection(
    server: ServerThread, client: StoreClient, body: bytes
) -> None:
    sock, _ = shaken(server)
    with sock:
        sock.sendall(len(body).to_bytes(4, "big") + body)
        while sock.recv(65536):  # until the server hangs up
            pass
    assert client.ask("book", b"echo:x", PATIENCE) == b"echo:x"
