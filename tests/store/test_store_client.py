"""A client and a server: blocked calls, lost connections and lost sessions."""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background, CuttingProxy, ServerThread
from regrow.store import (
    ConnectionState,
    MemoryStore,
    ServerProcess,
    StoreAuthError,
    StoreClient,
    StoreClosedError,
    StoreConnectionError,
    StoreLimitError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
    StoreValueError,
    connect,
    make_token,
    start_server,
)
from regrow.store.protocol import wire
from regrow.utils import PortReservation

Join = Callable[..., StoreClient]
Serve = Callable[..., ServerThread]


@pytest.fixture
def proxied(serve: Serve) -> Iterator[tuple[ServerThread, CuttingProxy]]:
    server = serve()
    proxy = CuttingProxy(server.port)
    yield server, proxy
    proxy.stop()


class States:
    """Collects the states a client reports and waits for one."""

    def __init__(self) -> None:
        self.seen: list[ConnectionState] = []
        self._changed = threading.Condition()

    def __call__(self, state: ConnectionState) -> None:
        with self._changed:
            self.seen.append(state)
            self._changed.notify_all()

    def wait_for(self, state: ConnectionState) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: state in self.seen, PATIENCE), self.seen


def test_a_blocked_wait_delays_no_other_call_of_the_same_client(join: Join) -> None:
    client = join()
    blocked = [Background(client.wait, ["never", str(i)], PATIENCE) for i in range(5)] + [
        Background(client.get, f"never {i}") for i in range(5)
    ]
    for number in range(200):
        client.set("k", str(number))
        assert client.get("k") == str(number).encode()
    assert all(call.running() for call in blocked)
    client.close()
    for call in blocked:
        with pytest.raises(StoreClosedError):
            call.result()


def test_many_threads_share_one_client(join: Join) -> None:
    client = join()

    def work(number: int) -> None:
        for step in range(100):
            client.add("sum", 1)
            client.set(f"own {number}", str(step))
            assert client.get(f"own {number}") == str(step).encode()

    calls = [Background(work, number) for number in range(8)]
    for call in calls:
        call.result()
    assert client.get("sum") == b"800"


def test_threads_wait_for_each_other_through_one_client(join: Join) -> None:
    client = join()

    def ping(mine: str, theirs: str) -> None:
        for step in range(100):
            client.set(f"{mine} {step}", "x")
            client.wait([f"{theirs} {step}"], PATIENCE)

    for call in [Background(ping, "ping", "pong"), Background(ping, "pong", "ping")]:
        call.result()


def test_a_call_that_begins_to_read_leaves_no_bytes_of_another_call_unsent(token: bytes) -> None:
    def is_in(name: str, thread: threading.Thread) -> bool:
        """Return whether a thread is in a function of this name."""
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame is not None

    def between(frame: FrameType, event: str, arg: object) -> Any:
        """Start the large call just before this one stops the background thread from reading."""
        code, caller = frame.f_code, frame.f_back
        line = linecache.getline(code.co_filename, frame.f_lineno)
        claims = caller is not None and caller.f_code.co_name == "claim"
        if claims and ".modify(" in line and setter.ident is None:
            setter.start()
            with contextlib.suppress(AssertionError):  # it may have to wait for this call
                wait_until(lambda: is_in("_await", setter), "the large call has sent", 0.5)
        return between

    def get() -> None:
        sys.settrace(between)
        got.append(client.get("late"))

    got: list[bytes] = []
    large = bytes(15 << 20)  # more than the socket takes while the server is stopped
    with (
        start_server(token=token) as server,
        connect(server.endpoint, token=token, call_timeout=10.0) as client,
    ):
        calls = [
            threading.Thread(target=client.wait, args=(["late"], PATIENCE), daemon=True),
            threading.Thread(target=get, daemon=True),
            setter := threading.Thread(target=client.set, args=("late", large), daemon=True),
        ]
        calls[0].start()
        wait_until(lambda: is_in("_await", calls[0]), "the background thread reads")
        os.kill(server.pid, signal.SIGSTOP)
        calls[1].start()
        wait_until(lambda: is_in("readable", calls[1]), "the call reads")
        os.kill(server.pid, signal.SIGCONT)
        for call in calls:
            call.join(PATIENCE)
    assert got == [large]


def test_a_wrong_token_is_a_clear_error_on_both_sides(serve: Serve) -> None:
    server = serve()
    with pytest.raises(StoreAuthError, match="REGROW_TOKEN") as caught:
        connect(server.endpoint, token=make_token(), timeout=PATIENCE)
    assert server.endpoint in str(caught.value)
    assert "does not hold this job's token" in server.logged("refused 127.0.0.1:")


