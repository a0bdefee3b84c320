"""The documented `mpirun`, word for word, over two hosts that it reaches by a remote shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.hosts.netns import Host, Network
from helpers.processes import children_of
from helpers.schedulers import remote_shell
from helpers.schedulers.training import (
    COMMANDS,
    PATIENCE_S,
    START_LINES,
    Training,
    introduce,
    is_about_losses,
    left_over,
    prepare,
    require_schedulers,
    stop_lines,
    unwrapped,
)

pytestmark = [pytest.mark.schedulers, pytest.mark.timeout(240)]

(COMMAND,) = (command for command in COMMANDS if command.startswith("mpirun"))
HOSTS = 2
RANKS = 8 * HOSTS


class MpiJob:
    """A running `mpirun` on the first of the hosts."""

    def __init__(self, folder: Path, hosts: list[Host], env: dict[str, str]) -> None:
        self.hosts = hosts
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process: subprocess.Popen[Any] = hosts[0].popen(
                ["bash", "-c", f"cd {folder}; exec {COMMAND}"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
            )  # fmt: skip
        self.training = Training(folder / "job-mpi", lambda: self.output)

    @property
    def output(self) -> str:
        """The output of `mpirun` and its processes."""
        return self._output.read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The lines of the output, without the messages of `mpirun`.

        It frames them by dashes or begins them with `[host:pid]`. The line that says which
        hosts may be lost does not count either.
        """
        framed = r"^-{70,}\n.*?^-{70,}\n"
        lines = unwrapped(re.sub(rf"(?ms){framed}|^\[[^]\n]+:\d+\][^\n]*\n", "", self.output))
        return [line for line in lines if not is_about_losses(line)]

    def ended(self) -> int:
        """Return its exit status after all of its processes have ended."""
        status = self.process.wait(PATIENCE_S)
        self.training.wait_until(lambda: not left_over(self.hosts), "nothing is left of the job")
        return int(status)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MpiJob]:
    """The documented command, started on hosts with the documented names."""
    require_schedulers("mpirun", "orted")
    prepare(tmp_path)
    agent = tmp_path / "rsh"
    socket_path = tmp_path / "rsh.socket"
    agent.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S {remote_shell.__file__} {socket_path} "$@"\n'
    )
    agent.chmod(0o755)
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "TMPDIR": str(tmp_path),
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    with Network() as network:
        hosts = {f"node{number}": network.host() for number in range(HOSTS)}
        for name, host in hosts.items():
            host.name = name
            host.run("hostname", name)
        introduce(list(hosts.values()))

        def start(host: str, command: str) -> subprocess.Popen[Any]:
            how = {"stdin": subprocess.DEVNULL, "env": env, "cwd": tmp_path}
            return hosts[host].popen(["bash", "-c", command], **how)

        with remote_shell.serve(socket_path, start):
            yield MpiJob(tmp_path, list(hosts.values()), env)


def test_a_job_succeeds_and_leaves_nothing(job: MpiJob) -> None:
    job.training.runs(RANKS)
    job.training.finish()
    assert job.ended() == 0, job.output
    assert len(job.training.records("finished")) == RANKS, job.output
    assert len(job.lines) == START_LINES, job.output


def test_a_worker_that_is_killed_costs_one_restart(job: MpiJob) -> None:
    victim = job.training.runs(RANKS)[9]
    (host,) = (host for host in job.hosts if host.name == victim.host)
    os.kill(host.pid_here(victim.pid), signal.SIGKILL)
    again = job.training.runs(RANKS, attempt=1)
    saved = job.training.saved()
    assert {record.rank: record.step for record in again} == {**saved, victim.rank: 0}
    job.training.finish()
    assert job.ended() == 0, job.output
    assert len(job.training.records("finished")) == RANKS, job.output
    assert len(job.lines) <= START_LINES + 7, job.output  # the failure on its host, and a story


def test_an_mpirun_that_is_stopped_leaves_nothing(job: MpiJob) -> None:
    job.training.runs(RANKS)
    (mpirun,) = children_of(job.process.pid)
    os.kill(mpirun, signal.SIGTERM)
    assert job.ended() != 0, job.output
    assert len(job.lines) <= START_LINES + stop_lines(HOSTS, job.output), job.output


def test_a_host_that_is_lost_ends_the_job(job: MpiJob) -> None:
    job.training.runs(RANKS)
    job.hosts[1].lose_power()
    job.hosts.pop()
    assert job.ended() != 0, job.output
    assert len(job.lines) <= START_LINES + stop_lines(HOSTS - 1, job.output), job.output
