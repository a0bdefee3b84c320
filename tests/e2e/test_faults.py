"""Every fault of a single host, and the outcome that the user of the job wants."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job, wait_gone
from regrow.utils import PortReservation

Launch = Callable[..., Job]

HOLD_FIRST_ATTEMPT = """
report("pid", os.getpid())
if ATTEMPT == 0:
    forever()
"""


def pids(job: Job, count: int = 2) -> dict[int, int]:
    return {int(rank): int(pid) for rank, _, _, pid in job.reports(count)}


def test_a_worker_killed_by_sigkill_is_replaced_and_named_as_the_first_failure(
    launch: Launch,
) -> None:
    job = launch(HOLD_FIRST_ATTEMPT, "--max-restarts=1")
    first = pids(job)
    os.kill(first[1], signal.SIGKILL)
    second = pids(job)
    assert job.finish() == 0, job.output
    assert not set(first.values()) & set(second.values())
    (failure,) = job.events("worker.failed")
    assert (failure["rank"], failure["signal"], failure["root_cause"]) == (1, "SIGKILL", True)
    assert failure["failed_monotonic"] <= failure["detected_monotonic"]
    assert "rank 1" in job.stderr
    assert "SIGKILL" in job.stderr


def test_an_event_log_that_takes_no_more_events_delays_no_restart(launch: Launch) -> None:
    # As on a file system that hangs, a write to the log blocks: it is a full pipe.
    job = launch(HOLD_FIRST_ATTEMPT, "--max-restarts=1")
    first = pids(job)
    (log,) = job.log_dir.glob("*/events.jsonl")
    log.unlink()
    os.mkfifo(log)
    pipe = os.open(log, os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"." * 4096)
    os.kill(first[1], signal.SIGKILL)
    second = pids(job)
    assert job.finish() == 0, job.output
    os.close(pipe)
    assert not set(first.values()) & set(second.values())
    assert "takes no more events" in job.stderr


# Rank 0 stops slowly, and reports that it has begun to stop.
LINGERS = """
def linger(*_):
    report("stops")
    while not os.path.exists(os.environ["REPORTS"] + ".end"):
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, linger)
report("pid", os.getpid())
while True:
    time.sleep(0.05)
"""


def test_a_failure_is_reported_even_if_a_signal_arrives_while_the_others_are_being_stopped(
    launch: Launch,
) -> None:
    job = launch(LINGERS, "--max-restarts=1", "--restart-timeout=30")
    os.kill(pids(job)[1], signal.SIGSEGV)
    assert job.reports() == [["0", "0", "stops"]]
    job.signal(signal.SIGTERM)
    assert job.reports() == [["0", "0", "stops"]]  # it has the signal from the agent as well
    (job.script.parent / "reports.end").touch()
    assert job.finish() == 143, job.output
    (failure,) = job.events("worker.failed")
    assert (failure["rank"], failure["signal"], failure["root_cause"]) == (1, "SIGSEGV", True)
    assert "rank 1" in job.stderr
    assert "SIGSEGV" in job.stderr


def test_without_restarts_left_the_job_fails_with_exit_code_1_and_a_report(launch: Launch) -> None:
    job = launch(HOLD_FIRST_ATTEMPT)
    os.kill(pids(job)[0], signal.SIGSEGV)
    assert job.finish() == 1, job.output
    assert "Root Cause (first observed failure):" in job.stderr
    assert "SIGSEGV" in job.stderr
    assert "Traceback" not in job.stderr


def test_no_worker_nor_any_of_its_children_outlives_an_agent_killed_by_sigkill(
    launch: Launch,
) -> None:
    job = launch(
        """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
