"""Several endpoints (`--rdzv-endpoint h0,h1,h2`): a job begins, and is found, without one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.hosts.jobs import PORT, Job
from helpers.hosts.netns import Host, Network

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

Start = Callable[..., Job]


def listed(hosts: list[Host]) -> str:
    """The first three hosts, the second without a port."""
    first, second, third = (host.addr for host in hosts[:3])
    return f"{first}:{PORT},{second},{third}:{PORT}"


def may_lose(job: Job, *hosts: Host) -> None:
    """Wait until all agents that run know that any one host may be lost."""
    for agent in [agent for agent in job.agents if agent.host in hosts]:
        job.wait_until(
            lambda agent=agent: [  # type: ignore[misc]
                event for event in agent.events("rendezvous.servers") if event["may_lose"] == 1
            ],
            f"{agent.host.name} may lose one host",
        )


def test_a_job_begins_without_the_first_listed_host_which_joins_later(
    start_job: Start, hosts: list[Host]
) -> None:
    job = start_job(
        None, endpoint=listed(hosts), nodes="3:4", mode="plain", conf="last_call_timeout=1"
    )
    agents = [job.agent(host) for host in hosts[1:]]
    world = job.world(3)
    assert sorted(world.hosts) == ["node2", "node3", "node4"], job
    late = job.agent(hosts[0])
    again = job.world(4, after=world)
    assert again.restarts == 0, job
    may_lose(job, *hosts)
    job.finish(late, *agents)


def test_the_first_listed_host_may_be_lost_while_the_first_round_forms(
    start_job: Start, hosts: list[Host]
) -> None:
    job = start_job(None, endpoint=listed(hosts), nodes="3:3", mode="plain")
    first, second = job.agent(hosts[0]), job.agent(hosts[1])
    job.waits(second)
    first.host.lose_power()
    agents = [second, job.agent(hosts[2]), job.agent(hosts[3])]
    world = job.world(3)
    assert sorted(world.hosts) == ["node2", "node3", "node4"], job
    job.finish(*agents)


def certificates(folder: Path, host: Host) -> list[str]:
    """Return flags for TLS, with a certificate that the agents of all hosts use."""
    tls = self_signed(folder, f"IP:{host.addr}")
    return [
        f"--rdzv-tls-cert={tls.certfile}",
        f"--rdzv-tls-key={tls.keyfile}",
        f"--rdzv-tls-ca={tls.cafile}",
    ]


@pytest.mark.parametrize(
    "lost",
    ["in", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("out", "frozen"))],
)
def test_the_first_listed_host_comes_back_to_the_others(
    start_job: Start, hosts: list[Host], network: Network, tmp_path: Path, lost: str
) -> None:
    """Over TLS; with a line in one direction only, or after all of its processes were stopped."""
    flags = certificates(tmp_path, hosts[0])
    conf = "last_call_timeout=1,reconnect_timeout=60"
    job = start_job(None, endpoint=listed(hosts), nodes="2:3", mode="plain", conf=conf)
    agents = [job.agent(host, *flags) for host in hosts[:3]]
    world = job.world(3)
    may_lose(job, *hosts[:3])
    if lost == "frozen":
        hosts[0].signal(signal.SIGSTOP)
    else:
        network.cut(hosts[0], lost)
    after = job.world(2, after=world)
    assert sorted(after.hosts) == ["node2", "node3"], job
    network.mend(hosts[0])
    hosts[0].signal(signal.SIGCONT)
    agents[0].process.signal(signal.SIGCONT)
    again = job.world(3, after=after)
    assert again.restarts == 0, job
    # The workers of a frozen host may run for a moment when it thaws, until their lease is checked.
    job.finish(*agents, overlap=lost == "frozen")


def test_listed_hosts_with_certificates_take_over(
    start_job: Start, hosts: list[Host], tmp_path: Path
) -> None:
    flags = certificates(tmp_path, hosts[0])
    settings = {"nodes": "2:3", "mode": "plain", "conf": "last_call_timeout=1"}
    job = start_job(None, endpoint=listed(hosts), **settings)
    agents = [job.agent(host, *flags) for host in hosts[:3]]
    world = job.world(3)
    may_lose(job, *hosts[:3])
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
        None, endpoint=listed(hosts), nodes="1:4", mode="plain", conf="last_call_timeout=1"
    )
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    may_lose(job, *hosts[:3])
    hosts[0].signal(signal.SIGKILL)
    job.agent(hosts[0])
    newcomer = job.agent(hosts[3])
    after = job.world(4, after=world)
    assert sorted(after.hosts) == ["node1", "node2", "node3", "node4"], job
    assert after.restarts == 0, job
    may_lose(job, *hosts[1:])
    network.cut(hosts[0])
    last = job.world(3, after=after)
    assert sorted(last.hosts) == ["node2", "node3", "node4"], job
    network.mend(hosts[0])
    job.finish(newcomer, *agents[1:])
