"""Workers with heartbeats, under an agent: the rank that is the cause is named first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from helpers.commands import run
from helpers.jobs.e2e_job import Job
from helpers.processes import wait_until
from regrow.events import read_events, story
from regrow.views import JobWatch, Library

Launch = Callable[..., Job]

BEATING = """
import ctypes, subprocess, threading
from regrow import heartbeat
def hold_the_gil():
    while True:
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""


@pytest.mark.thorough
def test_a_worker_that_hangs_is_killed_by_its_agent_before_the_others_detect_it(
    launch: Launch,
) -> None:
    job = launch(
        BEATING
        + """
hangs = (ATTEMPT, RANK) in ((0, 1), (1, 0))
# The other worker survives it: on a busy machine it might end first.
heartbeat.start(0.1, timeout=0.9, on_failure=None if hangs else print)
if ATTEMPT == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if ATTEMPT == 1 and RANK == 0:
    hold_the_gil()
if ATTEMPT < 2:
    forever()
""",
        "--timers",
        "--max-restarts=2",
    )
    assert job.finish() == 0, job.output
    failed = [event for event in job.events("worker.failed") if event["root_cause"]]
    assert [(event["attempt"], event["rank"]) for event in failed] == [(0, 1), (1, 0)]
    assert [(each["heartbeat"], each["rank"]) for each in job.events("timer.expired")] == [
        (True, 1),
        (True, 0),
    ]
    output = " ".join(job.stderr.split())
    assert "hung: no heartbeat for" in output
    assert "in hold_the_gil (train.py:" in output


@pytest.mark.thorough
def test_the_missing_worker_is_the_root_cause_and_not_the_one_that_noticed(launch: Launch) -> None:
    job = launch(
        BEATING
        + """
# With on_failure, no kernel timer ends the worker; on a busy machine the timer would be first.
heartbeat.start(0.1, timeout=0.4, on_failure=print if RANK == 1 else None)
if RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
forever()
"""
    )
    assert job.finish() == 1, job.output
    (noticed,) = job.events("heartbeat.failed")
    assert (noticed["rank"], noticed["kind"], noticed["ranks"]) == (0, "missing", [1])
    by_rank = {event["rank"]: event for event in job.events("worker.failed")}
    assert (by_rank[0]["signal"], by_rank[0]["root_cause"]) == ("SIGABRT", False)
    assert by_rank[1]["root_cause"] is True
    assert by_rank[1]["message"].startswith("rank 0 ended because of this rank: HeartbeatFailure: ")
    (failure,) = story(read_events(job.log_dir)).failures
    assert failure.rank == 1
    _, _, root = job.stderr.partition("Root Cause (first observed failure):")
    assert "rank      : 1 (local_rank: 1)" in root


def test_every_worker_sends_heartbeats_without_any_code_and_its_children_do_not(
    launch: Launch,
) -> None:
    job = launch(
        BEATING
        + """
def beats():
    return any(thread.name.startswith("regrow-heartbeat") for thread in threading.enumerate())
assert beats()
CHILD = "import regrow, threading; print([t.name for t in threading.enumerate()])"
started = subprocess.run(
    [sys.executable, "-c", CHILD], capture_output=True, text=True, start_new_session=RANK == 0
)
event = heartbeat.start(60)  # one runs already
report(started.stdout.strip(), started.stderr.strip())
heartbeat.step(RANK)
if RANK == 0:
    event.wait(30)  # until the other one leaves
else:  # leaves when both have reported a step
    while [row.step for row in heartbeat.progress()] != [0, 1]:
        time.sleep(0.005)
report(event.is_set())
""",
        "--heartbeat=1",
    )
    reports = job.reports(4)
    assert job.finish() == 0, job.output
    assert sorted(reports[:3])[:2] == [["0", "0", "['MainThread']"], ["1", "0", "False"]]
    assert reports[3] == ["0", "0", "True"]
    assert job.events("worker.failed") == []
    assert job.stderr.count("heartbeat: `regrow run --heartbeat` has already started") == 2
    bounds = job.events("job.started")[0]["bounds"]
    assert bounds["a missing heartbeat ends all workers"] == 3 * (1 + 2) + 2