daemon = subprocess.Popen(["setsid", "sh", "-c", "sleep 1000 & sleep 1000"])
report("pid", os.getpid())
report("pid", child.pid)
report("pid", daemon.pid)
forever()
"""
    )
    started = [int(pid) for _, _, _, pid in job.reports(6)]
    job.signal(signal.SIGKILL)
    assert job.finish() == -signal.SIGKILL
    for pid in started:
        wait_gone(pid)


@pytest.mark.thorough
def test_the_agent_ignores_a_killed_child_of_a_worker(launch: Launch) -> None:
    job = launch(
        """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
report("pid", child.pid)
sys.exit(0 if child.wait() == -signal.SIGKILL else 4)
"""
    )
    for pid in pids(job).values():
        os.kill(pid, signal.SIGKILL)
    assert job.finish() == 0, job.output
    assert job.events("worker.failed") == []


def test_the_children_of_a_worker_that_died_are_stopped_before_the_next_attempt(
    launch: Launch,
) -> None:
    job = launch(
        """
import subprocess
if ATTEMPT == 0:
    report(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid)
else:
    report("started")
forever()
""",
        "--max-restarts=1",
    )
    first = [[int(word) for word in words] for words in job.reports(2)]
    os.kill(first[0][2], signal.SIGKILL)
    assert all(words == ["started"] for _, _, *words in job.reports(2))
    for _, _, worker, child in first:
        assert _is_gone(worker)
        assert _is_gone(child)
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_stopped_worker_is_reported_and_still_ends_with_the_job(launch: Launch) -> None:
    job = launch("report('pid', os.getpid())\nforever()\n", nproc=2)
    stopped = pids(job)[1]
    os.kill(stopped, signal.SIGSTOP)
    event = job.await_event("worker.suspended")
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM, job.output
    assert (event["rank"], event["pid"], event["signal"]) == (1, stopped, "SIGSTOP")


@pytest.mark.thorough
def test_a_stopped_worker_that_continues_costs_nothing(launch: Launch) -> None:
    job = launch(
        """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
report("pid", os.getpid())
forever()
"""
    )
    found = pids(job)
    os.kill(found[0], signal.SIGSTOP)
    os.kill(found[0], signal.SIGCONT)
    for pid in found.values():
        os.kill(pid, signal.SIGUSR1)
    assert job.finish() == 0, job.output
    assert job.events("worker.failed") == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_every_worker_with_its_grace_and_ends_the_job(
    launch: Launch, signum: signal.Signals
) -> None:
    job = launch(
        f"""
def checkpoint(*_):
    report("checkpoint")
    sys.exit(0)
signal.signal({int(signum)}, checkpoint)
report("pid", os.getpid())
forever()
"""
    )
    pids(job)
    job.signal(signum)
    assert sorted(rank for rank, _, word in job.reports(2) if word == "checkpoint") == ["0", "1"]
    assert job.finish() == 128 + signum, job.output
    (finished,) = job.events("job.finished")
    assert (finished["state"], finished["signal"]) == ("SIGNALED", signum.name)
    assert "Traceback" not in job.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_very_start_leaves_nothing_behind(
    launch: Launch, signum: signal.Signals
) -> None:
    # As soon as the launcher exists, and again when its guardian or its first worker does.
    early = launch("report('pid', os.getpid())\nforever()\n")
    early.signal(signum)
    later = launch("report('pid', os.getpid())\nforever()\n", nproc=4)
    later.reports(1)
    later.signal(signum)
    code = early.finish()
    # Before our first line Python itself is interrupted: it prints a traceback and exits with 1.
    interrupted = "KeyboardInterrupt" in early.stderr and "/src/regrow/" not in early.stderr
    assert code in (128 + signum, -signum) or (code == 1 and interrupted), early.output
    assert later.finish() == 128 + signum, later.output


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_workers_are_being_stopped_for_a_restart_ends_the_job(
    launch: Launch, signum: signal.Signals
) -> None:
    job = launch(
        """
