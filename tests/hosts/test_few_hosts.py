"""Jobs on three hosts, with workers that import nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from helpers.hosts.jobs import Job
from helpers.hosts.netns import Host, Network, require_hosts
from helpers.suite.recovery import Fault

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]


@pytest.fixture
def three() -> Iterator[list[Host]]:
    """Three hosts on a switch without answers to name lookups."""
    require_hosts()
    with Network(names="silent") as network:
        yield [network.host() for _ in range(3)]


def test_a_node_on_standby_takes_the_place_of_one_that_is_killed_and_costs_no_restart_before(
    start_job: Callable[..., Job], three: list[Host], fault: Fault
) -> None:
    job = start_job(three[0], nodes="2:2", mode="plain")
    first, second = job.agent(three[0]), job.agent(three[1])
    world = job.world(2)
    standby = job.agent(three[2])
    job.connected(three[2])
    fault.now()
    second.kill_family()
    after = job.world(2, after=world)
    fault.healed(after, reduces=False)
    assert after.hosts == ("node1", "node3"), job
    assert after.round == world.round + 1, job
    assert after.restarts == 0, job
    node, why = job.blamed(world, first)
    assert node.split("/")[0] == three[1].addr, job
    # The kernel resets the connection if the agent had unread data.
    assert "connection" in why or "no heartbeat" in why, job
    job.finish(first, standby)
    lost = f"host {three[1].name} ({three[1].addr}) is gone: {why}"
    assert standby.output.count(f"this node joins the job, with rank 1 of 2; {lost}") == 1
    assert "joins the job" not in first.output
    assert "with 1 membership change" in " ".join(standby.output.split())


def test_the_loss_of_the_store_s_host_ends_the_others_with_a_code_to_try_again(
    start_job: Callable[..., Job], three: list[Host]
) -> None:
    job = start_job(three[0], nodes="1:3", mode="plain", conf="reconnect_timeout=1,successors=0")
    agents = [job.agent(host) for host in three]
    job.world(3)
    warning = (
        f"survives the loss of any host but {three[0].name} ({three[0].addr}), which serves it"
    )
    job.wait_until(lambda: warning in agents[1].output or None, "a warning")
    three[0].lose_power()
    for agent in agents[1:]:
        assert agent.finish() == 75, agent
        assert f"{three[0].addr}:29400" in agent.output, agent
    job.assert_one_world_at_a_time()
