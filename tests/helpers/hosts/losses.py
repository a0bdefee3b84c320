"""Ways to lose a host, and which hosts the agents of a job may lose."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.hosts.jobs import PORT, Agent, Job
from helpers.hosts.netns import Host, Network

Lose = Callable[[Network, Agent], None]


def rare(*values: object) -> object:
    """Return values of a parametrized test that only `make thorough` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


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


def bring_back(network: Network, agent: Agent) -> None:
    """Undo a cut and a freeze."""
    network.mend(agent.host)
    agent.host.signal(signal.SIGCONT)
    agent.process.signal(signal.SIGCONT)


def kill_server(host: Host) -> None:
    """Kill the server process on a host, and nothing else."""
    (server,) = [
        pid
        for pid in host.processes()
        if b"store.server.serving" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(server, signal.SIGKILL)


def certificates(folder: Path, host: Host) -> list[str]:
    """Return flags for TLS, with a certificate that the agents of all hosts use."""
    tls = self_signed(folder, f"IP:{host.addr}")
    return [
        f"--rdzv-tls-cert={tls.certfile}",
        f"--rdzv-tls-key={tls.keyfile}",
        f"--rdzv-tls-ca={tls.cafile}",
    ]


def listed(hosts: list[Host]) -> str:
    """The endpoints of the hosts, the second one without a port."""
    ports = ["" if at == 1 else f":{PORT}" for at in range(len(hosts))]
    return ",".join(f"{host.addr}{port}" for host, port in zip(hosts, ports, strict=True))


def servers(agent: Agent) -> dict[str, object]:
    """The latest event about the hosts that may run the rounds."""
    found = agent.events("rendezvous.servers")
    return found[-1] if found else {}


def settled(job: Job, may_lose: int, *agents: Agent) -> set[object]:
    """Wait until the agents agree on how many hosts may be lost; return those that may serve."""

    def known() -> bool:
        latest = [servers(agent) for agent in agents]
        same = len({(of.get("epoch"), of.get("server")) for of in latest}) == 1
        return same and {of.get("may_lose") for of in latest} == {may_lose}

    job.wait_until(lambda: known() or None, f"{may_lose} hosts may be lost, for {agents}")
    of = servers(agents[0])
    return {of["server"], *of["successors"]}  # type: ignore[misc]


def trained(world_size: int) -> list[int]:
    """The checkpoint of an undisturbed run of the workers' mode `training`: step and weight."""
    weight = 0
    for step in range(1, 401):
        weight = (31 * weight + step * sum(range(1, world_size + 1))) % (2**31 - 1)
    return [400, weight]