def test_a_server_without_the_token_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            conn, _ = listener.accept()
            with conn:
                conn.recv(4096)
                conn.sendall(wire.PREAMBLE + bytes(32))
                conn.recv(4096)
                conn.sendall(bytes(33))
                conn.recv(4096)

        thread = Background(pretend)
        with pytest.raises(StoreAuthError, match="not this job's store"):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", token=make_token(), timeout=PATIENCE)
        thread.result()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak the regrow store's protocol"),
        (b"REGROW\x00\x63" + bytes(32), "version 99"),
    ],
)
def test_another_service_at_the_address_is_a_clear_error(answer: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_once() -> None:
            conn, _ = listener.accept()
            with conn:
                conn.recv(4096)
                conn.sendall(answer)

        thread = Background(serve_once)
        with pytest.raises(StoreProtocolError, match=message):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", token=make_token(), timeout=PATIENCE)
        thread.result()


@pytest.fixture
def proxy_alone() -> Iterator[tuple[CuttingProxy, int]]:
    """A proxy that accepts and hangs up, and the port of the missing server behind it."""
    with PortReservation("127.0.0.1") as reservation:
        proxy = CuttingProxy(reservation.port)
        yield proxy, reservation.port
        proxy.stop()


@pytest.mark.parametrize(("final", "timeout"), [(True, PATIENCE * 100), (False, 0.2)])
def test_a_program_that_hangs_up_is_a_clear_error(
    proxy_alone: tuple[CuttingProxy, int], *, final: bool, timeout: float
) -> None:
    endpoint, token = proxy_alone[0].endpoint, make_token()
    calling = Background(connect, endpoint, token=token, timeout=timeout, refusal_is_final=final)
    with pytest.raises(StoreProtocolError, match="not a regrow store"):
        calling.result()


def test_a_client_waits_for_a_server_behind_a_proxy_that_hangs_up(
    proxy_alone: tuple[CuttingProxy, int],
) -> None:
    proxy, port = proxy_alone
    token = make_token()
    connecting = Background(connect, proxy.endpoint, token=token, timeout=PATIENCE)
    wait_until(lambda: proxy.refused > 1, "the proxy hangs up")
    with start_server(port=port, token=token), connecting.result() as client:
        client.set("k", "v")
        assert client.get("k") == b"v"


def test_a_silent_program_is_a_clear_error_after_the_timeout() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(StoreTimeout, match="not a regrow store"),
    ):
        connect(f"127.0.0.1:{listener.getsockname()[1]}", token=make_token(), timeout=0.2)


def test_no_server_is_a_clear_error_after_the_timeout() -> None:
    with (
        PortReservation() as held,
        pytest.raises(StoreConnectionError, match=f"127.0.0.1:{held.port} cannot be reached"),
    ):
        connect(f"127.0.0.1:{held.port}", token=make_token(), timeout=0.1)


def test_connect_waits_for_a_server_that_starts_later(token: bytes) -> None:
    held = PortReservation()
    early = Background(connect, f"127.0.0.1:{held.port}", token=token, timeout=PATIENCE)
    with held, start_server(port=held.port, token=token):
        client = early.result()
        client.set("k", "v")
        client.close()


def test_a_refusal_can_be_final(token: bytes) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(StoreConnectionError, match="Connection refused"):
            connect(endpoint, token=token, timeout=1e6, refusal_is_final=True)


