"""The file timer's server: whoever lets a timer expire is reaped, and nobody else."""

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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from file_timers import TORCHS_TIMER, Rig, WatchedServer, line
from processes import PATIENCE, wait_until

from regrow.timer._file_request import FileTimerRequest
from regrow.timer._file_server import Reaping
from regrow.timer._file_workers import Worker
from regrow.timer._sleeper import Sleeper


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.clear()


def test_a_worker_whose_timer_expires_is_killed_and_what_is_told_is_torchs(rig: Rig) -> None:
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


def test_the_earliest_timer_with_a_signal_says_which(rig: Rig) -> None:
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
def test_without_a_signal_an_expiration_is_reported_and_nobody_killed(
    rig: Rig, number: int
) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    request = rig.arm(worker.pid, 0, signal=number)
    assert server.reaping()[:3] == (worker.pid, [request], 0)
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid  # and not the first one again
    assert worker.poll() is None
    assert ("timer expired", request) in server.events
    server.wait_armed([])


def test_a_timer_that_reports_leaves_the_one_around_it_that_kills(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    rig.arm(worker.pid, 600, "kills")
    rig.arm(worker.pid, 0, "reports", signal=0)
    assert [request.scope_id for request in server.reaping().expired] == ["reports"]
    wait_until(lambda: server.armed() == [(worker.pid, "kills")], "that one is left")
    assert worker.poll() is None


def test_what_a_worker_sent_before_it_was_reaped_does_not_get_it_reaped_again(rig: Rig) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    rig.arm(worker.pid, 0, signal=signal.SIGURG)  # which it survives
    assert server.reaping().pid == worker.pid
    wait_until(lambda: server.armed() == [], "cleared")
    now = time.monotonic()
    rig.arm(worker.pid, 0, "sent before", monotonic=now - 60, armed=now - 60)
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid
    rig.arm(worker.pid, 0, "sent after", monotonic=time.monotonic(), armed=time.monotonic())
    assert server.reaping().pid == worker.pid


def test_a_worker_that_was_killed_and_that_nobody_has_waited_for_has_no_timers(rig: Rig) -> None:
    server, worker, other = rig.serve(), rig.worker(), rig.worker()
    rig.arm(worker.pid, 0)
    assert server.reaping().pid == worker.pid
    wait_until(lambda: server._workers.get(worker.pid) is None, "its end is seen")
    rig.arm(worker.pid, 0, "sent before")
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid
    assert server.refusals.get(timeout=PATIENCE).why == "is of a process that is gone"


def test_a_worker_that_ends_by_itself_when_its_timer_expires_is_not_reaped(rig: Rig) -> None:
    ending, other = rig.worker(), rig.worker()

    class Late(WatchedServer):
        def _sleep(self) -> list[int]:
            ready = super()._sleep()
            if self.armed() and ending.poll() is None:
                ending.kill()
                ending.wait()
                return []  # as if it had ended just after the look at it
            return ready

    server = Late(rig.path)
    rig.servers.append(server)
    server.register_timers([FileTimerRequest(ending.pid, "scope", time.time() + 0.05, 9)])
    server.start()
    wait_until(lambda: server.armed() == [], "cleared")
    rig.arm(other.pid, 0)
    assert server.reaping().pid == other.pid


def test_a_release_that_is_in_the_pipe_when_the_deadline_passes_counts(rig: Rig) -> None:
    healthy, hung = rig.worker(), rig.worker()

    class Slow(WatchedServer):
        def _sleep(self) -> list[int]:
            ready = super()._sleep()
            if self.armed() and not released.is_set():
                rig.release(healthy.pid)
                released.set()
                return []  # as if it had come just after the look at the pipe
            return ready

    released = threading.Event()
    server = Slow(rig.path)
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
    assert server._workers.get(worker.pid) is None


def test_a_process_that_got_the_pid_of_a_worker_is_not_signalled(rig: Rig) -> None:
    ended, stranger = rig.worker(), rig.worker()
    worker = Worker(stranger.pid, os.pidfd_open(ended.pid))
    ended.kill()
    ended.wait()
    try:
        with pytest.raises(ProcessLookupError):
            worker.send(signal.SIGKILL)
    finally:
        os.close(worker.pidfd)
    assert stranger.poll() is None


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


def test_no_error_in_a_hook_ends_the_thread(rig: Rig) -> None:
    class Careless(WatchedServer):
        def _before_reaping(self, reapings: list[Reaping]) -> None:
            super()._before_reaping(reapings)
            raise RuntimeError("on purpose")

        def _sleep(self) -> list[int]:
            if not self.failed:
                self.failed = True
                raise RuntimeError("on purpose")
            return super()._sleep()

        failed = False

    server, worker = rig.serve(Careless), rig.worker()
    server._log_event = lambda name, request: 1 / 0  # type: ignore[assignment]
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL


def test_the_own_process_is_never_signalled(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    server.register_timers([FileTimerRequest(os.getpid(), "scope", 0.0, signal.SIGKILL)])
    assert server.reaping().pid == os.getpid()
    rig.arm(os.getpid(), 0)
    assert "own process" in server._refusal(os.getpid())  # type: ignore[operator]
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL


class Clock:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.set_forward = 0.0

    def __call__(self) -> float:
        return time.time() + self.set_forward


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_clock_that_is_set_by_a_day_reaps_nobody_and_spares_nobody(rig: Rig, jump: float) -> None:
    clock = Clock()

    class Set(WatchedServer):
        _wall = clock

    server, healthy, hung, torchs = rig.serve(Set), rig.worker(), rig.worker(), rig.worker()
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


def test_timers_of_processes_that_have_ended_are_cleared_with_the_others(rig: Rig) -> None:
    server, worker = WatchedServer(rig.path), rig.worker()
    rig.servers.append(server)
    server.register_timers([FileTimerRequest(pid, "a", 2e9, 9) for pid in (-3, worker.pid)])
    server.clear_timers(set())
    assert server.armed() == [(worker.pid, "a")]
    assert [server.is_process_running(pid) for pid in (worker.pid, -3, -1, 0)] == [
        True,
        False,
        False,
        False,
    ]


def test_the_time_in_which_the_whole_host_stood_still_does_not_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, thawed, released, sleep = [0.0], threading.Event(), threading.Event(), Sleeper.sleep

    class Host(WatchedServer):
        _monotonic = staticmethod(lambda: time.monotonic() + passed[0])

    def stand_still(sleeper: Sleeper, until: float) -> list[int]:
        if thawed.is_set():
            released.wait(PATIENCE)
        ready = sleep(sleeper, until)
        if until < math.inf and not ready and not thawed.is_set():
            passed[0] = 1000.0
            thawed.set()
        return ready

    monkeypatch.setattr(Sleeper, "sleep", stand_still)
    server, healthy, hung = rig.serve(Host), rig.worker(), rig.worker()
    rig.arm(healthy.pid, 0.1)
    rig.arm(hung.pid, 0.1)
    assert thawed.wait(PATIENCE)
    rig.release(healthy.pid)
    released.set()
    reaping = server.reaping()
    assert reaping.pid == hung.pid
    assert reaping.deadline > time.monotonic() + 1000 - PATIENCE
    assert healthy.poll() is None


def test_who_found_the_pipe_full_while_another_was_reaped_is_not_late(rig: Rig) -> None:
    passed, released = [0.0], threading.Event()

    class Busy(WatchedServer):
        _monotonic = staticmethod(lambda: time.monotonic() + passed[0])

        def _before_reaping(self, reapings: list[Reaping]) -> None:
            super()._before_reaping(reapings)
            released.wait(PATIENCE)
            passed[0] = 1000.0

    server, other = rig.serve(Busy), rig.worker()
    program = """
import sys
from regrow.timer import FileTimerClient, _file_client, expires
_file_client.PATIENCE = 0.01
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
    wait_until(lambda: server._intake.waiting() == 0, "the pipe is empty")
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: server.armed() == [], "its release has arrived, or it is reaped")
    assert server.reapings.empty()
    assert worker.poll() is None


def test_stopping_leaves_no_thread_no_descriptor_and_no_pipe(rig: Rig) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    server, worker = rig.serve(), rig.worker()
    assert stat.S_IMODE(rig.path.stat().st_mode) & 0o777 == 0o600
    rig.arm(worker.pid, 600)
    server.next_seen()
    thread = server._watchdog_thread
    server.stop()
    assert thread is not None
    assert not thread.is_alive()
    assert not rig.path.exists()
    assert sorted(os.listdir("/proc/self/fd")) == before
    server.stop()
    assert [name for name, _ in server.events].count("watchdog stopped") == 1
    with pytest.raises(RuntimeError, match="was stopped; make a new one"):
        server.start()


def test_a_server_that_was_never_started_is_stopped_as_well(rig: Rig) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    WatchedServer(rig.path).stop()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not rig.path.exists()


def test_a_server_that_is_forgotten_leaves_no_descriptor_and_its_pipe_to_the_next(
    rig: Rig,
) -> None:
    gc.collect()  # what other tests have left
    before = sorted(os.listdir("/proc/self/fd"))
    server = WatchedServer(rig.path)
    del server
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before
    WatchedServer(rig.path).stop()


def test_stopping_from_within_does_not_wait_for_itself(rig: Rig) -> None:
    class Quitter(WatchedServer):
        def _before_reaping(self, reapings: list[Reaping]) -> None:
            super()._before_reaping(reapings)
            thread = self._watchdog_thread
            self.stop()
            ended.append(thread)

    ended: list[threading.Thread | None] = []
    _server, worker = rig.serve(Quitter), rig.worker()
    rig.arm(worker.pid, 0)
    assert worker.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: bool(ended), "stopped")
    assert ended[0] is not None
    ended[0].join(PATIENCE)
    assert not ended[0].is_alive()


def test_run_once_acts_on_what_is_in_the_pipe_and_ends(rig: Rig) -> None:
    server, worker = rig.serve(), rig.worker()
    rig.arm(worker.pid, 0)
    rig.arm(os.getppid(), 600, "kept")
    server.run_once()
    assert worker.wait(PATIENCE) == -signal.SIGKILL
    assert server.reaping().pid == worker.pid
    assert server.armed() == [(os.getppid(), "kept")]
    assert not rig.path.exists()


def test_the_progress_is_of_now_as_long_as_nothing_is_overdue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, worker = rig.serve(), rig.worker()
    hold, held = threading.Event(), threading.Event()
    rig.arm(worker.pid, 600)
    server.next_seen()
    wait_until(lambda: server._working_since is None, "it waits again")
    assert server.get_last_progress_time() >= int(time.time()) - 1

    def wait(reapings: list[Reaping]) -> None:
        held.set()
        hold.wait(PATIENCE)

    monkeypatch.setattr(server, "_before_reaping", wait)
    rig.arm(worker.pid, 0, "hangs")
    assert held.wait(PATIENCE)
    monkeypatch.setattr(server, "_monotonic", lambda: time.monotonic() + 1000)
    assert server.get_last_progress_time() <= time.time() - 999
    monkeypatch.undo()
    hold.set()
    assert worker.wait(PATIENCE) == -signal.SIGKILL


def test_a_server_that_is_gone_makes_no_progress(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    server = WatchedServer(rig.path)
    rig.servers.append(server)
    assert server.get_last_progress_time() >= int(time.time()) - 1
    server.stop()
    monkeypatch.setattr(server, "_monotonic", lambda: time.monotonic() + 1000)
    assert server.get_last_progress_time() <= time.time() - 999


def test_a_file_that_is_no_pipe_is_kept(rig: Rig) -> None:
    rig.path.write_text("precious")
    with pytest.raises(FileExistsError, match=r"no pipe of this user.*TORCHELASTIC_TIMER_FILE"):
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


def test_a_pipe_that_took_the_place_of_ours_is_not_removed(rig: Rig) -> None:
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
from regrow.timer._file_server import FileTimerServer
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


def test_a_forked_child_neither_stops_its_parents_server_nor_poses_as_one(rig: Rig) -> None:
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