def test_a_worker_that_is_slower_than_a_whole_other_one_is_not_held_by_its_first_start(
    launch: Launch,
) -> None:
    job = launch(
        BEATING
        + """
if RANK == 0:  # until the other one has left
    while any(thread.name.startswith("regrow-heartbeat") for thread in threading.enumerate()):
        time.sleep(0.005)
    report(heartbeat.start(60, on_failure=print).wait(30))
else:
    heartbeat.start(60, start_timeout=30)
""",
        "--heartbeat=0.2",
    )
    assert job.reports() == [["0", "0", "True"]]
    assert job.finish() == 0, job.output
    assert "has ended, because rank 1 left" in " ".join(job.stderr.split())


@pytest.mark.thorough
def test_a_stall_is_reported_and_workers_that_are_stopped_are_left_their_grace_though_one_is_lost(
    launch: Launch,
) -> None:
    job = launch(
        BEATING
        + """
event = heartbeat.start(0.1, timeout=20, stalled_after=2)
def save(*_):
    event.wait(30)  # until it is known that the other one is lost
    report("saved", event.is_set())
    sys.exit()
signal.signal(signal.SIGTERM, save)
def load_batch():
    time.sleep(1000)
heartbeat.step(0, "loading")
report("ready", os.getpid())
if RANK == 1:
    load_batch()
while True:
    time.sleep(0.01)
    heartbeat.step(int(time.monotonic() * 100))
""",
        "--timers",
    )
    pids = {rank: int(pid) for rank, _, _, pid in job.reports(2)}
    stalled = job.await_event("heartbeat.stalled")
    assert (stalled["rank"], stalled["pid"]) == (1, pids["1"])
    assert stalled["message"].startswith("rank 1 sends heartbeats, but stays at step 0 in phase")
    assert stalled["stood"].startswith("in load_batch (train.py:")
    os.kill(pids["1"], signal.SIGKILL)
    assert job.reports() == [["0", "0", "saved", "True"]]
    assert job.finish() == 1, job.output
    assert [event["rank"] for event in job.events("worker.failed")] == [1]
    output = " ".join(job.stderr.split())
    assert f"rank 1 on host {stalled['host']} (pid {pids['1']}) sends heartbeats, but" in output


FUNCTIONS = """
import os, sys, time
from regrow import heartbeat
from regrow.launch import LaunchConfig, elastic_launch
from regrow.workers import DefaultLogsSpecs
def train():
    event = heartbeat.start(60)  # one runs already
    rank = int(os.environ["RANK"])
    heartbeat.step(rank)
    if rank == 0:
        event.wait(30)  # until the other one leaves
    else:  # leaves when both have reported a step
        while [row.step for row in heartbeat.progress()] != [0, 1]:
            time.sleep(0.005)
    return event.is_set()
if __name__ == "__main__":
    config = LaunchConfig(
        1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=sys.argv[1]), start_method="fork", heartbeat=1,
    )
    print(elastic_launch(config, train)())
"""


@pytest.mark.thorough
def test_functions_send_heartbeats_too_and_leave_when_they_return(tmp_path: Path) -> None:
    script = tmp_path / "functions.py"
    script.write_text(FUNCTIONS)
    ended = run([sys.executable, script, tmp_path / "logs"])
    assert ended.code == 0, ended.output
    assert "{0: True, 1: False}" in ended.output
    assert ended.output.count("heartbeat: `regrow run --heartbeat` has already started") == 2


def test_a_view_knows_when_each_rank_exchanged_its_last_heartbeat(launch: Launch) -> None:
    job = launch("import regrow\nregrow.step(1)\nforever()\n", "--heartbeat=0.3")
    job.await_event("worker.first_step")
    library = Library([str(job.log_dir)])
    watch = JobWatch(library, library.jobs()[0])

    def ages() -> list[float]:
        return [r.heartbeat_age_s for r in watch.snapshot().ranks if r.heartbeat_age_s is not None]

    wait_until(lambda: len(ages()) == 2, "both ranks exchanged heartbeats")
    begun = monotonic()
    first = ages()
    wait_until(lambda: min(ages()) < monotonic() - begun, "a further heartbeat")
    assert max(first) < 60
    watch.close()
    job.signal(signal.SIGTERM)
