"""Time that workers have to stop: for a restart after a failure, and at the end of the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

# Rank 0 hangs as in a collective: only SIGKILL ends it. Rank 1 fails.
STUCK = """
if ATTEMPT == 0 and RANK == 0:
    signal.signal(signal.SIGTERM, lambda *_: None)
    report("stuck")
    while True:
        time.sleep(0.1)
if ATTEMPT == 0:
    while not os.path.exists(os.environ["REPORTS"] + ".fail"):
        time.sleep(0.01)
    sys.exit(3)
"""

# Rank 0 saves for a second when it is stopped; rank 1 fails.
SAVES = """
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        time.sleep(0.05)
    report("saved")
    sys.exit(0)
if RANK == 0:
    signal.signal(signal.SIGTERM, save)
    report("ready")
    while True:
        time.sleep(0.1)
while not os.path.exists(os.environ["REPORTS"] + ".fail"):
    time.sleep(0.01)
sys.exit(3)
"""


def fail(job: Job) -> None:
    """Let rank 1 fail, once rank 0 has reported that it is ready."""
    job.reports()
    (job.script.parent / "reports.fail").touch()


def test_a_restart_after_a_failure_takes_the_restart_timeout_and_not_that_of_a_save(
    launch: Launch,
) -> None:
    graces = ("--shutdown-timeout=1000", "--restart-timeout=1")
    job = launch(STUCK, "--max-restarts=1", *graces)
    fail(job)
    assert job.finish() == 0, job.output  # by its deadline, of far less than 1000 s
    bounds = job.events("job.started")[0]["bounds"]
    assert bounds["after a failure the other workers are gone"] == 1.1
    assert bounds["workers that are stopped are gone"] == 1000.1


def test_workers_have_the_whole_grace_where_a_failure_ends_the_job(launch: Launch) -> None:
    job = launch(SAVES, "--restart-timeout=0")
    fail(job)
    assert job.reports() == [["0", "0", "saved"]]
    assert job.finish() == 1, job.output


@pytest.mark.thorough
def test_a_signal_that_ends_the_job_gives_workers_the_whole_grace_after_all(
    launch: Launch,
) -> None:
    # Rank 0 needs twice the short grace, and reports when the grace has begun.
    slow = SAVES.replace("+ 1.0", "+ 4.0").replace("    end =", '    report("saves")\n    end =')
    job = launch(slow, "--max-restarts=1", "--restart-timeout=2")
    fail(job)
    assert job.reports() == [["0", "0", "saves"]]
    job.signal(signal.SIGTERM)
    assert job.reports() == [["0", "0", "saved"]]
    assert job.finish() == 143, job.output


NOTICED = """
def save(*_):
    time.sleep(0.5)
    report("saved")
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
report("ready", os.getpid())
while True:
    time.sleep(0.1)
"""


def test_a_notice_by_another_signal_to_every_process_is_for_the_workers_alone(
    launch: Launch,
) -> None:
    job = launch(NOTICED)
    workers = [int(pid) for *_, pid in job.reports(2)]
    for pid in (job.process.pid, *workers):
        os.kill(pid, signal.SIGUSR1)
    assert sorted(job.reports(2)) == [["0", "0", "saved"], ["1", "0", "saved"]]
    assert job.finish() == 0, job.output
