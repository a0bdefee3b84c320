"""Native stacks by py-spy, or the reason for their absence."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from helpers.processes import wait_until
from helpers.timers.hanging import hanging, holding_the_gil
from regrow.timer.stacks.capture import capture, find_py_spy, native_stacks

PATIENCE = 30.0


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which a program is used as py-spy."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "py-spy"


def write(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_the_output_of_py_spy_is_returned_for_each_process(py_spy: Path) -> None:
    write(py_spy, 'echo "$*"')
    assert native_stacks([7, 8], PATIENCE) == {
        7: "dump --native --pid 7\n",
        8: "dump --native --pid 8\n",
    }


def test_py_spy_beside_the_interpreter_is_preferred(py_spy: Path) -> None:
    write(py_spy, "echo path")
    beside = Path(sys.executable).parent
    beside.mkdir()
    write(beside / "py-spy", "echo beside")
    assert native_stacks([7], PATIENCE) == {7: "beside\n"}


@pytest.mark.parametrize(
    ("stderr", "passed_on"),
    [
        ("Error: Failed to find it\n\nCaused by:\n  0: nobody", "Failed to find it"),
        ("Permission Denied: Try sudo", "Permission Denied: Try sudo; it needs CAP_SYS_PTRACE"),
        ("", "exit code 3"),
    ],
)
def test_a_failure_of_py_spy_is_one_line(py_spy: Path, stderr: str, passed_on: str) -> None:
    write(py_spy, f"printf '{stderr}' >&2; exit 3")
    assert native_stacks([7], PATIENCE) == {7: f"py-spy failed: {passed_on}"}


def test_a_slow_py_spy_is_killed(py_spy: Path, tmp_path: Path) -> None:
    write(py_spy, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    assert native_stacks([7], 0.2) == {7: "py-spy did not finish within 0.2 s"}
    written = tmp_path / "pid"
    assert not written.exists() or not Path(f"/proc/{written.read_text().strip()}").exists()


def test_an_invalid_py_spy_is_reported(py_spy: Path) -> None:
    py_spy.write_text("")
    py_spy.chmod(0o755)
    assert native_stacks([7], PATIENCE)[7] == f"{py_spy} cannot be started: Exec format error"


def test_a_missing_py_spy_is_reported(py_spy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(py_spy.parent))
    assert native_stacks([7], PATIENCE) == {7: "py-spy is not installed (pip install py-spy)"}


def test_native_frames_are_captured_with_python_frames() -> None:
    assert find_py_spy(), "py-spy is one of the tools for development: pip install -e .[dev]"
    with hanging(holding_the_gil) as hung:
        pid = hung.target.pid
        status = Path(f"/proc/{pid}/status")
        wait_until(lambda: "\nState:\tS" in status.read_text(), "it reads")
        dump = capture([hung.target], PATIENCE, native=PATIENCE)[pid]
    assert dump.outcome == "dumped"
    assert (
        re.search(r"holding_the_gil \(\S*hanging.py:", dump.native)
        or "CAP_SYS_PTRACE" in dump.native
    )
