"""`regrow run --requeue` under a fake Slurm: its commands record their requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from helpers.commands import run
from helpers.jobs.agents import WAIT, Hosts, store_server_of
from helpers.jobs.environments import recorded
from regrow.launch.slurm_rules import turn
from regrow.utils import PortReservation

SCONTROL = """\
#!/bin/sh
cd {folder}
echo "$0 $*" | sed 's/.*bin.//' >> asked
case "$1 $2" in
  "show job") echo "JobId=7 JobState=$(cat state) Restarts=0 BatchFlag=1 BatchHost=n1" ;;
  "show node") echo "NodeName=$4 NodeAddr=127.0.0.1 State=$(cat node)" ;;
  "show step") cat steps ;;
  "requeue 7") {requeue} ;;
esac
"""
ACCEPTS = "echo PENDING > state"
STEPS = "StepId=7.batch State=RUNNING\nStepId=7.0 State=RUNNING\n"


class FakeSlurm:
    """A fake Slurm with a running job 7."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        self.plays(ACCEPTS)
        for name, text in {"state": "RUNNING", "node": "ALLOCATED", "steps": STEPS}.items():
            (folder / name).write_text(text)

    def plays(self, requeue: str) -> None:
        """Set the shell code that runs on a request to requeue the job."""
        text = SCONTROL.format(folder=self.folder, requeue=requeue)
        for name in ("scontrol", "scancel"):
            (self.folder / "bin" / name).write_text(text)
            (self.folder / "bin" / name).chmod(0o755)

    def task(self, rank: int = 0, tasks: int = 1, **changes: str) -> dict[str, str]:
        """The environment of a task in a step of `tasks` tasks, one on each node."""
        own = {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_NUM_NODES": str(tasks),
            "SLURMD_NODENAME": f"n{rank + 1}",
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }
        return {**recorded("slurm22-step-of-4"), **own, **changes}

    @property
    def asked(self) -> list[str]:
        """Requests for changes that the commands received."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if " show " not in line]


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with PortReservation() as port:
        hosts = Hosts(tmp_path, port.port)
        yield hosts
        hosts.close()


def stopped(hosts: Hosts, flags: str, environ: dict[str, str]) -> tuple[int, str]:
    """Send SIGTERM to an agent of one node; return its exit code and output."""
    agent = hosts.start(flags, WAIT, **environ)
    hosts.wait_for("started-0-of-1")
    agent.send_signal(signal.SIGTERM)
    return hosts.ended(agent)


def test_a_job_that_gets_a_notice_is_requeued_once(hosts: Hosts, slurm: FakeSlurm) -> None:
    code, output = stopped(hosts, "--requeue", slurm.task())
    assert (code, slurm.asked) == (143, ["scontrol requeue 7"]), output
    assert "requested a requeue of job 7 from Slurm\n" in output


def test_slurm_ends_the_agent_that_has_asked_and_the_exit_code_stays(
    hosts: Hosts, slurm: FakeSlurm
) -> None:
    slurm.plays(f"{ACCEPTS}; kill -TERM $PPID $$; sleep 0.1")
    code, output = stopped(hosts, "--requeue", slurm.task())
    assert (code, slurm.asked) == (143, ["scontrol requeue 7"]), output
    assert "requested a requeue of job 7 from Slurm\n" in output


EARLY = """
import os, signal, sys
import regrow.launch.api as launcher
from regrow.workers import SignalException

class Agent(launcher.LocalElasticAgent):
    def run(self, role="default"):
        os.kill(os.getpid(), signal.SIGTERM)  # it does not handle signals yet
        return super().run(role)

launcher.LocalElasticAgent = Agent
config = launcher.LaunchConfig(
    1, 1, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0", requeue=True
)
try:
    launcher.elastic_launch(config, "echo")("a worker")
except SignalException as error:
    sys.exit(128 + error.sigval)
