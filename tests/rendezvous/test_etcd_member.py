"""The connections to one member of etcd, which here is whatever a test makes of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from storing import PATIENCE, Background

from regrow.rendezvous._etcd_answers import EtcdUnreachable
from regrow.rendezvous._etcd_member import Member

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        yield listener


@pytest.fixture
def member(listener: socket.socket) -> Iterator[Member]:
    member = Member("127.0.0.1", listener.getsockname()[1], None)
    yield member
    member.close()


def ask(member: Member) -> Background:
    return Background(member.ask, "kv/range", b"{}", "", PATIENCE, PATIENCE)


def taken(listener: socket.socket) -> socket.socket:
    """The next connection, from which a request was read."""
    connection, _ = listener.accept()
    assert connection.recv(65536)
    return connection


def test_a_connection_that_was_closed_while_nobody_used_it_is_replaced(
    listener: socket.socket, member: Member
) -> None:
    first = ask(member)
    with taken(listener) as connection:
        connection.sendall(ANSWER)
        assert first.result() == (200, b"{}")
    second = ask(member)
    with taken(listener) as connection:
        connection.sendall(ANSWER)
        assert second.result() == (200, b"{}")


def test_a_call_that_is_cut_asks_the_silent_member_no_second_time(
    listener: socket.socket, member: Member
) -> None:
    first = ask(member)
    with taken(listener) as connection:
        connection.sendall(ANSWER)
        assert first.result() == (200, b"{}")
        second = ask(member)  # over the same connection
        assert connection.recv(65536)
        member.cut()
        with pytest.raises(ConnectionError):
            second.result()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_stream_that_is_the_last_answer_of_its_connection_is_one(
    listener: socket.socket, member: Member
) -> None:
    """As of a proxy that takes one request a connection."""
    opening = Background(member.listen, "watch", b"{}", "", PATIENCE, PATIENCE)
    with taken(listener) as connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        stream = opening.result()
        stream.wait_at_most(None)
        connection.sendall(b'{"result": {"n": 1}}\n')
        messages = iter(stream)
        assert next(messages) == {"n": 1}
        waiting = Background(next, messages)
        member.cut()
        with pytest.raises(EtcdUnreachable):
            waiting.result()
        stream.end()
        assert stream._sock.fileno() < 0


def test_the_kernel_asks_whether_a_silent_host_is_still_there(
    listener: socket.socket, member: Member
) -> None:
    """A watch has nothing to send, and so would never know."""
    opening = Background(member.listen, "watch", b"{}", "", PATIENCE, PATIENCE)
    with taken(listener) as connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        stream = opening.result()
        (sock,) = member._busy.values()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        stream.end()
