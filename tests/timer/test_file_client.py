"""The file timer's client: its requests arrive, and it never harms the training."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.processes import PATIENCE, wait_until
from helpers.timers.file_timers import TORCHS_TIMER, Rig, WatchedServer
from regrow.timer.fifo.client import FileTimerClient, wait_for_room, write_line
from regrow.timer.fifo.pipe import Pipe
from regrow.timer.fifo.request import MAX_LINE, FileTimerRequest, RequestLines

LOGGER = "regrow.timer.fifo.client"


class Reader:
    """The reading end of the pipe; it reads only when a test calls it."""

    def __init__(self, path: Path) -> None:
        self.pipe = Pipe(str(path))
        self.lines = RequestLines()
        self.requests: list[FileTimerRequest] = []
        self.armed: dict[tuple[int, str], float] = {}

    def read(self) -> list[FileTimerRequest]:
        """Return the requests that arrived since the last call."""
        found: list[FileTimerRequest] = []
        while select.select([self.pipe.fd], [], [], 0)[0]:
            batch = self.lines.feed(os.read(self.pipe.fd, 1 << 20))
            assert batch.refusals == []
            found += batch.requests
        for request in found:
            if request.expiration_time < 0:
                self.armed.pop((request.worker_pid, request.scope_id), None)
            else:
                self.armed[request.worker_pid, request.scope_id] = request.expiration_time
        self.requests += found
        return found

    def close(self) -> None:
        """Remove the pipe and close the reading end."""
        self.pipe.remove()
        self.pipe.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pipe"


@pytest.fixture
def reader(path: Path) -> Iterator[Reader]:
    made = Reader(path)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of all clients."""
    monkeypatch.setattr("regrow.timer.fifo.client.FLUSH_TIMEOUT", 0.01)
    monkeypatch.setattr("regrow.timer.fifo.client.PAUSE", 0.0)


