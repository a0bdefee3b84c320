"""Every way in which a training hangs; it continues afterwards, and the reason is reported."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.commands import run
from helpers.jobs.e2e_job import Job, wait_gone
from helpers.processes import wait_until
from regrow.events import read_events, story

# 0.1 or 0.2 s, less the time that a busy machine took from there to the timer.
OVER = r"timer step of 0\.[0-2]\d* s was exceeded by"

Launch = Callable[..., Job]
Record = Callable[[str, object], None]

# A step that takes its time in the first attempt, on the ranks that are to hang.
STEP = """
from regrow.timer import expires
def wait():
    {wait}
def step():
    with expires(after=0.2, scope="step"):
        wait()
report("pid", os.getpid())
if ATTEMPT == 0:
    if RANK in {ranks}:
        step()
    forever()
report("done")
"""

ENDLESS_LOOP = "while True: pass"
SLEEP = "time.sleep(1000)"
NATIVE_WITH_THE_GIL = (
    "import ctypes as c; c.PyDLL(None).read(os.pipe()[0], c.create_string_buffer(1), 1)"
)
SUSPENDED = "os.kill(os.getpid(), signal.SIGSTOP)"


def hang(wait: str, *ranks: int) -> str:
    return STEP.format(wait=wait, ranks=ranks or (0,))


def times_of(job: Job) -> tuple[float, float, float]:
    """When the first timer was due, when that was noticed, and when its worker was dead."""
    expired, failed = job.events("timer.expired")[0], job.events("worker.failed")[0]
    assert expired["pid"] == failed["pid"]
    return expired["deadline_monotonic"], expired["noticed_monotonic"], failed["exited_monotonic"]


def stacks_of(job: Job, rank: int = 0) -> str:
    (path,) = job.log_dir.glob(f"*/attempt_0/{rank}/stacks.*.txt")
    return path.read_text()


@pytest.mark.parametrize(
    ("wait", "stood"),
    [
        pytest.param(
            ENDLESS_LOOP, "in wait (train.py:", id="endless loop", marks=pytest.mark.thorough
        ),
        pytest.param(SLEEP, "in wait (train.py:", id="time.sleep", marks=pytest.mark.thorough),
        pytest.param(NATIVE_WITH_THE_GIL, "in wait (train.py:", id="native code with the GIL"),
        pytest.param(SUSPENDED, "stopped by a signal", id="SIGSTOP"),
    ],
)
def test_a_hung_worker_is_reaped_explained_and_started_again(
    launch: Launch, record_property: Record, wait: str, stood: str
) -> None:
    job = launch(hang(wait), "--timers", "--max-restarts=1", nproc=1)
    ((_, _, _, pid), *_) = job.reports(2)
    assert job.finish() == 0, job.output
    (expired,), (failed,) = job.events("timer.expired"), job.events("worker.failed")
    assert (expired["rank"], expired["pid"], expired["scope"]) == (0, int(pid), "step")
    assert expired["stood"].startswith(stood)
    assert (failed["signal"], failed["root_cause"]) == ("SIGKILL", True)
    deadline, noticed, dead = times_of(job)
    assert deadline <= noticed <= dead
    assert failed["failed_monotonic"] == deadline
    record_property("from deadline to death, s", dead - deadline)
    assert story(read_events(job.log_dir)).render() in job.stderr
    output = " ".join(job.stderr.split())
    did = "was paused by SIGSTOP" if wait == SUSPENDED else "hung"
    assert re.search(rf"rank 0 .* {did}: {OVER} .* killed by SIGKILL", output)
    assert f"location {stood}" in output
    if wait != SUSPENDED:
        assert "in wait" in stacks_of(job)
        assert "in step" in stacks_of(job)


TORCH = """
from regrow.timer import expires
if ATTEMPT:
    report("done")
    sys.exit()
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
def step():
    with expires(after=0.5, scope="step"):
        torch.distributed.all_reduce(torch.ones(1))
