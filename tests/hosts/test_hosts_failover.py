"""The loss of the host that serves the rendezvous: another host takes over, and the job goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.hosts.jobs import Agent, Job, World
from helpers.hosts.netns import Host, Network
from helpers.suite.recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

Form = Callable[..., tuple[Job, list[Agent], World]]


def servers(agent: Agent) -> dict[str, object]:
    """The latest event about the hosts that may run the rounds."""
    found = agent.events("rendezvous.servers")
    return found[-1] if found else {}


def settled(job: Job, agents: list[Agent], *, may_lose: int) -> set[object]:
    """Wait until the agents agree on how many hosts may be lost; return those that may serve."""

    def known() -> bool:
        latest = [servers(agent) for agent in agents]
        same = len({(of.get("epoch"), of.get("server")) for of in latest}) == 1
        return same and {of.get("may_lose") for of in latest} == {may_lose}

    job.wait_until(lambda: known() or None, f"{may_lose} hosts may be lost")
    of = servers(agents[0])
    return {of["server"], *of["successors"]}  # type: ignore[misc]


def lose_power(network: Network, agent: Agent) -> None:
    agent.host.lose_power()


def kill_all(network: Network, agent: Agent) -> None:
    """Kill agent, workers and server; the kernel closes or refuses all connections."""
    agent.host.signal(signal.SIGKILL)


def cut_off(network: Network, agent: Agent) -> None:
    network.cut(agent.host)


def cut_out(network: Network, agent: Agent) -> None:
    network.cut(agent.host, "out")


def cut_in(network: Network, agent: Agent) -> None:
    network.cut(agent.host, "in")


def freeze(network: Network, agent: Agent) -> None:
    agent.host.signal(signal.SIGSTOP)


@pytest.mark.parametrize("lose", [lose_power, kill_all])
def test_the_others_go_on_without_the_host_of_the_server(
    form: Form, network: Network, fault: Fault, lose: Callable[[Network, Agent], None]
) -> None:
    job, agents, world = form("server")
    settled(job, agents, may_lose=1)
    fault.now()
    lose(network, agents[0])
    after = job.world(3, after=world)
    fault.healed(after)
    assert sorted(after.hosts) == ["node2", "node3", "node4"], job
    assert after.restarts == 0, job
    assert settled(job, agents[1:], may_lose=1) == {agent.host.addr for agent in agents[1:]}, job
    job.finish(*agents[1:])


@pytest.mark.parametrize("lose", [cut_off, cut_out, cut_in, freeze])
def test_a_host_of_the_server_that_comes_back_joins_the_others(
    form: Form, network: Network, fault: Fault, lose: Callable[[Network, Agent], None]
) -> None:
    job, agents, world = form("server", conf="reconnect_timeout=60")
    settled(job, agents, may_lose=1)
    fault.now()
    lose(network, agents[0])
    after = job.world(3, after=world)
    fault.healed(after)
    assert sorted(after.hosts) == ["node2", "node3", "node4"], job
    network.mend(agents[0].host)
    agents[0].host.signal(signal.SIGCONT)
    agents[0].process.signal(signal.SIGCONT)
    again = job.world(4, after=after)
    assert sorted(again.hosts) == sorted(world.hosts), job
    assert again.restarts == 0, job
    # The workers of a frozen host may run for a moment when it thaws, until their lease is checked.
    job.finish(*agents, overlap=lose is freeze)


def test_a_server_that_is_killed_alone_is_started_again_and_no_other_host_takes_over(
    form: Form,
) -> None:
    job, agents, world = form("server")
    settled(job, agents, may_lose=1)
    (server,) = [
        pid
        for pid in agents[0].host.processes()
        if b"store.server.serving" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(server, signal.SIGKILL)
    job.event(agents[0], "rendezvous.server_ended")
    for agent in agents:
        job.running_at(time.monotonic() + 5.0, agent)
    assert {record.round for record in job.records("started")} == {world.round}, job
    assert {servers(agent)["epoch"] for agent in agents} == {0}, job
    job.finish(*agents)


def test_the_host_of_the_server_and_one_without_a_copy_may_be_lost_at_one_time(
    form: Form, fault: Fault
) -> None:
    job, agents, world = form("server")
    able = settled(job, agents, may_lose=1)
    (other,) = [agent for agent in agents[1:] if agent.host.addr not in able]
    fault.now()
    for agent in (agents[0], other):
        agent.host.lose_power()
    after = job.world(2, after=world)
    fault.healed(after)
    left = [agent for agent in agents[1:] if agent is not other]
    assert sorted(after.hosts) == sorted(agent.host.name for agent in left), job
    assert after.restarts == 0, job
    job.finish(*left)


def test_the_agent_beside_the_server_may_be_lost_alone(form: Form, fault: Fault) -> None:
    """Its server outlives it, and runs the rounds for the others."""
    job, agents, world = form("server")
    settled(job, agents, may_lose=1)
    fault.now()
    agents[0].process.signal(signal.SIGKILL)
    after = job.world(3, after=world)
    fault.healed(after)
    assert sorted(after.hosts) == ["node2", "node3", "node4"], job
    assert after.restarts == 0, job
    job.finish(*agents[1:])


def test_two_hosts_of_five_may_be_lost_at_one_time_and_then_a_third(
    start_job: Callable[..., Job], hosts: list[Host], network: Network, fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="1:5", mode="plain")
    agents = [job.agent(host) for host in [*hosts, network.host()]]
    world = job.world(5)
    settled(job, agents, may_lose=2)
    fault.now()
    agents[0].host.lose_power()
    agents[1].host.lose_power()
    after = job.world(3, after=world)
    fault.healed(after)
    assert sorted(after.hosts) == ["node3", "node4", "node5"], job
    settled(job, agents[2:], may_lose=1)
    (third,) = [a for a in agents[2:] if a.host.addr == servers(agents[4])["server"]]
    third.host.lose_power()
    last = job.world(2, after=after)
    assert last.restarts == 0, job
    job.finish(*(agent for agent in agents[2:] if agent is not third))


def test_another_host_takes_over_with_certificates(
    start_job: Callable[..., Job], hosts: list[Host], tmp_path: Path, fault: Fault
) -> None:
    tls = self_signed(tmp_path, f"IP:{hosts[0].addr}")
    job = start_job(hosts[0], nodes="1:3", mode="plain")
    flags = [
        f"--rdzv-tls-cert={tls.certfile}",
        f"--rdzv-tls-key={tls.keyfile}",
        f"--rdzv-tls-ca={tls.cafile}",
    ]
    agents = [job.agent(host, *flags) for host in hosts[:3]]
    world = job.world(3)
    settled(job, agents, may_lose=1)
    fault.now()
    agents[0].host.signal(signal.SIGKILL)
    after = job.world(2, after=world)
    fault.healed(after)
    job.finish(*agents[1:])


@pytest.mark.parametrize("lose", [lose_power, kill_all])
def test_training_ends_with_the_weights_of_an_undisturbed_run(
    start_job: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    lose: Callable[[Network, Agent], None],
) -> None:
    job = start_job(hosts[0], nodes="3:3", mode="training")
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    spare = job.agent(hosts[3])
    settled(job, [*agents, spare], may_lose=1)
    lose(network, agents[0])
    after = job.world(3, after=world)
    assert sorted(after.hosts) == ["node2", "node3", "node4"], job
    job.finish(*agents[1:], spare)
    weight = 0
    for step in range(1, 401):
        weight = (31 * weight + step * (1 + 2 + 3)) % (2**31 - 1)
    assert json.loads((job.folder / "checkpoint").read_text()) == [400, weight]
