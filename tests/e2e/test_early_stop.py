"""`regrow.should_stop`: all ranks of a job stop at the same step, whenever it is asked to end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.jobs.agents import Hosts
from regrow.utils import PortReservation

pytestmark = pytest.mark.timeout(120)

# Each rank has a pace of its own, and no collective keeps the ranks together.
TRAIN = """
import random, time, regrow
pace = random.Random(int(rank))
step = 0
while step < 100_000:
    step += 1
    time.sleep(pace.random() * 0.004)
    if step == 3:
        open(f"running-{rank}", "w").close()
    if regrow.should_stop():
        open(f"stopped-{rank}", "w").write(f"{step} {regrow.deadline()}")
        break
"""
MEET = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT"
RUNS = int(os.environ.get("REGROW_STOP_RUNS", "2"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with PortReservation() as free:
        made = Hosts(tmp_path, free.port)
    yield made
    made.close()


def steps(hosts: Hosts) -> dict[str, int]:
    """Return the step at which each rank has stopped."""
    found = hosts.folder.glob("stopped-*")
    return {path.name: int(path.read_text().split()[0]) for path in found}


@pytest.mark.parametrize("run", range(RUNS))
def test_four_ranks_on_two_hosts_stop_at_the_same_step(hosts: Hosts, run: int) -> None:
    chance = random.Random(run)
    agents = [hosts.start(f"{MEET} --node-rank {n} --log-dir logs", TRAIN) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    with pytest.raises(subprocess.TimeoutExpired):
        agents[0].wait(chance.random() * 0.5)
    signum = chance.choice([signal.SIGTERM, signal.SIGUSR1])
    for agent in chance.choice([agents[:1], agents[1:], agents]):
        agent.send_signal(signum)
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [85, 85], ended
    found = steps(hosts)
    assert len(found) == 4, ended
    assert len(set(found.values())) == 1, found


def test_regrow_stop_reaches_a_job_at_its_endpoint(hosts: Hosts) -> None:
    agents = [hosts.start(f"{MEET} --node-rank {n} --rdzv-id mine", TRAIN) for n in range(2)]
    hosts.wait_for(*(f"running-{rank}" for rank in range(4)))
    asked = hosts.regrow("stop --rdzv-endpoint 127.0.0.1:PORT --rdzv-id mine")
    assert asked.code == 0, asked
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [85, 85], ended
    (step,) = set(steps(hosts).values())
    assert f"all ranks stop at call {step} of should_stop" in asked.output
    assert "by regrow stop" in ended[0][1]


def test_regrow_stop_names_a_job_that_does_not_run_there(hosts: Hosts) -> None:
    asked = hosts.regrow("stop --rdzv-endpoint 127.0.0.1:PORT --rdzv-id other")
    assert asked.code == 75
    assert "job 'other': 127.0.0.1" in asked.output
