"""Jobs in unusual environments: closed streams, a hang-up, a host that refuses calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import DEADLINE_S, Job
from helpers.processes import alive, children_of, state_of, wait_until

Launch = Callable[..., Job]


def regrow_run(
    tmp_path: Path, *arguments: str, closed: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `regrow run` to its end; the shell text `closed` redirects its standard streams."""
    command = [sys.executable, "-m", "regrow.run", "--standalone", f"--log-dir={tmp_path}/logs"]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | env,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_the_null_device_for_the_workers(
    tmp_path: Path, closed: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, sys
for fd in (0, 1, 2):
    with open(os.environ["SEEN"] + os.environ["RANK"], "a") as seen:
        seen.write(os.readlink(f"/proc/self/fd/{fd}") + " ")
print("out")
print("err", file=sys.stderr)
"""
    )
    seen = str(tmp_path / "seen")
    done = regrow_run(tmp_path, "--nproc-per-node=2", str(script), closed=closed, SEEN=seen)
    assert done.returncode == 0, done
    numbers = {"<&-": 0, ">&-": 1, "2>&-": 2}
    for rank in (0, 1):
        streams = Path(f"{seen}{rank}").read_text().split()
        for word in closed.split():
            assert streams[numbers[word]] == os.devnull
        assert all(stream == os.devnull or stream.startswith("pipe:") for stream in streams[1:])


@pytest.mark.thorough
def test_a_job_under_nohup_survives_a_hangup(launch: Launch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = launch("report('pid')\nforever()\n", nproc=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.reports(1)
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM, job.output


def test_a_guardian_that_is_suspended_does_not_keep_the_job_from_ending(launch: Launch) -> None:
    job = launch("report(os.getppid())\nforever()\n", nproc=2)
    guardian = int(job.reports(2)[0][2])
    os.kill(guardian, signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM, job.output
    assert "has not reported the end" not in job.stderr


def test_a_guardian_that_is_killed_is_named_as_what_ended_the_attempt(launch: Launch) -> None:
    job = launch("report(os.getppid())\nif ATTEMPT == 0: forever()\n", "--max-restarts=1", nproc=2)
    guardian = int(job.reports(2)[0][2])
    os.kill(guardian, signal.SIGKILL)
    assert job.finish() == 0, job.output
    named = f"the guardian (pid {guardian}) was killed by SIGKILL, and the workers of this host"
    story = " ".join(job.stderr.partition("failure 1 (attempt 0): ")[2].split())
    assert named in story, job.stderr
    assert "rank 0" not in story


def test_a_death_that_a_suspended_guardian_noticed_late_is_reported_as_late(launch: Launch) -> None:
    job = launch(
        "report(os.getppid(), os.getpid())\nif ATTEMPT == 0: forever()\n",
        "--max-restarts=1",
        nproc=1,
    )
    guardian, worker = map(int, job.reports(1)[0][2:4])
    os.kill(guardian, signal.SIGSTOP)
    wait_until(lambda: state_of(guardian) == "T", "the guardian is stopped")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not alive(worker), "the worker has ended")
    os.kill(guardian, signal.SIGCONT)
    assert job.finish() == 0, job.output
    assert "detected after   an unknown delay" in job.stderr, job.stderr


def test_a_guardian_that_is_suspended_while_it_starts_workers_does_not_keep_the_job_from_ending(
    launch: Launch,
) -> None:
    job = launch("report('is there')\nforever()\n", nproc=2)
    guardians: list[int] = []

    def is_started() -> bool:  # earlier, a stop would block its agent as well
        words = b"regrow_guardian"
        started = children_of(job.process.pid)
        guardians[:] = [p for p in started if words in Path(f"/proc/{p}/cmdline").read_bytes()]
        return guardians != []

    wait_until(is_started, "the guardian is started")
    os.kill(guardians[0], signal.SIGSTOP)
    wait_until(lambda: [*job.log_dir.glob("*/attempt_0/0")] != [], "workers are being started")
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM, job.output


@pytest.mark.thorough
def test_a_program_that_cannot_run_fails_the_job_in_plain_words(tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text("#!/nonexistent/python\n")
    program.chmod(0o755)
    done = regrow_run(tmp_path, "--no-python", str(program))
    assert done.returncode == 1, done
    first = done.stderr.splitlines()[0]
    assert "the interpreter '/nonexistent/python' of its #! line is missing" in first
    assert str(program) in first
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--event-log-handler=nope"], "unknown event log handler 'nope'"),
        (["--virtual-local-rank", "--nproc-per-node=2"], "CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    tmp_path: Path, flags: list[str], fault: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    done = regrow_run(tmp_path, *flags, str(script), CUDA_VISIBLE_DEVICES="0", OMP_NUM_THREADS="1")
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert fault in line
    assert done.stdout == ""


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_function_forked_just_before_its_agent_is_killed_never_begins(
    tmp_path: Path, method: str
) -> None:
    program = tmp_path / "program.py"
    begun = tmp_path / "begun"
    program.write_text(
        f"""
import os, pathlib, signal
from regrow.launch import LaunchConfig, elastic_launch
from regrow.workers import Guardian

def work():
    pathlib.Path({str(begun)!r}).touch()
    signal.pause()

def killed(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    Guardian.adopt = killed
    config = LaunchConfig(1, 1, 1, run_id="job", rdzv_backend="c10d", start_method={method!r})
    elastic_launch(config, work)()
"""
    )
    # Reads to the end of its output, which every process that it started holds open.
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == -signal.SIGKILL, done
    assert not begun.exists()
