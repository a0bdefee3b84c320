"""A hostile, broken or lost client harms only itself."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background, ServerThread
from regrow.store import (
    Limits,
    StoreClient,
    StoreClosedError,
    StoreConnectionError,
    StoreLimitError,
    StoreProtocolError,
    connect,
    make_token,
    start_server,
)
from regrow.store.keyspace import Query
from regrow.store.protocol import wire

Serve = Callable[..., ServerThread]


class Bystander:
    """A client that the other clients must not disturb."""

    def __init__(self, server: ServerThread) -> None:
        self._client = server.connect(session_grace=0)
        self._waiting = Background(self._client.wait, ["bystander done"], 120)

    def check_undisturbed(self) -> None:
        # The grace is zero. If the connection had broken, this call would raise.
        self._client.num_keys()
        assert self._waiting.running()

    def close(self) -> None:
        self._client.set("bystander done", "")
        self._waiting.result()
        self._client.close()


@pytest.fixture(scope="module")
def target() -> Iterator[ServerThread]:
    server = ServerThread(limits=Limits(key_bytes=64, value_bytes=4096, frame_bytes=8192))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bystander(target: ServerThread) -> Iterator[Bystander]:
    client = Bystander(target)
    yield client
    client.check_undisturbed()
    client.close()


def dial(server: ServerThread) -> socket.socket:
    return _dial(server.port)


def _dial(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        assert chunk, f"closed after {len(data)} of {count} bytes"
        data += chunk
    return data


def shaken(server: ServerThread) -> socket.socket:
    """Return a raw connection that is through the handshake, its Welcome read."""
    return _shaken(server.port, server.token)


def _shaken(port: int, token: bytes, session: bytes = b"") -> socket.socket:
    sock = _dial(port)
    nonce = os.urandom(wire.NONCE)
    sock.sendall(wire.PREAMBLE + nonce)
    theirs = exactly(sock, wire.OPENING)[len(wire.PREAMBLE) :]
    sock.sendall(wire.prove(token, "client", nonce, theirs))
    sock.sendall(wire.frame(wire.Hello(session, 0.0, "a raw client")))
    exactly(sock, 1 + wire.PROOF)
    exactly(sock, int.from_bytes(exactly(sock, wire.HEADER), "big"))
    return sock


def drained(sock: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.binary(max_size=300))
def test_garbage_instead_of_a_handshake_gets_no_answer(
    target: ServerThread, bystander: Bystander, garbage: bytes
) -> None:
    with dial(target) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        answer = drained(sock)
    assert answer == b"" or (garbage.startswith(wire.PREAMBLE) and len(garbage) >= 40)
    bystander.check_undisturbed()


@FUZZ
@given(st.binary(min_size=32, max_size=200))
def test_a_client_without_the_token_gets_only_a_refusal(
    target: ServerThread, bystander: Bystander, garbage: bytes
) -> None:
    with dial(target) as sock:
        sock.sendall(wire.PREAMBLE + bytes(wire.NONCE))
        exactly(sock, wire.OPENING)
        sock.sendall(garbage)
        assert drained(sock) in (wire.REFUSED + bytes(wire.PROOF), b"")
    bystander.check_undisturbed()


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


def packed(tree: object) -> bytes:
    import msgspec

    with contextlib.suppress(OverflowError):
        return msgspec.msgpack.encode(tree)
    return b"\xc1"


GOOD = [
    wire.Set(1, 1, "k", b"v"),
    wire.Add(1, 1, "n", 1),
    wire.CompareSet(1, 1, "k", b"v", b"w"),
    wire.MultiSet(1, 1, ["a", "b"], [b"1", b"2"]),
    wire.DeletePrefix(1, 1, "k"),
    wire.Read(1, Query("multi_get", ("a", "b"))),
    wire.Cancel(1),
]


@FUZZ
@given(
    st.one_of(
        st.binary(max_size=200),
        TREES.map(packed),
        st.lists(st.integers(0, 20) | TREES, max_size=6).map(packed),
    ),
    st.booleans(),
)
def test_garbage_after_the_handshake_ends_that_connection_alone(
    target: ServerThread, bystander: Bystander, garbage: bytes, framed: bool
) -> None:
    with shaken(target) as sock:
        sock.sendall((len(garbage).to_bytes(4, "big") if framed else b"") + garbage)
        sock.shutdown(socket.SHUT_WR)
        drained(sock)
    bystander.check_undisturbed()


@FUZZ
@given(
    st.lists(st.sampled_from(GOOD), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_messages_with_changed_bytes_end_that_connection_alone(
    target: ServerThread,
    bystander: Bystander,
    messages: list[wire.Request],
    changes: list[tuple[int, int]],
) -> None:
    data = bytearray(b"".join(wire.frame(message) for message in messages))
    for place, byte in changes:
        data[place % len(data)] = byte
    with shaken(target) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        drained(sock)
    bystander.check_undisturbed()


def test_the_length_of_a_gigabyte_is_refused_before_it_is_stored(serve: Serve) -> None:
    server = serve()
    bystander = Bystander(server)
    with shaken(server) as sock:
        sock.sendall((1 << 30).to_bytes(4, "big") + b"x")
        answer = wire.decode_reply(drained(sock)[wire.HEADER :])
    assert isinstance(answer, wire.Failed)
    assert "1073741824 bytes" in answer.message
    assert "(a raw client): it announced a message of 1073741824" in server.logged("1073741824")
    bystander.check_undisturbed()
    bystander.close()


def test_half_a_message_delays_no_other_client(serve: Serve) -> None:
    server = serve()
    with shaken(server) as sock:
        sock.sendall(wire.frame(wire.Set(1, 1, "k", bytes(1000)))[:500])
        client = server.connect()
        assert not client.check(["k"])
        client.set("other", "v")
        client.close()


def test_a_message_that_comes_byte_by_byte_is_understood(serve: Serve) -> None:
    server = serve()
    with shaken(server) as sock:
        for byte in wire.frame(wire.Set(1, 1, "k", b"v")) + wire.frame(
            wire.Read(2, Query("multi_get", ("k",)))
        ):
            sock.sendall(bytes([byte]))
        want = wire.frame(wire.Done(1)) + wire.frame(wire.Done(2, [b"v"]))
        assert exactly(sock, len(want)) == want


def test_many_requests_in_one_packet_are_answered_in_order(serve: Serve) -> None:
    server = serve()
    with shaken(server) as sock:
        sock.sendall(b"".join(wire.frame(wire.Add(i, i, "n", 1)) for i in range(1, 1001)))
        want = b"".join(wire.frame(wire.Done(i, i)) for i in range(1, 1001))
        assert exactly(sock, len(want)) == want


def test_a_client_that_never_proves_the_token_is_closed(serve: Serve, small: Limits) -> None:
    server = serve(limits=small)
    with dial(server) as silent, dial(server) as slow:
        slow.sendall(wire.PREAMBLE[:3])
        assert drained(silent) == drained(slow) == b""
    server.logged("did not prove the token within 1 s")


def test_many_connections_without_the_token_do_not_keep_out_one_with_it(serve: Serve) -> None:
    server = serve(limits=Limits(handshakes=4))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(dial(server))
        client = server.connect()
        client.set("k", "v")
        client.close()
    server.logged("too many connections are in their handshake")


def test_a_client_that_does_not_read_is_stopped_from_sending(serve: Serve) -> None:
    """It may ask as much as it likes: the server stops reading, and its memory is bounded."""
    server = serve()
    owner = server.connect()
    owner.set("large", bytes(1 << 20))
    with shaken(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sock.setblocking(False)
        requests = b"".join(
            wire.frame(wire.Read(i, Query("multi_get", ("large",)))) for i in range(1, 10_000)
        )
        sent, deadline = 0, time.monotonic() + PATIENCE
        idle = time.monotonic()
        while time.monotonic() - idle < 0.3:  # until the server has stopped reading
            assert time.monotonic() < deadline, "the server continues to read"
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(requests[sent % len(requests) :])
                idle = time.monotonic()
                continue
            owner.set("other", "v")
        [connection] = [
            c
            for c in server.server.connections
            if c.session is not None and c.session.client == "a raw client"
        ]
        assert connection.transport.get_write_buffer_size() < 4 << 20
        assert owner.get("other") == b"v"
    owner.close()


def test_a_client_with_too_many_unread_answers_is_disconnected(serve: Serve) -> None:
    """Answers to blocked calls come whether or not the client reads: they are bounded."""
    limits = Limits(value_bytes=1 << 20, frame_bytes=2 << 20, outgoing_bytes=4 << 20)
    server = serve(limits=limits)
    owner = server.connect()
    with shaken(server) as sock:
        sock.sendall(
            b"".join(wire.frame(wire.Read(i, Query("multi_get", ("large",)))) for i in range(1, 65))
        )
        sock.sendall(wire.frame(wire.Add(65, 65, "ready", 1)))
        owner.wait(["ready"])
        owner.set("large", bytes(1 << 20))
        assert "it did not read" in server.logged("disconnected")
        assert owner.get("ready") == b"1"
        assert len(drained(sock)) < 64 << 20
    owner.close()


def test_one_change_that_wakes_many_calls_of_a_client_does_not_fill_the_servers_memory() -> None:
    limits = Limits(value_bytes=1 << 20, frame_bytes=2 << 20, outgoing_bytes=4 << 20)
    token = make_token()

    def most_memory() -> int:
        """Return the most memory that the server had so far, in bytes."""
        status = Path(f"/proc/{server.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    with (
        start_server(token=token, limits=limits) as server,
        connect(server.endpoint, token=token) as owner,
        _shaken(int(server.endpoint.rpartition(":")[2]), token) as sock,
    ):
        reads = (wire.Read(i, Query("multi_get", ("large",))) for i in range(1, 257))
        sock.sendall(b"".join(map(wire.frame, reads)) + wire.frame(wire.Add(300, 300, "ready", 1)))
        owner.wait(["ready"])
        before = most_memory()
        owner.set("large", bytes(1 << 20))
        assert owner.get("ready") == b"1"
        assert most_memory() - before < 64 << 20


def test_a_flood_of_one_client_does_not_block_the_others(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    between: set[int] = set()
    first, deadline = 1, time.monotonic() + PATIENCE
    with shaken(server) as sock:
        # The other client is served in the middle of a flood, again and again. On a busy machine
        # the threads of this process may not have their turns within the first one.
        while len(between) < 5:
            assert time.monotonic() < deadline, f"served after {between} of {first - 1} only"
            ids = range(first, first + 20_000)
            first = ids.stop
            sender = Background(
                sock.sendall, b"".join(wire.frame(wire.Add(i, i, "flood", 1)) for i in ids)
            )
            reader = Background(exactly, sock, sum(len(wire.frame(wire.Done(i, i))) for i in ids))
            while reader.running():
                count = client.add("flood", 0)
                if ids.start <= count < ids.stop - 1:
                    between.add(count)
            sender.result()
            reader.result()
    client.close()


def test_counts_over_the_limits_are_refused_without_effect(serve: Serve, small: Limits) -> None:
    server = serve(limits=small)
    client = server.connect()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: client.set("k" * 65, ""), "key_bytes"),
        (lambda: client.set("k", bytes(1025)), "value_bytes"),
        (lambda: client.append("k", bytes(1025)), "value_bytes"),
        (lambda: client.multi_set([str(i) for i in range(9)], [""] * 9), "at most 8 "),
        (lambda: client.check([str(i) for i in range(9)]), "at most 8 "),
        (lambda: client.multi_set(["a", "b", "c", "d"], [bytes(1024)] * 4), "frame_bytes"),
    ]
    for case, message in cases:
        with pytest.raises(StoreLimitError, match=message) as caught:
            case()
        assert caught.value.applied == "no"
    assert client.num_keys() == 0
    for number in range(16):
        client.set(str(number), "")
    with pytest.raises(StoreLimitError, match="holds 16 keys"):
        client.set("one more", "")
    client.set("15", "may still change")
    blocked = [Background(client.get, f"never {i}") for i in range(4)]
    server_side = next(iter(server.server.machine.sessions.values()))
    wait_until(lambda: len(server_side.parked) == 4, "four calls are parked")
    with pytest.raises(StoreLimitError, match=r"Limits\.parked"):
        client.get("never")
    client.close()
    for call in blocked:
        with pytest.raises(StoreClosedError):
            call.result()


def test_sessions_over_the_limit_are_refused(serve: Serve, small: Limits) -> None:
    server = serve(limits=small)
    clients: list[StoreClient] = [server.connect() for _ in range(4)]
    with pytest.raises(StoreConnectionError, match="4 sessions are open"):
        connect(server.endpoint, token=server.token, timeout=1)
    server.logged("refused")
    clients.pop().close()
    server.connect().close()
    for client in clients:
        client.close()


def test_a_client_that_resumes_an_unknown_session_gets_none(serve: Serve, small: Limits) -> None:
    server = serve(limits=small)
    with _shaken(server.port, server.token, b"unknown") as sock:
        sock.sendall(wire.frame(wire.Set(1, 1, "k", b"v")))
        assert drained(sock) == b""
    assert server.sessions() == 0
    with server.connect() as client:
        assert not client.check(["k"])


def test_a_client_that_breaks_the_protocol_gets_an_error_and_loses_its_session(
    serve: Serve,
) -> None:
    server = serve()
    with shaken(server) as sock:
        sock.sendall(wire.frame(wire.Add(9, 9, "n", 1)) + wire.frame(wire.Add(5, 9, "n", 1)))
        data = drained(sock)
    assert b"the client repeats request 5" in data
    assert server.sessions() == 0
    client = server.connect()
    assert client.get("n") == b"1"
    client.close()


def test_requests_after_bye_have_no_effect(serve: Serve) -> None:
    server = serve()
    with shaken(server) as sock:
        late = wire.Set(2, 2, "late", b"v")
        sock.sendall(wire.frame(wire.Bye(1)) + wire.frame(late))
        assert exactly(sock, len(wire.frame(wire.Done(1)))) == wire.frame(wire.Done(1))
        sock.sendall(wire.frame(late))
        client = server.connect()
        assert not client.check(["late"])
        client.close()


def test_a_refusal_of_the_connection_ends_blocked_calls(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    [connection] = server.server.connections

    def babble() -> None:
        connection.transport.write(wire.frame(wire.Failed(0, "protocol", "for the test")))

    blocked = Background(client.get, "never")
    server.loop.call_soon_threadsafe(babble)
    with pytest.raises(StoreProtocolError, match="for the test"):
        blocked.result()
    client.close()
