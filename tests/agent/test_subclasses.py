"""Agents written for torch: subclasses of `LocalElasticAgent` with hooks and loops of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.processes import PATIENCE, alive, wait_until
from helpers.schedulers import agents as scheduler_agents
from regrow.utils import PortReservation

AGENTS = ("OwnLoop", "OwnStart", "Monitored", "Torch26", "Torch213")
every_agent = pytest.mark.parametrize("agent", AGENTS)


def start(
    agent: str, tmp_path: Path, nodes: int, endpoint: str, *command: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, scheduler_agents.__file__, agent, "3", str(tmp_path / "logs")),
            *(str(nodes), endpoint, *command),
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )


@every_agent
def test_its_workers_run_to_their_end_and_a_failure_is_started_again(
    agent: str, tmp_path: Path
) -> None:
    command = ["sh", "-c", 'test "$TORCHELASTIC_RESTART_COUNT" = 1 || exit "$RANK"']
    result = scheduler_agents.run(agent, 1, str(tmp_path), command)
    assert result.return_values == {0: None, 1: None}


@every_agent
def test_its_budget_of_restarts_is_kept(agent: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = ["sh", "-c", f'test "$RANK" = 0 && exec sleep 1000; echo >> {started}; exit 7']
    result = scheduler_agents.run(agent, 1, str(tmp_path / "logs"), command)
    assert result.is_failed()
    assert result.failures[1].exitcode == 7
    assert started.read_text() == "\n" * 2


SAVE = """
test -e $1/../saved.$RANK && exit 0
trap 'sleep 1; touch $1/../saved.$RANK; exit 0' TERM
touch $1/$RANK
while :; do sleep 0.05; done
"""


def test_workers_that_a_loop_of_its_own_restarts_without_a_failure_have_time_to_save(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    command = ["sh", "-c", SAVE, "save", str(ready)]
    logs = str(tmp_path / "logs")
    result = scheduler_agents.run("RestartsHealthy", 3, logs, command, restart_timeout=0.1)
    assert result.return_values == {0: None, 1: None}


@every_agent
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_its_workers_by_a_signal_exception(
    agent: str, signum: signal.Signals, tmp_path: Path
) -> None:
    pids, script = tmp_path / "pids", tmp_path / "script"
    script.write_text(f"echo $$ >> {pids}; exec sleep 1000")
    command = ["sh", str(script)]
    with start(agent, tmp_path, 1, "localhost:0", *command) as process:
        wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "two workers")
        process.send_signal(signum)
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 128 + signum
    assert output == f"SignalException {signum.name}\n"
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


MEET_AGAIN = """
case $RANK.$TORCHELASTIC_RESTART_COUNT in
3.0) exit 3 ;;
3.1) touch {again} ;;
*) until test -e {again}; do sleep 0.05; done ;;
esac
"""


@pytest.mark.hosts
@pytest.mark.parametrize("agent", ["OwnLoop", "Torch26", "Torch213"])
def test_the_agents_of_two_nodes_start_again_together(agent: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(MEET_AGAIN.format(again=tmp_path / "again"))
    with PortReservation() as held:
        endpoint = f"127.0.0.1:{held.port}"
    with ExitStack() as stack:
        nodes = []
        for _ in range(2):
            node = start(agent, tmp_path, 2, endpoint, "sh", str(script))
            stack.callback(node.wait)
            stack.callback(node.kill)
            nodes.append(node)
        outputs = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
    assert [output.splitlines()[-1] for output in outputs] == ["SUCCEEDED"] * 2
