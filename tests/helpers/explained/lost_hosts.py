"""Failures of a job on several hosts, which are network namespaces of this machine (as root)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from helpers.explained.scenarios import BEGIN, END, LATE, TRAIN, wrapped
from helpers.hosts.losses import kill_server
from helpers.hosts.netns import Network, Process
from helpers.processes import wait_until

_PORT = 29400
_TIMEOUT_S = 90.0


class Agents(NamedTuple):
    """The agents of a job, one on each host."""

    network: Network
    processes: Sequence[Process]
    folder: Path
    start: Callable[[int], None]
    """Starts the agent of a host that has none yet."""


class HostScenario(NamedTuple):
    """A job on several hosts that loses something."""

    act: Callable[[Agents], None]
    """What happens when the workers have made some steps."""
    hosts: int = 3
    late: int = 0
    """How many of them join later."""
    flags: str = "--nnodes 2:3 --rdzv-conf last_call_timeout=3"
    fault: str = ""
    """The end of the script before the training."""
    script: str = TRAIN


def _lose_power(number: int) -> Callable[[Agents], None]:
    def act(agents: Agents) -> None:
        agents.network.hosts[number].lose_power()

    return act


def _kill_agent(number: int) -> Callable[[Agents], None]:
    def act(agents: Agents) -> None:
        agents.processes[number].signal(signal.SIGKILL)

    return act


def _preempt(agents: Agents) -> None:
    agents.processes[2].signal(signal.SIGTERM)


def _lose_the_server(agents: Agents) -> None:
    """Remove the host of the server, when another one can take over."""

    def can_be_lost() -> bool:
        logs = agents.folder.glob("runs*/*/events.jsonl")
        return sum('"may_lose": 1' in log.read_text() for log in logs) == len(agents.processes)

    wait_until(can_be_lost, "every agent knows that the server may be lost")
    agents.network.hosts[0].lose_power()


def _kill_server(agents: Agents) -> None:
    """Kill the store server; its agent goes on."""
    kill_server(agents.network.hosts[0])


def _join(agents: Agents) -> None:
    agents.start(len(agents.processes))


def _nothing(agents: Agents) -> None:
    """The script fails by itself."""


LONG = "FAULT_ATTEMPTS = ()\ntrain(250)\n"
ELASTIC = wrapped("FAULT_ATTEMPTS = ()\n", "replace=True, elastic=True", BEGIN).replace(
    "train(60)", "train(250)"
)

HOST_SCENARIOS = {
    "host-lost": HostScenario(_lose_power(2), fault=LONG),
    "agent-killed": HostScenario(_kill_agent(2), fault=LONG),
    "host-preempted": HostScenario(_preempt, fault=LONG),
    "server-host-lost": HostScenario(_lose_the_server, fault=LONG),
    "server-killed": HostScenario(_kill_server, hosts=2, flags="--nnodes 2", fault=LONG),
    "rendezvous-lost": HostScenario(
        _lose_power(0),
        hosts=2,
        flags="--nnodes 2 --rdzv-conf reconnect_timeout=2",
        fault=LONG,
    ),
    "host-joined": HostScenario(
        _join, late=1, flags="--nnodes 2:3 --rdzv-conf last_call_timeout=1", fault=LONG
    ),
    "host-lost-in-place": HostScenario(_lose_power(2), fault=ELASTIC, script=LATE),
    "host-joined-in-place": HostScenario(
        _join,
        late=1,
        flags="--nnodes 2:3 --rdzv-conf last_call_timeout=1",
        fault=ELASTIC,
        script=LATE,
    ),
    "exception-on-another-host": HostScenario(
        _nothing,
        hosts=2,
        flags="--nnodes 2 --max-restarts 1",
        fault="def fault():\n    raise ValueError('batch of 0 rows')\n" + END,
    ),
}


def run(scenario: HostScenario, folder: Path) -> list[Path]:
    """Run a job to its end; return the event logs of its hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(scenario.script + scenario.fault)
    outer = {k: os.environ[k] for k in ("PATH", "LANG", "PYTHONPATH") if k in os.environ}
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        hosts = [network.host() for _ in range(scenario.hosts)]
        endpoint = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0].addr}:{_PORT} --rdzv-id job"
        processes: list[Process] = []

        def start(number: int) -> None:
            home = folder / f"home{number}"
            home.mkdir()
            environment = {**outer, "HOME": str(home), "REGROW_TOKEN": "a token for a test"}
            logs = f"--log-dir {folder}/runs{number}"
            output = stack.enter_context((folder / f"output{number}").open("wb"))
            words = f"-m regrow run {endpoint} {scenario.flags} --nproc-per-node 1 {logs} train.py"
            command = ["env", "-C", str(folder), sys.executable, *words.split()]
            processes.append(Process(hosts[number], command, environment, output))

        first = scenario.hosts - scenario.late
        for number in range(first):
            start(number)
        mark = folder / f"done.0.0.{first - 1}"
        wait_until(lambda: mark.exists() and int(mark.read_text() or 0) >= 25, "steps")
        scenario.act(Agents(network, processes, folder, start))
        for process in processes:
            process.wait(_TIMEOUT_S)
    return sorted(folder.glob("runs*/*/events.jsonl"))
