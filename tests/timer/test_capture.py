"""Capture of the stacks of processes that hang in different ways."""

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

from helpers.processes import wait_until
from helpers.timers.hanging import (
    Hanging,
    armed_child,
    ask,
    asking_itself,
    blocking,
    child,
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
    woken,
)
from regrow.timer.stacks.answering import CANDIDATES, Marker, Signals
from regrow.timer.stacks.capture import (
    KEEP_BYTES,
    Target,
    capture,
    link_target,
    signal_main_thread,
    state_of,
)
from regrow.timer.stacks.report import Dump, where

QUICK = 0.02
NEVER_ARMED = "it has neither imported regrow nor set a timer"


def status(pid: int) -> bytes:
    return Path(f"/proc/{pid}/status").read_bytes()


def state(pid: int) -> str:
    return state_of(status(pid))


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
def test_a_hanging_process_reports_its_place(way: Callable[[], None], place: str) -> None:
    with hanging(way) as hung:
        wait_until(lambda: where(ask(hung.target)).startswith(place), "it has reached that place")
        assert where(ask(hung.target._replace(doomed=True))).startswith(place)


def test_only_a_doomed_process_dumps_all_threads() -> None:
    with hanging(sleeping, threads=3) as hung:
        assert [thread.main for thread in ask(hung.target).threads] == [True]
        threads = ask(hung.target._replace(doomed=True)).threads
        assert sorted(thread.main for thread in threads) == [False, False, False, True]


def test_a_doomed_process_leaves_no_core() -> None:
    with hanging(sleeping) as hung:
        pid = hung.target.pid
        before, most = resource.prlimit(pid, resource.RLIMIT_CORE)
        ask(hung.target)
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (before, most)
        ask(hung.target._replace(doomed=True))
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (1 if most else 0, most)


def test_a_process_with_many_threads_shows_its_main_thread() -> None:
    with hanging(sleeping, threads=110) as hung:
        wait_until(lambda: where(ask(hung.target)).startswith("in sleeping "), "it sleeps")
        dump = ask(hung.target._replace(doomed=True))
        assert ("\n...\n" in dump.text, dump.note) == (True, "")
        assert len(dump.threads) == 101
        assert where(dump).startswith("in sleeping ")


def test_the_first_stack_of_the_main_thread_counts() -> None:
    with hanging(woken) as hung:
        wait_until(lambda: state(hung.target.pid) == "S", "it pauses")
        assert where(ask(hung.target._replace(doomed=True))).startswith("in woken ")
        wait_until(lambda: where(ask(hung.target)).startswith("in sleeping "), "it goes on")


def test_a_thread_can_be_signalled_before_linux_6_9(
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
            signal_main_thread(hung.target.pid, hung.target.pidfd, CANDIDATES[0])


def test_a_process_that_blocks_the_signal_is_sent_none() -> None:
    with hanging(blocking) as hung:
        silent = ask(hung.target._replace(doomed=True), QUICK)
        why = "no answer within 20 ms: its main thread blocks signal 45"
        assert silent == Dump(hung.target.pid, "silent", why)
        assert not left_pending(hung)


def test_a_stopped_process_is_reported_and_sent_no_signal() -> None:
    with hanging(sleeping) as hung:
        os.kill(hung.target.pid, signal.SIGSTOP)
        wait_until(lambda: state(hung.target.pid) == "T", "it stops")
        stopped = ask(hung.target)
        assert where(stopped) == "stopped by a signal (SIGSTOP or a debugger)"
        assert not left_pending(hung)


def test_an_uninterruptible_process_is_asked_later(tmp_path: Path) -> None:
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


# Each ends when it reads a line, which shows that it lives.
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
def test_a_process_that_imports_regrow_reports_stacks_if_timers_are_served(
    pipe: str, outcome: str
) -> None:
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


def test_an_unarmed_child_is_not_confused_with_its_parent() -> None:
    with hanging(child) as hung:
        pid = int(hung.output)
        pidfd = os.pidfd_open(pid)
        try:
            dumps = capture([hung.target, Target(pid, pidfd)], 20.0)
            assert dumps[pid].outcome == "no handler"
            assert dumps[hung.target.pid].outcome == "dumped"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(pidfd)


def test_an_armed_child_and_its_parent_report_their_own_stacks() -> None:
    with hanging(armed_child) as hung:
        pid = int(hung.output)
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


def test_an_ended_process_is_gone() -> None:
    with hanging(exiting) as hung:
        wait_until(lambda: state(hung.target.pid) == "Z", "it ends")
        assert ask(hung.target) == Dump(hung.target.pid, "gone")
    assert ask(hung.target._replace(pidfd=-1)) == Dump(hung.target.pid, "gone")


def test_a_process_that_ends_when_its_descriptors_are_listed_is_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hanging(executing) as hung:
        pid, target = hung.target.pid, link_target
        wait_until(lambda: status(pid).startswith(b"Name:\tsleep"), "it executes")

        def ends_first(link: str) -> str:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: state(pid) == "Z", "it ends")
            return target(link)

        monkeypatch.setattr("regrow.timer.stacks.capture.link_target", ends_first)
        assert ask(hung.target) == Dump(pid, "gone", "it is ending")


