"""The documented batch script, word for word, under a real Slurm of four nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from helpers.schedulers.slurm import HALF, NODES, RANKS, SCRIPT, Cluster, SlurmJob
from helpers.schedulers.training import START_LINES, Record, prepare, stop_lines

pytestmark = [pytest.mark.schedulers, pytest.mark.timeout(240)]


def pid_here(cluster: Cluster, worker: Record) -> int:
    """The pid of a worker in the namespace of this process."""
    (node,) = (node for node in cluster.nodes if node.name == worker.host)
    return node.pid_here(worker.pid)


def test_a_job_completes_and_leaves_nothing(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT)
    job.training.runs(RANKS)
    job.training.finish()
    job.ends("COMPLETED")
    assert job.facts["Restarts"] == "0"
    assert sorted(job.training.saved()) == list(range(RANKS)), cluster.report()
    assert len(job.training.records("finished")) == RANKS, cluster.report()
    assert len(job.lines()) == START_LINES, job.output
    assert job.lines(of_slurm=True) == []


def test_a_worker_that_is_killed_costs_one_restart(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT)
    victim = job.training.runs(RANKS)[3]
    os.kill(pid_here(cluster, victim), signal.SIGKILL)
    again = job.training.runs(RANKS, attempt=1)
    saved = job.training.saved()
    assert {record.rank: record.step for record in again} == {**saved, victim.rank: 0}
    job.training.finish()
    job.ends("COMPLETED")
    assert len(job.training.records("finished")) == RANKS, cluster.report()
    stories = [line for line in job.lines() if "SUCCEEDED after" in line]
    assert len(stories) == 1, job.output
    # The failure on its host and on node rank 0, and the story: seven lines, some of them long.
    assert len(job.lines()) <= START_LINES + 13, job.output
    assert f"rank {victim.rank} on host {victim.host}" in job.output


def test_scancel_ends_the_job_for_good(cluster: Cluster) -> None:
    job = cluster.submit(SCRIPT)
    job.training.runs(RANKS)
    cluster.call(f"scancel {job.name}")
    job.becomes("CANCELLED")
    job.leaves_nothing()
    assert (job.state, job.facts["Restarts"]) == ("CANCELLED", "0")
    assert sorted(job.training.saved()) == list(range(RANKS)), cluster.report()
    assert "requeue" not in job.output
    assert len(job.lines()) <= START_LINES + stop_lines(NODES, job.output), job.output


def all_succeed(jobs: list[SlurmJob]) -> None:
    """Let jobs that run at once, each on half of the nodes, succeed."""
    for job in jobs:
        job.training.runs(RANKS // 2)
    for job in jobs:
        job.training.finish()
    for job in jobs:
        job.ends("COMPLETED")
        assert len(job.training.records("finished")) == RANKS // 2, job.output
        assert len(job.lines()) == START_LINES, job.output


def test_two_jobs_at_once_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    jobs = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        prepare(folder)
        jobs.append(cluster.submit(HALF, folder=folder))
    all_succeed(jobs)


def test_the_tasks_of_an_array_are_jobs_of_their_own(cluster: Cluster) -> None:
    all_succeed(cluster.submit_array(HALF, 2))
