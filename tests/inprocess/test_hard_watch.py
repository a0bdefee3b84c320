"""The connection of a rank to its monitor."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from helpers.processes import PATIENCE
from regrow.inprocess.watchdog import monitor_client
from regrow.inprocess.watchdog.monitor_client import (
    DEADLINE,
    GOODBYE,
    UNCHECKED,
    HardWatch,
    RankDeadline,
    Terms,
    monitor_environment,
    monitor_job,
    monitor_name,
)
from regrow.workers.guardian.procfs import MARK

JOB = f"test-{os.getpid()}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """The socket on which a monitor listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(monitor_name(JOB))
        listener.listen()
        yield listener


def test_a_monitor_has_the_agents_mark_and_not_that_of_the_worker_that_started_it() -> None:
    environ = {"REGROW_WORKER": "/12-ab/3/", "REGROW_HEARTBEAT": "10", "A": "b"}
    assert monitor_environment(environ) == {"REGROW_WORKER": "/12-ab/", "A": "b"}
    assert monitor_environment({"REGROW_WORKER": "/12-ab/3/45-cd/6/"}) == {
        "REGROW_WORKER": "/12-ab/3/45-cd/"
    }
    assert monitor_environment({"A": "b"}) == {"A": "b"}


def test_a_rank_finds_the_running_monitor_and_sends_packets(
    listener: socket.socket,
) -> None:
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    monitor, _ = listener.accept()
    with monitor:
        assert b'"rank": 3' in monitor.recv(1 << 16)
        watch.change(10.0, UNCHECKED)
        assert DEADLINE.unpack(monitor.recv(1 << 16)) == (1, 10.0, UNCHECKED)
        watch.send(RankDeadline(1, 11.0, 4))
        assert DEADLINE.unpack(monitor.recv(1 << 16)) == (1, 11.0, 4)
        watch.change(math.inf, UNCHECKED)
        assert DEADLINE.unpack(monitor.recv(1 << 16)) == (2, float("inf"), UNCHECKED)
        watch.close()
        assert monitor.recv(1 << 16) == GOODBYE
        assert monitor.recv(1 << 16) == b""


def test_a_monitor_that_does_not_read_does_not_block_the_rank(
    listener: socket.socket,
) -> None:
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    monitor, _ = listener.accept()
    with monitor:
        monitor.setblocking(False)
        for at in range(5000):  # more than a connection's buffer holds
            watch.send(RankDeadline(1, float(at)))
        received = 0
        while received < 5000:
            try:
                monitor.recv(1 << 16)
            except BlockingIOError:
                break
            received += 1
        assert 0 < received < 5000
        watch.send(RankDeadline(1, 4999.0))
        assert DEADLINE.unpack(monitor.recv(1 << 16)) == (1, 4999.0, UNCHECKED)
        watch.close()


