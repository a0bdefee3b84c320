"""Jobs whose later attempts are forked from a template (`--preload`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

FAILS_ONCE = """
imported = "decimal" in sys.modules
if ATTEMPT == 0:
    report(os.getpid())
    forever()
report("imported", imported)
"""


def kill_rank_1(job: Job) -> None:
    pids = {rank: int(pid) for rank, _, pid in job.reports(2)}
    os.kill(pids["1"], signal.SIGKILL)


def test_the_workers_of_the_next_attempt_have_the_modules_already(launch: Launch) -> None:
    job = launch(FAILS_ONCE, "--preload=decimal", "--max-restarts=1")
    ready = job.await_event("template.ready")
    assert ready["modules"] == ["decimal"]
    assert ready["resident_bytes"] > 1 << 20
    kill_rank_1(job)
    assert job.finish() == 0, job.output
    assert sorted(job.unread_reports()) == [
        ["0", "1", "imported", "True"],
        ["1", "1", "imported", "True"],
    ]
    assert "(all 2 workers started again, from the template; no" in " ".join(job.stderr.split())
    assert [each["forked"] for each in job.events("attempt.started")] == [[], [0, 1]]


def test_a_template_that_is_killed_costs_the_next_workers_an_import(launch: Launch) -> None:
    job = launch(FAILS_ONCE, "--preload=decimal", "--max-restarts=1")
    os.kill(job.await_event("template.ready")["pid"], signal.SIGKILL)
    assert job.await_event("template.gone")["reason"] == "it has ended"
    kill_rank_1(job)
    assert job.finish() == 0, job.output
    assert sorted(job.unread_reports()) == [
        ["0", "1", "imported", "False"],
        ["1", "1", "imported", "False"],
    ]
    assert "(all 2 workers started again; no" in " ".join(job.stderr.split())


def test_a_module_that_does_not_exist_costs_a_warning(launch: Launch) -> None:
    job = launch(FAILS_ONCE, "--preload=no_such_module", "--max-restarts=1")
    job.await_event("template.gone")
    kill_rank_1(job)
    assert job.finish() == 0, job.output
    assert "is not used any more: it cannot import no_such_module" in job.stderr
    assert len(job.events("template.gone")) == 1, "it is not started again"


def test_a_program_that_is_no_python_script_has_no_template(launch: Launch) -> None:
    job = launch("", "--preload=decimal", "--no-python", "true")
    assert job.finish() == 0, job.output
    assert "the workers are not started as `python SCRIPT`" in job.stderr
    assert job.events("template.ready") == []


def test_timers_and_heartbeats_work_in_forked_workers(launch: Launch) -> None:
    job = launch(
        """
import regrow
if ATTEMPT == 0:
    report(os.getpid())
    forever()
from regrow.heartbeat import automatic
automatic.wait()
import threading
report("beats", "regrow-heartbeat" in [thread.name for thread in threading.enumerate()])
if RANK == 1:
    with regrow.expires(after=0.2):
        time.sleep(60)
forever()
""",
        *("--preload=regrow", "--max-restarts=1", "--heartbeat=1"),
    )
    job.await_event("template.ready")
    kill_rank_1(job)
    assert job.finish() == 1, job.output
    assert sorted(job.unread_reports()) == [
        ["0", "1", "beats", "True"],
        ["1", "1", "beats", "True"],
    ]
    assert [each["forked"] for each in job.events("attempt.started")] == [[], [0, 1]]
    (expired,) = job.events("timer.expired")
    assert expired["rank"] == 1


@pytest.mark.training
@pytest.mark.timeout(120)
def test_ranks_of_torch_that_are_forked_meet_in_a_new_group(launch: Launch) -> None:
    job = launch(
        """
imported = "torch" in sys.modules
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((3,), RANK + 1.0)
dist.all_reduce(total)
if ATTEMPT == 0:
    report(os.getpid())
    forever()
report(imported, total.tolist() == [3.0] * 3, torch.initial_seed(), torch.get_num_threads())
dist.barrier()
dist.destroy_process_group()
""",
        *("--preload=torch", "--max-restarts=1"),
        env={"OMP_NUM_THREADS": "1"},
    )
    job.await_event("template.ready")
    kill_rank_1(job)
    assert job.finish() == 0, job.output
    reports = [words[2:] for words in job.unread_reports()]
    seeds = {seed for _, _, seed, _ in reports}
    assert len(seeds) == 2, "as if each had imported torch"
    assert {(*rest, threads) for *rest, _, threads in reports} == {("True", "True", "1")}
    assert [each["forked"] for each in job.events("attempt.started")] == [[], [0, 1]]