def stubborn(*_):
    report("stopping")
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, stubborn)
report("pid", os.getpid())
forever()
""",
        "--max-restarts=3",
        "--shutdown-timeout=1",
    )
    os.kill(pids(job)[0], signal.SIGKILL)
    assert job.reports(1)[0][2] == "stopping"
    job.signal(signum)
    assert job.finish() == 128 + signum, job.output
    assert len(job.events("attempt.started")) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_back_off_of_a_crash_loop_ends_the_job(
    launch: Launch, signum: signal.Signals
) -> None:
    job = launch("report('x')\nsys.exit(1)\n", "--max-restarts=100", nproc=1)
    job.reports(2)
    job.await_event("job.restarting", lambda event: event["delay_s"] > 0)
    job.signal(signum)
    assert job.finish() == 128 + signum, job.output


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_others_are_waited_for_ends_the_job(
    launch: Launch, tmp_path: Path, signum: signal.Signals
) -> None:
    home = {"HOME": str(tmp_path)}  # where agents of one user have their common secret
    with PortReservation() as port:
        meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port.port}"]
        job = launch("report('started')", *meeting, nproc=1, env=home, standalone=False)
        job.await_event("job.started")
        job.signal(signum)
        assert job.finish() == 128 + signum, job.output
    assert job.events("attempt.started") == []
    assert "Traceback" not in job.stderr


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_the_grace_at_once(launch: Launch) -> None:
    job = launch(
        """
signal.signal(signal.SIGINT, lambda *_: report("ignored"))
report("pid", os.getpid())
forever()
""",
        "--shutdown-timeout=3600",
    )
    pids(job)
    job.signal(signal.SIGINT)
    job.reports(2)
    job.signal(signal.SIGINT)
    assert job.finish() == 128 + signal.SIGINT, job.output


@pytest.mark.thorough
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(launch: Launch) -> None:
    job = launch(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report("pid", os.getpid())
forever()
""",
        "--shutdown-timeout=1",
    )
    os.kill(pids(job)[0], signal.SIGKILL)
    assert job.finish() == 1, job.output
    assert [failure["rank"] for failure in job.events("worker.failed")] == [0]


@pytest.mark.thorough
def test_a_worker_that_closes_its_stdout_runs_on(launch: Launch) -> None:
    job = launch("os.close(1)\nos.close(2)\nreport('on')\n", "--redirects=3")
    assert len(job.reports(2)) == 2
    assert job.finish() == 0, job.output


@pytest.mark.thorough
def test_a_gigabyte_of_output_is_stored_to_the_last_byte(launch: Launch) -> None:
    job = launch(
        """
block = (b"x" * 127 + b"\\n") * 8192
for _ in range(1024):
    os.write(1, block)
""",
        "--redirects=1",
        nproc=1,
    )
    assert job.finish() == 0, job.output
    (log,) = job.log_dir.glob("*/attempt_0/0/stdout.log")
    assert log.stat().st_size == 1 << 30
    log.unlink()


@pytest.fixture
def tiny_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 128 KiB, or as the test asks."""
    size = getattr(request, "param", "128k")
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.thorough
def test_a_full_disk_under_the_logs_costs_no_training_and_no_line(
    launch: Launch, tiny_disk: Path
) -> None:
    job = launch(
        """
if ATTEMPT == 0:
    for i in range(20000):
        print("line", i, "of rank", RANK)
    report("pid", os.getpid())
    forever()
""",
        f"--log-dir={tiny_disk}",
        "--redirects=3",
        "--max-restarts=1",
    )
    os.kill(pids(job)[1], signal.SIGKILL)
    assert job.finish() == 0, job.output
    assert "No space left on device" in job.stderr
    for rank in (0, 1):
        (log,) = tiny_disk.glob(f"*/attempt_0/{rank}/stdout.log")
        # The file may end within a line; the console continues from there.
        shown = re.findall(rf"^\[default{rank}\]:(.*\n)", job.stdout, re.MULTILINE)
        assert log.read_text() + "".join(shown) == "".join(
            f"line {i} of rank {rank}\n" for i in range(20000)
        )


@pytest.mark.parametrize("tiny_disk", ["128k", "16k"], indirect=True)
def test_the_story_of_a_job_that_ends_on_a_full_disk_has_its_end(
    launch: Launch, tiny_disk: Path
) -> None:
    job = launch(
        f"""