@pytest.mark.parametrize("may_start", [True, False])
def test_a_program_that_is_silent_on_the_port_is_reported_once_with_the_address(
    token: bytes,
    may_start: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("regrow.store.client.connecting.WARN_AFTER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(StoreTimeout):
            connect(endpoint, token=token, timeout=1, server_may_start=may_start)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(f"the store at {endpoint}: it did not answer the handshake in time")
    assert "no other program has that port" in warning


def test_a_worker_warns_once_that_its_server_does_not_listen(
    token: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("regrow.store.client.connecting.WARN_AFTER_S", 0.1)
    with PortReservation() as held:
        endpoint = f"127.0.0.1:{held.port}"
        for may_start, lines in ((False, 0), (True, 1)):
            with pytest.raises(StoreConnectionError, match="refused"):
                connect(endpoint, token=token, timeout=1, server_may_start=may_start)
            assert len(caplog.records) == lines


@pytest.mark.parametrize("listens", [True, False])
def test_connecting_can_be_stopped(token: bytes, listens: bool) -> None:
    stop = os.eventfd(0)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listens:  # without an answer to any message
            mute.listen()
        endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
        connecting = Background(connect, endpoint, token=token, timeout=1e6, stop=stop)
        os.eventfd_write(stop, 1)
        with pytest.raises(StoreClosedError):
            connecting.result()
    os.close(stop)


def test_connecting_to_a_path_without_a_server_can_be_stopped(token: bytes, tmp_path: Path) -> None:
    stop = os.eventfd(0)
    connecting = Background(connect, f"unix:{tmp_path}/s", token=token, timeout=1e6, stop=stop)
    os.eventfd_write(stop, 1)
    with pytest.raises(StoreClosedError):
        connecting.result()
    os.close(stop)


def test_a_slower_link_gives_a_session_more_grace(serve: Serve) -> None:
    server = serve()
    with server.connect(session_grace=0.5), server.connect(session_grace=0.5, spare_round_trips=9):
        plain, spare = [session.grace for session in server.server.machine.sessions.values()]
    assert plain == 0.5
    assert spare > plain


def test_a_busy_server_gives_a_session_no_more_grace(serve: Serve) -> None:
    server = serve()
    server.loop.call_soon_threadsafe(time.sleep, 0.3)
    with server.connect(session_grace=0.5, spare_round_trips=9):
        (session,) = server.server.machine.sessions.values()
    assert session.grace < 0.7


def test_a_client_reports_its_own_address_on_the_route_to_the_server(
    join: Join, tmp_path: Path
) -> None:
    assert join().local_host == "127.0.0.1"
    token, path = make_token(), tmp_path / "store"
    with (
        start_server(path=str(path), token=token) as server,
        connect(server.endpoint, token=token) as client,
    ):
        assert client.local_host == ""


@pytest.mark.parametrize("endpoint", ["nowhere", "host:", "host:0", "host:70000", ":x"])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is not a store endpoint"):
        connect(endpoint, token=make_token())


def test_the_session_has_ended_when_close_returns(serve: Serve) -> None:
    server = serve()
    client = server.connect(session_grace=PATIENCE)
    assert server.sessions() == 1
    client.close()
    assert server.sessions() == 0
    with pytest.raises(StoreClosedError):
        client.set("k", "v")
    assert client.state is ConnectionState.CLOSED


def test_the_session_of_a_killed_process_ends_after_its_grace(serve: Serve) -> None:
    server = serve()
    script = (
        "import signal, sys; from regrow.store import connect;"
        "client = connect(sys.argv[1], token=sys.argv[2].encode(), session_grace=0.2);"
        "print('connected', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", script, server.endpoint, server.token.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        assert server.sessions() == 1
        process.kill()
    wait_until(lambda: server.sessions() == 0, "the session does not end")


def test_a_session_is_resumed_without_a_name_lookup(
    proxied: tuple[ServerThread, CuttingProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, proxy = proxied
    endpoint, look_up = proxy.endpoint.replace("127.0.0.1", "localhost"), socket.getaddrinfo
    with connect(endpoint, token=server.token, timeout=PATIENCE) as client:

        def fails(host: str, *args: Any, **options: Any) -> Any:
            if host == "localhost":
                raise socket.gaierror("no answer")
            return look_up(host, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        session = list(server.server.machine.sessions)
        proxy.cut_now()
        assert client.add("n", 1) == 1
        assert list(server.server.machine.sessions) == session


def test_an_address_that_never_answers_does_not_keep_a_client_from_the_next_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, look_up = serve(), socket.getaddrinfo

    def both(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host != "localhost":
            return look_up(host, port, *args, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (f"127.0.0.{n}", port)) for n in (2, 1)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setattr("regrow.store.client.connecting.TRY_S", 0.05)
    with socket.create_server(("127.0.0.2", server.port), backlog=0) as deaf:
        fill = [socket.socket() for _ in range(3)]  # later connections get no answer
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(deaf.getsockname())
        with connect(f"localhost:{server.port}", token=server.token, timeout=PATIENCE) as client:
            assert client.local_host == "127.0.0.1"
        for sock in fill:
            sock.close()


def test_a_session_outlives_a_lost_connection(proxied: tuple[ServerThread, CuttingProxy]) -> None:
    server, proxy = proxied
    states = States()
    client = connect(
        proxy.endpoint,
        token=server.token,
        timeout=PATIENCE,
        session_grace=PATIENCE,
        on_state=states,
    )
    other = server.connect()
    sessions = list(server.server.machine.sessions)
    waiting = Background(client.get, "late")
    proxy.cut_now()
    states.wait_for(ConnectionState.SUSPENDED)
    states.wait_for(ConnectionState.CONNECTED)
    other.set("late", "2")
    assert waiting.result() == b"2"
    assert list(server.server.machine.sessions) == sessions
    client.close()
    assert states.seen[-1] is ConnectionState.CLOSED
    other.close()


def test_an_idle_client_notices_a_hang_up_right_after_the_greeting(token: bytes) -> None:
    def greet() -> None:
        """Accept a connection, greet the client, and hang up at once."""
        sock, _ = listener.accept()
        with sock:
            opening = sock.recv(wire.OPENING, socket.MSG_WAITALL)
            nonce = os.urandom(wire.NONCE)
            sock.sendall(wire.PREAMBLE + nonce)
            sock.recv(wire.PROOF, socket.MSG_WAITALL)
            length = int.from_bytes(sock.recv(wire.HEADER, socket.MSG_WAITALL), "big")
            sock.recv(length, socket.MSG_WAITALL)
            proof = wire.prove(token, "server", opening[len(wire.PREAMBLE) :], nonce)
            welcome = wire.Welcome(b"session", PATIENCE, 1 << 20)
            sock.sendall(wire.ACCEPTED + proof + wire.frame(welcome))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        connecting = Background(connect, endpoint, token=token, session_grace=PATIENCE)
        greet()
        client = connecting.result()
        for _ in range(100):
            greet()
    client.close(0)


def test_a_function_for_states_that_raises_ends_no_session(
    proxied: tuple[ServerThread, CuttingProxy], caplog: pytest.LogCaptureFixture
) -> None:
    server, proxy = proxied
    states = States()

    def raises(state: ConnectionState) -> None:
        states(state)
        raise ZeroDivisionError

    client = connect(proxy.endpoint, token=server.token, session_grace=PATIENCE, on_state=raises)
    proxy.cut_now()
    states.wait_for(ConnectionState.CONNECTED)
    client.set("k", "v")
    client.close()
    seen = [ConnectionState.SUSPENDED, ConnectionState.CONNECTED, ConnectionState.CLOSED]
    assert states.seen == seen
    assert caplog.text.count("on_state of a store client raised an exception") == len(seen)


def test_a_server_that_is_gone_for_longer_than_the_grace_loses_the_session() -> None:
    token = make_token()
    states = States()
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token, session_grace=0.2, on_state=states)
        reading = Background(client.get, "never")
        os.kill(server.pid, signal.SIGKILL)
        states.wait_for(ConnectionState.LOST)
    with pytest.raises(StoreSessionLost) as caught:
        reading.result()
    assert caught.value.applied == "no"
    with pytest.raises(StoreSessionLost) as caught:
        client.set("k", "v")
    assert caught.value.applied == "no"
    assert states.seen == [ConnectionState.SUSPENDED, ConnectionState.LOST]
    client.close()


def test_another_server_at_the_same_port_does_not_know_the_session() -> None:
    token = make_token()
    with start_server(token=token) as first:
        client = connect(first.endpoint, token=token, session_grace=PATIENCE)
        client.set("k", "v")
    port = int(first.endpoint.rpartition(":")[2])
    with start_server(port=port, token=token):
        with pytest.raises(StoreSessionLost, match="no longer knows this session"):
            client.get("k")
        assert client.state is ConnectionState.LOST
    client.close()


def test_the_error_of_a_timed_out_call_has_its_possible_effect() -> None:
    token = make_token()
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token, session_grace=PATIENCE)
        client.set("k", "v")
        client.set_timeout(0.299876)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreTimeout) as sent:
                client.add("n", 1)
            with pytest.raises(StoreTimeout) as read:
                client.num_keys()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert (sent.value.applied, read.value.applied) == ("unknown", "no")
        assert "timed out after 0.3 s: no answer" in str(read.value)
        client.set_timeout(PATIENCE)
        client.set("k", "w")
        assert client.get("n") == b"1"
        client.close()
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token, session_grace=PATIENCE, call_timeout=0.3)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: client.state is ConnectionState.SUSPENDED, "suspended")
        with pytest.raises(StoreTimeout, match="suspended") as unsent:
            client.add("n", 1)
        assert unsent.value.applied == "no"
        client.close()


def test_a_forked_child_cannot_use_or_harm_the_parents_client(join: Join) -> None:
    client = join()
    blocked = Background(client.get, "set by the parent")
    read, write = os.pipe()
    with warnings.catch_warnings():  # newer Pythons warn about such forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            client.set("set by the child", "v")
            outcome = "no error"
        except StoreClosedError as error:
            outcome = f"{error.applied} {error}"
        client.close()
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        outcome = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert outcome.startswith("no ")
    assert "connect again in the child" in outcome
    client.set("set by the parent", "v")
    assert blocked.result() == b"v"
    assert not client.check(["set by the child"])


def test_calls_interrupted_by_signals_leave_the_client_whole(join: Join) -> None:
    """A signal's handler may raise anywhere in a call, also while it reads for others."""

    class Interrupted(Exception):
        pass

    armed = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False  # one interrupt a call, as with Ctrl-C
            raise Interrupted

    client = join(session_grace=PATIENCE)
    main, done = threading.get_ident(), threading.Event()
    old = signal.signal(signal.SIGUSR1, interrupt)

    def disturb() -> None:
        random = Random(1)
        while not done.wait(random.uniform(0.0, 0.002)):
            signal.pthread_kill(main, signal.SIGUSR1)

    def others() -> int:
        count = 0
        while not done.is_set():
            client.add("others", 1)
            count += 1
        return count

    disturber, beside = Background(disturb), Background(others)
    returned = interrupted = 0
    try:
        while interrupted < 200:
            try:
                armed = True
                client.add("mine", 1)
                armed = False
                returned += 1
            except Interrupted:
                interrupted += 1
    finally:
        armed = False
        done.set()
        disturber.result()
        signal.signal(signal.SIGUSR1, old)
    assert beside.result() == int(client.get("others"))
    assert returned <= int(client.get("mine")) <= returned + interrupted
    assert client.state is ConnectionState.CONNECTED


def test_a_call_that_is_interrupted_while_it_waits_for_its_answer_costs_no_connection(
    token: bytes,
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    states = States()
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token, on_state=states)
        os.kill(server.pid, signal.SIGSTOP)
        old = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(Interrupted):
                client.add("n", 1)
        finally:
            signal.signal(signal.SIGALRM, old)
            os.kill(server.pid, signal.SIGCONT)
        assert client.add("n", 1) == 2
        assert states.seen == []
        client.close()


def test_odd_arguments_are_refused_or_taken_and_do_not_end_the_session(join: Join) -> None:
    client = join()
    client.set("odd", "v")
    for key in (5, None, b"bytes"):
        with pytest.raises(StoreValueError):
            client.set(key, "v")  # type: ignore[arg-type]
    for call in (client.get, client.delete_key):
        with pytest.raises(StoreValueError):
            call("\ud800")
    with pytest.raises(StoreValueError, match="must be a list of str"):
        client.wait("odd", 1)
    with pytest.raises(StoreValueError):
        client.delete_prefix(b"odd")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        client.add("odd", "1")  # type: ignore[arg-type]
    assert client.get("odd") == b"v"
    assert client.state is ConnectionState.CONNECTED


def test_a_thousand_blocked_waits_cost_the_server_no_thread(
    join: Join, server: ServerProcess
) -> None:
    client = join()

    def threads() -> int:
        return len(os.listdir(f"/proc/{server.pid}/task"))

    before = threads()
    calls = [Background(client.wait, ["go"], PATIENCE) for _ in range(1000)]
    client.set("k", "v")
    assert client.get("k") == b"v"
    assert threads() == before
    client.set("go", "1")
    for call in calls:
        call.result()


def test_a_call_over_the_servers_limit_is_refused_before_it_is_sent(serve: Serve) -> None:
    from regrow.store import Limits

    server = serve(limits=Limits(key_bytes=64, value_bytes=1024, frame_bytes=2200))
    client = server.connect()
    with pytest.raises(StoreLimitError, match="frame_bytes") as caught:
        client.set("k", bytes(5000))
    assert caught.value.applied == "no"
    client.set("k", "v")
    client.close()


def test_a_closed_memory_handle_wakes_its_blocked_calls_alone() -> None:
    for _ in range(50):  # in most rounds both calls are blocked before the handle is closed
        store = MemoryStore()
        other = store.session()
        mine, theirs = Background(other.get, "k"), Background(store.get, "k")
        other.close()
        with pytest.raises(StoreClosedError):
            mine.result()
        store.set("k", "v")
        assert theirs.result() == b"v"
        with pytest.raises(StoreClosedError):
            other.set("k", "w")
