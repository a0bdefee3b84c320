"""The file timer's server: it reaps workers with expired timers and no others."""

from __future__ import annotations

import gc
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.descriptors import open_files
from helpers.processes import PATIENCE, wait_until
from helpers.timers.file_timers import TORCHS_TIMER, Rig, WatchedServer, line
from regrow.timer.fifo.request import FileTimerRequest
from regrow.timer.fifo.server import Reaping
from regrow.timer.processes import Sleeper, TimedProcesses, foreign
from regrow.timer.rules import SteadyClock


def test_a_worker_with_an_expired_timer_is_killed_and_torchs_events_are_logged(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    request = rig.arm(worker.pid, 0.05)
    assert worker.wait(PATIENCE) == -signal.SIGKILL
    server.stop()
    assert server.events == [
        ("watchdog started", None),
        ("timer expired", request),
        ("kill worker process", request),
        ("watchdog stopped", None),
    ]


def test_a_worker_that_releases_its_timer_lives(rig: Rig) -> None:
    server, healthy, hung = rig.serve(), rig.worker(), rig.worker()
    rig.arm(healthy.pid, 0.05)
    rig.release(healthy.pid)
    rig.arm(hung.pid, 0.1)
    assert server.reaping().pid == hung.pid
    assert healthy.poll() is None


def test_a_timer_that_is_armed_again_counts_from_then(rig: Rig) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    rig.arm(worker.pid, 0.05)
    rig.arm(worker.pid, 600)
    rig.arm(other.pid, 0.1)
    assert server.reaping().pid == other.pid
    server.wait_armed([(worker.pid, "scope")])


def test_the_earliest_timer_with_a_signal_decides_the_signal(rig: Rig) -> None:
    worker = rig.worker()
    server = WatchedServer(rig.path)
    rig.servers.append(server)
    rig.arm(worker.pid, -3, "report", signal=0)
    rig.arm(worker.pid, -1, "later", signal=signal.SIGKILL)
    rig.arm(worker.pid, -2, "earlier", signal=signal.SIGTERM)
    server.start()
    reaping = server.reaping()
    assert [request.scope_id for request in reaping.expired] == ["report", "earlier", "later"]
    assert worker.wait(PATIENCE) == -signal.SIGTERM
    assert reaping.signal == signal.SIGTERM


def test_workers_that_are_due_together_are_reaped_together(rig: Rig) -> None:
    workers = [rig.worker(), rig.worker(), rig.worker()]
    server = WatchedServer(rig.path)
    rig.servers.append(server)
    for worker in workers:
        rig.arm(worker.pid, 0)
    server.start()
    reapings = server.reapings.get(timeout=PATIENCE)
    assert sorted(each.pid for each in reapings) == sorted(worker.pid for worker in workers)
    assert [worker.wait(PATIENCE) for worker in workers] == [-signal.SIGKILL] * 3


@pytest.mark.parametrize("number", [0, -1])
def test_a_timer_without_a_signal_only_reports(rig: Rig, number: int) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    request = rig.arm(worker.pid, 0, signal=number)
    assert server.reaping()[:3] == (worker.pid, [request], 0)
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid  # the first one is not reaped again
    assert worker.poll() is None
    assert ("timer expired", request) in server.events
    server.wait_armed([])


def test_a_reporting_timer_leaves_the_outer_timer(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    rig.arm(worker.pid, 600, "kills")
    rig.arm(worker.pid, 0, "reports", signal=0)
    assert [request.scope_id for request in server.reaping().expired] == ["reports"]
    wait_until(lambda: server.armed() == [(worker.pid, "kills")], "that one is left")
    assert worker.poll() is None


def test_requests_from_before_a_reaping_are_ignored(rig: Rig) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    rig.arm(worker.pid, 0, signal=signal.SIGURG)  # the worker survives it
    assert server.reaping().pid == worker.pid
    wait_until(lambda: server.armed() == [], "cleared")
    now = time.monotonic()
    rig.arm(worker.pid, 0, "sent before", monotonic=now - 60, armed=now - 60)
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid
    rig.arm(worker.pid, 0, "sent after", monotonic=time.monotonic(), armed=time.monotonic())
    assert server.reaping().pid == worker.pid


def test_a_killed_zombie_has_no_timers(rig: Rig) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    rig.arm(worker.pid, 0)
    assert server.reaping().pid == worker.pid
    wait_until(lambda: server.workers.get(worker.pid) is None, "its end is seen")
    rig.arm(worker.pid, 0, "sent before")
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid
    assert server.refusals.get(timeout=PATIENCE).why == "is of a process that is gone"


def test_a_worker_that_ends_by_itself_when_its_timer_expires_is_not_reaped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, other = rig.worker(), rig.worker()

    def late(sleeper: Sleeper, until: float) -> list[int]:
        ready = sleep(sleeper, until)
        if server.armed() and ending.poll() is None:
            ending.kill()
            ending.wait()
            return []  # as if it had ended just after the check
        return ready

    sleep, server = Sleeper.sleep, WatchedServer(rig.path)
    monkeypatch.setattr(Sleeper, "sleep", late)
    rig.servers.append(server)
    server.register_timers([FileTimerRequest(ending.pid, "scope", time.time() + 0.05, 9)])
    server.start()
    wait_until(lambda: server.armed() == [], "cleared")
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid


def test_a_release_that_is_in_the_pipe_when_the_deadline_passes_counts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, hung = rig.worker(), rig.worker()

    def late(sleeper: Sleeper, until: float) -> list[int]:
        ready = sleep(sleeper, until)
        if server.armed() and not released.is_set():
            rig.release(healthy.pid)
            released.set()
            return []  # as if it had arrived just after the check of the pipe
        return ready

    released = threading.Event()
    sleep, server = Sleeper.sleep, WatchedServer(rig.path)
    monkeypatch.setattr(Sleeper, "sleep", late)
    rig.servers.append(server)
    server.register_timers([FileTimerRequest(healthy.pid, "scope", time.time() + 0.05, 9)])
    server.start()
    assert released.wait(PATIENCE)
    rig.arm(hung.pid, 0.1)
    assert server.reaping().pid == hung.pid
    assert healthy.poll() is None


def test_the_timers_of_a_worker_that_ends_are_gone(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    rig.arm(worker.pid, 600)
    assert server.next_seen().worker_pid == worker.pid
    worker.kill()
    worker.wait()
    wait_until(lambda: server.armed() == [], "the timers of the dead worker are cleared")
    assert server.workers.get(worker.pid) is None


def test_a_process_that_got_the_pid_of_a_worker_is_not_signalled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, stranger = rig.worker(), rig.worker()
    pidfd = os.pidfd_open(ended.pid)
    workers = TimedProcesses(Sleeper())
    with monkeypatch.context() as patch:  # as if the worker had had the stranger's pid
        patch.setattr(os, "pidfd_open", lambda pid: pidfd)
        workers.add(stranger.pid)
    ended.kill()
    ended.wait()
    assert workers.signal(stranger.pid, signal.SIGKILL)
    assert stranger.poll() is None
    workers.close()


def test_a_reaping_that_fails_is_tried_again_and_announced_once(rig: Rig) -> None:
    class Weak(WatchedServer):
        attempts = 0

        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            self.attempts += 1
            return self.attempts > 2 and super()._reap_worker(worker_pid, signal)

    worker = rig.worker()
    server = rig.serve(Weak)
    assert isinstance(server, Weak)
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL
    server.stop()
    assert server.attempts == 3
    assert server.reapings.qsize() == 1
    assert [name for name, _ in server.events].count("timer expired") == 1


def test_an_exception_in_reaping_counts_as_reaped(rig: Rig) -> None:
    class Failing(WatchedServer):
        attempts = 0

        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            self.attempts += 1
            raise OSError("on purpose")

    server, worker, other = rig.serve(Failing), rig.worker(), rig.worker()
    rig.arm(worker.pid, 0)
    assert server.reaping().pid == worker.pid
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid
    server.stop()
    assert isinstance(server, Failing)
    assert server.attempts == 2


def test_no_error_in_a_hook_ends_the_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(WatchedServer):
        def before_reaping(self, reapings: list[Reaping]) -> None:
            super().before_reaping(reapings)
            raise RuntimeError("on purpose")

    def failing(sleeper: Sleeper, until: float) -> list[int]:
        if not failures:
            failures.append(until)
            raise RuntimeError("on purpose")
        return sleep(sleeper, until)

    failures: list[float] = []
    sleep = Sleeper.sleep
    monkeypatch.setattr(Sleeper, "sleep", failing)
    server, worker = rig.serve(Careless), rig.worker()
    server.events = None  # type: ignore[assignment]  # so that `log_event` fails
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL


def test_the_own_process_is_never_signalled(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    server.register_timers([FileTimerRequest(os.getpid(), "scope", 0.0, signal.SIGKILL)])
    assert server.reaping().pid == os.getpid()
    rig.arm(os.getpid(), 0)
    assert "own process" in (foreign(os.getpid()) or "")
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL


def delayed(passed: list[float]) -> SteadyClock:
    """A clock on which more time has passed, which the caller sets."""
    return SteadyClock(monotonic=lambda: time.monotonic() + passed[0])


class Clock:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.set_forward = 0.0

    def __call__(self) -> float:
        return time.time() + self.set_forward


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_change_of_the_clock_by_a_day_has_no_effect(rig: Rig, jump: float) -> None:
    clock = Clock()

    server, healthy, hung, torchs = (
        rig.serve(clock=SteadyClock(clock)),
        rig.worker(),
        rig.worker(),
        rig.worker(),
    )
    now = time.monotonic()
    rig.arm(healthy.pid, 600, monotonic=now + 600, armed=now)
    rig.arm(torchs.pid, 600)
    for _ in range(2):
        server.next_seen()
    clock.set_forward = jump
    rig.write(line(FileTimerRequest(hung.pid, "scope", clock() + 0.05, 9)))
    assert server.reaping().pid == hung.pid
    server.wait_armed(sorted([(healthy.pid, "scope"), (torchs.pid, "scope")]))
    assert abs(server.get_last_progress_time() - clock()) < PATIENCE


def test_timers_are_asked_for_in_the_time_that_they_were_given_in(rig: Rig) -> None:
    server = WatchedServer(rig.path)
    rig.servers.append(server)
    early, late = (FileTimerRequest(os.getpid(), scope, 2e9 + i, 9) for i, scope in enumerate("ab"))
    server.register_timers([late, early])
    assert server.get_expired_timers(2e9 - 1e-3) == {}
    assert server.get_expired_timers(2e9) == {os.getpid(): [early]}
    assert server.get_expired_timers(math.inf) == {os.getpid(): [early, late]}
    server.register_timers([FileTimerRequest(os.getpid(), "a", -1)])
    assert server.get_expired_timers(math.inf) == {os.getpid(): [late]}
    server.clear_timers({os.getpid()})
    assert server.get_expired_timers(math.inf) == {}


def test_the_time_of_a_suspended_host_does_not_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, thawed, released, sleep = [0.0], threading.Event(), threading.Event(), Sleeper.sleep

    def stall(sleeper: Sleeper, until: float) -> list[int]:
        if thawed.is_set():
            released.wait(PATIENCE)
        ready = sleep(sleeper, until)
        if until < math.inf and not ready and not thawed.is_set():
            passed[0] = 1000.0
            thawed.set()
        return ready

    monkeypatch.setattr(Sleeper, "sleep", stall)
    server, healthy, hung = rig.serve(clock=delayed(passed)), rig.worker(), rig.worker()
    rig.arm(healthy.pid, 0.1)
    rig.arm(hung.pid, 0.1)
    assert thawed.wait(PATIENCE)
    rig.release(healthy.pid)
    released.set()
    reaping = server.reaping()
    assert reaping.pid == hung.pid
    assert reaping.deadline > time.monotonic() + 1000 - PATIENCE
    assert healthy.poll() is None


def test_time_with_a_full_pipe_does_not_count(rig: Rig) -> None:
    passed, released = [0.0], threading.Event()

    class Busy(WatchedServer):
        def before_reaping(self, reapings: list[Reaping]) -> None:
            super().before_reaping(reapings)
            released.wait(PATIENCE)
            passed[0] = 1000.0

    server, other = rig.serve(Busy, clock=delayed(passed)), rig.worker()
    program = """
import sys
from regrow.timer import FileTimerClient, expires
from regrow.timer.fifo import client
client.FLUSH_TIMEOUT = 0.01
with expires(600, client=FileTimerClient(sys.argv[1])):
    print(flush=True)
    sys.stdin.readline()
print(flush=True)
sys.stdin.readline()
"""
    worker = rig.run(sys.executable, "-c", program, str(rig.path))
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdout.readline()
    rig.arm(other.pid, 0, "reported", signal=0)
    assert server.reaping().pid == other.pid
    pipe = os.open(rig.path, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n" * 4096)
    os.close(pipe)
    worker.stdin.write(b"\n")
    worker.stdin.flush()
    worker.stdout.readline()
    worker.send_signal(signal.SIGSTOP)  # it gets no processor just now
    released.set()
    wait_until(lambda: rig.waiting() == 0, "the pipe is empty")
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: server.armed() == [], "its release has arrived, or it is reaped")
    assert server.reapings.empty()
    assert worker.poll() is None


def test_stopping_leaves_no_thread_no_descriptor_and_no_pipe(rig: Rig) -> None:
    before = open_files()
    server, worker = rig.serve(), rig.worker()
    assert stat.S_IMODE(rig.path.stat().st_mode) & 0o777 == 0o600
    rig.arm(worker.pid, 600)
    server.next_seen()
    assert "regrow-WatchedServer" in [thread.name for thread in threading.enumerate()]
    server.stop()
    assert "regrow-WatchedServer" not in [thread.name for thread in threading.enumerate()]
    assert not rig.path.exists()
    assert open_files() <= before
    server.stop()
    assert [name for name, _ in server.events].count("watchdog stopped") == 1
    with pytest.raises(RuntimeError, match="was stopped: create a new one"):
        server.start()


def test_a_server_that_was_never_started_is_stopped_as_well(rig: Rig) -> None:
    before = open_files()
    WatchedServer(rig.path).stop()
    assert open_files() <= before
    assert not rig.path.exists()


def test_a_server_that_is_forgotten_leaves_no_descriptor_and_its_pipe_to_the_next(
    rig: Rig,
) -> None:
    before = open_files()
    server = WatchedServer(rig.path)
    del server
    gc.collect()
    assert open_files() <= before
    WatchedServer(rig.path).stop()


def test_stop_in_the_servers_thread_does_not_wait(rig: Rig) -> None:
    class Quitter(WatchedServer):
        def before_reaping(self, reapings: list[Reaping]) -> None:
            super().before_reaping(reapings)
            self.stop()
            ended.append(threading.current_thread())

    ended: list[threading.Thread] = []
    _server, worker = rig.serve(Quitter), rig.worker()
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: bool(ended), "stopped")
    ended[0].join(PATIENCE)
    assert not ended[0].is_alive()


def test_the_last_progress_is_now_while_no_timer_is_overdue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    server, worker = rig.serve(clock=delayed(passed)), rig.worker()
    hold, held = threading.Event(), threading.Event()
    rig.arm(worker.pid, 600)
    server.next_seen()
    assert server.get_last_progress_time() >= int(time.time()) - 1

    def wait(reapings: list[Reaping]) -> None:
        held.set()
        hold.wait(PATIENCE)

    monkeypatch.setattr(server, "before_reaping", wait)
    rig.arm(worker.pid, 0, "hangs")
    assert held.wait(PATIENCE)
    passed[0] = 1000.0
    assert server.get_last_progress_time() <= time.time() - 999
    passed[0] = 0.0
    hold.set()
    assert worker.wait(PATIENCE) == -signal.SIGKILL


def test_a_stopped_server_makes_no_progress(rig: Rig) -> None:
    passed = [0.0]
    server = WatchedServer(rig.path, clock=delayed(passed))
    rig.servers.append(server)
    assert server.get_last_progress_time() >= int(time.time()) - 1
    server.stop()
    passed[0] = 1000.0
    assert server.get_last_progress_time() <= time.time() - 999


def test_a_file_that_is_no_pipe_is_kept(rig: Rig) -> None:
    rig.path.write_text("precious")
    with pytest.raises(FileExistsError, match=r"not a pipe of this user.*TORCHELASTIC_TIMER_FILE"):
        WatchedServer(rig.path)
    assert rig.path.read_text() == "precious"


def test_a_pipe_that_another_server_reads_is_kept(rig: Rig) -> None:
    first, worker = rig.serve(), rig.worker()
    with pytest.raises(FileExistsError, match="another process reads"):
        WatchedServer(rig.path)
    rig.arm(worker.pid, 0)
    assert first.reaping().pid == worker.pid


def test_a_pipe_that_a_killed_server_left_is_replaced(rig: Rig) -> None:
    os.mkfifo(rig.path)
    worker = rig.worker()
    server = rig.serve()
    rig.arm(worker.pid, 0)
    assert server.reaping().pid == worker.pid


def test_another_file_at_the_path_is_not_removed(rig: Rig) -> None:
    server = rig.serve()
    rig.path.unlink()
    rig.path.write_text("precious")
    server.stop()
    assert rig.path.read_text() == "precious"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/pipe"):
        WatchedServer(tmp_path / "nowhere" / "pipe")


FORKING = """
import os, sys, time
from regrow.timer.fifo.server import FileTimerServer
server = FileTimerServer(sys.argv[1], "run")
server.start()
child = os.fork()
if child == 0:
    server.stop()
    print("child", os.path.exists(sys.argv[1]), flush=True)
    sys.stdin.read()
    os._exit(0)
time.sleep(1000)
"""


def test_a_forked_child_does_not_affect_its_parents_server(rig: Rig) -> None:
    parent = rig.run(sys.executable, "-c", FORKING, str(rig.path))
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"child True\n"
    parent.kill()
    parent.wait()
    with pytest.raises(OSError, match="No such device"):  # though the child still runs
        os.close(os.open(rig.path, os.O_WRONLY | os.O_NONBLOCK))


TORCHS_CLIENT = f"""
{TORCHS_TIMER}
import time
timer.configure(timer.FileTimerClient(sys.argv[1]))
with timer.expires(after=60):
    pass
with timer.expires(after=0.1, scope="hangs"):
    time.sleep(1000)
"""


def test_torchs_client_is_served(rig: Rig) -> None:
    server = rig.serve()
    worker = subprocess.Popen([sys.executable, "-c", TORCHS_CLIENT, str(rig.path)])
    rig.processes.append(worker)
    (expired,) = server.reaping().expired
    assert (expired.worker_pid, expired.scope_id) == (worker.pid, "hangs")
    assert worker.wait(PATIENCE) == -signal.SIGKILL
    assert server.refusals.empty()
