"""A lost result fails the attempt and is reported, unless other ranks compensate for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

SHORT = """
from datetime import timedelta
from regrow.inprocess import Wrapper
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.completion import Completion

def seconds(number):
    return timedelta(seconds=number)

SHORT = dict(
    soft_timeout=seconds(0.5),
    hard_timeout=seconds(1),
    heartbeat_timeout=seconds(1),
    barrier_timeout=seconds(1.5),
    monitor_thread_interval=seconds(0.1),
    monitor_process_interval=seconds(0.1),
    heartbeat_interval=seconds(0.1),
    progress_watchdog_interval=seconds(0.1),
)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_never_calls_the_function_fails_the_attempt_of_those_that_wait_for_it(
    launch: Launch,
) -> None:
    job = launch(
        SHORT
        + """
@Wrapper(**SHORT)
def train():
    report("called")
if (RANK, ATTEMPT) == (2, 0):
    forever()
train()
""",
        "--nproc-per-node=3",
        "--max-restarts=1",
    )
    assert job.finish() == 0, job.output
    assert sorted(job.unread_reports()) == [[str(rank), "1", "called"] for rank in range(3)]
    (failed, *_) = job.events("worker.failed")
    assert failed["attempt"] == 0
    assert "1 of 3 ranks (2) did not arrive at the barrier 'joined'" in job.stderr


KILLED = """
class Dies(Completion):
    def __call__(self, state):
        if RANK == 1 and ATTEMPT == 0 and WHERE == "in completion":
            die()
        return state

def dying(call, where):
    def called(self, iteration):
        ended = call(self, iteration)
        if RANK == 1 and ATTEMPT == 0 and WHERE == where:
            die()
        return ended
    return called

WHERE = os.environ["WHERE"]
ServiceLink.done = dying(ServiceLink.done, "before it confirms")
ServiceLink.confirm = dying(ServiceLink.confirm, "before its completion")

@Wrapper(completion=Dies())
def train():
    return True

assert train()
report("result")
"""


@pytest.mark.parametrize("where", ["before its completion", "in completion"])
def test_a_rank_that_is_killed_when_the_call_is_over_is_a_failure_of_the_attempt(
    launch: Launch, where: str
) -> None:
    job = launch(SHORT + KILLED, "--nproc-per-node=3", "--max-restarts=1", env={"WHERE": where})
    assert job.finish() == 0, job.output
    (failed,) = job.events("worker.failed")
    assert (failed["rank"], failed["attempt"], failed["exit_code"]) == (1, 0, -9)
    assert job.events("inprocess.lost") == []
    again = [report for report in job.unread_reports() if report[1:] == ["1", "result"]]
    assert sorted(report[0] for report in again) == ["0", "1", "2"]


def test_the_others_compensate_for_a_rank_that_is_killed_before_the_call_is_over(
    launch: Launch,
) -> None:
    where = {"WHERE": "before it confirms"}
    job = launch(SHORT + KILLED, "--nproc-per-node=3", "--max-restarts=0", env=where)
    assert job.finish() == 0, job.output
    assert [event["rank"] for event in job.events("inprocess.lost")] == [1]
    assert sorted(job.unread_reports()) == [["0", "0", "result"], ["2", "0", "result"]]


def test_an_exit_with_0_in_the_function_is_a_failure_with_this_reason(launch: Launch) -> None:
    job = launch(
        SHORT
        + """
@Wrapper()
def train():
    if RANK == 1:
        sys.exit()
train()
""",
        "--nproc-per-node=2",
        "--max-restarts=0",
    )
    assert job.finish() == 1, job.output
    (failed,) = job.events("worker.failed")
    assert (failed["rank"], failed["exit_code"]) == (1, 0)
    assert "exit code 0, but the function that it runs in regrow.inprocess.Wrapper" in job.stderr
