"""Processes that hang, each in its way, are asked where they stand."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hanging import (
    Hanging,
    armed_child,
    ask,
    asking_itself,
    child,
    deaf,
    executing,
    exiting,
    hanging,
    holding_the_gil,
    littering,
    looping,
    lying,
    matching,
    otherwise,
    sleeping,
    spawning,
    stone_deaf,
    woken,
)
from processes import wait_until

from regrow.timer import _capture
from regrow.timer._capture import Target, capture
from regrow.timer._frames import Dump, where
from regrow.timer._stacks import CANDIDATES, Marker, Signals

QUICK = 0.02
NEVER_ARMED = "it has neither imported regrow nor set a timer"


def status(pid: int) -> bytes:
    return Path(f"/proc/{pid}/status").read_bytes()


def state(pid: int) -> str:
    return _capture._state(status(pid))


def left_pending(hung: Hanging) -> bool:
    """Whether a process has a signal waiting that asks for stacks."""
    return any(Signals.of(status(hung.target.pid)).pending >> n - 1 & 1 for n in CANDIDATES)


@pytest.mark.parametrize(
    ("way", "place"),
    [
        (sleeping, "in sleeping (hanging.py:"),
        (looping, "in looping (hanging.py:"),
        (holding_the_gil, "in holding_the_gil (hanging.py:"),
        (matching, "in match (re/__init__.py:"),
    ],
)
def test_whatever_hangs_says_where_it_stands(way: Callable[[], None], place: str) -> None:
    with hanging(way) as hung:
        wait_until(lambda: where(ask(hung.target)).startswith(place), "it stands there")
        assert where(ask(hung.target._replace(doomed=True))).startswith(place)


def test_of_a_process_that_is_to_live_only_the_main_thread_is_dumped() -> None:
    with hanging(sleeping, threads=3) as hung:
        assert [thread.main for thread in ask(hung.target).threads] == [True]
        threads = ask(hung.target._replace(doomed=True)).threads
        assert sorted(thread.main for thread in threads) == [False, False, False, True]


def test_a_process_that_is_to_be_killed_leaves_no_core_if_that_crashes_it() -> None:
    with hanging(sleeping) as hung:
        pid = hung.target.pid
        before, most = resource.prlimit(pid, resource.RLIMIT_CORE)
        ask(hung.target)
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (before, most)
        ask(hung.target._replace(doomed=True))
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (1 if most else 0, most)


def test_a_process_of_more_threads_than_are_listed_still_shows_its_main_one() -> None:
    with hanging(sleeping, threads=110) as hung:
        wait_until(lambda: where(ask(hung.target)).startswith("in sleeping "), "it sleeps")
        dump = ask(hung.target._replace(doomed=True))
        assert ("\n...\n" in dump.text, dump.note) == (True, "")
        assert len(dump.threads) == 101
        assert where(dump).startswith("in sleeping ")


def test_where_a_process_stood_is_where_it_was_when_it_was_first_asked() -> None:
    with hanging(woken) as hung:
        wait_until(lambda: state(hung.target.pid) == "S", "it pauses")
        assert where(ask(hung.target._replace(doomed=True))).startswith("in woken ")
        wait_until(lambda: where(ask(hung.target)).startswith("in sleeping "), "it goes on")


def test_before_linux_6_9_there_is_another_way_to_signal_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = signal.pidfd_send_signal

    def older(pidfd: int, number: int, info: None = None, flags: int = 0) -> None:
        if flags:
            raise OSError(errno.EINVAL, "Invalid argument")
        send(pidfd, number, info, flags)

    monkeypatch.setattr(signal, "pidfd_send_signal", older)
    with hanging(sleeping) as hung:
        assert ask(hung.target).outcome == "dumped"
        hung.process.kill()
        hung.process.wait()
        with pytest.raises(ProcessLookupError):
            _capture._signal_main_thread(hung.target.pid, hung.target.pidfd, CANDIDATES[0])


def test_a_main_thread_that_takes_no_signal_is_shown_by_another_thread() -> None:
    with hanging(deaf) as hung:
        dump = ask(hung.target._replace(doomed=True))
        assert [(thread.main, thread.current) for thread in dump.threads] == [(True, False)]
        assert (where(dump)[:3], dump.note) == ("in ", "")
        # Which takes a dump of all threads.
        why = "no answer within 20 ms: its main thread blocks signal 45"
        assert ask(hung.target, QUICK) == Dump(hung.target.pid, "silent", why)


def test_a_process_that_takes_no_signal_is_left_without_one() -> None:
    with hanging(stone_deaf) as hung:
        silent = ask(hung.target._replace(doomed=True), QUICK)
        assert (silent.outcome, silent.threads) == ("silent", ())
        assert not left_pending(hung)


def test_a_stopped_process_is_said_to_be_and_is_left_without_a_signal() -> None:
    with hanging(sleeping) as hung:
        os.kill(hung.target.pid, signal.SIGSTOP)
        wait_until(lambda: state(hung.target.pid) == "T", "it stops")
        stopped = ask(hung.target)
        assert where(stopped) == "stopped by a signal (SIGSTOP or a debugger)"
        assert not left_pending(hung)


def test_an_uninterruptible_process_is_asked_when_it_no_longer_is(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with hanging(spawning, str(fifo), threads=1) as hung:
        wait_until(lambda: state(hung.target.pid) == "D", "it waits for its child")
        silent = ask(hung.target._replace(doomed=True), QUICK)
        assert silent.outcome == "silent"
        assert where(silent).startswith("in an uninterruptible sleep in the kernel")
        assert not left_pending(hung)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, hung.target)
            fifo.write_bytes(b"")
            assert answer.result().outcome == "dumped"


def test_another_program_under_the_same_pid_is_not_signalled() -> None:
    with hanging(executing) as hung:
        wait_until(lambda: status(hung.target.pid).startswith(b"Name:\tsleep"), "it executes")
        assert ask(hung.target)[:3] == (hung.target.pid, "no handler", NEVER_ARMED)
        assert hung.process.poll() is None


# Each says that it lives by ending when it is told to.
STRANGERS = {
    NEVER_ARMED: "signal.signal(44, lambda *_: os._exit(1))",
    "it does not catch signal 45 any more": (
        "memory = os.memfd_create(f'regrow-stacks.{os.getpid()}.44.45.1')"
    ),
}


@pytest.mark.parametrize("why", STRANGERS)
def test_a_stranger_is_not_signalled(why: str) -> None:
    program = f"import os, signal\n{STRANGERS[why]}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        pidfd = os.pidfd_open(process.pid)
        dump = ask(Target(process.pid, pidfd, doomed=True))
        os.close(pidfd)
        assert (dump.outcome, dump.note) == ("no handler", why)
        process.stdin.write(b"\n")
    assert process.returncode == 0


@pytest.mark.parametrize(("pipe", "outcome"), [("/a/pipe", "dumped"), ("", "no handler")])
def test_who_imports_regrow_can_be_asked_where_timers_are_served(pipe: str, outcome: str) -> None:
    script = "import regrow, time; print('up', flush=True); time.sleep(1000)"
    env = {**os.environ, "TORCHELASTIC_TIMER_FILE": pipe}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pidfd = os.pidfd_open(process.pid)
        assert ask(Target(process.pid, pidfd)).outcome == outcome
        os.close(pidfd)
        process.kill()


def test_a_child_that_did_not_arm_itself_is_not_taken_for_its_parent() -> None:
    with hanging(child) as hung:
        pid = int(hung.said)
        pidfd = os.pidfd_open(pid)
        try:
            dumps = capture([hung.target, Target(pid, pidfd)], 20.0)
            assert dumps[pid].outcome == "no handler"
            assert dumps[hung.target.pid].outcome == "dumped"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(pidfd)


def test_a_child_that_armed_itself_and_its_parent_answer_for_themselves() -> None:
    with hanging(armed_child) as hung:
        pid = int(hung.said)
        pidfd = os.pidfd_open(pid)
        try:
            wait_until(lambda: state(pid) == "S", "the child sleeps")
            dumps = capture([hung.target, Target(pid, pidfd)], 20.0)
            lines = {each: where(dump).split(" ", 1)[1] for each, dump in dumps.items()}
            assert {pid, hung.target.pid} == set(lines)
            assert lines[pid] != lines[hung.target.pid]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(pidfd)


def test_a_process_that_has_ended_is_gone() -> None:
    with hanging(exiting) as hung:
        wait_until(lambda: state(hung.target.pid) == "Z", "it ends")
        assert ask(hung.target) == Dump(hung.target.pid, "gone")
    assert ask(hung.target._replace(pidfd=-1)) == Dump(hung.target.pid, "gone")


def test_what_a_process_left_in_its_memory_is_not_read_and_not_kept() -> None:
    with hanging(littering) as hung:
        wait_until(lambda: where(ask(hung.target)).startswith("in sleeping "), "it sleeps")
        assert len(ask(hung.target).text) < 2000
        memory = [
            fd
            for fd in Path(f"/proc/{hung.target.pid}/fd").iterdir()
            if "stacks" in str(fd.readlink())
        ]
        assert [fd.stat().st_size < _capture.KEEP_BYTES for fd in memory] == [True]


def test_a_file_that_took_the_number_of_the_memory_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, target, size = os.getpid(), _capture._target, 2 * _capture.KEEP_BYTES
    marker = Marker(pid, CANDIDATES[0], CANDIDATES[1], 1)
    with open(tmp_path / "checkpoint", "wb") as file:
        file.truncate(size)
        number = f"/proc/{pid}/fd/{file.fileno()}"
        before = f"/memfd:{marker.name} (deleted)"

        def as_it_was(link: str) -> str:
            if link == number:
                return before
            return "" if Marker.of(now := target(link)) else now  # another test has armed us

        monkeypatch.setattr(_capture, "_target", as_it_was)
        pidfd = os.pidfd_open(pid)
        dump = capture([Target(pid, pidfd)], QUICK)[pid]
        os.close(pidfd)
    assert (dump.outcome, dump.note) == ("no handler", NEVER_ARMED)
    assert (tmp_path / "checkpoint").stat().st_size == size


def test_what_a_terminal_would_obey_in_an_answer_is_escaped() -> None:
    with hanging(lying) as hung:
        wait_until(lambda: "31m" in ask(hung.target).text, "it answers in its own way")
        assert r'File "a\x1b[31mb\x9bc", line 1 in f\x07' in ask(hung.target).text


def test_a_process_that_has_its_own_use_for_the_signal_is_silent() -> None:
    with hanging(otherwise, "sleeping") as hung:
        silent = ask(hung.target, QUICK)
        assert (silent.outcome, silent.text, silent.note[:9]) == ("silent", "", "no answer")
        assert hung.process.poll() is None


@pytest.mark.parametrize("why", ["doomed", "awaited"])
def test_a_process_that_waits_for_a_processor_has_more_time_if_it_is_worth_it(why: str) -> None:
    with hanging(otherwise, "looping") as hung:
        wait_until(lambda: state(hung.target.pid) == "R", "it loops")
        silent = ask(Target(hung.target.pid, hung.target.pidfd, **{why: True}), QUICK)
        assert (silent.outcome, silent.note) == ("silent", "no answer within 200 ms (state R)")
        silent = ask(hung.target, QUICK)  # which another one's end would wait for
        assert (silent.outcome, silent.note) == ("silent", "no answer within 20 ms (state R)")


def test_whoever_asks_itself_is_not_endangered() -> None:
    with hanging(asking_itself, threads=2) as hung:
        assert hung.said == "dumped, 1 thread"