"""


def test_a_sigterm_before_the_agent_runs_requeues_the_job(slurm: FakeSlurm) -> None:
    ended = run([sys.executable, "-c", EARLY], env=slurm.task())
    assert (ended.code, slurm.asked) == (143, ["scontrol requeue 7"]), ended.output
    assert "a worker" not in ended.output


def test_the_variable_is_as_good_as_the_flag(hosts: Hosts, slurm: FakeSlurm) -> None:
    code, output = stopped(hosts, "--standalone", slurm.task(PET_REQUEUE="1"))
    assert (code, slurm.asked) == (143, ["scontrol requeue 7"]), output


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT"])
def test_a_job_that_slurm_is_ending_is_left_alone(
    hosts: Hosts, slurm: FakeSlurm, state: str
) -> None:
    (slurm.folder / "state").write_text(state)
    code, output = stopped(hosts, "--requeue", slurm.task())
    assert (code, slurm.asked) == (143, []), output
    assert "requeue" not in output


def test_a_request_after_that_of_another_agent_is_silent(hosts: Hosts, slurm: FakeSlurm) -> None:
    slurm.plays(f"{ACCEPTS}; echo 'Job is pending execution for job 7' >&2; exit 1")
    code, output = stopped(hosts, "--requeue", slurm.task())
    assert code == 143
    assert "requeue" not in output


def test_a_refusal_is_a_line_with_the_reason(hosts: Hosts, slurm: FakeSlurm) -> None:
    slurm.plays("echo 'Requested operation is presently disabled for job 7' >&2; exit 1")
    code, output = stopped(hosts, "--requeue", slurm.task())
    assert code == 143
    assert (
        "Slurm job 7 was not requeued: scontrol requeue 7 failed: Requested operation is presently"
        " disabled for job 7. To requeue it, run: scontrol requeue 7\n"
    ) in output


def test_a_missing_command_is_one_line(hosts: Hosts, slurm: FakeSlurm) -> None:
    code, output = stopped(hosts, "--requeue", slurm.task(PATH=str(slurm.folder)))
    assert code == 143
    assert (
        "scontrol cannot be run: No such file or directory. To requeue it, run: scontrol requeue 7"
        in output
    )


HURRIED = """\
import os
from regrow.launch import LaunchConfig, launch_agent, slurm_requeue

