"""Jobs of real gloo workers on four hosts that grow, shrink by intent, and fail.

Changes without lost hosts: nodes that join, a node that leaves, workers that fail.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from helpers.hosts.jobs import Agent, Job, World
from helpers.hosts.netns import Host
from helpers.suite.recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]

Form = Callable[..., tuple[Job, list[Agent], World]]


def no_worker_failed(job: Job, *why: str) -> None:
    """Check that no worker is to blame, and that every round has ended for this reason."""
    for agent in job.agents:
        assert agent.root_causes() == [], agent
        assert {event["why"] for event in agent.events("round.ended")} <= {*why}, agent


def test_a_node_that_joins_a_running_job_is_taken_in(
    form: Form, hosts: list[Host], fault: Fault, backend: str
) -> None:
    job, agents, world = form(backend, count=3, nodes="3:4", conf="last_call_timeout=1")
    fault.now()
    agents.append(job.agent(hosts[3]))
    after = job.world(4, after=world)
    fault.healed(after)
    assert after.hosts == (*world.hosts, "node4"), job
    assert after.restarts == 0, job
    no_worker_failed(job, f"host node4 ({hosts[3].addr}) waits to join")
    job.finish(*agents)


def test_a_node_that_joins_while_the_others_start_again_is_in_the_same_round(
    form: Form, hosts: list[Host], fault: Fault, backend: str
) -> None:
    conf, env = "last_call_timeout=1", {"STAYS": "1", "PET_RESTART_TIMEOUT": "30"}
    job, agents, world = form(backend, count=3, nodes="3:4", max_restarts=1, conf=conf, env=env)
    (job.folder / "fail.node2").touch()
    job.event(agents[0], "round.ended")  # its worker gets a SIGTERM and does not end
    agents.append(job.agent(hosts[3]))
    job.waits(agents[3])
    fault.now()  # from here on no node is delayed
    (job.folder / "end").touch()
    after = job.world(4, after=world)
    fault.healed(after)
    assert after.round == world.round + 1, job
    assert after.hosts == (*world.hosts, "node4"), job
    assert after.restarts == 1, job
    for agent in agents[:3]:
        assert agent.root_causes() == [("node2", world.hosts.index("node2"), 7)], agent
    job.finish(*agents)


def test_a_node_that_comes_during_the_last_call_is_in_the_round(
    prepare: Callable[..., Job], hosts: list[Host], fault: Fault, backend: str
) -> None:
    job = prepare(backend, nodes="2:4", conf="last_call_timeout=600,join_timeout=900")
    agents = [job.agent(host) for host in hosts[:3]]
    for agent in agents:
        job.waits(agent)
    assert job.records("started") == [], job
    fault.now()
    agents.append(job.agent(hosts[3]))
    world = job.world(4)
    fault.healed(world)
    assert sorted(world.hosts) == ["node1", "node2", "node3", "node4"], job
    assert world.round == 1, job
    no_worker_failed(job)
    job.finish(*agents)
    assert {record.round for record in job.records("started")} == {1}, job


def test_a_failed_worker_starts_all_again_with_the_same_ranks_and_one_budget(
    form: Form, fault: Fault
) -> None:
    job, agents, world = form("server", max_restarts=1)
    fault.now()
    (job.folder / "fail.node3").touch()
    after = job.world(4, after=world)
    fault.healed(after)
    assert after.hosts == world.hosts, job
    assert after.restarts == 1, job
    (job.folder / "fail.node2").touch()
    assert [agent.finish() for agent in agents] == [1, 1, 1, 1], job
    for agent in agents:
        assert agent.root_causes() == [("node3", 2, 7), ("node2", 1, 7)], agent
    job.assert_one_world_at_a_time()


def test_a_worker_that_fails_for_good_ends_every_agent_with_the_same_root_cause(
    form: Form,
) -> None:
    job, agents, _ = form("server")
    (job.folder / "fail.node3").touch()
    assert [agent.finish() for agent in agents] == [1, 1, 1, 1], job
    for agent in agents:
        assert agent.root_causes() == [("node3", 2, 7)], agent
        assert "node3" in agent.output, agent
    job.assert_one_world_at_a_time()


def test_a_node_with_a_sigterm_has_its_grace_and_the_others_continue(
    form: Form, hosts: list[Host], fault: Fault, backend: str
) -> None:
    job, agents, world = form(backend, env={"CHECKPOINT": "1"})
    fault.now()
    agents[2].process.signal(signal.SIGTERM)
    after = job.world(3, after=world)
    fault.healed(after)
    assert agents[2].finish() == 128 + signal.SIGTERM, agents[2]
    saved = sorted(record.host for record in job.records("checkpoint"))
    assert saved == [host.name for host in hosts], job
    assert after.hosts == ("node1", "node2", "node4"), job
    assert after.restarts == 0, job
    for agent in (agents[0], agents[1], agents[3]):
        node, why = job.blamed(world, agent)
        assert "node3" in node or hosts[2].addr in node, agent
        assert "SIGTERM" in why, (why, agent)
        assert agent.root_causes() == [], agent
    job.finish(agents[0], agents[1], agents[3])
