"""What is read from /proc."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from helpers.processes import alive, wait_until
from regrow.workers.guardian import procfs


def _sleeper(program: str = "sleep", **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([program, "1000"], env=os.environ | env, start_new_session=True)


def _end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def test_states_of_processes_are_read_without_missing_processes() -> None:
    sleeping, stopped, zombie = _sleeper(), _sleeper(), subprocess.Popen(["true"])
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        pids = [sleeping.pid, stopped.pid, zombie.pid, 2**30]
        wait_until(
            lambda: (
                procfs.process_states(pids)
                == {sleeping.pid: "S", stopped.pid: "T", zombie.pid: "Z"}
            ),
            "the three states",
        )
    finally:
        _end(sleeping, stopped)
        zombie.wait()


def test_a_program_with_parentheses_and_spaces_in_its_name_is_read_right(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    shutil.copy(shutil.which("sleep") or "", program)
    process = _sleeper(str(program))
    try:
        entry = procfs.stat(process.pid)
        assert entry is not None
        assert entry.parent == os.getpid()
        assert entry.session == process.pid
    finally:
        _end(process)


def test_a_family_is_a_session_a_mark_and_all_below() -> None:
    leader, stranger = _sleeper(), _sleeper()
    marked = _sleeper(**{procfs.MARK: "/job/1/2/"})
    try:
        found = procfs.family((leader.pid,), (b"/job/1/",))
        assert {leader.pid, marked.pid} <= set(found)
        assert stranger.pid not in found
        assert procfs.family((), (b"/job/2/",)) == []
        assert procfs.family((), (), roots=(stranger.pid,)) == [stranger.pid]
    finally:
        _end(leader, stranger, marked)


def test_a_mark_is_read_right_also_in_the_moment_of_exec() -> None:
    # Popen returns when the kernel has closed its pipe, before the new environment is in place.
    for number in range(40):
        process = _sleeper(**{procfs.MARK: f"/job/{number}/"})
        try:
            assert procfs.mark(process.pid) == f"/job/{number}/".encode()
        finally:
            _end(process)


def test_a_family_is_killed_completely_and_no_other_process() -> None:
    stranger = _sleeper()
    family = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & setsid sleep 1000 & sleep 1000"],
        env=os.environ | {procfs.MARK: "/job/7/"},
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(procfs.family((), (b"/job/7/",))) == 4, "the family")
        assert procfs.kill_family((), (b"/job/7/",), 30) == []
        assert family.wait() == -signal.SIGKILL
        assert alive(stranger.pid)
    finally:
        _end(stranger, family)
