"""Two `regrow run` on this machine, as on two hosts: from the command line to the exit codes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from commands import run
from processes import PATIENCE, wait_until

from regrow.utils import PortReservation

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

# Says where it is, and does what its file says.
WORKER = """\
import os, signal, sys
rank, world, node = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
os.write(1, f"rank {rank} of {world} on node {node}\\n".encode())
open(f"started-{rank}-of-{world}", "w").close()
"""
WAIT = "signal.pause()\n"


class Hosts:
    """Agents that run here as on hosts of their own, at a port of their own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._port = port
        self._agents: list[subprocess.Popen[str]] = []

    def start(self, flags: str, worker: str = "", **environ: str) -> subprocess.Popen[str]:
        """Start an agent; PORT in its flags is the port where all meet."""
        (self.folder / "train.py").write_text(WORKER + worker)
        words = [sys.executable, "-m", "regrow", "run", *flags.split(), "train.py"]
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": "", "TMPDIR": str(self.folder)}
        home["REGROW_VERBOSE"] = "0"  # the line at the start differs from run to run
        agent = subprocess.Popen(
            [word.replace("PORT", str(self._port)) for word in words],
            cwd=self.folder,
            env={**os.environ, **home, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._agents.append(agent)
        return agent

    def ended(self, agent: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for the end of an agent; its exit code and what it and its workers said."""
        output, _ = agent.communicate(timeout=PATIENCE)
        return agent.returncode, output

    def wait_for(self, *names: str) -> None:
        """Wait until the workers have made these files."""
        for name in names:
            wait_until((self.folder / name).exists, name)

    def close(self) -> None:
        for agent in self._agents:
            with suppress(ProcessLookupError):
                agent.kill()
            agent.communicate()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with PortReservation() as port:
        hosts = Hosts(tmp_path, port.port)
        yield hosts
        hosts.close()


C10D = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_hosts_with_certificates_meet_under_tls_and_have_the_ranks_that_they_asked_for(
    hosts: Hosts,
) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = "-addext subjectAltName=IP:127.0.0.1 -subj /CN=job -keyout key -out cert"
    assert run(f"{make} {names}".split(), cwd=hosts.folder).code == 0
    tls = "--rdzv-tls-ca cert --rdzv-tls-cert cert --rdzv-tls-key key"
    agents = [hosts.start(f"--nnodes 2 {C10D} {tls} --node-rank {rank}") for rank in (1, 0)]
    assert [hosts.ended(agent) for agent in agents] == [
        (0, "rank 1 of 2 on node 1\n"),
        (0, "rank 0 of 2 on node 0\n"),
    ]
    # No token was given: those on one host have one of their own.
    assert (hosts.folder / ".local" / "state" / "regrow" / "token").exists()


def test_hosts_whose_number_is_fixed_meet_with_a_token_file(hosts: Hosts) -> None:
    (hosts.folder / "token").write_text("a secret of this test, and of nobody else\n")
    meet = "--nnodes 2 --master-addr 127.0.0.1 --master-port PORT --rdzv-token-file token"
    agents = [hosts.start(f"{meet} --node-rank {rank}") for rank in (0, 1)]
    assert [hosts.ended(agent) for agent in agents] == [
        (0, "rank 0 of 2 on node 0\n"),
        (0, "rank 1 of 2 on node 1\n"),
    ]


def test_hosts_whose_number_is_fixed_stop_at_once_when_one_is_lost(hosts: Hosts) -> None:
    meet = "--nnodes 2 --master-addr 127.0.0.1 --master-port PORT --max-restarts 3 --node-rank"
    agents = [hosts.start(f"{meet} {rank}", WAIT) for rank in (0, 1)]
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    agents[0].send_signal(signal.SIGKILL)  # also when it is the one that serves the others
    code, said = hosts.ended(agents[1])
    assert code == 75, said
    assert "its nodes are fixed, so no other takes its place" in said


def hang_together(hosts: Hosts, trial: int) -> list[str]:
    """Rank 2 keeps the others waiting, of whom one of the other host is out of time first.

    Returns:
        What each agent said.
    """
    hangs = f"""\
import time
from pathlib import Path
from regrow.timer import expires
here = "trial-{trial}-" + os.environ["REGROW_ATTEMPT"]
def load_batch(): open(f"{{here}}-{{rank}}", "w"), time.sleep(1000)
def all_reduce(): open(f"{{here}}-{{rank}}", "w"), time.sleep(1000)
if rank == "2":
    load_batch()
while rank == "1" and len(list(Path().glob(f"{{here}}-*"))) < 3:
    time.sleep(0.01)
with expires(after=0.2 if rank == "1" else 1000, scope="step"):
    all_reduce()
"""
    flags = f"--nnodes 2 --nproc-per-node 2 {C10D} --timers --max-restarts 1"
    logs = f"--log-dir logs-{trial}"
    agents = [hosts.start(f"{flags} {logs}-{n} --node-rank {n}", hangs) for n in (0, 1)]
    ended = [hosts.ended(agent) for agent in agents]
    assert [code for code, _ in ended] == [1, 1], ended
    return [said for _, said in ended]


def test_a_worker_that_hangs_is_the_root_cause_on_every_node_and_the_odd_one_is_named(
    hosts: Hosts,
) -> None:
    for trial in range(5):  # on a busy machine a rank may have no processor within the 50 ms
        both = hang_together(hosts, trial)
        if not any("could not be asked" in said for said in both):
            break
    for number, said in enumerate(both):
        assert "rank      : 1 (local_rank: 1)" in said
        assert re.search(r"traceback : timer step of 0\.[0-2]\d* s was over by", said)
        assert 'train.py", line' in said
        # Of the last attempt, the host of the root cause hears no more.
        story = said[said.index("failure 1 (attempt 0)") :].splitlines()
        odd = "rank 2 alone stands in load_batch (train.py:9)"
        assert sum(line.endswith(odd) for line in story) == number + 1, said
        assert "compared         ranks 0, 1, 3 stand in all_reduce (train.py:10)" in said
    stacks = hosts.folder.glob(f"logs-{trial}-1/*/attempt_0/[01]/stacks.*.txt")
    assert len(list(stacks)) == 2


def test_a_worker_that_fails_for_good_ends_all_agents_with_its_report(hosts: Hosts) -> None:
    fails = f'if rank == "1": sys.exit(3)\n{WAIT}'
    agents = [hosts.start(f"--nnodes 2 {C10D} --node-rank {rank}", fails) for rank in (0, 1)]
    for code, said in map(hosts.ended, agents):
        assert code == 1, said
        assert "train.py FAILED" in said
        assert "rank      : 1 (local_rank: 0)" in said
        assert "exitcode  : 3" in said


def test_the_job_goes_on_without_the_host_whose_agent_was_killed(hosts: Hosts) -> None:
    waits = f'if world == "2":\n    {WAIT}'
    agents = [hosts.start(f"--nnodes 1:2 {C10D} --node-rank {rank}", waits) for rank in (0, 1)]
    hosts.wait_for("started-0-of-2", "started-1-of-2")
    agents[1].send_signal(signal.SIGKILL)
    code, said = hosts.ended(agents[0])
    assert code == 0, said
    assert "rank 0 of 1 on node 0" in said
    # The story, in lines as wide as they may be, says why there was a restart.
    # Its kernel resets the connection if it had an answer to read yet: then silence tells.
    story = " ".join(said.split())
    assert "its connection broke" in story or "nothing was heard of it" in story


def test_several_hosts_without_a_token_are_told_what_to_type(hosts: Hosts) -> None:
    environ = {"REGROW_TOKEN": "", "REGROW_TOKEN_FILE": ""}
    flags = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1:PORT"
    code, said = hosts.ended(hosts.start(flags, **environ))
    assert code == 1
    assert "regrow token ~/job.token" in said
    assert "--rdzv-token-file ~/job.token" in said
