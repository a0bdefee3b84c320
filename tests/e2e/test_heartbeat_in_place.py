"""Heartbeats with in-process restart: the wrapper handles a loss; no other worker ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.jobs.e2e_job import Job

pytestmark = pytest.mark.training

Launch = Callable[..., Job]

WRAPPED = """
import threading
from regrow import heartbeat
from regrow.inprocess import CallWrapper, Wrapper
@Wrapper()
def train(call: CallWrapper):
    if call.iteration == 0:
        if RANK == 1:
            fault()
        time.sleep(60)
    # The report of the heartbeat arrives at the same time, or earlier.
    assert event.wait(20)
    report("done", os.environ["RANK"], os.environ["WORLD_SIZE"])
event = heartbeat.start(60, start_timeout=30)
"""


@pytest.mark.parametrize("signum", ["SIGKILL", "SIGSTOP"])
def test_the_others_restart_in_process_without_a_worker_that_is_lost_or_hangs(
    launch: Launch, signum: str
) -> None:
    """The agent kills a worker that hangs, because it sends no heartbeats."""
    job = launch(
        WRAPPED
        + f"""
def fault():
    os.kill(os.getpid(), signal.{signum})
train()
""",
        "--nproc-per-node=3",
        "--max-restarts=0",
        "--heartbeat=0.1",
    )
    assert job.finish() == 0, job.output
    assert sorted(job.reports(2)) == [["0", "0", "done", "0", "2"], ["2", "0", "done", "1", "2"]]
    assert [event["rank"] for event in job.events("inprocess.lost")] == [1]
    assert len(job.events("timer.expired")) == (signum == "SIGSTOP")
    assert job.events("worker.failed") == job.events("heartbeat.failed") == []
    output = " ".join(job.stderr.split())
    assert (
        output.count("in-process restart handles this fault; heartbeats stop until the workers are")
        == 1
    )
