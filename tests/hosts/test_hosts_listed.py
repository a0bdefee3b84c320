"""Several endpoints (`--rdzv-endpoint h0,h1,h2`): a job begins, and is found, without one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.hosts.jobs import Job
from helpers.hosts.losses import Lose, certificates, kill_all, listed, lose_power, rare, settled
from helpers.hosts.netns import Host, Network

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

Start = Callable[..., Job]


def test_a_job_begins_without_the_first_listed_host_which_joins_later(
    start_job: Start, hosts: list[Host]
) -> None:
    job = start_job(
        None, endpoint=listed(hosts[:3]), nodes="3:4", mode="plain", conf="last_call_timeout=1"
    )
    agents = [job.agent(host) for host in hosts[1:]]
    world = job.world(3)
    assert sorted(world.hosts) == ["node2", "node3", "node4"], job
    late = job.agent(hosts[0])
    again = job.world(4, after=world)
    assert again.restarts == 0, job
    settled(job, 1, late, *agents)
    job.finish(late, *agents)


@pytest.mark.parametrize(
    ("count", "lose"), [(3, lose_power), rare(3, kill_all), rare(4, lose_power)]
)
def test_the_first_listed_host_may_be_lost_while_the_first_round_forms(
    start_job: Start, hosts: list[Host], network: Network, tmp_path: Path, count: int, lose: Lose
) -> None:
    """Of four, over TLS."""
    job = start_job(None, endpoint=listed(hosts[:count]), nodes="3:3", mode="plain")
    flags = certificates(tmp_path, hosts[0]) if count == 4 else []
    first, second = job.agent(hosts[0], *flags), job.agent(hosts[1], *flags)
    job.waits(second)
    lose(network, first)
    agents = [second, job.agent(hosts[2], *flags), job.agent(hosts[3], *flags)]
    world = job.world(3)
    assert sorted(world.hosts) == ["node2", "node3", "node4"], job
    job.finish(*agents)


def test_listed_hosts_with_certificates_take_over(
    start_job: Start, hosts: list[Host], tmp_path: Path
) -> None:
    flags = certificates(tmp_path, hosts[0])
    settings = {"nodes": "2:3", "mode": "plain", "conf": "last_call_timeout=1"}
    job = start_job(None, endpoint=listed(hosts[:3]), **settings)
    agents = [job.agent(host, *flags) for host in hosts[:3]]
    world = job.world(3)
    settled(job, 1, *agents)
    hosts[0].signal(signal.SIGKILL)
    after = job.world(2, after=world)
    newcomer = job.agent(hosts[3], *flags)
    job.world(3, after=after)
    job.finish(newcomer, *agents[1:])


def test_an_agent_that_starts_again_where_the_job_began_joins_the_job(
    start_job: Start, hosts: list[Host], network: Network
) -> None:
    """A single endpoint begins a second job there, if the others have not reported in time."""
    job = start_job(
        None, endpoint=listed(hosts[:3]), nodes="1:4", mode="plain", conf="last_call_timeout=1"
    )
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    settled(job, 1, *agents)
    hosts[0].signal(signal.SIGKILL)
    job.agent(hosts[0])
    newcomer = job.agent(hosts[3])
    after = job.world(4, after=world)
    assert sorted(after.hosts) == ["node1", "node2", "node3", "node4"], job
    assert after.restarts == 0, job
    settled(job, 1, newcomer, *agents[1:])
    network.cut(hosts[0])
    last = job.world(3, after=after)
    assert sorted(last.hosts) == ["node2", "node3", "node4"], job
    network.mend(hosts[0])
    job.finish(newcomer, *agents[1:])
