"""In-process restarts over two hosts: a fault costs no process, but the loss of a host does."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from helpers.hosts.jobs import Agent, Job, World
from helpers.hosts.netns import Host
from helpers.suite.recovery import Fault
from regrow.events import read_events, story

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]


def called(job: Job, world: World, iteration: int) -> list[tuple[str, int]]:
    """Wait until all ranks are in an iteration; return host and pid of each rank."""

    def ranks() -> list[tuple[str, int]] | None:
        records = [r for r in job.records(f"iteration {iteration}") if r.round == world.round]
        assert {record.world_size for record in records} <= {len(world.hosts)}, job
        found = [(r.host, r.pid) for r in sorted(records, key=lambda record: record.rank)]
        return found if len(found) == len(world.hosts) else None

    return job.wait_until(ranks, f"all of {world} are in iteration {iteration}")


@pytest.fixture
def two(start_job: Callable[..., Job], hosts: list[Host]) -> tuple[Job, list[Agent], World]:
    """A job with a wrapped worker on each of two hosts; an exception restarted the function."""
    job = start_job(hosts[0], nodes="1:2", mode="wrapped", max_restarts=1)
    agents = [job.agent(host) for host in hosts[:2]]
    world = job.world(2)
    before = called(job, world, 0)
    (job.folder / f"fail.{world.hosts[1]}").touch()
    assert called(job, world, 1) == before, "in the same processes"
    return job, agents, world


def test_an_exception_on_one_host_restarts_the_function_on_both_in_the_same_processes(
    two: tuple[Job, list[Agent], World],
) -> None:
    job, agents, world = two
    first = next(agent for agent in agents if agent.host.name == world.hosts[0])
    restarted = job.event(first, "inprocess.restarted")
    assert (restarted["kind"], restarted["rank"], restarted["world_size"]) == ("EXCEPTION", 1, 2)
    job.finish(*agents)
    assert {record.round for record in job.records("finished")} == {world.round}, job


def test_the_loss_of_a_host_costs_the_others_their_processes_and_no_restart(
    two: tuple[Job, list[Agent], World], fault: Fault
) -> None:
    job, agents, world = two
    fault.now()
    agents[1].host.lose_power()
    after = job.world(1, after=world)
    fault.healed(after, reduces=False)
    assert (after.hosts, after.restarts) == (("node1",), 0)
    called(job, after, 0)
    job.finish(agents[0])
    report = story(read_events(agents[0].log_dir))
    (failure,) = report.failures
    assert (report.state, failure.rank) == ("SUCCEEDED", None), "no worker is to blame"
    assert f"host {agents[1].host.name} " in failure.what
    lost, why = job.blamed(world, agents[0])
    assert (lost.split("/")[0], why.partition(" for ")[0]) == (
        agents[1].host.addr,
        "no heartbeat arrived",
    )


def test_a_host_that_has_lost_its_last_worker_has_failed(
    two: tuple[Job, list[Agent], World],
) -> None:
    job, agents, world = two
    ((host, pid),) = [each for each in called(job, world, 1) if each[0] == "node2"]
    agents[1].host.run("kill", "-KILL", str(pid))
    after = job.world(2, after=world)
    assert (sorted(after.hosts), after.restarts) == (["node1", host], 1)
    called(job, after, 0)
    job.finish(*agents)
    rank = world.hosts.index(host)
    assert [agent.root_causes() for agent in agents] == [[(host, rank, -signal.SIGKILL)]] * 2