if RANK == 0:
    step()
forever()
"""


@pytest.mark.training
@pytest.mark.timeout(120)
def test_a_worker_in_a_collective_that_another_does_not_join_is_reaped(
    launch: Launch, record_property: Record
) -> None:
    job = launch(TORCH, "--timers", "--max-restarts=1", env={"OMP_NUM_THREADS": "1"})
    assert job.finish() == 0, job.output
    (expired,) = job.events("timer.expired")
    assert re.match(r"in all_reduce \(.*\), called by step \(train\.py:\d+\)", expired["stood"])
    assert "distributed_c10d.py" in stacks_of(job)
    deadline, _, dead = times_of(job)
    record_property("from deadline to death, s", dead - deadline)


def test_without_restarts_left_the_stack_is_the_traceback_of_the_root_cause(
    launch: Launch,
) -> None:
    job = launch(hang(SLEEP), "--timers", nproc=1)
    assert job.finish() == 1, job.output
    _, _, root = job.stderr.partition("Root Cause (first observed failure):")
    assert re.search(f"traceback : {OVER}", root)
    assert re.search(r'File ".*/train\.py", line \d+, in wait\n', root)
    assert "SIGKILL" in root


TOGETHER = """
from regrow.timer import expires
def all_reduce():
    report("waits")
    time.sleep(1000)
def load():
    time.sleep(1000)
if ATTEMPT == 0:
    if RANK == 1:
        open(os.environ["GATE"]).read()  # until the others wait
    with expires(after=0.3 if RANK == 1 else 60, scope="step"):
        load() if RANK == 1 else all_reduce()
"""


@pytest.mark.thorough
def test_of_ranks_that_hang_together_the_odd_one_out_is_named(
    launch: Launch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = launch(TOGETHER, "--timers", "--max-restarts=1", nproc=3, env={"GATE": str(gate)})
    job.reports(2)
    gate.open("w").close()
    assert job.finish() == 0, job.output
    compared = job.events("timer.expired")[0]["compared"]
    assert [re.sub(r" \(.*", "", line) for line in compared] == [
        "ranks 0, 2 are in all_reduce",
        "rank 1 alone is in load",
    ]
    output = " ".join(job.stderr.split())
    assert " ".join(compared) in output


@pytest.mark.thorough
def test_a_timer_without_a_signal_is_reported_and_the_worker_continues(
    launch: Launch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = launch(
        """
from regrow.timer import FileTimerClient, configure, expires
configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=0))
with expires(after=0.05, scope="slow"), open(os.environ["GATE"]) as gate:
    gate.read()
""",
        "--timers",
        nproc=1,
        env={"GATE": str(gate)},
    )
    with gate.open("w"):
        expired = job.await_event("timer.expired")
    assert job.finish() == 0, job.output
    assert expired["signal"] is None
    assert "train.py" in expired["stood"]
    assert "which is only reported" in " ".join(job.stderr.split())
    assert job.events("worker.failed") == []


@pytest.mark.thorough
def test_a_helper_that_a_worker_forked_is_reaped_alone_and_reported_as_a_helper(
    launch: Launch,
) -> None:
    job = launch(
        """
from regrow.timer import expires
with expires(after=60):
    pid = os.fork()
    if pid == 0:
        with expires(after=0.1, scope="load"):
            time.sleep(1000)
    _, status = os.waitpid(pid, 0)
