"""Two hosts and a directory for the third vote: the loss of either host, and of the directory."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
    settled,
    trained,
)
from helpers.hosts.netns import Host, Network
from helpers.suite.recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

Start = Callable[..., Job]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that all hosts see; it is created by the job."""
    return tmp_path / "shared" / "witness"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that never answers; request it before the hosts.

    As with NFS, a process that waits for it can be killed.
    """
    hung = tmp_path / "hung"
    hung.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    mounted = ctypes.CDLL(None, use_errno=True).mount(
        b"hung", bytes(hung), b"fuse", ctypes.c_ulong(0), options
    )
    assert mounted == 0, os.strerror(ctypes.get_errno())
    yield hung
    os.close(server)
    subprocess.run(["umount", "--lazy", hung], check=True)


@pytest.fixture
def tls(hosts: list[Host], tmp_path: Path) -> list[str]:
    """Flags for TLS."""
    return certificates(tmp_path, hosts[0])


@pytest.fixture
def pair(start_job: Start, hosts: list[Host], shared: Path) -> Callable[..., Job]:
    """Return a factory of jobs that go on with one host, at an endpoint on the first one."""

    def pair(conf: str = "", **settings: object) -> Job:
        conf = ",".join(filter(None, [f"witness={shared}", conf]))
        defaults: dict[str, object] = {"nodes": "1:2", "mode": "plain"}
        coordinator = None if "endpoint" in settings else hosts[0]
        return start_job(coordinator, **(defaults | settings | {"conf": conf}))

    return pair


def start(job: Job, hosts: list[Host], *flags: str) -> tuple[list[Agent], World]:
    agents = [job.agent(host, *flags) for host in hosts[:2]]
    world = job.world(2)
    settled(job, 1, *agents)
    return agents, world


def ballots(shared: Path) -> list[Path]:
    return [*shared.glob("witness=*/=witness*")]


def warned(job: Job, server: Host, agent: Agent) -> None:
    """Wait for the line that the host of the server may not be lost."""
    line = f"survives the loss of any host but {server.name} ({server.addr}), which serves it"
    job.wait_until(lambda: line in agent.output or None, "a line about the host that serves")


@pytest.mark.parametrize("lost", [0, rare(1)])
@pytest.mark.parametrize("lose", [lose_power, kill_all])
def test_the_other_host_goes_on_without_either_host(
    pair: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    fault: Fault,
    shared: Path,
    lose: Lose,
    lost: int,
) -> None:
    job = pair(endpoint=listed(hosts[:2]))
    agents, world = start(job, hosts)
    fault.now()
    lose(network, agents[lost])
    after = job.world(1, after=world)
    fault.healed(after)
    assert after.restarts == 0, job
    left = agents[1 - lost]
    settled(job, 0, left)
    another = job.agent(hosts[2])
    again = job.world(2, after=after)
    assert again.restarts == 0, job
    settled(job, 1, left, another)
    job.finish(left, another)
    assert not ballots(shared), job


# While both see the directory, either side of a cut may go on: the one beside the coordinator does.
@pytest.mark.parametrize(
    ("lose", "left"),
    [
        (cut_off, "node1"),
        rare(freeze, "node2"),
        rare(cut_out, "node1 or node2"),
        rare(cut_in, "node1 or node2"),
    ],
)
def test_a_host_of_the_server_that_comes_back_meets_the_other_again(
    pair: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    fault: Fault,
    tls: list[str],
    lose: Lose,
    left: str,
) -> None:
    job = pair("reconnect_timeout=60")
    agents, world = start(job, hosts, *tls)
    lost_s = time.monotonic()
    fault.now()
    lose(network, agents[0])
    after = job.world(1, after=world)
    fault.healed(after)
    assert after.hosts[0] in left, job
    if lose is freeze:
        job.running_at(lost_s + 10.0, agents[1])
    bring_back(network, agents[0])
    again = job.world(2, after=after)
    assert again.restarts == 0, job
    job.finish(*agents, overlap=lose is freeze)


@pytest.mark.thorough
def test_the_server_alone_is_started_again(
    pair: Callable[..., Job], hosts: list[Host], tls: list[str]
) -> None:
    job = pair()
    agents, world = start(job, hosts, *tls)
    kill_server(agents[0].host)
    job.event(agents[0], "rendezvous.server_ended")
    assert {record.round for record in job.records("started")} == {world.round}, job
    job.finish(*agents)


@pytest.mark.thorough
def test_the_agent_beside_the_server_may_be_lost_alone(
    pair: Callable[..., Job], hosts: list[Host], tls: list[str]
) -> None:
    job = pair()
    agents, world = start(job, hosts, *tls)
    agents[0].process.signal(signal.SIGKILL)
    after = job.world(1, after=world)
    assert after.restarts == 0, job
    job.finish(agents[1])


def test_the_first_listed_host_may_be_lost_while_the_first_round_forms(
    pair: Callable[..., Job], hosts: list[Host], shared: Path, tls: list[str]
) -> None:
    job = pair(endpoint=listed(hosts[:2]), nodes="3:3")
    first, second = job.agent(hosts[0], *tls), job.agent(hosts[1], *tls)
    job.waits(first)
    job.waits(second)
    job.wait_until(lambda: ballots(shared) or None, "the witness has a ballot")
    settled(job, 1, first, second)
    first.host.lose_power()
    others = [job.agent(hosts[2], *tls), job.agent(hosts[3], *tls)]
    world = job.world(3)
    assert sorted(world.hosts) == ["node2", "node3", "node4"], job
    job.finish(second, *others)


@pytest.mark.parametrize("lose", [kill_all, rare(lose_power)])
def test_either_host_may_be_lost_with_certificates(
    pair: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    fault: Fault,
    tls: list[str],
    lose: Lose,
) -> None:
    job = pair()
    agents, world = start(job, hosts, *tls)
    fault.now()
    lose(network, agents[0])
    fault.healed(job.world(1, after=world))
    job.finish(agents[1])


@pytest.mark.thorough
def test_training_ends_with_the_weights_of_an_undisturbed_run(
    pair: Callable[..., Job], hosts: list[Host]
) -> None:
    job = pair(endpoint=listed(hosts[:2]), nodes="2:2", mode="training")
    agents, world = start(job, hosts)
    hosts[0].lose_power()
    newcomer = job.agent(hosts[2])
    after = job.world(2, after=world)
    assert after.restarts == 0, job
    job.finish(agents[1], newcomer)
    assert json.loads((job.folder / "checkpoint").read_text()) == trained(world_size=2)


def test_a_directory_that_vanishes_disturbs_nothing_and_returns(
    pair: Callable[..., Job], hosts: list[Host], shared: Path
) -> None:
    job = pair()
    agents, world = start(job, hosts)
    away = shared.with_name("away")
    shared.rename(away)
    settled(job, 0, *agents)
    warned(job, hosts[0], agents[1])
    away.rename(shared)
    settled(job, 1, *agents)
    assert {record.round for record in job.records("started")} == {world.round}, job
    hosts[0].lose_power()
    job.world(1, after=world)
    job.finish(agents[1])


def test_a_directory_that_hangs_disturbs_nothing_and_delays_no_end(
    hung: Path, start_job: Start, hosts: list[Host], tmp_path: Path
) -> None:
    (tmp_path / "works").mkdir()
    link = tmp_path / "link"
    link.symlink_to("works")
    job = start_job(hosts[0], nodes="1:2", mode="plain", conf=f"witness={link}/witness")
    agents, world = start(job, hosts)
    (tmp_path / "next").symlink_to(hung)
    (tmp_path / "next").rename(link)
    settled(job, 0, *agents)
    warned(job, hosts[0], agents[1])
    assert {record.round for record in job.records("started")} == {world.round}, job
    job.finish(*agents)


def test_two_directories_with_one_path_are_no_witness(
    start_job: Start, hosts: list[Host], tmp_path: Path
) -> None:
    job = start_job(hosts[0], nodes="1:2", mode="plain")
    agents = [
        job.agent(host, f"--rdzv-conf=witness={tmp_path}/of-{host.name}") for host in hosts[:2]
    ]
    job.world(2)
    line = "is not there, although another host has written it"
    job.wait_until(lambda: line in agents[1].output or None, "a warning")
    warned(job, hosts[0], agents[1])
    for agent in agents:
        found = agent.events("rendezvous.servers")
        assert not [event for event in found if event["may_lose"]], job
    job.finish(*agents)


def test_two_hosts_grow_to_three_and_shrink_back(
    pair: Callable[..., Job], hosts: list[Host], shared: Path
) -> None:
    job = pair(nodes="1:3")
    agents, world = start(job, hosts)
    (before,) = ballots(shared)
    third = job.agent(hosts[2])
    three = job.world(3, after=world)
    job.wait_until(lambda: not ballots(shared) or None, "three hosts need no witness")
    third.host.lose_power()
    two = job.world(2, after=three)
    (after,) = job.wait_until(lambda: ballots(shared) or None, "two hosts have a witness again")
    assert after != before
    settled(job, 1, *agents)
    hosts[0].lose_power()
    job.world(1, after=two)
    job.finish(agents[1])
