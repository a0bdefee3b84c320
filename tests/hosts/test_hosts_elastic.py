"""Workers whose processes outlive the loss of a host, on hosts of their own (`elastic=True`)."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from helpers.hosts.jobs import Agent, Job, World
from helpers.hosts.netns import Host
from helpers.suite.recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]

Form = Callable[..., tuple[Job, list[Agent], World]]


def pids(job: Job, world: World) -> dict[str, int]:
    """Return the process of each host's worker in a world."""
    return {each.host: each.pid for each in job.records("reduced") if each.round == world.round}


def lose(agent: Agent, how: str) -> None:
    """Lose the host of an agent: its processes, or its power."""
    if how == "killed":
        agent.kill_family()
    else:
        agent.host.lose_power()


@pytest.mark.parametrize("how", ["killed", "power"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_spare_host_takes_the_rank_of_a_lost_one(
    prepare: Callable[..., Job], hosts: list[Host], fault: Fault, how: str, lost: int
) -> None:
    job = prepare("server", nodes="3:3", mode="elastic")
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    spare = job.agent(hosts[3], "--preload=torch,regrow.inprocess,regrow.state")
    job.waits(spare)
    job.event(spare, "template.ready")
    before = pids(job, world)
    (victim,) = [agent for agent in agents if agent.host.name == world.hosts[lost]]
    fault.now()
    lose(victim, how)
    after = job.world(3, after=world)
    fault.healed(after)
    expected = tuple(spare.host.name if h == victim.host.name else h for h in world.hosts)
    assert (after.hosts, after.restarts) == (expected, 0)
    now = pids(job, after)
    assert {h: p for h, p in now.items() if h != spare.host.name} == {
        h: p for h, p in before.items() if h != victim.host.name
    }
    agents.remove(victim)
    job.finish(*agents, spare)
    (result,) = (what for what in job.kinds() if what.startswith("result"))
    _, steps, *weights = re.sub(r"[\[\],]", "", result).split()
    assert {float(each) for each in weights} == {6.0 * sum(range(int(steps) + 1))}, job
    assert len(job.records("default")) == 3, "no rank went back to the checkpoint"


def test_the_job_shrinks_and_grows_without_the_end_of_a_process(
    form: Form, hosts: list[Host], backend: str
) -> None:
    job, agents, world = form(backend, count=3, nodes="2:3", mode="elastic")
    before = pids(job, world)
    (victim,) = [agent for agent in agents if agent.host.name == world.hosts[1]]
    victim.host.lose_power()
    agents.remove(victim)
    smaller = job.world(2, after=world)
    left = {h: p for h, p in before.items() if h != victim.host.name}
    assert pids(job, smaller) == left, job
    agents.append(job.agent(hosts[3]))
    larger = job.world(3, after=smaller)
    assert {h: p for h, p in pids(job, larger).items() if h != "node4"} == left, job
    assert len(job.records("default")) == 3, "no rank went back to the checkpoint"
    job.finish(*agents)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_that_leaves_with_notice_ends_no_process_of_the_others(
    form: Form, backend: str, fault: Fault, rank: int
) -> None:
    job, agents, world = form(
        backend, count=3, nodes="2:3", mode="elastic", env={"CHECKPOINT": "1"}
    )
    before = pids(job, world)
    (leaver,) = [agent for agent in agents if agent.host.name == world.hosts[rank]]
    agents.remove(leaver)
    fault.now()
    leaver.process.signal(signal.SIGTERM)
    after = job.world(2, after=world)
    fault.healed(after)
    assert pids(job, after) == {h: p for h, p in before.items() if h != leaver.host.name}
    assert leaver.finish() == 128 + signal.SIGTERM, leaver
    assert [record.host for record in job.records("checkpoint")] == [leaver.host.name]
    assert after.restarts == 0
    job.finish(*agents)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_that_loses_power_while_it_leaves_ends_no_process_of_the_others(
    form: Form, fault: Fault, rank: int
) -> None:
    job, agents, world = form("server", count=3, nodes="2:3", mode="elastic", env={"STAYS": "1"})
    before = pids(job, world)
    (leaver,) = [agent for agent in agents if agent.host.name == world.hosts[rank]]
    agents.remove(leaver)
    leaver.process.signal(signal.SIGTERM)
    job.event(leaver, "job.stopping")
    fault.now()
    leaver.host.lose_power()
    after = job.world(2, after=world)
    fault.healed(after)
    assert pids(job, after) == {h: p for h, p in before.items() if h != leaver.host.name}
    job.finish(*agents)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_go_on_in_their_processes_when_all_of_a_host_is_killed(
    form: Form, fault: Fault, rank: int
) -> None:
    job, agents, world = form("server", count=3, nodes="2:3", mode="elastic")
    before = pids(job, world)
    (lost,) = [agent for agent in agents if agent.host.name == world.hosts[rank]]
    agents.remove(lost)
    fault.now()
    lost.kill_family()
    after = job.world(2, after=world)
    fault.healed(after)
    assert pids(job, after) == {h: p for h, p in before.items() if h != lost.host.name}
    job.finish(*agents)
