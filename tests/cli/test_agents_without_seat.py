"""An agent without a seat ends, and the job of the other agents continues.

A worker of the job fails after that. The job could not recover if the rendezvous were closed.
"""

from __future__ import annotations

import os
import signal

import pytest

from helpers.jobs.agents import Hosts, store_server_of

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

# Runs until the file `fail` is there, then rank 1 fails, and the next attempt succeeds.
HEALS = """\
import time
from pathlib import Path
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while first and not Path("fail").exists():
    time.sleep(0.02)
if first and rank == "1":
    sys.exit(1)
elif first:
    signal.pause()
"""
C10D = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT"
STATIC = "--nnodes 2 --master-addr 127.0.0.1 --master-port PORT --node-rank"


def heals(hosts: Hosts, *agents: object) -> None:
    """Let a worker fail; the job heals that and succeeds."""
    (hosts.folder / "fail").touch()
    for agent in agents:
        code, output = hosts.ended(agent)  # type: ignore[arg-type]
        assert code == 0, output
        assert "of 2 on node" in output


def test_a_refused_host_does_not_close_the_job(hosts: Hosts) -> None:
    flags = f"--nnodes 2:4 {C10D} --max-restarts 3 --rdzv-conf last_call_timeout=2"
    agents = [hosts.start(flags, HEALS) for _ in range(2)]
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    code, output = hosts.ended(hosts.start(f"--nnodes 3 {C10D}", HEALS))
    assert code == 1
    assert "this node has 3:3" in output
    heals(hosts, *agents)


def test_a_second_static_host_with_a_running_rank_does_not_close_the_job(hosts: Hosts) -> None:
    agents = [hosts.start(f"{STATIC} {rank} --max-restarts 3", HEALS) for rank in (0, 1)]
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    code, output = hosts.ended(hosts.start(f"{STATIC} 1", HEALS))
    assert code == 1
    assert "node rank 1 is used twice" in output
    heals(hosts, *agents)


def test_an_agent_of_an_earlier_run_that_wakes_does_not_close_the_job(hosts: Hosts) -> None:
    flags = f"--nnodes 2 {C10D} --max-restarts 3"
    first = hosts.start(flags, HEALS)
    server = store_server_of(first)
    frozen = hosts.start(flags, HEALS)
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    frozen.send_signal(signal.SIGSTOP)
    first.kill()
    first.wait()
    os.kill(server, signal.SIGKILL)
    for name in ("started-0-of-2", "started-1-of-2"):
        (hosts.folder / name).unlink()
    agents = [hosts.start(flags, HEALS) for _ in range(2)]  # the same run id: none
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    frozen.send_signal(signal.SIGCONT)
    code, output = hosts.ended(frozen)
    assert code == 75, output
    heals(hosts, *agents)
