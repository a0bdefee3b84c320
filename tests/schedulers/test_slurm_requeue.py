"""Ends of jobs after which Slurm starts them again, and ends after which it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.schedulers.slurm import GPUS, HALF, NODES, RANKS, SCRIPT, Cluster, SlurmJob
from helpers.schedulers.training import START_LINES, left_over, stop_lines

pytestmark = [pytest.mark.schedulers, pytest.mark.timeout(240)]

SLOW_S = 12.0
"""Longer than a lease, and longer than Slurm leaves to processes that it ends."""
LEFT = RANKS - GPUS
"""Ranks when a host is lost."""


def most_lines(job: SlurmJob) -> int:
    """Return the most lines of a job on all nodes that is stopped."""
    return START_LINES + stop_lines(NODES, job.output)


def asked(job: SlurmJob) -> int:
    """Return how often an agent has requested a requeue of the job from Slurm."""
    return job.output.count(f"requested a requeue of job {job.name} from Slurm\n")


def waits_for_its_next_run(job: SlurmJob) -> None:
    """Wait until a job waits to be started again; it has saved, and left nothing."""
    job.becomes("PENDING", "FAILED", "COMPLETED", "CANCELLED")
    assert (job.state, job.facts["Restarts"]) == ("PENDING", "1"), job.cluster.report()


def resumes(job: SlurmJob) -> None:
    """Let a requeued job start: each rank continues from its saved step, and the job succeeds."""
    job.leaves_nothing()
    saved = job.training.saved()
    assert sorted(saved) == list(range(RANKS)), job.output
    job.training.slow("none", 0)
    assert runs_again(job) == saved, job.output


def runs_again(job: SlurmJob) -> dict[int, int]:
    """Let a requeued job start and succeed; return the step with which each rank began."""
    job.start_soon()
    again = job.training.runs(RANKS, run=1)
    job.training.finish()
    job.ends("COMPLETED")
    assert job.facts["Restarts"] == "1"
    return {record.rank: record.step for record in again}


@pytest.mark.parametrize("slow_rank", [0, RANKS - 1])
def test_a_notice_leaves_a_slow_rank_the_time_to_save(cluster: Cluster, slow_rank: int) -> None:
    job = cluster.submit(SCRIPT)
    job.training.runs(RANKS)
    job.training.slow(slow_rank, SLOW_S)
    cluster.call(f"scancel --signal=TERM {job.name}")
    waits_for_its_next_run(job)
    assert asked(job) == 1, job.output
    assert len(job.lines()) <= most_lines(job) + 1, job.output
    assert job.output.count(" was stopped by SIGTERM after") == 1, job.output
    resumes(job)
    assert asked(job) == 1, job.output
    assert len(job.lines()) <= most_lines(job) + 1 + START_LINES, job.output


@pytest.mark.parametrize("signame", ["TERM", "USR1"])
def test_all_ranks_save_the_same_step_on_a_notice(cluster: Cluster, signame: str) -> None:
    job = cluster.submit(SCRIPT.replace("train.py", "train.py --should-stop"))
    job.training.wait_until(lambda: len(job.training.records("asks")) == RANKS, "all ranks run")
    cluster.call(f"scancel --signal={signame} {job.name}")
    waits_for_its_next_run(job)
    assert asked(job) == 1, job.output
    assert "all ranks stopped at the same step, by SIG" in " ".join(job.output.split())
    assert len(set(job.training.saved().values())) == 1, job.output
    resumes(job)


def agents_on(cluster: Cluster, node: int) -> list[str]:
    """The agents that run on a node."""
    running = left_over([cluster.nodes[node]])
    return [line for line in running if "/regrow run " in line and "srun" not in line]


def test_the_agent_that_serves_outlasts_a_save_on_another_host(cluster: Cluster) -> None:
    # At most sites, Slurm kills all processes of a task when the task ends.
    job = cluster.submit(
        SCRIPT.replace("--shutdown-timeout 100 --requeue", "--shutdown-timeout 100")
    )
    job.training.runs(RANKS)
    job.training.slow(RANKS - 1, SLOW_S)
    cluster.call(f"scancel --signal=TERM {job.name}")
    cluster.wait_until(
        lambda: agents_on(cluster, 1) == agents_on(cluster, 2) == [], "two agents end"
    )
    assert len(job.training.saved()) == RANKS - 1
    assert agents_on(cluster, 0) != []
    job.ends("FAILED", "143:0")
    assert len(job.training.saved()) == RANKS
    assert asked(job) == 0, job.output
    assert len(job.lines()) <= most_lines(job), job.output


def test_a_job_that_saves_fast_is_requeued_long_before_its_grace_is_over(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT)
    job.training.runs(RANKS)
    cluster.call(f"scancel --signal=TERM {job.name}")
    waits_for_its_next_run(job)
    assert asked(job) == 1, job.output
    assert len(job.lines()) <= most_lines(job) + 1, job.output
    resumes(job)


def test_a_job_that_is_requeued_by_hand_continues(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT)
    job.training.runs(RANKS)
    cluster.call(f"scontrol requeue {job.name}")
    waits_for_its_next_run(job)
    resumes(job)
    assert asked(job) == 0, job.output
    assert len(job.lines()) <= most_lines(job) + START_LINES, job.output


def test_the_notice_of_one_task_of_an_array_requeues_that_task_alone(cluster: Cluster) -> None:
    # The last one's id is also that of the array.
    one, other = cluster.submit_array(HALF, 2)
    for job in (one, other):
        job.training.runs(RANKS // 2)
    cluster.call(f"scancel --signal=TERM {other.name}")
    waits_for_its_next_run(other)
    assert (one.state, one.facts["Restarts"]) == ("RUNNING", "0")
    most = START_LINES + stop_lines(NODES // 2, other.output) + 1
    assert len(other.lines()) <= most, other.output
    one.training.finish()
    one.ends("COMPLETED")
    assert len(one.lines()) == START_LINES, one.output


def test_the_others_continue_without_a_host_that_loses_its_power(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT)
    job.training.runs(RANKS)
    cluster.lose(cluster.nodes[-1])
    again = job.training.runs(LEFT, attempt=1)
    saved = job.training.saved()
    assert {record.rank: record.step for record in again} == {
        rank: saved[rank] for rank in range(LEFT)
    }
    job.training.finish()
    job.ends("COMPLETED")
    assert len(job.training.records("finished")) == LEFT
    assert asked(job) == 0, job.output
    assert len(job.lines()) <= 9, job.output


def test_a_job_is_requeued_when_its_batch_host_loses_its_power_and_none_takes_over(
    cluster: Cluster,
) -> None:
    job = cluster.submit(SCRIPT.replace("train.py", "--rdzv-conf successors=0 train.py"))
    job.training.runs(RANKS)
    first = cluster.nodes[0]
    cluster.lose(first)
    waits_for_its_next_run(job)
    job.leaves_nothing()
    cluster.restore(first)
    # The loss of the host that serves the rendezvous leaves no rank the time to save.
    assert runs_again(job) == dict.fromkeys(range(RANKS), 0), job.output
    assert len(job.lines()) <= 2 * START_LINES, job.output


@pytest.mark.parametrize("backend", ["c10d", "file"])
def test_an_allocation_without_a_batch_host_ends_with_the_job(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    (tmp_path / "meeting").mkdir()
    meeting = f"--rdzv-backend file --rdzv-endpoint {tmp_path}/meeting "
    where = meeting if backend == "file" else ""
    job = cluster.submit(SCRIPT.replace("train.py", f"{where}train.py"))
    job.training.runs(RANKS)
    if backend == "c10d":
        cluster.wait_until(
            lambda: "loss of any one host" in job.output, "another host may take over"
        )
    cluster.lose(cluster.nodes[0])
    job.training.runs(LEFT, attempt=1)
    job.training.finish()
    job.ends("CANCELLED")
    assert len(job.training.records("finished")) == LEFT
    # One more line: the backend `file` needs no token.
    # Slurm reads no output after the loss.
    assert len(job.lines()) <= START_LINES + 1, job.output
