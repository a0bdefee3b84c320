"""In-process restart under an agent: the agent reports a loss and stops no other worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.jobs.e2e_job import Job
from regrow.events import read_events, story

Launch = Callable[..., Job]

WRAPPED = """
from regrow.inprocess import CallWrapper, Wrapper
@Wrapper()
def train(call: CallWrapper):
    report("called", call.iteration, os.environ["RANK"], os.environ["WORLD_SIZE"])
    fail(call.iteration)
    if call.iteration == 0:
        time.sleep(60)
"""


def test_the_others_restart_in_process_without_a_worker_that_was_killed(launch: Launch) -> None:
    job = launch(
        WRAPPED
        + """
def fail(iteration):
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
train()
""",
        "--nproc-per-node=3",
        "--max-restarts=0",
    )
    assert job.finish() == 0, job.output
    assert [event["rank"] for event in job.events("inprocess.lost")] == [0]
    (restarted,) = job.events("inprocess.restarted")
    assert (restarted["kind"], restarted["rank"]) == ("TERMINATED", 0)
    assert (restarted["world_size"], restarted["lost"]) == (2, [0])
    phases = ["detected", "notified", "aborted", "finalized", "checked", "met", "called"]
    assert list(restarted["seconds"]) == phases
    assert sorted(restarted["seconds"].values()) == list(restarted["seconds"].values())
    assert "in-process restart (iteration 1): rank 0 on host" in job.stderr
    assert story(read_events(job.log_dir)).in_place[0].lost == (0,)


@pytest.mark.thorough
def test_a_failure_after_the_wrapper_fails_the_attempt_and_so_does_the_loss_of_all_workers(
    launch: Launch,
) -> None:
    job = launch(
        WRAPPED
        + """
def fail(iteration):
    if ATTEMPT == 0:
        sys.exit(4)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # the death is seen before the other worker continues
train()
sys.exit(6)
""",
        "--nproc-per-node=2",
        "--max-restarts=1",
    )
    assert job.finish() == 1, job.output
    failed = [(event["attempt"], event["exit_code"]) for event in job.events("worker.failed")]
    assert failed == [(0, 4), (0, 4), (1, 6)]


def test_an_exception_of_the_function_is_an_event_with_its_traceback(launch: Launch) -> None:
    job = launch(
        WRAPPED
        + """
def fail(iteration):
    if RANK == 0 and iteration < 2:
        raise ValueError("a bad batch")
train()
""",
        "--nproc-per-node=2",
        "--max-restarts=0",
    )
    assert job.finish() == 0, job.output
    first, second = job.events("inprocess.raised")
    assert [(each["iteration"], each["rank"]) for each in (first, second)] == [(0, 0), (1, 0)]
    lines = first["traceback"].splitlines()
    assert (lines[0], lines[-1]) == (
        "Traceback (most recent call last):",
        "ValueError: a bad batch",
    )
    assert "in fail" in first["traceback"]
    assert "regrow/inprocess" not in first["traceback"]
    assert second["traceback"] is None  # it is that of the event before


def test_a_hang_in_the_function_is_an_event_with_the_stack_of_the_rank_that_hung(
    launch: Launch,
) -> None:
    job = launch(
        """
from datetime import timedelta
import regrow
from regrow.inprocess import CallWrapper, Wrapper
def load_batch():
    time.sleep(60)
@Wrapper(soft_timeout=timedelta(seconds=1.5))
def train(call: CallWrapper):
    if call.iteration > 0:
        return
    regrow.step(7 + RANK)
    if RANK == 0:
        load_batch()
    with call.disable_hang_protection():
        time.sleep(60)
train()
""",
        "--nproc-per-node=2",
        "--max-restarts=0",
    )
    assert job.finish() == 0, job.output
    (raised,) = job.events("inprocess.raised")
    assert (raised["iteration"], raised["rank"]) == (0, 0)
    assert raised["last_step"] == 7
    assert "in load_batch\n" in raised["traceback"]
