"""Four `regrow run` with a common output, as under `srun`: which agent prints which line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress

import pytest

from helpers.jobs.agents import WAIT, Hosts, store_server_of
from helpers.processes import children_of
from helpers.stories import without_times

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]

NODES = 4
FLAGS = "--rdzv-endpoint 127.0.0.1:PORT --nnodes 2:4"
Agents = list[subprocess.Popen[str]]


def start(hosts: Hosts, worker: str, flags: str = "") -> Agents:
    """Start the agents of one Slurm step; the first serves the others."""
    agents: Agents = []
    for rank in range(NODES):
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": str(NODES),
            "SLURM_STEP_NUM_TASKS": str(NODES),
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_PROCID": str(rank),
            "REGROW_VERBOSE": "",
        }
        agents.append(hosts.start(f"{FLAGS} {flags}", worker, **step))
        if rank == 0:
            store_server_of(agents[0])
    return agents


def below(pid: int) -> list[int]:
    """All descendants of a process."""
    return [found for child in children_of(pid) for found in (child, *below(child))]


def ended(hosts: Hosts, agents: Agents) -> tuple[list[int], list[list[str]]]:
    """The exit codes, and the lines of each agent without those of its workers.

    The line about a wait of 10 s for the other agents is left out, too: only a loaded machine
    adds it.
    """
    both = [hosts.ended(agent) for agent in agents]
    others = re.compile(r"rank \d of \d on node|regrow: still waiting for other nodes")
    texts = [without_times(output).splitlines() for _, output in both]
    lines = [[line for line in text if not others.match(line)] for text in texts]
    return [code for code, _ in both], lines


BOUNDS = "a dead worker is acted on within"
STORY = "regrow: job slurm-7.0 (train.py"


def test_a_job_that_succeeds_has_its_placement_and_its_bounds_once(hosts: Hosts) -> None:
    codes, (first, *others) = ended(hosts, start(hosts, ""))
    assert codes == [0] * NODES, first
    assert others == [[]] * 3
    assert len(first) == 2
    assert first[0] == "regrow: node rank 0 from Slurm step 7.0"
    assert BOUNDS in first[1]


def test_a_job_that_fails_has_one_report_and_one_line_of_each_other_agent(hosts: Hosts) -> None:
    fails = f'if rank == "2": sys.exit(3)\n{WAIT}'
    codes, (first, *others) = ended(hosts, start(hosts, fails))
    assert codes == [1] * NODES, first
    assert "train.py FAILED" in first
    assert any(line.startswith(STORY) for line in first), first
    for rank, lines in enumerate(others, 1):
        about_its_worker = [line for line in lines if "exited with code 3; no restarts" in line]
        assert len(about_its_worker) == (rank == 2), lines
        (line,) = [line for line in lines if line not in about_its_worker]
        assert line.startswith("regrow: the job has failed: rank 2"), line
        assert "exit code 3; logs and events in" in line


def test_a_job_that_is_stopped_has_one_story_and_one_line_of_each_other_agent(
    hosts: Hosts,
) -> None:
    handles = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{WAIT}"
    agents = start(hosts, handles)
    hosts.wait_for(*(f"started-{rank}-of-4" for rank in range(NODES)))
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    codes, (first, *others) = ended(hosts, agents)
    assert codes == [143] * NODES, first
    assert sum(line.startswith(STORY) for line in first) == 1
    for lines in others:
        assert [line.partition(";")[0] for line in lines] == ["regrow: stopped by SIGTERM"], lines


def test_where_the_first_host_is_lost_the_next_one_prints_the_story(hosts: Hosts) -> None:
    agents = start(hosts, WAIT)
    hosts.wait_for(*(f"started-{rank}-of-4" for rank in range(NODES)))
    for pid in [*below(agents[0].pid), agents[0].pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    codes, (_, *others) = ended(hosts, agents)
    assert codes == [-signal.SIGKILL, 75, 75, 75]
    stories = [sum(line.startswith(STORY) for line in lines) for lines in others]
    assert stories == [1, 0, 0], others
    for lines in others[1:]:
        (line,) = lines
        assert "(running the command again may succeed); logs and events in" in line
