"""The health-check server, asked over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest

from regrow.agent.features.health import HealthCheckServer, create_healthcheck_server
from regrow.utils import http_server
from regrow.utils.http_server import HttpRequest, HttpResponse, HttpServer

Make = Callable[..., HealthCheckServer]


@pytest.fixture
def serve() -> Iterator[Make]:
    """Start a server on a free port: `serve(age, timeout=60)`."""
    servers: list[HealthCheckServer] = []

    def start(age: Callable[[], float] = lambda: 0.0, timeout: int = 60) -> HealthCheckServer:
        server = HealthCheckServer(lambda: 0, 0, timeout, age=age)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


def ask(
    server: HealthCheckServer, path: str = "/healthz", method: str = "GET"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def report(server: HealthCheckServer) -> tuple[int, dict[str, object]]:
    status, body = ask(server)
    return status, json.loads(body)


def raw(server: HealthCheckServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30)


def read_all(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(65536):
        received += data
    return received


def test_it_is_healthy_while_there_is_progress(serve: Make) -> None:
    server = serve(lambda: 12.3456, timeout=60)
    assert report(server) == (200, {"status": "healthy", "last_progress_s": 12.346})


def test_it_is_unhealthy_when_the_last_progress_is_too_long_ago(serve: Make) -> None:
    server = serve(lambda: 60.5, timeout=60)
    assert report(server) == (503, {"status": "unhealthy", "last_progress_s": 60.5})


def test_it_is_healthy_up_to_the_time_out_itself(serve: Make) -> None:
    assert report(serve(lambda: 60.0, timeout=60))[0] == 200


def test_it_becomes_healthy_again(serve: Make) -> None:
    ages = iter([1.0, 100.0, 2.0])
    server = serve(lambda: next(ages))
    assert [report(server)[0] for _ in range(3)] == [200, 503, 200]


@pytest.mark.parametrize(
    ("last_progress", "status"), [(lambda now: now, 200), (lambda now: now - 100, 503)]
)
def test_torchs_callback_returns_the_time_of_the_last_progress(
    last_progress: Callable[[int], int], status: int
) -> None:
    server = create_healthcheck_server(lambda: last_progress(int(time.time())), 0, 60)
    assert isinstance(server, HealthCheckServer)
    server.start()
    try:
        answer, fields = report(server)
        assert answer == status
        assert isinstance(fields["last_progress_s"], int)
        assert abs(fields["last_progress_s"] - (100 if status == 503 else 0)) <= 30
    finally:
        server.stop()


def test_a_clock_set_back_does_not_make_a_live_agent_unhealthy() -> None:
    server = create_healthcheck_server(lambda: int(time.time()) + 3600, 0, 60)
    server.start()
    try:
        assert report(server) == (200, {"status": "healthy", "last_progress_s": 0})
    finally:
        server.stop()


def test_a_callback_that_fails_makes_the_agent_unhealthy_with_its_error(serve: Make) -> None:
    def fail() -> float:
        raise RuntimeError("no clock")

    server = serve(fail)
    assert report(server) == (503, {"status": "unhealthy", "error": "RuntimeError('no clock')"})
    assert report(server)[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/healthz/", 404),
        ("GET", "/other", 404),
        ("GET", "/healthz?verbose=1", 200),
        ("HEAD", "/healthz", 200),
        ("POST", "/healthz", 405),
        ("DELETE", "/healthz", 405),
    ],
)
def test_only_get_healthz_is_answered_with_health(
    serve: Make, method: str, path: str, status: int
) -> None:
    answer, body = ask(serve(), path, method)
    assert answer == status
    assert (body == b"") == (method == "HEAD")


def test_the_server_listens_on_ipv4_and_ipv6() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = create_healthcheck_server(lambda: int(time.time()), 0, 60)
    server.start()
    try:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, server.port), 30) as client:
                client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert read_all(client).startswith(b"HTTP/1.1 200 OK\r\n")
    finally:
        server.stop()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = create_healthcheck_server(lambda: 0, port, 60)
        with pytest.raises(OSError, match=f"cannot listen on port {port}: Address already in use"):
            server.start()
        server.stop()


def test_a_number_that_is_no_port_is_named() -> None:
    with pytest.raises(ValueError, match="port 70000 is not between 0 and 65535"):
        create_healthcheck_server(lambda: 0, 70000, 60)


def test_stop_gives_the_port_back_and_ends_the_thread(serve: Make) -> None:
    threads = set(threading.enumerate())
    server = serve()
    idle = raw(server)
    answered = raw(server)
    answered.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
    read_all(answered)
    server.stop()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ConnectionRefusedError):
        raw(server)
    socket.create_server(("127.0.0.1", server.port)).close()
    assert idle.recv(1) == b""
    idle.close()
    answered.close()


def test_stop_gives_the_port_back_although_a_child_holds_the_socket_too() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = HttpServer(listener, lambda _: HttpResponse(200, b""), "server")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    try:
        server.stop()
        socket.create_server(address).close()
    finally:
        child.communicate(timeout=30)


def test_stop_and_start_may_be_called_at_any_time(serve: Make) -> None:
    never = HealthCheckServer(lambda: 0, 0, 60)
    never.stop()
    server = serve()
    server.start()
    server.stop()
    server.stop()
    server.start()
    assert ask(server)[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"rubbish\r\n",
        b"GET healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz SPDY/3\r\n\r\n",
        b"GET /healthz HTTP/1.1 more\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_garbage_is_answered_with_400(serve: Make, request_: bytes) -> None:
    with raw(serve()) as client:
        client.sendall(request_)
        assert read_all(client).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * 20_000,
        b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"POST /healthz HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    ],
)
def test_a_request_without_end_is_refused_and_not_kept(serve: Make, request_: bytes) -> None:
    with raw(serve()) as client:
        client.sendall(request_)
        assert read_all(client).startswith(b"HTTP/1.1 413 Content Too Large\r\n")


def test_a_request_may_come_in_single_bytes(serve: Make) -> None:
    with raw(serve()) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
            client.sendall(bytes([byte]))
        assert read_all(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_slow_clients_do_not_keep_a_probe_waiting(serve: Make) -> None:
    server = serve()
    slow = [raw(server) for _ in range(10)]
    for client in slow:
        client.sendall(b"GET /hea")
    assert ask(server)[0] == 200
    slow[0].sendall(b"lthz HTTP/1.1\r\n\r\n")
    assert read_all(slow[0]).startswith(b"HTTP/1.1 200 OK\r\n")
    for client in slow:
        client.close()


def test_the_oldest_client_is_dropped_when_there_are_too_many(serve: Make) -> None:
    server = serve()
    crowd = [raw(server) for _ in range(http_server.MOST_CLIENTS + 5)]
    assert ask(server)[0] == 200
    assert [client.recv(1) for client in crowd[:6]] == [b""] * 6
    crowd[-1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert read_all(crowd[-1]).startswith(b"HTTP/1.1 200 OK\r\n")
    for client in crowd:
        client.close()


def test_a_client_that_sends_nothing_is_dropped_after_its_time(
    serve: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CLIENT_TIME_S", 0.05)
    with raw(serve()) as client:
        assert client.recv(1) == b""


class Listener(socket.socket):
    """A listening socket that remembers an `accept` that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = threading.Event()
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, object]:
        try:
            return super().accept()
        except OSError:
            self.failed.set()
            raise


def test_a_process_out_of_file_descriptors_answers_again_when_it_has_some() -> None:
    listener = Listener()
    server = HttpServer(listener, lambda _: HttpResponse(200, b""), "server")
    with socket.socket() as client:
        client.settimeout(30)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            client.connect(listener.getsockname())
            assert listener.failed.wait(30), "the server did not notice"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 OK\r\n")
    server.stop()


def test_a_client_that_never_stops_sending_is_dropped_after_its_time(
    serve: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CLIENT_TIME_S", 0.05)
    chatter = repeat(b"G")
    with raw(serve()) as client, pytest.raises(OSError, match=r"Broken pipe|Connection reset"):
        deque(map(client.sendall, chatter), maxlen=0)


def test_an_answer_that_raises_is_sent_as_its_text() -> None:
    def answer(request: HttpRequest) -> HttpResponse:
        raise RuntimeError(f"no {request.query}")

    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(listener, answer, "server")
    with socket.create_connection(listener.getsockname(), 30) as client:
        client.sendall(b"GET /?luck HTTP/1.1\r\n\r\n")
        received = read_all(client)
    server.stop()
    assert received.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert received.endswith(b"\r\n\r\nRuntimeError: no luck\n")
