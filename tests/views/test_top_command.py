"""`regrow top`: what it prints, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from helpers.processes import PATIENCE, wait_until
from helpers.views.written_job import WrittenJob
from regrow.views import JobWatch, Library
from regrow.views.top import render


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WrittenJob]:
    written = WrittenJob(tmp_path, 512)
    written.start()
    yield written
    written.close()


def shown(runs: Path, height: int | None, fault: str | None = None) -> str:
    library = Library([str(runs)])
    out = io.StringIO()
    snapshot = JobWatch(library, library.jobs()[0]).snapshot()
    Console(file=out, width=120).print(render(snapshot, height, fault))
    return out.getvalue()


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regrow", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_pipe_gets_all_ranks_once(job: WrittenJob, tmp_path: Path) -> None:
    job.step(3, 1234)
    done = top(str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.py job  running" in done.stdout
    assert "\x1b" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sum(row[1:2] == ["running"] and row[0].isdecimal() for row in rows) == 512
    assert ["3", "running", "1234"] in [row[:3] for row in rows]


def test_a_small_terminal_shows_the_ranks_that_need_attention(
    job: WrittenJob, tmp_path: Path
) -> None:
    for rank in range(512):
        job.step(rank, 100 - (rank == 400) * 60)
    job.emit("worker.suspended", rank=300, local_rank=300, pid=1300, signal="SIGSTOP")
    text = shown(tmp_path, 24)
    assert len(text.splitlines()) <= 24
    rows = [line.split() for line in text.splitlines()]
    assert ["300", "suspended"] in [row[:2] for row in rows]
    assert ["400", "running", "40", "60"] in [row[:4] for row in rows]
    assert "more: " in text


def test_a_job_that_is_over_ran_and_repeats_no_state(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    written.start()
    written.end("SUCCEEDED", "succeeded")
    written.finish("SUCCEEDED", reason="succeeded")
    head = shown(tmp_path, None).partition("node ")[0].splitlines()
    assert head[0].endswith("train.py job  succeeded")
    assert [line[:7] for line in head[1:] if line] == ["ran for"]


def test_a_text_of_a_job_is_no_markup(job: WrittenJob, tmp_path: Path) -> None:
    job.fail(1, "[bold]ValueError[/nothing]")
    WrittenJob(tmp_path, [512], host="[red]node1[/nothing]")
    text = shown(tmp_path, None)
    assert "[bold]ValueError[/nothing]" in text
    assert "[red]node1[/nothing]" in text


def test_the_ranks_that_are_not_shown_are_counted(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, 2)
    job.start(world_size=4)
    hint = "without 2 ranks of other hosts: give their log directories or --rdzv-endpoint"
    assert hint in shown(tmp_path, None)
    asked = shown(tmp_path, None, fault="")
    assert "without 2 ranks of other hosts, because their agents have sent no answer" in asked
    assert "--rdzv-endpoint" not in asked, "it was given"
    job.start(world_size=2)
    assert "of other hosts" not in shown(tmp_path, None)
    job.close()


def test_a_terminal_is_redrawn_until_ctrl_c(job: WrittenJob, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "regrow", "top", str(tmp_path)],
        stdout=theirs,
        stdin=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    ) as process:
        os.close(theirs)
        os.set_blocking(ours, False)
        seen = bytearray()

        def shows(text: bytes) -> bool:
            with suppress(BlockingIOError):
                seen.extend(os.read(ours, 1 << 16))
            return text in seen

        wait_until(lambda: shows(b"512 workers"), "drawn")
        job.step(0, 4321)
        wait_until(lambda: shows(b"step 4321"), "redrawn")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: shows(b"\x1b[?1049l"), "the screen is restored")
        assert process.wait(PATIENCE) == 0
    os.close(ours)


def test_without_a_job_it_says_so(tmp_path: Path) -> None:
    done = top(str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"regrow top: no job in {tmp_path}: give the --log-dir of one\n"
