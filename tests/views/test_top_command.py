"""`regrow top`: what it prints, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from helpers.processes import PATIENCE, wait_until
from helpers.views.written_job import WrittenJob
from regrow.events import NO_ID
from regrow.views import JobWatch, Library
from regrow.views.top import render


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WrittenJob]:
    written = WrittenJob(tmp_path, 512)
    written.start()
    yield written
    written.close()


def shown(runs: Path, height: int | None = None, fault: str | None = None, width: int = 120) -> str:
    library = Library([str(runs)])
    out = io.StringIO()
    snapshot = JobWatch(library, library.jobs()[0]).snapshot()
    console = Console(file=out, width=width, height=height)
    console.print(render(snapshot, console, fits=height is not None, fault=fault))
    return out.getvalue()


def top(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regrow", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | environ,
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


LONG = "RuntimeError: CUDA error: " + "an illegal memory access was encountered; " * 5


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("height", [24, None])
def test_a_long_message_leaves_room_for_the_ranks(
    job: WrittenJob, tmp_path: Path, width: int, height: int | None
) -> None:
    for restart in range(6):
        for rank in range(512):
            job.step(rank, 123456 - rank)
        job.fail(1, f"{LONG}{restart}")
        job.emit("job.restarting", restart_count=1, restarts_left=3, delay_s=0, reason=LONG)
        job.start()
    for rank in range(512):
        job.step(rank, 123456 - rank)
    job.emit("heartbeat.stalled", rank=500, local_rank=500, pid=1500, message=LONG)
    text = shown(tmp_path, height, width=width)
    assert height is None or len(text.splitlines()) == height
    rows = [line.split() for line in text.splitlines()]
    (row,) = [row for row in rows if row[:2] == ["500", "stalled"]]
    assert row[2:4] == ["122956", "500"]
    assert row[4] not in ("-", "...")
    assert "1500" in row


def test_the_last_heartbeat_of_a_rank_is_shown_if_there_are_heartbeats(
    job: WrittenJob, tmp_path: Path
) -> None:
    for rank in range(512):
        job.step(rank, 100)
    assert "heartbeat" not in shown(tmp_path)
    assert "last exchange" not in shown(tmp_path)
    job.heartbeat(7, ago=12)
    (row,) = (line.split() for line in shown(tmp_path).splitlines() if line.split()[:1] == ["7"])
    assert " ".join(row[-4:]).endswith("s ago 1007")
    assert 12 <= float(row[-4]) < 60
    assert "last exchange" in shown(tmp_path)


def test_heartbeats_leave_room_for_what_happened_to_a_rank(job: WrittenJob, tmp_path: Path) -> None:
    job.begun -= 120
    for rank in range(512):
        job.step(rank, 123456)
    job.emit("timer.expired", rank=2, signal="SIGKILL", stood="in all_reduce (hang.py:33)")
    for rank in range(512):
        job.heartbeat(rank, ago=12)
    text = shown(tmp_path, width=80)
    assert "last exchange" not in text
    (row,) = (line for line in text.splitlines() if line.split()[:2] == ["2", "hung"])
    assert "in all_" in row


def test_a_hang_of_all_ranks_is_in_the_head(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    job.start()
    job.begun -= 120
    for rank in range(2):
        job.step(rank, 1000, ago=38)
    head = " ".join(shown(tmp_path).partition("node ")[0].split())
    assert "step 1000, 0 steps/s, last step 3" in head
    job.close()


def test_the_step_of_a_killed_job_is_a_minimum(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    job = WrittenJob(tmp_path, pid=ended.pid)
    job.start()
    job.emit("worker.first_step", rank=1, local_rank=1, step=1461, step_monotonic=1.0)
    job.close()
    text = shown(tmp_path)
    assert "step at least 1461" in text
    assert ["1", "unknown", ">=1461"] in [line.split()[:3] for line in text.splitlines()]


def test_a_failure_is_restarting_until_its_workers_run_again(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    job.start()
    job.fail(1, "ValueError: x")

    def row() -> list[str]:
        lines = shown(tmp_path).partition("rung ")[2].splitlines()
        return [word for line in lines if "exception" in line for word in line.split()]

    job.emit("job.restarting", restart_count=1, restarts_left=2, delay_s=9, reason="failed")
    assert (row()[0], row()[-1]) == ("restarting", "-")
    job.emit("rendezvous.completed", group_rank=0, group_world_size=1, world_size=2)
    assert (row()[0], row()[-1]) == ("restarting", "-")
    job.start()
    assert (row()[0], row()[-1]) == ("3", "s")
    job.close()


def test_a_failure_that_ended_the_job_is_not_healed(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    job.start()
    job.fail(1, "ValueError: x")
    job.finish("FAILED", 1, "ValueError: x")
    (row,) = (line.split() for line in shown(tmp_path).splitlines() if "exception" in line)
    assert row[:2] == ["not", "healed"]
    assert row[-1] == "-"


def test_the_restarts_that_were_not_charged_are_told_from_those_that_were(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    job.start()
    assert ", restarts 0, 3 left," in shown(tmp_path)
    left = 3
    for cause in ("membership", "failure", "membership"):
        if cause == "failure":
            job.fail(1, "ValueError: x")
            left -= 1
        else:
            job.emit("round.ended", node="n2", why="host b waits to join", failed=False)
            job.end("STOPPED")
        job.emit("job.restarting", restart_count=1, restarts_left=left, delay_s=0, reason=cause)
        job.start()
    assert ", restarts 3 (1 charged), 2 left," in " ".join(shown(tmp_path).split())
    job.close()


def test_the_default_id_of_a_job_is_not_shown(tmp_path: Path) -> None:
    WrittenJob(tmp_path, run_id=NO_ID).close()
    assert shown(tmp_path).startswith("regrow train.py  waiting\n")


def test_a_single_worker_is_in_the_singular(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, 1)
    job.start()
    assert ", 1 worker, " in shown(tmp_path)
    job.close()


def test_a_job_that_is_over_ran_and_repeats_no_state(tmp_path: Path) -> None:
    written = WrittenJob(tmp_path)
    written.start()
    written.end("SUCCEEDED", "succeeded")
    written.finish("SUCCEEDED", reason="succeeded")
    head = shown(tmp_path).partition("node ")[0].splitlines()
    assert head[0].endswith("train.py job  succeeded")
    assert [line[:7] for line in head[1:] if line] == ["ran for"]


def test_a_node_without_an_end_in_a_job_that_is_over_has_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lost = WrittenJob(tmp_path, [0], host="a"), WrittenJob(tmp_path, [1], host="b")
    for job in (first, lost):
        job.start(world_size=2)
        job.close()
    first.end("SUCCEEDED")
    first.finish("SUCCEEDED", reason="succeeded")
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    head, _, rest = shown(tmp_path).partition("node ")
    assert head.startswith("regrow train.py job  succeeded\nran for 0.")
    (row,) = (line.split() for line in rest.splitlines() if line.startswith("b "))
    assert row[1] == "unknown"
    assert " ".join(row[6:]).startswith("its log ends at 20")


def test_a_text_of_a_job_is_no_markup(job: WrittenJob, tmp_path: Path) -> None:
    job.fail(1, "[bold]ValueError[/nothing]")
    WrittenJob(tmp_path, [512], host="[red]node1[/nothing]")
    text = shown(tmp_path)
    assert "[bold]ValueError[/nothing]" in text
    assert "[red]node1[/nothing]" in text


def test_control_characters_of_a_job_do_not_reach_the_terminal(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    job.fail(1, "RuntimeError: \x1b[2J gone")
    job.emit("job.finished", state="FAILED", reason="\x1b]0;t\x07 over")
    text = shown(tmp_path)
    assert "gone" in text
    assert "over" in text
    assert not {"\x1b", "\x07"} & {*text}


def test_control_characters_in_a_state_do_not_reach_the_terminal(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    job.start()
    job.end("FAILED")
    job.finish("\x1b]0;t\x07\x1b[2J over")
    text = shown(tmp_path)
    assert "over" in text
    assert not {"\x1b", "\x07"} & {*text}


def test_a_text_that_is_not_cut_is_whole_and_in_its_own_letters(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, run_id="größe", host="hôte")
    job.start()
    reason = "é" * 5 + " word" * 200
    job.end("FAILED")
    job.finish("FAILED", 1, reason)
    text = " ".join(shown(tmp_path).split())
    assert reason in text
    assert "regrow train.py größe failed" in text
    assert "hôte" in text


def test_an_output_without_a_letter_of_the_job_gets_a_question_mark(tmp_path: Path) -> None:
    WrittenJob(tmp_path, run_id="größe").close()
    done = top("--once", str(tmp_path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr??e" in done.stdout


def test_the_ranks_that_are_not_shown_are_counted(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, 2)
    job.start(world_size=4)
    hint = "without 2 ranks of other hosts: give their log directories or --rdzv-endpoint"
    assert hint in shown(tmp_path)
    asked = shown(tmp_path, fault="")
    assert "without 2 ranks of other hosts, because their agents have sent no answer" in asked
    assert "--rdzv-endpoint" not in asked, "it was given"
    job.start(world_size=2)
    assert "of other hosts" not in shown(tmp_path)
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
    hint = f"or {tempfile.gettempdir()}/torchelastic_* for jobs without --log-dir"
    assert done.stderr == (f"regrow top: no job in {tmp_path}: give the --log-dir of one, {hint}\n")