report(pid, os.waitstatus_to_exitcode(status))
""",
        "--timers",
        nproc=1,
    )
    ((_, _, pid, status),) = job.reports()
    assert job.finish() == 0, job.output
    assert int(status) == -signal.SIGKILL
    (expired,) = job.events("timer.expired")
    assert (expired["pid"], expired["rank"], expired["outcome"]) == (int(pid), 0, "dumped")
    assert expired["worker_pid"] != expired["pid"]
    assert f"a process that rank 0 on host {expired['host']} had started" in job.stderr


def test_torchs_variables_turn_the_timers_on_and_set_the_path_of_the_pipe(
    launch: Launch, tmp_path: Path
) -> None:
    pipe = tmp_path / "timers"
    job = launch(
        hang(SLEEP),
        nproc=1,
        env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(pipe)},
    )
    job.reports()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert job.finish() == 1, job.output
    assert len(job.events("timer.expired")) == 1
    assert not pipe.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["taken", "no/such/folder"])
def test_a_pipe_that_cannot_be_made_ends_the_job_before_it_begins(
    launch: Launch, tmp_path: Path, place: str
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("somebody's data")
    path = str(tmp_path / place)
    job = launch("", "--timers", nproc=1, env={"TORCHELASTIC_TIMER_FILE": path})
    assert job.finish() == 1, job.output
    (line,) = job.stderr.splitlines()
    assert path in line
    assert "give the timer server another path (TORCHELASTIC_TIMER_FILE)" in line
    assert taken.read_text() == "somebody's data"


@pytest.mark.thorough
def test_a_killed_agents_pipe_does_not_disturb_the_next_job(launch: Launch, tmp_path: Path) -> None:
    pipe = {"TORCHELASTIC_TIMER_FILE": str(tmp_path / "timers")}
    killed = launch("report('pid'); forever()", "--timers", nproc=1, env=pipe)
    killed.reports()
    killed.signal(signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    job = launch(hang(SLEEP), "--timers", "--max-restarts=1", nproc=1, env=pipe)
    assert job.finish() == 0, job.output
    assert len(job.events("timer.expired")) == 1


@pytest.mark.thorough
def test_data_of_other_processes_in_the_pipe_harms_no_worker(launch: Launch) -> None:
    job = launch(
        """
import json, random
from regrow.timer import expires
guardian = os.getppid()
with open(f"/proc/{guardian}/stat") as stat:
    agent = int(stat.read().rpartition(")")[2].split()[1])
pipe = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY)
for pid in (agent, guardian, 1, 0, -1, 2 ** 70, "1", None):
    line = {"version": 1, "pid": pid, "scope_id": "s", "expiration_time": 1.0, "signal": 9}
    os.write(pipe, json.dumps(line).encode() + b"\\n")
for junk in (b"\\n" * 99, b"[" * 4000 + b"\\n", b"{}\\n", b"\\xff\\n", b'{"version": 1, "pi'):
    os.write(pipe, junk)
if ATTEMPT == 0:
    with expires(after=0.2, scope="step"):
        time.sleep(1000)
report("done")
""",
        "--timers",
        "--max-restarts=1",
        nproc=1,
    )
    assert job.reports() == [["0", "1", "done"]], job.output
    assert job.finish() == 0, job.output
    (expired,) = job.events("timer.expired")
    assert expired["scope"] == "step"
    assert "neither a worker of this agent" in job.stderr


FUNCTIONS = """
import os, sys, time
from regrow.launch import LaunchConfig, elastic_launch
from regrow.timer import expires
from regrow.workers import DefaultLogsSpecs
def train():
    with expires(after=0.3, scope="step"):
        if os.environ["REGROW_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            time.sleep(1000)
    return os.environ["RANK"]
if __name__ == "__main__":
    config = LaunchConfig(
        1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=sys.argv[1]), max_restarts=1,
        start_method=sys.argv[2], timers=True,
    )
    assert elastic_launch(config, train)() == {0: "0", 1: "1"}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions_have_timers_too(tmp_path: Path, method: str) -> None:
    script, logs = tmp_path / "functions.py", tmp_path / "logs"
    script.write_text(FUNCTIONS)
    ended = run([sys.executable, script, logs, method])
    assert ended.code == 0, ended.output
    assert "rank 1" in ended.output
    assert "in train (functions.py:9)" in ended.output