def fill(reader: Reader) -> None:
    """Fill the pipe."""
    fd = os.open(reader.pipe.path, os.O_WRONLY | os.O_NONBLOCK)
    for size in (1 << 16, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(fd, b"\n" * size)
    os.close(fd)


def test_requests_arrive_as_sent(
    path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 5.0)
    monkeypatch.setattr("regrow.timer.fifo.client.time", clocks)
    client = FileTimerClient(str(path), signal.SIGTERM)
    client.acquire("a/ä\udcff\n#1", 1060.0)
    client.release("a/ä\udcff\n#1")
    armed, released = reader.read()
    assert armed == FileTimerRequest(os.getpid(), "a/ä\udcff\n#1", 1060.0, signal.SIGTERM)
    assert (armed.monotonic, armed.armed) == (65.0, 5.0)
    assert released == FileTimerRequest(os.getpid(), "a/ä\udcff\n#1", -1, 0)


def test_a_request_has_the_fields_that_torchs_server_reads(path: Path, reader: Reader) -> None:
    FileTimerClient(str(path)).acquire("a", 2e9)
    content = json.loads(os.read(reader.pipe.fd, 1 << 16))
    assert {name: content[name] for name in list(content)[:5]} == {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": "a",
        "expiration_time": 2e9,
        "signal": 9,
    }


def test_a_time_may_be_any_number_and_a_scope_anything_with_a_name(
    path: Path, reader: Reader
) -> None:
    client = FileTimerClient(str(path))
    client.acquire(7, Fraction(2 * 10**9))  # type: ignore[arg-type]
    client.acquire("seven", 2 * 10**9)
    reader.read()
    assert reader.armed == {(os.getpid(), "7"): 2e9, (os.getpid(), "seven"): 2e9}


@pytest.mark.parametrize("at", [math.inf, -1.0, -math.inf])
def test_a_timer_that_never_expires_is_none(path: Path, reader: Reader, at: float) -> None:
    client = FileTimerClient(str(path))
    client.acquire("a", 2e9)
    client.acquire("a", at)
    reader.read()
    assert reader.armed == {}


def test_no_number_is_refused(path: Path, reader: Reader) -> None:
    with pytest.raises(ValueError, match=r"scope 'a' is nan; give seconds"):
        FileTimerClient(str(path)).acquire("a", math.nan)
    assert reader.read() == []


def test_a_long_scope_is_shortened_always_in_the_same_way(path: Path, reader: Reader) -> None:
    scopes = ["\U0001f600" * 5000, "\U0001f600" * 5001, "a" * 3000, "a" * 3600, "a" * 10**6]
    client = FileTimerClient(str(path))
    for scope in scopes:
        client.acquire(scope, 2e9)
    first = [request.scope_id for request in reader.read()]
    assert len(set(first)) == len(scopes)
    assert first[2] == scopes[2]
    for scope in scopes:
        client.release(scope)
    assert [request.scope_id for request in reader.read()] == first
    assert reader.armed == {}


def test_no_line_is_longer_than_a_pipe_takes_in_one_piece(
    path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SimpleNamespace(time=lambda: 1.23456789e-300, monotonic=lambda: 1.23456789e-300)
    monkeypatch.setattr("regrow.timer.fifo.client.time", clocks)
    client = FileTimerClient(str(path))
    for length in (1790, 1791, 1792, 3580, 3582, 3584, 9999):
        for letter in "aä\U0001f600":
            client.acquire(letter * length, 1.2345678901234567e300)
            assert len(os.read(reader.pipe.fd, 1 << 20)) <= MAX_LINE


class Trusting(WatchedServer):
    """Accepts timers of its own process, too."""

    def refusal(self, pid: int) -> str | None:
        return None


def test_ten_thousand_requests_in_a_burst_all_arrive(rig: Rig) -> None:
    server = rig.serve(Trusting)
    client = FileTimerClient(str(rig.path))
    client.acquire("first", 2e9)
    for _ in range(4999):
        client.acquire("again", 2e9)
        client.release("again")
    client.acquire("last", 2e9)
    while server.next_seen().scope_id != "last":
        pass
    assert server.armed() == [(os.getpid(), "first"), (os.getpid(), "last")]
    assert server.refusals.empty()


def test_threads_do_not_garble_each_others_requests(path: Path, reader: Reader) -> None:
    client = FileTimerClient(str(path))

    def work(name: str) -> None:
        for number in range(200):
            client.acquire(f"{name}{number}", 2e9)
            if number % 2:
                client.release(f"{name}{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reader.read()) == 4 * 300
    assert {scope for _, scope in reader.armed} == {
        f"{name}{number}" for name in "abcd" for number in range(0, 200, 2)
    }


def test_a_signal_handler_may_arm_a_timer_while_one_is_armed(
    path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, handled = FileTimerClient(str(path)), list[int]()

    def interrupted(fd: int, line: bytes) -> None:
        if not handled:
            signal.raise_signal(signal.SIGUSR1)
        write_line(fd, line)

    def handler(number: int, frame: object) -> None:
        handled.append(number)
        client.acquire("of the handler", 2e9)

    client.acquire("before", 2e9)
    monkeypatch.setattr("regrow.timer.fifo.client.write_line", interrupted)
    was = signal.signal(signal.SIGUSR1, handler)
    try:
        client.acquire("interrupted", 2e9)
    finally:
        signal.signal(signal.SIGUSR1, was)
    reader.read()
    assert {scope for _, scope in reader.armed} == {"before", "interrupted", "of the handler"}


def test_a_signal_handler_that_finds_a_full_pipe_starts_the_only_thread(
    path: Path, reader: Reader, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, handled = FileTimerClient(str(path)), list[int]()

    def interrupted(fd: int, patience: float) -> bool:
        if threading.current_thread() is threading.main_thread() and not handled:
            signal.raise_signal(signal.SIGUSR1)
        return wait_for_room(fd, patience)

    def handler(number: int, frame: object) -> None:
        handled.append(number)
        client.acquire("of the handler", 2e9)

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    client.acquire("before", 2e9)
    fill(reader)
    monkeypatch.setattr("regrow.timer.fifo.client.wait_for_room", interrupted)
    was = signal.signal(signal.SIGUSR1, handler)
    try:
        client.acquire("interrupted", 2e9)
    finally:
        signal.signal(signal.SIGUSR1, was)
    assert names().count("regrow-FileTimerClient") == 1

    def arrived() -> bool:
        reader.read()
        return len(reader.armed) == 3

    wait_until(arrived, "all of it has arrived")
    wait_until(lambda: "regrow-FileTimerClient" not in names(), "the thread has ended")


def test_a_client_may_start_before_the_server(
    path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    client = FileTimerClient(str(path))
    with caplog.at_level(logging.WARNING, LOGGER):
        client.acquire("a", 2e9)
        client.acquire("b", 2e9)
        client.release("a")
    assert [record.getMessage() for record in caplog.records] == [
        f"timers: those of process {os.getpid()} are not kept, because no timer server reads {path}"
        " (No such file or directory). The training continues, and the client looks for the server"
        " again"
    ]
    late = Reader(path)
    client.acquire("c", 2e9)
    late.read()
    assert {scope for _, scope in late.armed} == {"b", "c"}
    late.close()


def test_a_restarted_server_receives_the_armed_timers(
    path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    client, first = FileTimerClient(str(path)), Reader(path)
    for scope in "ab":
        client.acquire(scope, 2e9)
    first.close()
    with caplog.at_level(logging.WARNING, LOGGER):
        client.release("a")
        client.acquire("c", 2e9)
    assert len(caplog.records) == 1
    second = Reader(path)
    client.acquire("d", 2e9)
    second.read()
    assert {scope for _, scope in second.armed} == {"b", "c", "d"}
    second.close()


def test_the_client_looks_for_a_server_once_a_second_at_most(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clocks = SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: now[0])
    monkeypatch.setattr("regrow.timer.fifo.client.time", clocks)
    client = FileTimerClient(str(path))
    client.acquire("a", 2e9)
    late = Reader(path)
    now[0] = 0.9
    client.acquire("b", 2e9)
    assert late.read() == []
    now[0] = 1.1
    client.release("c")
    assert [request.scope_id for request in late.read()] == ["a", "b", "c"]
    late.close()


def test_a_full_pipe_delays_the_training_once(
    path: Path, reader: Reader, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    client = FileTimerClient(str(path))
    client.acquire("before", 2e9)
    reader.read()
    fill(reader)
    waits: list[threading.Thread] = []
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        pytest.MonkeyPatch.context() as patch,
    ):

        def counted(fd: int, patience: float) -> bool:
            waits.append(threading.current_thread())
            return wait_for_room(fd, patience)

        patch.setattr("regrow.timer.fifo.client.wait_for_room", counted)
        for number in range(1000):
            client.acquire(f"step {number}", 2e9)
            client.release(f"step {number}")
        client.release("before")
        client.acquire("last", 2e9)
    assert waits.count(threading.current_thread()) == 1
    assert ["has not read its pipe" in record.message for record in caplog.records] == [True]

    def state() -> set[str]:
        reader.read()
        return {scope for _, scope in reader.armed}

    wait_until(lambda: state() == {"last"}, "a thread sends the newest state")
    # The error of the first request may have come after the request was written.
    assert [request.scope_id for request in reader.requests[1:]] == ["step 0", "before", "last"]
    wait_until(
        lambda: "regrow-FileTimerClient" not in {t.name for t in threading.enumerate()},
        "the thread ends when it has nothing to do",
    )
    client.release("last")
    reader.read()
    assert reader.armed == {}


def test_the_client_detects_the_end_of_a_server_with_a_full_pipe(
    path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    first, client = Reader(path), FileTimerClient(str(path))
    fill(first)
    with caplog.at_level(logging.WARNING, LOGGER):
        client.acquire("a", 2e9)
        first.close()
        wait_until(lambda: len(caplog.records) == 2, "the thread finds that the pipe has no reader")
    second = Reader(path)
    client.acquire("b", 2e9)
    second.read()
    assert {scope for _, scope in second.armed} == {"a", "b"}
    second.close()


def test_a_file_that_is_not_a_pipe_is_not_written_to(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("precious")
    with caplog.at_level(logging.WARNING, LOGGER):
        FileTimerClient(str(path)).acquire("a", 2e9)
    assert path.read_text() == "precious"
    assert "(it is not a pipe)" in caplog.text


def test_the_pipe_of_torchs_server_is_not_kept_open(path: Path) -> None:
    # torch's server waits while any process has the pipe open, and checks no deadlines.
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    client = FileTimerClient(str(path))
    for number in range(3):
        client.acquire("a", 2e9)
        assert os.read(end, 1 << 16).count(b"\n") == 2, number
        assert os.read(end, 1) == b""  # not EAGAIN: no process has it open
    os.close(end)


SIGPIPE = """
import signal, sys
from regrow.timer.fifo.client import FileTimerClient
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
client = FileTimerClient(sys.argv[1])
client.acquire("a", 2e9)
print("armed", flush=True)
sys.stdin.readline()
client.release("a")
print("alive", signal.getsignal(signal.SIGPIPE), signal.sigpending(),
    signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
"""


def test_a_broken_pipe_does_not_kill_a_process_with_default_sigpipe(rig: Rig) -> None:
    reader = Reader(rig.path)
    worker = rig.run(sys.executable, "-c", SIGPIPE, str(rig.path))
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"armed\n"
    reader.close()
    worker.stdin.write(b"\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == b"alive 0 set() set()\n"
    assert worker.wait(PATIENCE) == 0


FORKS = """
import os, sys, threading
from regrow.timer.fifo.client import FileTimerClient
client = FileTimerClient(sys.argv[1])
client.acquire("armed by the parent", 2e9)
go_on = True
def work():
    while go_on:
        client.acquire("of a thread", 2e9)
thread = threading.Thread(target=work)
thread.start()
children = []
for _ in range(20):  # some of them while the thread has the lock
    child = os.fork()
    if child == 0:
        client.acquire("of the child", 2e9)
        client.release("armed by the parent")
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
go_on = False
thread.join()
client.release("of a thread")
print(*children, flush=True)
"""


def test_a_forked_child_has_timers_of_its_own(rig: Rig) -> None:
    reader = Reader(rig.path)
    parent = rig.run(sys.executable, "-c", FORKS, str(rig.path))
    assert parent.stdout is not None
    out = parent.stdout
    children: list[int] = []
    reading = threading.Thread(target=lambda: children.extend(map(int, out.readline().split())))
    reading.start()
    wait_until(lambda: bool(reader.read()) or not reading.is_alive(), "requests arrive")
    while reading.is_alive():
        reader.read()
        reading.join(0.01)
    assert parent.wait(PATIENCE) == 0
    reader.read()
    assert len(children) == 20
    assert set(reader.armed) == {
        (parent.pid, "armed by the parent"),
        *((child, "of the child") for child in children),
    }
    reader.close()


TORCHS_SERVER = f"""
{TORCHS_TIMER}
import time
server = timer.FileTimerServer(sys.argv[1], "run", max_interval=0.05)
server.start()
print("serves", flush=True)
time.sleep(1000)
"""
HANGS = """
import sys, time
from regrow.timer import FileTimerClient, configure, expires
configure(FileTimerClient(sys.argv[1]))
for _ in range(10):
    with expires(after=600):
        pass
with expires(after=0.1):
    time.sleep(1000)
"""


def test_torchs_server_serves_regrows_client(rig: Rig) -> None:
    server = rig.run(sys.executable, "-c", TORCHS_SERVER, str(rig.path))
    assert server.stdout is not None
    assert server.stdout.readline() == b"serves\n"
    worker = rig.run(sys.executable, "-c", HANGS, str(rig.path))
    assert worker.wait(PATIENCE) == -signal.SIGKILL


def test_the_server_logs_the_stacks_of_a_clients_process(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    from regrow.timer import FileTimerServer

    server = FileTimerServer(str(rig.path), "run")
    rig.servers.append(server)
    server.start()
    with caplog.at_level(logging.WARNING, "regrow.timer"):
        worker = rig.run(sys.executable, "-c", HANGS, str(rig.path))
        assert worker.wait(PATIENCE) == -signal.SIGKILL
    (record,) = caplog.records
    line, _, stacks = record.getMessage().partition("\n")
    assert line.startswith(f"timers: ['<string>#8'] of worker {worker.pid} expired, the first ")
    assert line.endswith("; it is sent signal 9; location: in <module> (<string>:9)")
    assert 'File "<string>", line 9 in <module>' in stacks
    assert time.time() - server.get_last_progress_time() < PATIENCE
