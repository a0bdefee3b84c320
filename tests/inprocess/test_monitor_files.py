"""The monitor ends hung ranks although their log file or stderr blocks."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.processes import PATIENCE
from helpers.stores.storing import Background, ServerThread
from regrow.inprocess.group.group_service import InprocessService
from regrow.inprocess.watchdog.monitor import Monitor
from regrow.inprocess.watchdog.monitor_client import (
    GOODBYE,
    RankDeadline,
    Terms,
)
from regrow.store import STORE_ENV, STORE_TOKEN_ENV


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    server = ServerThread(services={"inprocess": InprocessService()})
    yield server
    server.stop()


HUNG_RANK = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as monitor:
    monitor.connect("\\0" + sys.argv[1])
    monitor.send(sys.argv[2].encode())
    monitor.recv(1)
"""


def test_a_log_that_cannot_be_opened_does_not_keep_a_hung_rank_alive(
    server: ServerThread, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)  # opening it blocks, as on a file server that does not answer
    where = server.endpoint, server.token.hex()
    terms = Terms(0, 1.0, 1.0, "group", "process", *where, logfile=str(log), soft=0.5, overdue=0.7)
    first = json.dumps({"terms": terms._asdict(), "deadline": RankDeadline(1, time.monotonic())})
    name = f"regrow-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        command = [sys.executable, "-S", "-c", HUNG_RANK, name, first]
        with subprocess.Popen(command) as rank:
            monitor = Background(Monitor(listener).run)
            try:
                assert rank.wait(20) == -signal.SIGTERM
            finally:
                rank.kill()
                with open(os.open(log, os.O_RDONLY | os.O_NONBLOCK)) as reader:
                    monitor.result()
                    text = reader.read()
    assert "watches initial rank 0" in text
    assert "is ended: no progress for 1 s" in text


def test_a_stderr_that_cannot_be_opened_does_not_keep_a_hung_rank_alive(
    server: ServerThread,
) -> None:
    left, opened = threading.Event(), threading.Event()

    def open_stderr(pids: Collection[int]) -> None:
        left.set()
        assert opened.wait(PATIENCE)  # as a file system that does not answer

    where = server.endpoint, server.token.hex()
    terms = Terms(0, 1.0, 1.0, "group", "process", *where)
    name = f"regrow-test-{os.getpid()}"

    def first(rank: int, until: float) -> str:
        deadline = RankDeadline(1, until)
        return json.dumps({"terms": terms._replace(rank=rank)._asdict(), "deadline": deadline})

    def connected(rank: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{name}")
        connection.send(first(rank, math.inf).encode())
        return connection

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        monitor = Background(Monitor(listener, open_stderr).run)
        try:
            with connected(1) as stays:
                with connected(2) as leaves:
                    leaves.send(GOODBYE)
                    assert left.wait(PATIENCE)
                command = [sys.executable, "-S", "-c", HUNG_RANK, name, first(0, time.monotonic())]
                with subprocess.Popen(command) as rank:
                    try:
                        assert rank.wait(20) == -signal.SIGTERM
                    finally:
                        rank.kill()
                stays.send(GOODBYE)
        finally:
            opened.set()
        monitor.result()


STUCK_STDERR = """
import os, sys, time
from datetime import timedelta
from regrow.inprocess import CallWrapper, Wrapper

def seconds(number):
    return timedelta(seconds=number)

@Wrapper(
    soft_timeout=seconds(0.5),
    hard_timeout=seconds(1),
    termination_grace_time=seconds(0.5),
    monitor_thread_interval=seconds(0.1),
    monitor_process_interval=seconds(0.1),
    progress_watchdog_interval=seconds(0.1),
)
def hang(call: CallWrapper):
    sum(range(10**12))  # holds the interpreter's lock

os.dup2(int(sys.argv[1]), 2)  # the monitor's stderr as well
hang()
"""


def test_a_blocked_stderr_does_not_keep_a_hung_rank_alive(
    server: ServerThread,
) -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writes, b"." * 4096)
    os.set_blocking(writes, True)
    environ = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "stuck"}
    environ |= {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: server.token.decode()}
    command = [sys.executable, "-c", STUCK_STDERR, str(writes)]
    with subprocess.Popen(command, env=environ, pass_fds=(writes,)) as rank:
        try:
            assert rank.wait(60) == -signal.SIGTERM
        finally:
            rank.kill()
            os.close(reads)
            os.close(writes)