import glob
(log,) = glob.glob({f"{tiny_disk}/*/events.jsonl"!r})
for piece in (4096, 1):  # blank lines, so that no page of the log has room for more
    with open(log, "ab", buffering=0) as fill:
        try:
            while True:
                fill.write(piece * b"\\n")
        except OSError:
            continue
""",
        f"--log-dir={tiny_disk}",
        nproc=1,
    )
    assert job.finish() == 0, job.output
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "events", tiny_disk], capture_output=True, text=True
    )
    assert "SUCCEEDED after" in done.stdout, done


def test_a_script_that_does_not_exist_is_one_line_and_exit_code_2(launch: Launch) -> None:
    job = launch("")
    assert job.finish() == 0
    job.script.unlink()
    again = launch("", "/nonexistent/train.py")
    assert again.finish() == 2
    assert "/nonexistent/train.py" in again.stderr
    assert len(again.stderr.splitlines()) == 1, again.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("this is no python", "SyntaxError"),
        ("raise ValueError('bad learning rate')", "ValueError: bad learning rate"),
        ("sys.exit(3)", "exitcode  : 3"),
    ],
)
def test_a_script_that_fails_by_itself_ends_the_job_with_exit_code_1_and_the_reason(
    launch: Launch, script: str, shown: str
) -> None:
    job = launch(script, nproc=1)
    assert job.finish() == 1, job.output
    assert shown in job.stderr


def test_a_recorded_exception_is_the_root_cause_though_another_rank_dies_first(
    launch: Launch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = launch(
        """
from regrow.workers.errors import record
peer = os.environ["PEER"]
@record
def main():
    if RANK == 0:
        raise RuntimeError("the first thing that went wrong")
    with open(peer) as gate:
        gate.read()
    os.kill(os.getpid(), signal.SIGKILL)
if RANK == 0:
    try:
        main()
    except RuntimeError:
        with open(peer, "w") as gate:
            gate.write("raised")
        forever()
else:
    main()
""",
        env={"PEER": str(gate)},
    )
    assert job.finish() == 1, job.output
    root = [event["rank"] for event in job.events("worker.failed") if event["root_cause"]]
    assert root == [0]
    assert "the first thing that went wrong" in job.stderr


@pytest.mark.thorough
def test_error_files_that_are_broken_hide_no_failure(launch: Launch) -> None:
    job = launch(
        """
path = os.environ["TORCHELASTIC_ERROR_FILE"]
content = [
    None,
    b"\\x93\\xfa\\x00\\xff",
    b'{"message": {"mess',
    b'{"message": "' + b"x" * (8 << 20) + b'"}',
    '{"message": "über"}'.encode("latin-1"),
    b'{"message": {"message": "\\\\ud800 half a pair", "extraInfo": {"timestamp": NaN}}}',
][RANK]
if content is None:
    os.mkdir(path)
else:
    open(path, "wb").write(content)
report("pid", os.getpid())
forever()
""",
        nproc=6,
    )
    os.kill(pids(job, 6)[0], signal.SIGKILL)
    assert job.finish() == 1, job.output
    messages = {event["rank"]: event["message"] for event in job.events("worker.failed")}
    assert messages.pop(0).startswith("Signal 9 (SIGKILL)")
    broken = [
        "is not valid JSON: 'utf-8' codec can't decode",
        "is not valid JSON: Unterminated string",
        "is longer than 4194304 bytes",
        "is not valid JSON: 'utf-8' codec can't decode",
        "half a pair",
    ]
    assert all(why in messages[rank] for rank, why in enumerate(broken, 1)), messages
    assert "Root Cause (first observed failure):" in job.stderr