def test_other_content_of_the_memory_is_not_read_and_not_kept() -> None:
    with hanging(littering) as hung:
        wait_until(lambda: where(ask(hung.target)).startswith("in sleeping "), "it sleeps")
        assert len(ask(hung.target).text) < 2000
        memory = [
            fd
            for fd in Path(f"/proc/{hung.target.pid}/fd").iterdir()
            if "stacks" in str(fd.readlink())
        ]
        assert [fd.stat().st_size < KEEP_BYTES for fd in memory] == [True]


def test_a_file_with_the_reused_number_of_the_memory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, target, size = os.getpid(), link_target, 2 * KEEP_BYTES
    marker = Marker(pid, CANDIDATES[0], CANDIDATES[1], 1)
    with open(tmp_path / "checkpoint", "wb") as file:
        file.truncate(size)
        number = f"/proc/{pid}/fd/{file.fileno()}"
        before = f"/memfd:{marker.name} (deleted)"

        def as_it_was(link: str) -> str:
            if link == number:
                return before
            return "" if Marker.of(now := target(link)) else now  # another test has armed us

        monkeypatch.setattr("regrow.timer.stacks.capture.link_target", as_it_was)
        pidfd = os.pidfd_open(pid)
        dump = capture([Target(pid, pidfd)], QUICK)[pid]
        os.close(pidfd)
    assert (dump.outcome, dump.note) == ("no handler", NEVER_ARMED)
    assert (tmp_path / "checkpoint").stat().st_size == size


def test_control_characters_in_a_dump_are_escaped() -> None:
    with hanging(lying) as hung:
        wait_until(lambda: "31m" in ask(hung.target).text, "it answers in its own way")
        assert r'File "a\x1b[31mb\x9bc", line 1 in f\x07' in ask(hung.target).text


def test_a_process_with_its_own_handler_is_silent() -> None:
    with hanging(otherwise, "sleeping") as hung:
        silent = ask(hung.target, QUICK)
        assert (silent.outcome, silent.text, silent.note[:9]) == ("silent", "", "no answer")
        assert hung.process.poll() is None


@pytest.mark.parametrize("why", ["doomed", "awaited"])
def test_a_doomed_or_awaited_process_may_wait_for_a_processor(why: str) -> None:
    with hanging(otherwise, "looping") as hung:
        wait_until(lambda: state(hung.target.pid) == "R", "it loops")
        silent = ask(Target(hung.target.pid, hung.target.pidfd, **{why: True}), QUICK)
        assert (silent.outcome, silent.note) == ("silent", "no answer within 200 ms (state R)")
        silent = ask(hung.target, QUICK)  # the end of another process would wait for it
        assert (silent.outcome, silent.note) == ("silent", "no answer within 20 ms (state R)")


def test_a_process_that_asks_itself_dumps_one_thread() -> None:
    with hanging(asking_itself, threads=2) as hung:
        assert hung.output == "dumped, 1 thread"
