"""Two hosts and a directory for the third vote: the loss of either host, and of the directory."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.hosts.jobs import PORT, Agent, Job, World
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
def pair(start_job: Start, hosts: list[Host], shared: Path) -> Callable[..., Job]:
    """Return a factory of jobs that go on with one host, at an endpoint on the first one."""

    def pair(conf: str = "", **settings: object) -> Job:
        conf = ",".join(filter(None, [f"witness={shared}", conf]))
        defaults: dict[str, object] = {"nodes": "1:2", "mode": "plain"}
        coordinator = None if "endpoint" in settings else hosts[0]
        return start_job(coordinator, **(defaults | settings | {"conf": conf}))

    return pair


def listed(hosts: list[Host]) -> str:
    """The first two hosts."""
    return ",".join(f"{host.addr}:{PORT}" for host in hosts[:2])


def may_lose(job: Job, hosts: int, *agents: Agent) -> None:
    """Wait until the agents know how many hosts may be lost now."""

    def known(agent: Agent) -> bool | None:
        found = agent.events("rendezvous.servers")
        return (bool(found) and found[-1]["may_lose"] == hosts) or None

    for agent in agents:
        job.wait_until(lambda agent=agent: known(agent), f"{hosts} may be lost, for {agent}")  # type: ignore[misc]


def start(job: Job, hosts: list[Host], *flags: str) -> tuple[list[Agent], World]:
    agents = [job.agent(host, *flags) for host in hosts[:2]]
    world = job.world(2)
    may_lose(job, 1, *agents)
    return agents, world


def ballots(shared: Path) -> list[Path]:
    return [*shared.glob("witness=*/=witness*")]


def server_of(agent: Agent) -> int:
    (server,) = [
        pid
        for pid in agent.host.processes()
        if b"store.server.serving" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return server


def lose_power(network: Network, host: Host) -> None:
    host.lose_power()


def kill_all(network: Network, host: Host) -> None:
    """Kill agent, workers and server; the kernel closes or refuses all connections."""
    host.signal(signal.SIGKILL)


def cut_off(network: Network, host: Host) -> None:
    network.cut(host)


def cut_out(network: Network, host: Host) -> None:
    network.cut(host, "out")


def cut_in(network: Network, host: Host) -> None:
    network.cut(host, "in")


def freeze(network: Network, host: Host) -> None:
    host.signal(signal.SIGSTOP)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("lose", [lose_power, kill_all])
def test_the_other_host_goes_on_without_either_host(
    pair: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    fault: Fault,
    shared: Path,
    lose: Callable[[Network, Host], None],
    lost: int,
) -> None:
    job = pair(endpoint=listed(hosts))
    agents, world = start(job, hosts)
    fault.now()
    lose(network, hosts[lost])
    after = job.world(1, after=world)
    fault.healed(after)
    assert after.restarts == 0, job
    left = agents[1 - lost]
    may_lose(job, 0, left)
    another = job.agent(hosts[2])
    again = job.world(2, after=after)
    assert again.restarts == 0, job
    may_lose(job, 1, left, another)
    job.finish(left, another)
    assert not ballots(shared), job


@pytest.mark.parametrize("lose", [cut_off, pytest.param(freeze, marks=pytest.mark.thorough)])
def test_a_host_of_the_server_that_comes_back_joins_the_other(
    pair: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    lose: Callable[[Network, Host], None],
) -> None:
    job = pair("reconnect_timeout=60")
    agents, world = start(job, hosts)
    if lose is cut_off:
        # While both see the directory, either side may go on: the one beside the coordinator does.
        lose(network, hosts[0])
        after = job.world(1, after=world)
        assert after.hosts == ("node1",), job
    else:
        lose(network, hosts[0])
        after = job.world(1, after=world)
        assert after.hosts == ("node2",), job
    network.mend(hosts[0])
    hosts[0].signal(signal.SIGCONT)
    agents[0].process.signal(signal.SIGCONT)
    again = job.world(2, after=after)
    assert again.restarts == 0, job
    job.finish(*agents, overlap=lose is freeze)


@pytest.mark.thorough
@pytest.mark.parametrize("lose", [cut_out, cut_in])
def test_two_hosts_with_a_line_in_one_direction_run_one_round_and_meet_again(
    pair: Callable[..., Job],
    hosts: list[Host],
    network: Network,
    lose: Callable[[Network, Host], None],
) -> None:
    job = pair("reconnect_timeout=60")
    agents, world = start(job, hosts)
    lose(network, hosts[0])
    after = job.world(1, after=world)
    network.mend(hosts[0])
    again = job.world(2, after=after)
    assert again.restarts == 0, job
    job.finish(*agents)


@pytest.mark.thorough
def test_the_server_alone_is_started_again(pair: Callable[..., Job], hosts: list[Host]) -> None:
    job = pair()
    agents, world = start(job, hosts)
    os.kill(server_of(agents[0]), signal.SIGKILL)
    job.event(agents[0], "rendezvous.server_ended")
    assert {record.round for record in job.records("started")} == {world.round}, job
    job.finish(*agents)


@pytest.mark.thorough
def test_the_agent_beside_the_server_may_be_lost_alone(
    pair: Callable[..., Job], hosts: list[Host], shared: Path
) -> None:
    job = pair()
    agents, world = start(job, hosts)
    agents[0].process.signal(signal.SIGKILL)
    after = job.world(1, after=world)
    assert after.restarts == 0, job
    job.finish(agents[1])


def test_the_first_listed_host_may_be_lost_while_the_first_round_forms(
    pair: Callable[..., Job], hosts: list[Host], shared: Path
) -> None:
    job = pair(endpoint=listed(hosts), nodes="3:3")
    first, second = job.agent(hosts[0]), job.agent(hosts[1])
    job.waits(first)
    job.waits(second)
    job.wait_until(lambda: ballots(shared) or None, "the witness has a ballot")
    may_lose(job, 1, first, second)
    first.host.lose_power()
    others = [job.agent(hosts[2]), job.agent(hosts[3])]
    world = job.world(3)
    assert sorted(world.hosts) == ["node2", "node3", "node4"], job
    job.finish(second, *others)


def test_either_host_may_be_lost_with_certificates(
    pair: Callable[..., Job], hosts: list[Host], tmp_path: Path
) -> None:
    tls = self_signed(tmp_path, f"IP:{hosts[0].addr}")
    job = pair()
    agents, world = start(
        job,
        hosts,
        f"--rdzv-tls-cert={tls.certfile}",
        f"--rdzv-tls-key={tls.keyfile}",
        f"--rdzv-tls-ca={tls.cafile}",
    )
    hosts[0].signal(signal.SIGKILL)
    job.world(1, after=world)
    job.finish(agents[1])


def test_a_directory_that_vanishes_disturbs_nothing_and_returns(
    pair: Callable[..., Job], hosts: list[Host], shared: Path
) -> None:
    job = pair()
    agents, world = start(job, hosts)
    away = shared.with_name("away")
    shared.rename(away)
    may_lose(job, 0, *agents)
    away.rename(shared)
    may_lose(job, 1, *agents)
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
    may_lose(job, 0, *agents)
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
    may_lose(job, 1, *agents)
    hosts[0].lose_power()
    job.world(1, after=two)
    job.finish(agents[1])
