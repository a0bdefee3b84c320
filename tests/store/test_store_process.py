"""The store server as a process: how it starts, and that it never outlives its parent."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path

import pytest

from helpers.descriptors import open_files
from helpers.processes import GROUP_SIGNALS, children_of, ends, wait_until
from helpers.stores.storing import PATIENCE, Background
from regrow.store import (
    ServerProcess,
    StoreConnectionError,
    connect,
    make_token,
    start_server,
    start_torch_server,
)

STARTER = """
import os, sys, time
from regrow.store import make_token, start_server
server = start_server(token=make_token())
{then}
print(server.pid, flush=True)
time.sleep(100)
"""


def starter(then: str = "") -> tuple[subprocess.Popen[str], int]:
    """Start a process that starts a server; return it and a pidfd of the server."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER.format(then=then)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, os.pidfd_open(int(process.stdout.readline()))


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_its_parent(way: signal.Signals) -> None:
    parent, server = starter()
    with parent:
        parent.send_signal(way)
    assert ends(server)
    os.close(server)


def test_the_server_ends_with_its_parent_though_a_child_of_the_parent_lives_on() -> None:
    parent, server = starter(then="if os.fork() == 0: os.setsid(); time.sleep(60); os._exit(0)")
    with parent:
        parent.kill()
        assert ends(server)
        os.close(server)
        assert parent.stdout is not None
        parent.stdout.close()


def test_a_server_that_sigkill_does_not_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(token=make_token())
    pidfd = os.pidfd_open(server.pid)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        # As for a process in state D, which ends when the kernel resumes it, or never.
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        monkeypatch.setattr("regrow.utils.process.KILL_S", 0.05)
        closing = Background(server.close, 0.05)
        closing.result()
        assert f"the store server (pid {server.pid}) has not ended" in caplog.text
    finally:
        os.kill(server.pid, signal.SIGKILL)
        assert ends(pidfd)
        os.waitpid(server.pid, 0)
        os.close(pidfd)


def test_the_server_survives_the_thread_that_started_it() -> None:
    token, started = make_token(), []
    thread = threading.Thread(target=lambda: started.append(start_server(token=token)))
    thread.start()
    thread.join(PATIENCE)
    with started[0] as server, connect(server.endpoint, token=token) as client:
        client.set("k", "v")
        assert client.get("k") == b"v"


def test_the_server_ignores_what_is_sent_to_all_processes_of_a_job() -> None:
    token = make_token()
    with start_server(token=token) as server:
        assert os.getsid(server.pid) == server.pid
        for signum in GROUP_SIGNALS:
            os.kill(server.pid, signum)
        with connect(server.endpoint, token=token) as client:
            client.set("k", "v")
            assert client.get("k") == b"v"


def test_a_closed_server_is_gone_and_may_be_closed_again() -> None:
    server = start_server(token=make_token())
    assert server.alive()
    pidfd = os.pidfd_open(server.pid)
    server.close()
    assert ends(pidfd)
    assert not server.alive()
    server.close()
    os.close(pidfd)


def test_the_descriptor_of_a_killed_server_becomes_readable() -> None:
    with start_server(token=make_token()) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert ends(server.fileno())
        assert not server.alive()


def test_a_server_that_does_not_stop_is_killed() -> None:
    server = start_server(token=make_token())
    pidfd = os.pidfd_open(server.pid)
    os.kill(server.pid, signal.SIGSTOP)
    server.close(timeout=0.1)
    assert ends(pidfd)
    os.close(pidfd)


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreConnectionError, match=f"cannot listen on 127.0.0.1:{port}"):
            start_server(port=port, token=make_token())


def test_a_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path, token = tmp_path / "store", make_token()
    with start_server(path=str(path), token=token) as server:
        assert server.endpoint == f"unix:{path}"
        assert path.stat().st_mode & 0o077 == 0
        with connect(server.endpoint, token=token) as client:
            client.set("k", "v")
            assert client.get("k") == b"v"
    assert not path.exists()


def test_ipv6_and_names_are_understood() -> None:
    token = make_token()
    with start_server("::1", token=token) as server:
        assert server.endpoint.startswith("[::1]:")
        with connect(server.endpoint, token=token) as client:
            client.set("k", "v")
    with (
        start_server("127.0.0.1", token=token) as server,
        connect(server.endpoint.replace("127.0.0.1", "localhost"), token=token) as client,
    ):
        client.set("k", "v")


def test_a_file_beside_the_users_script_does_not_take_a_modules_place(tmp_path: Path) -> None:
    for name in ("asyncio", "msgspec", "json", "regrow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    script = (
        "import sys; sys.path.pop(0);"
        "from regrow.store import *; import os; sys.path.insert(0, os.getcwd());"
        "server = start_server(token=make_token()); print(server.endpoint); server.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE * 2,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("127.0.0.1:")


def test_the_descriptors_of_a_server_are_given_back() -> None:
    gc.collect()  # leftovers of older tests of this process
    before = open_files()
    for _ in range(2):
        server: ServerProcess = start_server(token=(token := make_token()))
        connect(server.endpoint, token=token).close()
        server.close()
    assert open_files() <= before


def test_a_child_that_is_forked_while_a_server_is_closed_closes_no_other_file() -> None:
    """The closed descriptor's number may be that of another file by then."""
    token = make_token()
    server = start_server(token=token, linger=True)
    client = connect(server.endpoint, token=token)
    pipes = {file for file in open_files() if file[1].startswith("pipe:")}
    closing = Background(server.close, wait=PATIENCE)  # waits for the client
    wait_until(lambda: bool(pipes - open_files()), "the server is told")
    ((number, _),) = pipes - open_files()
    other = fcntl(0, F_DUPFD_CLOEXEC, int(number))
    with warnings.catch_warnings():  # newer Pythons warn about such forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.fstat(other)
            code = 0
        finally:
            os._exit(code)
    assert other == int(number)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(other)
    client.close()
    closing.result()


STARTER_WITHOUT_DESCRIPTORS = """
import os, resource, socket
from regrow.store import make_token, start_server, start_torch_server

def start(spare):
    # Return whether a start succeeds with a number of spare descriptors.
    for fd in taken[:spare]:
        os.close(fd)
    try:
        {start}.close(timeout=0)
    except OSError:
        return False
    else:
        return True
    finally:
        taken[:spare] = [os.dup(0) for _ in range(spare)]  # fails if the start left one open

token, listener, taken = make_token(), socket.create_server(("127.0.0.1", 0)), []
start(0)  # imports everything
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    print(next(spare for spare in range(20) if start(spare)) > 2)
"""
STARTS = ["start_server(token=token)", "start_torch_server(listener)"]


@pytest.mark.parametrize("start", STARTS)
def test_a_start_without_free_descriptors_leaves_none_open(start: str) -> None:
    script = STARTER_WITHOUT_DESCRIPTORS.format(start=start)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == (b"True\n", b"")


def _start_store(listener: socket.socket) -> ServerProcess:
    return start_server(token=make_token(), listener=listener)


@pytest.mark.parametrize("start", [_start_store, start_torch_server])
def test_a_server_without_a_descriptor_for_its_process_is_ended(
    start: Callable[[socket.socket], ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    files, children = open_files(), children_of(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", fails)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="Too"):
        start(listener)
    assert open_files() <= files
    assert set(children_of(os.getpid())) <= set(children)


def test_a_server_starts_beside_more_than_a_thousand_open_files() -> None:
    script = """
import os, resource
from regrow.store import make_token, start_server
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
files = [os.dup(0) for _ in range(1100)]
with start_server(token=make_token()) as server:
    print(server.endpoint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"")
