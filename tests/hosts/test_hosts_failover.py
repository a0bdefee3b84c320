"""The loss of the host that serves the rendezvous: another host takes over, and the job goes on.

At a single endpoint this is the host of the endpoint, with a list of endpoints the first one.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.hosts.jobs import Agent, Job, World
from helpers.hosts.losses import (
    Lose,
    bring_back,
    certificates,
    cut_in,
    cut_off,
    cut_out,
    freeze,
    kill_all,
    kill_server,
    listed,
    lose_power,
    rare,
    servers,
    settled,
    trained,
)
from helpers.hosts.netns import Host, Network
from helpers.suite.recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]


class Setup(NamedTuple):
    """The hosts of a job, and how their agents find the server."""

    hosts: int
    listed: int = 0
    """Number of listed endpoints; 0: a single one, on the first host."""
    tls: bool = False
    mode: str = "plain"
    """What the workers do."""


SETUPS = {
    "four": Setup(4, mode="gloo"),
    "three": Setup(3),
    "three_tls": Setup(3, tls=True),
    "three_listed": Setup(3, listed=3),
    "three_listed_tls": Setup(3, listed=3, tls=True),
    "four_listed_tls": Setup(4, listed=4, tls=True),
    "five": Setup(5),
    "five_listed": Setup(5, listed=5),
}
Begin = Callable[..., tuple[Job, list[Agent], World]]


@pytest.fixture
def tls(hosts: list[Host], tmp_path: Path) -> list[str]:
    """Flags for TLS."""
    return certificates(tmp_path, hosts[0])


@pytest.fixture
def begin(
    start_job: Callable[..., Job], hosts: list[Host], network: Network, tls: list[str]
) -> Begin:
    """Return a function that starts a job and waits until it may lose hosts: `begin("four")`."""

    def begin(name: str, **settings: str) -> tuple[Job, list[Agent], World]:
        setup = SETUPS[name]
        on = [*hosts, *(network.host() for _ in range(setup.hosts - len(hosts)))][: setup.hosts]
        endpoint = {"endpoint": listed(on[: setup.listed])} if setup.listed else {}
        job = start_job(
            None if endpoint else hosts[0],
            **{"nodes": f"2:{setup.hosts}", "mode": setup.mode, **endpoint, **settings},
        )
        agents = [job.agent(host, *(tls if setup.tls else [])) for host in on]
        world = job.world(setup.hosts)
        settled(job, (setup.hosts - 1) // 2, *agents)
        return job, agents, world

    return begin


def goes_on(job: Job, after: World, *agents: Agent) -> None:
    """Check that the world consists of the hosts of these agents, and cost no restart."""
    assert sorted(after.hosts) == sorted(agent.host.name for agent in agents), job
    assert after.restarts == 0, job


@pytest.mark.parametrize(
    ("setup", "lose"),
    [
        ("four", lose_power),
        ("four", kill_all),
        ("four_listed_tls", lose_power),
        ("three_tls", kill_all),
        rare("four_listed_tls", kill_all),
        rare("three", lose_power),
        rare("three_tls", lose_power),
        rare("three_listed", lose_power),
        rare("three_listed", kill_all),
        rare("three_listed_tls", lose_power),
    ],
)
def test_the_others_go_on_without_the_host_of_the_server(
    begin: Begin, network: Network, fault: Fault, setup: str, lose: Lose
) -> None:
    job, agents, world = begin(setup)
    fault.now()
    lose(network, agents[0])
    after = job.world(len(agents) - 1, after=world)
    fault.healed(after)
    goes_on(job, after, *agents[1:])
    if len(after.hosts) > 2:
        able = settled(job, 1, *agents[1:])
        assert able == {agent.host.addr for agent in agents[1:]}, job
    job.finish(*agents[1:])


@pytest.mark.parametrize(
    ("setup", "lose"),
    [
        ("four", cut_off),
        ("four", cut_out),
        rare("four", cut_in),
        ("four", freeze),
        ("three_listed_tls", cut_off),
        *(rare("three_listed_tls", lose) for lose in (cut_out, cut_in, freeze)),
        *(rare("four_listed_tls", lose) for lose in (cut_off, cut_out, cut_in, freeze)),
    ],
)
def test_a_host_of_the_server_that_comes_back_joins_the_others(
    begin: Begin, network: Network, fault: Fault, setup: str, lose: Lose
) -> None:
    job, agents, world = begin(setup, conf="reconnect_timeout=60")
    lost_s = time.monotonic()
    fault.now()
    lose(network, agents[0])
    after = job.world(len(agents) - 1, after=world)
    fault.healed(after)
    goes_on(job, after, *agents[1:])
    if lose is freeze:
        job.running_at(lost_s + 10.0, agents[1])
    bring_back(network, agents[0])
    again = job.world(len(agents), after=after)
    goes_on(job, again, *agents)
    # The workers of a frozen host may run for a moment when it thaws, until their lease is checked.
    job.finish(*agents, overlap=lose is freeze)


@pytest.mark.parametrize("setup", ["four", "three_listed_tls"])
def test_a_server_that_is_killed_alone_is_started_again_and_no_other_host_takes_over(
    begin: Begin, setup: str
) -> None:
    # The others wait for half a lease, 5 s. A slow machine may take more than the default of 1.5 s
    # to start a server.
    conf = "keep_alive_interval=1,keep_alive_max_attempt=10"
    job, agents, world = begin(setup, conf=conf)
    before = servers(agents[0])
    kill_server(agents[0].host)
    job.event(agents[0], "rendezvous.server_ended")
    later_s = time.monotonic() + 11.0  # longer than a lease
    for agent in agents:
        job.running_at(later_s, agent)
    assert {record.round for record in job.records("started")} == {world.round}, job
    assert [servers(agent)["epoch"] for agent in agents] == [before["epoch"]] * len(agents), job
    job.finish(*agents)


@pytest.mark.parametrize("setup", ["four", rare("four_listed_tls")])
def test_the_host_of_the_server_and_one_without_a_copy_may_be_lost_at_one_time(
    begin: Begin, fault: Fault, setup: str
) -> None:
    job, agents, world = begin(setup)
    able = settled(job, 1, *agents)
    (other,) = [agent for agent in agents[1:] if agent.host.addr not in able]
    fault.now()
    for agent in (agents[0], other):
        agent.host.lose_power()
    after = job.world(2, after=world)
    fault.healed(after)
    left = [agent for agent in agents[1:] if agent is not other]
    goes_on(job, after, *left)
    job.finish(*left)


@pytest.mark.parametrize("setup", ["four", rare("three_listed_tls")])
def test_the_agent_beside_the_server_may_be_lost_alone(
    begin: Begin, fault: Fault, setup: str
) -> None:
    """Its server outlives it, and runs the rounds for the others."""
    job, agents, world = begin(setup)
    fault.now()
    agents[0].process.signal(signal.SIGKILL)
    after = job.world(len(agents) - 1, after=world)
    fault.healed(after)
    goes_on(job, after, *agents[1:])
    job.finish(*agents[1:])


@pytest.mark.parametrize("setup", ["five", rare("five_listed")])
def test_two_hosts_of_five_may_be_lost_at_one_time_and_then_a_third(
    begin: Begin, fault: Fault, setup: str
) -> None:
    job, agents, world = begin(setup)
    fault.now()
    agents[0].host.lose_power()
    agents[1].host.lose_power()
    after = job.world(3, after=world)
    fault.healed(after)
    goes_on(job, after, *agents[2:])
    settled(job, 1, *agents[2:])
    (third,) = [a for a in agents[2:] if a.host.addr == servers(agents[4])["server"]]
    third.host.lose_power()
    last = job.world(2, after=after)
    assert last.restarts == 0, job
    job.finish(*(agent for agent in agents[2:] if agent is not third))


@pytest.mark.parametrize(
    ("setup", "lose"),
    [("three", lose_power), rare("three", kill_all), rare("three_listed_tls", lose_power)],
)
def test_training_ends_with_the_weights_of_an_undisturbed_run(
    begin: Begin, hosts: list[Host], network: Network, tls: list[str], setup: str, lose: Lose
) -> None:
    job, agents, world = begin(setup, nodes="3:3", mode="training")
    spare = job.agent(hosts[3], *(tls if SETUPS[setup].tls else []))
    settled(job, 1, *agents, spare)
    lose(network, agents[0])
    after = job.world(3, after=world)
    goes_on(job, after, *agents[1:], spare)
    job.finish(*agents[1:], spare)
    assert json.loads((job.folder / "checkpoint").read_text()) == trained(world_size=3)


@pytest.mark.parametrize("lose", [kill_all, rare(lose_power)])
def test_the_loss_of_the_only_endpoint_before_the_first_round_is_an_error_that_says_so(
    start_job: Callable[..., Job], hosts: list[Host], network: Network, lose: Lose
) -> None:
    job = start_job(hosts[0], nodes="3:3", mode="plain", conf="reconnect_timeout=1")
    first, second = job.agent(hosts[0]), job.agent(hosts[1])
    job.waits(second)
    lose(network, first)
    assert second.finish() == 75, second
    assert f"'job' cannot be reached at {hosts[0].addr}:29400: " in second.output, second
    assert job.records("started") == [], job