@pytest.mark.thorough
def test_an_error_of_a_worker_that_the_request_for_stacks_woke_is_no_explanation(
    launch: Launch,
) -> None:
    job = launch(
        """
from regrow.timer import expires
from regrow.workers.errors import record
@record
def main():
    with expires(after=0.2, scope="step"):
        signal.pause()  # returns when the process is asked for its stacks
        raise RuntimeError("interrupted")
main()
""",
        "--timers",
        nproc=1,
    )
    assert job.finish() == 1, job.output
    assert re.search(f"traceback : {OVER}", job.stderr)
    assert "location         in main (train.py:" in job.stderr


def test_a_worker_that_the_request_for_stacks_ends_early_is_explained(
    launch: Launch,
) -> None:
    job = launch(
        """
from regrow.timer import expires
folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
# Opening a pipe without a reader never returns; the agent gives up its wait for that.
os.mkfifo(os.path.join(folder, f"stacks.{os.getpid()}.txt"))
with expires(after=0.2, scope="step"):
    signal.pause()  # returns when the process is asked for its stacks
    os._exit(3)
""",
        "--timers",
        nproc=1,
    )
    assert job.finish() == 1, job.output
    (expired,) = job.events("timer.expired")
    (failed,) = job.events("worker.failed")
    assert failed["exit_code"] == 3
    assert failed["message"] == expired["message"]
    assert failed["failed_monotonic"] == expired["deadline_monotonic"]


HANDLES = """
from regrow.timer import FileTimerClient, configure, expires
configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=signal.SIGTERM))
{handler}
with expires(after=0.1, scope="step"):
    forever()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("handler", "signum"),
    [("", "SIGTERM"), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", None)],
    ids=["not handled", "handled"],
)
def test_a_worker_that_ends_of_its_timers_signal_is_explained(
    launch: Launch, handler: str, signum: str | None
) -> None:
    job = launch(HANDLES.format(handler=handler), "--timers", nproc=1)
    assert job.finish() == 1, job.output
    (failed,) = job.events("worker.failed")
    assert (failed["signal"], failed["exit_code"]) == (signum, -signal.SIGTERM if signum else 3)
    assert re.match(OVER, failed["message"])
    fate = "killed by SIGTERM" if signum else "sent SIGTERM"
    assert f"so it was {fate}" in " ".join(job.stderr.split())


@pytest.mark.thorough
def test_a_worker_that_handles_its_timers_signal_may_fail_of_something_else(
    launch: Launch,
) -> None:
    job = launch(
        """
from regrow.timer import FileTimerClient, configure, expires
from regrow.workers.errors import record
configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=signal.SIGUSR1))
signal.signal(signal.SIGUSR1, lambda *_: signals.append("go on"))
signals = []
@record
def main():
    with expires(after=0.1, scope="step"):
        while not signals:
            time.sleep(0.01)
    raise ValueError("of something else")
main()
""",
        "--timers",
        nproc=1,
    )
    assert job.finish() == 1, job.output
    (failed,) = job.events("worker.failed")
    assert failed["message"] == "ValueError: of something else"
    assert "so it was sent SIGUSR1" in " ".join(job.stderr.split())


@pytest.mark.thorough
def test_an_agent_with_a_blocked_terminal_reaps_on_time(tmp_path: Path) -> None:
    script, pid_file = tmp_path / "train.py", tmp_path / "pid"
    script.write_text(
        "import os, sys, time, regrow\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "with regrow.expires(after=0.2):\n"
        "    time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "regrow.run", "--standalone", "--timers", "--max-restarts=9"]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(65536))
    os.set_blocking(writing, True)
    agent = subprocess.Popen(
        [*command, f"--log-dir={tmp_path}", script, pid_file],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # where it leaves its pipe when it is killed
        stdout=writing,
        stderr=writing,
    )
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", "the worker starts")
        wait_gone(int(pid_file.read_text()))
        assert agent.poll() is None
    finally:
        agent.kill()
        agent.wait()
        os.close(reading)
        os.close(writing)
