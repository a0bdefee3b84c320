"""Hostile input in the pipe of a file timer.

The server serves healthy workers, its thread continues, and it reports each fault once with its
source.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from helpers.processes import PATIENCE, wait_until
from helpers.timers.file_timers import Rig, WatchedServer, line
from regrow.timer.fifo.request import MAX_LINE, FileTimerRequest


def serves(rig: Rig, server: WatchedServer, seconds: float = 0.5) -> None:
    """The server keeps the timers of healthy workers, and reaps one that hangs.

    Args:
        seconds: in which the release of a timer finds room in a pipe that others fill.
    """
    healthy, hung = rig.worker(), rig.worker()
    rig.arm(healthy.pid, seconds)
    rig.release(healthy.pid)
    rig.arm(hung.pid, seconds + 0.1)
    assert server.reaping().pid == hung.pid
    assert hung.wait(PATIENCE) == -signal.SIGKILL
    assert healthy.poll() is None


KILLED = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY)
os.write(fd, b'{"version": 1, "pid": %d, "scope_id": "tra' % os.getpid())
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("newline", [b"\n", b""])
def test_a_client_that_dies_in_mid_write(rig: Rig, newline: bytes) -> None:
    server = rig.serve()
    dead = rig.run(sys.executable, "-c", KILLED, str(rig.path))
    assert dead.wait(PATIENCE) == -signal.SIGKILL
    worker = rig.worker()
    # Requests of regrow begin with a newline; those of torch do not.
    rig.write(newline + line(FileTimerRequest(worker.pid, "healthy", time.time(), 9)))
    assert server.reaping().pid == worker.pid
    assert server.refusals.get(timeout=PATIENCE).pid == dead.pid
    serves(rig, server)


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_of_hundreds_of_megabytes(rig: Rig, end: bytes) -> None:
    server = rig.serve()
    rig.write(*[b"x" * (1 << 20)] * 256, end)
    refusal = server.refusals.get(timeout=PATIENCE)
    assert (refusal.why, refusal.pid) == (f"is longer than {MAX_LINE} bytes", 0)
    serves(rig, server)
    assert server.refusals.empty()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n" * 3_000_000,
        b"{\n" * 1_000_000,
        b"[]\n" * 1_000_000,
        b"\0" * 3_000_000,
        b"[" * 4000 + b"\n" + b'{"a":' * 700 + b"\n",
        os.urandom(1_000_000),
        b'{"version": 1, "pid": 12, "scope_id": "aaaaaaaaaaaaaaaaaaaaaaaaaa"}\n' * 10_000,
    ],
    ids=["newlines", "braces", "JSON", "zeros", "depth", "noise", "shape"],
)
def test_garbage(rig: Rig, garbage: bytes) -> None:
    server = rig.serve()
    rig.write(garbage, b"\n")
    serves(rig, server)


def test_a_stream_of_garbage_that_never_ends(rig: Rig) -> None:
    server = rig.serve()
    with open(rig.path, "wb") as pipe:
        rig.processes.append(subprocess.Popen(["yes", "x"], stdout=pipe))
    assert server.refusals.get(timeout=PATIENCE).sample == "x"
    serves(rig, server, 4.0)
    assert server.refusals.empty()


def refused(rig: Rig, server: WatchedServer, pid: int) -> str:
    """Why a process may have no timers."""
    for _ in range(3):
        rig.arm(pid, 0, str(pid))
    refusal = server.refusals.get(timeout=PATIENCE)
    assert refusal.pid == pid
    return refusal.why


def test_pids_of_other_processes_are_refused(rig: Rig) -> None:
    server, gone = rig.serve(), rig.worker()
    gone.kill()
    gone.wait()
    assert "process that is gone" in refused(rig, server, gone.pid)
    rig.arm(2**22, 0)  # as for a helper that ended quickly; not worth a report
    assert "own process" in refused(rig, server, os.getpid())
    serves(rig, server)
    assert server.refusals.empty()
    assert [name for name, _ in server.events].count("bad request") == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user(rig: Rig) -> None:
    server = rig.serve()
    rig.processes.append(subprocess.Popen(["sleep", "1000"], user=65534))
    assert "another user (65534)" in refused(rig, server, rig.processes[0].pid)
    assert rig.processes[0].poll() is None


def test_a_subclass_may_refuse_processes(rig: Rig) -> None:
    class Choosy(WatchedServer):
        def refusal(self, pid: int) -> str | None:
            return "is not known" if pid == stranger.pid else super().refusal(pid)

    stranger = rig.worker()
    server = rig.serve(Choosy)
    assert refused(rig, server, stranger.pid) == "is not known"
    serves(rig, server)
    assert stranger.poll() is None


def test_a_failing_check_of_one_process_does_not_affect_others(rig: Rig) -> None:
    class Failing(WatchedServer):
        def refusal(self, pid: int) -> str | None:
            return str(1 // 0) if pid == odd.pid else None

    odd, worker = rig.worker(), rig.worker()
    server = rig.serve(Failing)
    requests = [FileTimerRequest(pid, "scope", time.time(), 9) for pid in (odd.pid, worker.pid)]
    rig.write(b"".join(map(line, requests)))
    assert server.reaping().pid == worker.pid
    assert "cannot be checked" in server.refusals.get(timeout=PATIENCE).why


def test_a_thread_is_no_process(rig: Rig) -> None:
    server, stop = rig.serve(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        assert "process that is gone" in refused(rig, server, thread.native_id)
    finally:
        stop.set()
        thread.join()


def test_the_release_of_an_unknown_timer_is_ignored(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    for pid in (worker.pid, os.getpid(), 2**22):
        rig.release(pid)
    serves(rig, server)
    assert server.refusals.empty()


def test_a_deadline_on_another_monotonic_clock_is_ignored(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    ahead = time.monotonic() + 10**6  # a clock of another time namespace
    rig.arm(worker.pid, 0, monotonic=ahead, armed=ahead)
    assert server.reaping().pid == worker.pid


def test_a_very_late_deadline_is_kept(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    rig.write(line(FileTimerRequest(worker.pid, "far", 1e308, 9)))
    assert server.next_seen().scope_id == "far"
    serves(rig, server)
    server.wait_armed([(worker.pid, "far")])


def test_the_timers_of_one_worker_are_limited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.timer.fifo.server.MANY", 10)
    server, greedy = rig.serve(), rig.worker()
    for number in range(10):
        rig.arm(greedy.pid, 600, str(number))
    wait_until(lambda: len(server.armed()) == 10, "armed")
    rig.arm(greedy.pid, 600, "one more")
    assert server.refusals.get(timeout=PATIENCE).why == "is of a process with 10 timers"
    serves(rig, server)
    server.wait_armed([(greedy.pid, str(number)) for number in range(10)])
    rig.arm(greedy.pid, 0.05, "3")  # a timer that it has
    assert server.reaping().pid == greedy.pid


def test_the_number_of_reports_is_limited(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("regrow.timer.fifo.server.REPORTS", 3)
    server = rig.serve()
    for pid in range(2**22 - 9, 2**22):
        rig.arm(pid, 600, signal=65)
    serves(rig, server)
    assert server.refusals.qsize() == 3
    assert [record.getMessage() for record in caplog.records][-1] == (
        f"timers: no more bad requests in {rig.path} are reported"
    )


def test_a_bad_request_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    server = rig.serve()
    bad = '{"version": 1, "pid": 4711, "scope_id": "a", "expiration_time": "x", "signal": 9}'
    rig.write(bad.encode() + b"\n")
    assert server.refusals.get(timeout=PATIENCE).pid == 4711
    assert [record.getMessage() for record in caplog.records] == [
        "timers: ignored input of process 4711, which has an expiration_time that is not a finite"
        f" number ({rig.path}); more of this kind is not reported: {bad!r}"
    ]


def test_workers_are_served_without_free_descriptors(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", exhausted)
    server = rig.serve()
    serves(rig, server)
    gone = rig.worker()
    rig.arm(gone.pid, 600)
    wait_until(lambda: (gone.pid, "scope") in server.armed(), "armed")
    gone.kill()
    gone.wait()
    rig.arm(gone.pid, 0)
    assert server.reaping().pid == gone.pid  # which signals no process


def test_a_removed_pipe_still_serves_its_clients(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    with open(rig.path, "wb", buffering=0) as pipe:
        rig.path.unlink()
        pipe.write(line(FileTimerRequest(worker.pid, "scope", time.time(), 9)))
    assert server.reaping().pid == worker.pid