def test_a_monitor_that_has_lasted_is_replaced_at_once_however_often_it_ends(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(monitor_client, "time", SimpleNamespace(monotonic=lambda: now))
    listener.settimeout(PATIENCE)
    deadline = RankDeadline(0, math.inf)
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    for _ in range(10):
        monitor, _ = listener.accept()
        now += 2.0
        watch.reconnect(deadline)  # the monitor still runs
        monitor.close()
        watch.reconnect(deadline)
    watch.close()


def test_a_forked_child_sends_nothing_over_its_parents_connection(listener: socket.socket) -> None:
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    monitor, _ = listener.accept()
    with monitor:
        monitor.recv(1 << 16)
        child = os.fork()
        if child == 0:
            watch.change(math.inf, UNCHECKED)
            os._exit(0)
        os.waitpid(child, 0)
        watch.change(5.0, UNCHECKED)
        assert DEADLINE.unpack(monitor.recv(1 << 16)) == (1, 5.0, UNCHECKED)
        watch.close()


def test_a_monitor_keeps_nothing_open_that_its_rank_lets_others_inherit() -> None:
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), f"{JOB}-pipe")
    os.close(writes)
    ended = select.poll()
    ended.register(reads, select.POLLHUP)
    assert ended.poll(1000 * PATIENCE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as another:
        another.connect(monitor_name(f"{JOB}-pipe"))  # it has not ended
    watch.close()
    os.close(reads)


WATCHED_RANK = """
import sys
from regrow.inprocess.watchdog.monitor_client import HardWatch, Terms
store = {"endpoint": sys.argv[3], "token": "00" * 16}
watch = HardWatch(Terms(int(sys.argv[2]), 90.0, 5.0, "group", **store), sys.argv[1])
print("watched", flush=True)
sys.stdin.read()
"""


def watched_rank(number: int, endpoint: str = "127.0.0.1:1") -> subprocess.Popen[bytes]:
    """Return a process that has started a monitor, or has connected to it."""
    command = [sys.executable, "-c", WATCHED_RANK, f"{JOB}-stderr", str(number), endpoint]
    pipe = subprocess.PIPE
    rank = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"watched\n"
    return rank


def test_the_stderr_of_a_rank_that_started_the_monitor_ends_with_the_rank() -> None:
    with watched_rank(0) as first:
        with watched_rank(1) as second:
            first.kill()
            assert first.stderr is not None
            ended = select.poll()
            ended.register(first.stderr, select.POLLHUP)
            found = ended.poll(1000 * PATIENCE)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as another:
                another.connect(monitor_name(f"{JOB}-stderr"))  # the monitor has not ended
            second.kill()
        assert found


def test_the_stderr_of_the_last_rank_ends_before_the_last_report_of_the_monitor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:  # it sends no answer
        store.settimeout(PATIENCE)
        host, port = store.getsockname()
        with watched_rank(0, f"{host}:{port}") as rank:
            rank.kill()
            report, _ = store.accept()
            with report:
                ended = select.poll()
                assert rank.stderr is not None
                ended.register(rank.stderr, select.POLLHUP)
                ended.register(report, select.POLLRDHUP)
                found = [fd for fd, _ in ended.poll(1000 * PATIENCE)]
                assert found == [rank.stderr.fileno()]


def test_ranks_of_two_agents_on_a_host_have_monitors_of_their_own() -> None:
    """An agent kills the monitor with the last of its workers."""
    one, beside, other = ({MARK: mark} for mark in ("/7-aa/1/", "/7-aa/2/", "/8-bb/1/"))
    assert monitor_name(JOB, one) == monitor_name(JOB, beside)
    assert len({monitor_name(JOB, environ) for environ in (one, other, {})}) == 3


def test_no_other_user_can_guess_the_name_of_a_monitors_socket() -> None:
    """The name is derived from the token of the ranks' store."""
    jobs = [monitor_job("unix:/x", token) for token in (b"a" * 16, b"b" * 16)]
    assert len({monitor_name(job) for job in (*jobs, "unix:/x")}) == 3


LISTENS = """
import os, socket, sys
os.setuid(65534)  # not before: this user need not be able to read Python's files
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(bytes.fromhex(sys.argv[1]))
    listener.listen()
    print("listens", flush=True)
    connection, _ = listener.accept()
    print(len(connection.recv(1 << 16)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_socket_of_another_user_gets_no_token_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = monitor_name(f"{JOB}-taken").hex()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LISTENS, name],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "listens\n"
            HardWatch(Terms(3, 90.0, 5.0, "group", token="a secret"), f"{JOB}-taken").close()
            received, _ = other.communicate(timeout=PATIENCE)
        finally:
            other.kill()
    assert received == "0\n"
    assert "the hard time-out of 90 s of initial rank 3 is not enforced" in caplog.text
    assert "belongs to another user (65534)" in caplog.text


def test_a_training_continues_without_a_monitor_and_logs_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    watch.change(time.monotonic() + 90.0, UNCHECKED)
    watch.close()
    assert "the hard time-out of 90 s of initial rank 3 is not enforced" in caplog.text
    assert "No such file" in caplog.text
