"""`TailLog` and `redirect_stdout`, `redirect_stderr`: torch's, for programs that use them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import wait_until
from regrow.workers.redirects import redirect, redirect_stdout
from regrow.workers.tail_log import TailLog


def test_lines_of_files_that_exist_and_that_appear_are_copied_as_they_grow(tmp_path: Path) -> None:
    there, later = tmp_path / "there.log", tmp_path / "new" / "folder" / "later.log"
    there.write_text("one\n")
    out = io.StringIO()
    tail = TailLog("trainer", {0: str(there), 1: str(later)}, out).start()
    wait_until(lambda: out.getvalue() == "[trainer0]:one\n", "what was there")
    later.parent.mkdir(parents=True)
    with open(later, "w") as file:
        file.write("two\n")
        file.flush()
        wait_until(lambda: out.getvalue().endswith("[trainer1]:two\n"), "a file that appeared")
        with open(there, "a") as other:
            other.write("thr")
            other.flush()
            other.write("ee\n")
            other.flush()
            wait_until(lambda: out.getvalue().endswith("[trainer0]:three\n"), "what was appended")
        file.write("no end")
    assert not tail.stopped()
    tail.stop()
    assert tail.stopped()
    assert out.getvalue().endswith("[trainer1]:no end\n")


def test_prefix_and_filter_are_the_users(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"loss 1\nnoise \xff\nloss 2\n")
    out = io.StringIO()
    tail = TailLog("t", {3: str(log)}, out, {3: "> "}, log_line_filter=lambda s: "loss" in s)
    tail.start()
    tail.stop()
    assert out.getvalue() == "> loss 1\n> loss 2\n"


def test_stop_copies_the_existing_lines_and_does_not_wait_for_missing_files(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    out = io.StringIO()
    tail = TailLog("t", {0: str(log), 1: str(tmp_path / "never")}, out, interval_sec=1000).start()
    lines = "".join(f"line {i}\n" for i in range(10_000))
    log.write_text(lines)
    tail.stop()
    assert out.getvalue().replace("[t0]:", "") == lines


def test_a_tail_without_files_stops() -> None:
    tail = TailLog("t", {}, io.StringIO()).start()
    tail.stop()
    assert tail.stopped()


def test_a_stream_that_is_closed_ends_the_tail_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    log.write_text("line\n")
    out = io.StringIO()
    tail = TailLog("t", {0: str(log)}, out)
    out.close()
    tail.start()
    tail.stop()
    assert "TailLog t ends: I/O operation on closed file" in caplog.text


def test_output_of_python_c_and_children_is_redirected_until_the_end_of_the_block(
    tmp_path: Path,
) -> None:
    script = """
import ctypes, os, sys
from regrow.workers.redirects import redirect_stderr, redirect_stdout
libc = ctypes.CDLL(None)
print("before")
libc.printf(b"c before\\n")
with redirect_stdout("out.log"), redirect_stderr("err.log"):
    print("python")
    libc.printf(b"c\\n")
    os.system("echo child")
    print("oops", file=sys.stderr)
print("after")
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=env,  # so that C buffers what it prints, too
        capture_output=True,
        check=True,
        text=True,
    )
    assert sorted(run.stdout.splitlines()) == ["after", "before", "c before"]
    assert sorted((tmp_path / "out.log").read_text().splitlines()) == ["c", "child", "python"]
    assert (tmp_path / "err.log").read_text() == "oops\n"
    assert run.stderr == ""


def test_a_stream_of_another_name_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="unknown standard stream <stdin>"),
        redirect("stdin", str(tmp_path / "log")),
    ):
        pass


def test_a_file_that_cannot_be_opened_redirects_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError), redirect_stdout("/nonexistent/log"):
        pass
    print("still here", flush=True)
    assert capfd.readouterr().out == "still here\n"
