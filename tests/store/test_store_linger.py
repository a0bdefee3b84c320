"""A server that outlives its starter as long as clients need it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.processes import ends, wait_until
from helpers.stores.storing import PATIENCE, Background
from regrow.store import (
    ServerProcess,
    StoreAuthError,
    StoreClient,
    connect,
    make_token,
    start_server,
)

TOKEN = make_token()
STARTER = """
import os, signal, sys
from regrow.store import connect, start_server
token = sys.argv[1].encode()
server = start_server(token=token, linger=True)
client = connect(server.endpoint, token=token, session_grace=0.1)
client.set("from", "starter")
print(server.pid, server.endpoint, flush=True)
{then}
"""


class Started:
    """A process that has started a server that lingers, with a client of its own."""

    def __init__(self, then: str = "signal.pause()") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER.format(then=then), TOKEN.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        pid, self.endpoint = self.process.stdout.readline().split()
        self.server = os.pidfd_open(int(pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)  # no process holds its output open

    def server_runs(self) -> bool:
        return not ends(self.server, 0)

    def connect(self) -> StoreClient:
        return connect(self.endpoint, token=TOKEN, timeout=PATIENCE)

    def clean(self) -> None:
        self.kill()
        assert ends(self.server), "a server was left behind"
        os.close(self.server)


@pytest.fixture
def started() -> Iterator[Started]:
    started = Started()
    yield started
    started.clean()


def test_a_killed_starter_costs_the_others_nothing(started: Started) -> None:
    with started.connect() as one, started.connect() as other:
        started.kill()
        waiting = Background(other.wait, ["k"], PATIENCE)
        one.set("k", "v")
        waiting.result()
        assert one.get("from") == b"starter"
        with started.connect() as new:  # new clients are served as well
            assert new.get("k") == b"v"
        assert started.server_runs()
    assert ends(started.server)


def test_the_server_of_a_killed_starter_without_clients_ends(started: Started) -> None:
    started.kill()
    with started.connect() as late:  # the first client comes late
        assert late.get("from") == b"starter"
    assert ends(started.server)


def test_a_starter_that_ends_without_a_goodbye_leaves_the_server_to_the_clients() -> None:
    started = Started(then="input()")
    with started.connect() as client:
        started.process.communicate("\n", timeout=PATIENCE)
        assert started.process.returncode == 0
        client.set("k", "v")
    started.clean()


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = start_server(token=TOKEN, linger=True)
    pidfd = os.pidfd_open(server.pid)
    yield server
    server.close()
    assert ends(pidfd), "a server was left behind"
    os.close(pidfd)


def test_a_starter_that_sends_a_goodbye_waits_for_the_other_clients(server: ServerProcess) -> None:
    with connect(server.endpoint, token=TOKEN) as client:
        closing = Background(server.close, wait=PATIENCE)
        client.set("k", "v")
        assert client.get("k") == b"v"
        assert closing.running()
    closing.result()
    assert not server.alive()


def test_a_server_without_clients_ends_with_the_goodbye_of_its_starter(
    server: ServerProcess,
) -> None:
    pidfd = os.pidfd_open(server.pid)
    server.close(wait=PATIENCE)
    assert ends(pidfd, 0)  # it ended at once, and waited for no new clients
    os.close(pidfd)


def test_a_starter_that_does_not_wait_leaves_the_server_to_the_other_clients(
    server: ServerProcess,
) -> None:
    pidfd = os.pidfd_open(server.pid)
    with connect(server.endpoint, token=TOKEN) as client:
        server.close(wait=0)
        client.set("k", "v")
        assert not ends(pidfd, 0)
    assert ends(pidfd)
    os.close(pidfd)
    os.waitpid(server.pid, 0)


def test_a_starter_that_does_not_wait_leaves_the_other_clients_time_to_reconnect(
    server: ServerProcess,
) -> None:
    pidfd = os.pidfd_open(server.pid)
    client = connect(server.endpoint, token=TOKEN)
    server.close(wait=0)
    # Only a stopped server finds at once that the last session has ended and the next one begins.
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    client.close(0)
    coming = Background(connect, server.endpoint, token=TOKEN, timeout=PATIENCE)
    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    with coming.result() as back:
        back.set("k", "v")
        assert back.get("k") == b"v"
    assert ends(pidfd)
    os.close(pidfd)
    os.waitpid(server.pid, 0)


def test_the_next_start_reaps_a_server_that_was_left_to_its_clients(server: ServerProcess) -> None:
    """The handle is closed before the server ends, so its starter had a zombie for ever."""
    pidfd = os.pidfd_open(server.pid)
    with connect(server.endpoint, token=TOKEN):
        server.close(wait=0)
    assert ends(pidfd)
    os.close(pidfd)
    with start_server(token=TOKEN), pytest.raises(ChildProcessError):
        os.waitpid(server.pid, os.WNOHANG)


def test_a_closed_server_ends_despite_its_clients(server: ServerProcess) -> None:
    pidfd = os.pidfd_open(server.pid)
    with connect(server.endpoint, token=TOKEN) as client:
        server.close()
        assert ends(pidfd, 0)
        wait_until(lambda: client.state.value != "connected", "the client notices")
    os.close(pidfd)


def test_a_server_without_its_starter_still_refuses_strangers(started: Started) -> None:
    with started.connect() as client:
        started.kill()
        # It logs each refusal, and its log has no reader any more.
        for _ in range(2):
            with pytest.raises(StoreAuthError):
                connect(started.endpoint, token=make_token(), timeout=PATIENCE)
        client.set("k", "v")
        assert client.get("k") == b"v"


def test_a_client_that_visits_does_not_keep_the_server(started: Started) -> None:
    with (
        started.connect() as stays,
        connect(started.endpoint, token=TOKEN, timeout=PATIENCE, visits=True) as visitor,
    ):
        started.kill()
        stays.set("k", "v")
        assert visitor.get("k") == b"v"
        assert started.server_runs()
        stays.close()
        assert ends(started.server)
