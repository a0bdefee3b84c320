"""Heartbeats on several hosts: which rank is named when a worker or its host is silent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.hosts.jobs import Job
from helpers.hosts.netns import Host, Process
from helpers.processes import wait_until
from helpers.suite.recovery import Fault
from regrow.events import read_events, story

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]

StartJob = Callable[..., Job]


def test_a_host_whose_link_is_cut_is_to_blame_and_not_the_workers_that_miss_it(
    start_job: StartJob, hosts: list[Host], fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="2:3", mode="beating")
    agents = [job.agent(host, "--heartbeat=0.5") for host in hosts[:3]]
    world = job.world(3)
    victim = next(agent for agent in agents if agent.host.name == world.hosts[2])
    fault.now()
    victim.host.link("down")
    after = job.world(2, after=world)
    fault.healed(after, reduces=False)
    assert after.restarts == 0, job
    for agent in agents:
        if agent is not victim:
            node, why = job.blamed(world, agent)
            assert victim.host.addr in node, agent
            assert "no heartbeat" in why, agent
            assert agent.root_causes() == [], agent
    victim.host.link("up")
    again = job.world(3, after=after)
    assert again.restarts == 0, job
    job.finish(*agents)


def test_a_lost_agent_is_to_blame_though_its_workers_are_missed_at_the_same_moment(
    start_job: StartJob, hosts: list[Host], fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="2:3", mode="beating")
    agents = [job.agent(host, "--heartbeat=0.5") for host in hosts[:3]]
    world = job.world(3)
    victim = next(agent for agent in agents if agent.host.name == world.hosts[2])
    fault.now()
    victim.kill()
    after = job.world(2, after=world)
    fault.healed(after, reduces=False)
    assert after.restarts == 0, job
    others = [agent for agent in agents if agent is not victim]
    for agent in others:
        node, _ = job.blamed(world, agent)
        assert victim.host.addr in node, agent
    job.finish(*others)
    for agent in others:
        report = story(read_events(agent.log_dir))
        lost = f"host {victim.host.name} "
        assert lost in report.render(1000), agent
        assert all(lost in failure.what for failure in report.failures), agent


def test_a_stopped_worker_is_the_root_cause_on_every_host(
    start_job: StartJob, hosts: list[Host], fault: Fault
) -> None:
    job = start_job(hosts[0], nodes="3", mode="beating", max_restarts=1)
    agents = [job.agent(host, "--heartbeat=0.5") for host in hosts[:3]]
    world = job.world(3)
    fault.now()
    (job.folder / f"stop.{world.hosts[1]}").touch()
    after = job.world(3, after=world)
    fault.healed(after, reduces=False)
    assert after.restarts == 1, job
    job.finish(*agents)
    for agent in agents:
        assert agent.root_causes() == [(world.hosts[1], 1, -signal.SIGKILL)], agent
        assert agent.events("heartbeat.failed") == [], agent
        assert "no heartbeat for" in agent.output, agent


ALONE = """
import time
from regrow import heartbeat
heartbeat.start(0.5, timeout=1)
print("beating", flush=True)
while True:
    time.sleep(1)
"""


def test_without_agents_the_workers_of_a_host_that_is_cut_off_end_and_so_do_the_others(
    hosts: list[Host], tmp_path: Path
) -> None:
    common = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        "WORLD_SIZE": "3",
        "MASTER_ADDR": hosts[0].addr,
        "MASTER_PORT": "29500",
        "REGROW_TOKEN": "a token for the tests",
        "HOME": str(tmp_path),
    }
    outputs = [tmp_path / f"{rank}.output" for rank in range(3)]
    workers = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            env = {**common, "RANK": str(rank)}
            workers.append(Process(hosts[rank], [sys.executable, "-c", ALONE], env, file))
    wait_until(lambda: all("beating" in each.read_text() for each in outputs), "all beat")
    hosts[2].link("down")
    assert [worker.wait(40) for worker in workers] == [-signal.SIGABRT] * 3
    for rank in (0, 1):
        assert f"heartbeat of rank {rank} of 3" in outputs[rank].read_text()
        assert "rank 2 is missing: " in outputs[rank].read_text()
    assert "no exchange has succeeded" in outputs[2].read_text()
