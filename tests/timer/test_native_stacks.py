"""py-spy is asked for native stacks, or it is said why there are none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hanging import hanging, holding_the_gil
from processes import wait_until

from regrow.timer import _native
from regrow.timer._capture import capture
from regrow.timer._native import native_stacks

PATIENCE = 30.0


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program has to be to be taken for py-spy."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "py-spy"


def write(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_what_py_spy_shows_of_each_process_is_passed_on(py_spy: Path) -> None:
    write(py_spy, 'echo "$*"')
    assert native_stacks([7, 8], PATIENCE) == {
        7: "dump --native --pid 7\n",
        8: "dump --native --pid 8\n",
    }


def test_the_one_beside_the_interpreter_comes_first(py_spy: Path) -> None:
    write(py_spy, "echo path")
    beside = Path(sys.executable).parent
    beside.mkdir()
    write(beside / "py-spy", "echo beside")
    assert native_stacks([7], PATIENCE) == {7: "beside\n"}


@pytest.mark.parametrize(
    ("said", "passed_on"),
    [
        ("Error: Failed to find it\n\nCaused by:\n  0: nobody", "Failed to find it"),
        ("Permission Denied: Try sudo", "Permission Denied: Try sudo; it needs CAP_SYS_PTRACE"),
        ("", "exit code 3"),
    ],
)
def test_a_refusal_is_said_in_a_line(py_spy: Path, said: str, passed_on: str) -> None:
    write(py_spy, f"printf '{said}' >&2; exit 3")
    assert native_stacks([7], PATIENCE) == {7: f"py-spy failed: {passed_on}"}


def test_one_that_takes_too_long_is_killed(py_spy: Path, tmp_path: Path) -> None:
    write(py_spy, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    assert native_stacks([7], 0.2) == {7: "py-spy did not finish within 0.2 s"}
    written = tmp_path / "pid"
    assert not written.exists() or not Path(f"/proc/{written.read_text().strip()}").exists()


def test_one_that_is_no_program_is_said_to_be_none(py_spy: Path) -> None:
    py_spy.write_text("")
    py_spy.chmod(0o755)
    assert native_stacks([7], PATIENCE)[7] == f"{py_spy} cannot be started: Exec format error"


def test_without_py_spy_that_is_said(py_spy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(py_spy.parent))
    assert native_stacks([7], PATIENCE) == {7: "py-spy is not installed (pip install py-spy)"}


def test_the_native_frames_of_a_process_come_with_its_python_ones() -> None:
    assert _native._program(), "py-spy is one of the tools for development: pip install -e .[dev]"
    with hanging(holding_the_gil) as hung:
        pid = hung.target.pid
        status = Path(f"/proc/{pid}/status")
        wait_until(lambda: "\nState:\tS" in status.read_text(), "it reads")
        dump = capture([hung.target], PATIENCE, native=PATIENCE)[pid]
    assert dump.outcome == "dumped"
    assert "holding_the_gil (hanging.py:" in dump.native or "CAP_SYS_PTRACE" in dump.native