slurm_requeue.COMMAND_S = 0.5
meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "job"}
config = LaunchConfig(1, 1, 1, requeue=True, **meeting)
launch_agent(config, "sh", ["-c", f"kill -TERM {os.getpid()}; sleep 9"])
"""


def test_a_command_that_hangs_is_given_up(slurm: FakeSlurm) -> None:
    slurm.plays("exec sleep 1000")
    environ = {**slurm.task(), "TMPDIR": str(slurm.folder)}
    ended = run([sys.executable, "-c", HURRIED], env=environ)
    assert ended.code == 1, ended.output  # of an exception that nothing handles
    assert (
        "scontrol requeue 7 did not end within 0.5 s. To requeue it, run: scontrol" in ended.output
    )


@pytest.mark.parametrize("worker", ["", "sys.exit(3)\n"])
def test_no_request_for_a_job_that_succeeds_or_fails(
    hosts: Hosts, slurm: FakeSlurm, worker: str
) -> None:
    code, output = hosts.ended(hosts.start("--requeue", worker, **slurm.task()))
    assert code == bool(worker)
    assert not (slurm.folder / "asked").exists(), output


def test_the_flag_is_ignored_outside_of_slurm(hosts: Hosts, slurm: FakeSlurm) -> None:
    environ = {"PATH": slurm.task()["PATH"]}
    code, output = stopped(hosts, "--requeue", environ)
    assert (code, slurm.asked) == (143, []), output
    assert (
        "the job will not be requeued: --requeue is set, but this process is not a task" in output
    )


def test_jobs_of_one_node_in_one_step_do_not_requeue_each_other(
    hosts: Hosts, slurm: FakeSlurm
) -> None:
    code, output = stopped(hosts, "--standalone --requeue", slurm.task(rank=1, tasks=4))
    assert (code, slurm.asked) == (143, []), output
    assert "each of the step's 4 tasks runs its own\n" in output


# --- several nodes


def start_two(
    hosts: Hosts, slurm: FakeSlurm, worker: str, grace: int = 1
) -> list[subprocess.Popen[str]]:
    """Start two agents with one worker each, which may go on without each other."""
    meeting = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT --nnodes 1:2"
    flags = f"{meeting} --shutdown-timeout {grace} --requeue"
    first = hosts.start(flags, worker, **slurm.task(0, 2))
    store_server_of(first)  # the meeting is at the first
    second = hosts.start(flags, worker, **slurm.task(1, 2))
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    return [first, second]


@pytest.mark.hosts
@pytest.mark.timeout(120)
def test_one_of_several_stopped_agents_sends_the_request(hosts: Hosts, slurm: FakeSlurm) -> None:
    agents = start_two(hosts, slurm, WAIT)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [143, 143], ended
    assert slurm.asked == ["scontrol requeue 7"], ended
    assert ["requested a requeue" in output for _, output in ended] == [True, False]


@pytest.mark.hosts
@pytest.mark.timeout(120)
def test_the_next_agent_sends_the_request_if_the_first_is_killed(
    hosts: Hosts, slurm: FakeSlurm
) -> None:
    agents = start_two(hosts, slurm, WAIT)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    agents[0].kill()
    code, output = hosts.ended(agents[1])
    assert (code, slurm.asked) == (143, ["scontrol requeue 7"]), output


@pytest.mark.hosts
@pytest.mark.timeout(120)
def test_a_disconnected_agent_waits_for_the_grace_of_the_others(
    hosts: Hosts, slurm: FakeSlurm
) -> None:
    first, second = start_two(hosts, slurm, WAIT, grace=8)
    server = store_server_of(first)
    os.kill(second.pid, signal.SIGSTOP)  # until the others are gone
    for pid in (first.pid, server):
        os.kill(pid, signal.SIGKILL)
    second.send_signal(signal.SIGTERM)
    began = monotonic()
    second.send_signal(signal.SIGCONT)
    code, output = hosts.ended(second)
    assert (code, slurm.asked) == (143, ["scontrol requeue 7"]), output
    assert monotonic() - began > 8 + turn(1, 2)  # seconds


@pytest.mark.hosts
@pytest.mark.timeout(120)
def test_an_agent_that_alone_gets_a_notice_leaves_the_job_to_the_others(
    hosts: Hosts, slurm: FakeSlurm
) -> None:
    stays = "while not os.path.exists('finish'): __import__('time').sleep(0.05)\n"
    agents = start_two(hosts, slurm, stays)
    agents[1].send_signal(signal.SIGTERM)
    assert hosts.ended(agents[1])[0] == 143
    hosts.wait_for("started-0-of-1")
    (hosts.folder / "finish").touch()
    assert hosts.ended(agents[0])[0] == 0
    assert slurm.asked == []


@pytest.mark.hosts
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("node", "steps", "asked"),
    [
        ("DOWN+NOT_RESPONDING", STEPS, ["scancel 7"]),
        pytest.param(
            *("DOWN+NOT_RESPONDING", f"{STEPS}StepId=7.1 State=RUNNING\n", []),
            marks=pytest.mark.thorough,
        ),
        # Its daemon's port refuses connections.
        pytest.param("ALLOCATED", STEPS, [], marks=pytest.mark.thorough),
    ],
)
def test_the_last_agent_ends_the_allocation_if_the_host_of_the_script_is_lost(
    hosts: Hosts, slurm: FakeSlurm, node: str, steps: str, asked: list[str]
) -> None:
    for name, text in {"node": node, "steps": steps}.items():
        (slurm.folder / name).write_text(text)
    (hosts.folder / "meeting").mkdir()
    stays = "while not os.path.exists('finish'): __import__('time').sleep(0.05)\n"
    meeting = f"--rdzv-backend file --rdzv-endpoint {hosts.folder}/meeting --nnodes 1:2"
    agents = [hosts.start(f"{meeting} --requeue", stays, **slurm.task(rank, 2)) for rank in (0, 1)]
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    agents[0].kill()
    hosts.wait_for("started-0-of-1")
    (hosts.folder / "finish").touch()
    code, output = hosts.ended(agents[1])
    assert (code, slurm.asked) == (0, asked), output
