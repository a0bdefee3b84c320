"""`Wrapper(elastic=True)`: the loss of a host, or a new one, ends no process of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job
from helpers.jobs.elastic_job import Elastic

Launch = Callable[..., Job]


@pytest.mark.parametrize("lost", [2, 0])
def test_a_spare_host_takes_the_ranks_of_a_lost_one_and_the_others_keep_their_processes(
    launch: Launch, tmp_path: Path, lost: int
) -> None:
    undisturbed = Elastic(launch, tmp_path, "3:3")
    expected = undisturbed.finish([undisturbed.agent() for _ in range(3)])
    assert len(expected) == 1
    job = Elastic(launch, tmp_path, "3:3")
    agents = [job.agent() for _ in range(3)]
    first, before = job.world(3)
    spare = job.agent()
    job.at_step(5, 3)
    (victim,) = [agent for agent in agents if job.of(before, agent) == lost]
    victim.kill_family()
    _, after = job.world(3, after=first)
    others = before.keys() - {lost}
    assert {rank: after[rank] for rank in others} == {rank: before[rank] for rank in others}
    assert job.of(after, spare) == lost
    left = [agent for agent in agents if agent is not victim]
    assert job.finish([*left, spare]) == expected
    assert len(job.lines("default")) == 3, "no rank went back to the checkpoint"
    for agent in left:
        assert len(agent.events("workers.kept")) == 1, agent.output
        assert [each["restart_count"] for each in agent.events("attempt.started")] == [0, 0]
