"""The connections to the members of etcd; tests act as the members."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.descriptors import open_files
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous.backends.etcd import etcd_client
from regrow.rendezvous.backends.etcd.etcd_client import (
    Access,
    EtcdClient,
    EtcdMember,
    EtcdUnreachable,
)

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LEASE = 7


# --- one member


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        yield listener


@pytest.fixture
def member(listener: socket.socket) -> Iterator[EtcdMember]:
    member = EtcdMember("127.0.0.1", listener.getsockname()[1], None)
    yield member
    member.close()


def ask(member: EtcdMember) -> Background:
    return Background(member.ask, "kv/range", b"{}", "", PATIENCE)


def accept(listener: socket.socket) -> socket.socket:
    """Accept the next connection, read a request from it, and return it."""
    connection, _ = listener.accept()
    assert connection.recv(65536)
    return connection


def test_a_connection_that_was_closed_while_idle_is_replaced(
    listener: socket.socket, member: EtcdMember
) -> None:
    first = ask(member)
    with accept(listener) as connection:
        connection.sendall(ANSWER)
        assert first.result() == (200, b"{}")
    second = ask(member)
    with accept(listener) as connection:
        connection.sendall(ANSWER)
        assert second.result() == (200, b"{}")


def test_a_call_that_is_cut_sends_no_second_request_to_the_silent_member(
    listener: socket.socket, member: EtcdMember
) -> None:
    first = ask(member)
    with accept(listener) as connection:
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


def test_a_stream_works_on_a_connection_that_serves_one_request_only(
    listener: socket.socket, member: EtcdMember
) -> None:
    """Some proxies accept one request per connection."""
    before = open_files()
    messages = member.listen("watch", b"{}", "", PATIENCE)
    opening = Background(next, messages)
    with accept(listener) as connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        connection.sendall(b'{"result": {"n": 1}}\n')
        assert opening.result() == {"n": 1}
        waiting = Background(next, messages)
        member.cut()
        with pytest.raises(ConnectionError):
            waiting.result()
    assert open_files() <= before


def test_the_kernel_probes_the_host_of_a_silent_stream(
    listener: socket.socket, member: EtcdMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch sends nothing, so it would never detect a lost host."""
    probed: list[socket.socket] = []
    monkeypatch.setattr(etcd_client, "keep_alive", probed.append)
    messages = member.listen("watch", b"{}", "", PATIENCE)
    opening = Background(next, messages)
    with accept(listener) as connection:
        connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"result": {}}\n')
        assert opening.result() == {}
        assert [sock.getpeername() for sock in probed] == [listener.getsockname()]
        messages.close()


# --- a cluster


class Cluster:
    """Members with two settings: whether and when they answer. They count renewals of leases."""

    def __init__(self) -> None:
        self.renewed = 0
        self.delay = 0.0
        self.answers = threading.Event()
        self.answers.set()
        self.over = threading.Event()
        self._servers = [self._member() for _ in range(3)]
        self.endpoints = tuple(("127.0.0.1", server.server_port) for server in self._servers)

    def _member(self) -> ThreadingHTTPServer:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                body = b"{}"
                if self.path == "/v3/lease/keepalive":
                    cluster.renewed += 1
                    body = b'{"result": {"ID": "%d", "TTL": "3"}}' % LEASE
                cluster.over.wait(cluster.delay)
                if not cluster.answers.is_set():
                    cluster.over.wait(PATIENCE)
                    self.close_connection = True
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return server

    def close(self) -> None:
        self.over.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_host_that_receives_no_answers_renews_its_lease_once_at_most(cluster: Cluster) -> None:
    client = EtcdClient(Access(cluster.endpoints), PATIENCE)
    for _ in range(3):
        assert client.renew([LEASE]) == [True]
    cluster.answers.clear()
    before = cluster.renewed
    for _ in range(2):
        with client.within(1.0), pytest.raises(EtcdUnreachable):
            client.renew([LEASE])
    assert cluster.renewed == before + 1
    cluster.answers.set()
    assert client.renew([LEASE]) == [True]
    client.close()


def test_a_call_leaves_a_silent_member_and_cuts_its_connections(
    listener: socket.socket, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda members: None)
    silent = ("127.0.0.1", listener.getsockname()[1])
    http = EtcdClient(Access((silent, cluster.endpoints[0])), PATIENCE)
    asking = Background(http.call, "kv/range", {})
    with accept(listener) as connection:
        assert asking.result() == [{}]
        connection.settimeout(PATIENCE)
        while connection.recv(65536):  # the rest of the request, up to the end
            pass
    assert http.call("kv/range", {}) == [{}]  # the silent member gets no request
    http.close()


def test_attempts_grow_longer_for_a_slow_etcd(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.rendezvous.backends.etcd.etcd_client.ATTEMPT", 0.05)
    cluster.delay = 0.3
    http = EtcdClient(Access(cluster.endpoints), PATIENCE)
    assert http.call("kv/range", {}) == [{}]
    http.close()


def test_an_attempt_at_a_distant_member_outlives_one_lost_packet(cluster: Cluster) -> None:
    client = EtcdClient(Access(cluster.endpoints[:1]), PATIENCE)
    cluster.delay = 0.6
    client.call("kv/range", {})
    cluster.delay = 0.8  # TCP sends a lost packet again
    assert client.renew([LEASE]) == [True]
    assert cluster.renewed == 1
    client.close()
