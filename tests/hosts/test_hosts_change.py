"""Jobs of real gloo workers on four hosts that grow, shrink by intent, and fail.

Where nothing is lost by accident: nodes that join, one that is told to go, workers that fail.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from host_jobs import Job
from netns import Host
from recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]


def test_a_node_that_joins_a_running_job_is_taken_in(
    start_job: Callable[..., Job], hosts: list[Host], fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="3:4", mode="gloo", conf="last_call_timeout=1")
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    fault.now()
    agents.append(job.agent(hosts[3]))
    after = job.world(4, after=world)
    fault.healed(after)
    assert after.hosts[:3] == world.hosts, job
    assert after.restarts == 0, job
    job.finish(*agents)


def test_a_node_that_joins_while_the_others_start_again_is_in_the_same_round(
    start_job: Callable[..., Job], hosts: list[Host], fault: Fault
) -> None:
    # The workers of node2 fail, and take their grace to end; meanwhile node4 comes.
    job = start_job(hosts[0], nodes="3:4", mode="gloo", conf="last_call_timeout=1", max_restarts=1)
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    fault.now()
    agents.append(job.agent(hosts[3]))
    (job.folder / "fail.node2").touch()
    after = job.world(4, after=world)
    fault.healed(after)
    assert after.hosts[:3] == world.hosts, job
    job.finish(*agents)


def test_a_failed_worker_starts_all_again_with_the_same_ranks_and_one_budget(
    start_job: Callable[..., Job], hosts: list[Host], fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="2:4", mode="gloo", max_restarts=1)
    agents = [job.agent(host) for host in hosts]
    world = job.world(4)
    fault.now()
    (job.folder / "fail.node3").touch()
    after = job.world(4, after=world)
    fault.healed(after)
    assert after.hosts == world.hosts, job
    assert after.restarts == 1, job
    (job.folder / "fail.node2").touch()
    assert [agent.finish() for agent in agents] == [1, 1, 1, 1], job
    job.assert_one_world_at_a_time()


def test_a_worker_that_fails_for_good_ends_every_agent_with_the_same_root_cause(
    start_job: Callable[..., Job], hosts: list[Host]
) -> None:
    job = start_job(hosts[0], nodes="2:4", mode="gloo")
    agents = [job.agent(host) for host in hosts]
    job.world(4)
    (job.folder / "fail.node3").touch()
    assert [agent.finish() for agent in agents] == [1, 1, 1, 1], job
    for agent in agents:
        causes = [event for event in agent.events("worker.failed") if event["root_cause"]]
        assert [(cause["host"], cause["rank"], cause["exit_code"]) for cause in causes] == [
            ("node3", 2, 7)
        ], agent
        assert "node3" in agent.output, agent
    job.assert_one_world_at_a_time()


def test_a_node_told_to_go_has_its_grace_and_the_others_go_on(
    start_job: Callable[..., Job], hosts: list[Host], fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="2:4", mode="gloo", env={"CHECKPOINT": "1"})
    agents = [job.agent(host) for host in hosts]
    world = job.world(4)
    fault.now()
    agents[2].process.signal(signal.SIGTERM)
    after = job.world(3, after=world)
    fault.healed(after)
    assert agents[2].finish() == 128 + signal.SIGTERM, agents[2]
    assert "node3" in {record.host for record in job.records("checkpoint")}, job
    assert after.hosts == ("node1", "node2", "node4"), job
    assert after.restarts == 0, job
    for agent in (agents[0], agents[1], agents[3]):
        node, why = job.blamed(world, agent)
        assert "node3" in node or hosts[2].addr in node, agent
        assert "SIGTERM" in why, (why, agent)
    job.finish(agents[0], agents[1], agents[3])
