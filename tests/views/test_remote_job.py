"""Views of a job whose agents run on other hosts: asked at the endpoint of the job."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.jobs.agents import Hosts
from helpers.pages import commands, typed
from helpers.processes import PATIENCE, wait_until
from helpers.views.served import served
from regrow.rendezvous import RendezvousParameters
from regrow.utils import PortReservation
from regrow.views import JobWatch, Library, RemoteJob, Snapshot

pytestmark = pytest.mark.timeout(120)

PAGE = "docs/guides/watching.md"
TRAIN = """
import time, regrow
n = 0
while not os.path.exists("end"):
    time.sleep(0.02)
    n += 1
    regrow.step(n)
    if rank == "3" and n == 5:
        with regrow.phase("checkpoint"):
            while not os.path.exists("saved"):
                time.sleep(0.02)
"""
MEET = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT"


class Elsewhere:
    """A job of two agents, and this process as a host without their logs and memory."""

    def __init__(self, hosts: Hosts, port: int) -> None:
        self.hosts = hosts
        assert hosts.regrow("token job.token").code == 0
        self.params = RendezvousParameters(
            *("c10d", f"127.0.0.1:{port}", "mine", 1, 1), token_file=str(hosts.folder / "job.token")
        )
        flags = f"{MEET} --rdzv-id mine --rdzv-token-file job.token --max-restarts 3"
        self.agents = [
            hosts.start(f"{flags} --node-rank {node} --log-dir runs", TRAIN) for node in range(2)
        ]
        hosts.wait_for(*(f"started-{rank}-of-4" for rank in range(4)))

    @contextmanager
    def watched(self, *runs: Path) -> Iterator[JobWatch]:
        """Follow the job, with these log directories."""
        remote = RemoteJob(self.params)
        remote.wait(PATIENCE)
        library = Library([str(each) for each in runs], remote)
        watch = JobWatch(library, library.jobs()[0])
        try:
            yield watch
        finally:
            watch.close()
            remote.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    with PortReservation() as free:
        hosts = Hosts(tmp_path, free.port)
    started = Elsewhere(hosts, free.port)
    named = SimpleNamespace(nodename="elsewhere", release=os.uname().release)
    monkeypatch.setattr(os, "uname", lambda: named)
    yield started
    hosts.close()


def when(watch: JobWatch, what: str, holds: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot for which a condition holds."""
    found: list[Snapshot] = []

    def seen() -> bool:
        found[:] = [watch.snapshot()]
        return holds(found[0])

    wait_until(seen, what)
    return found[0]


def steps(snapshot: Snapshot) -> list[int]:
    return [rank.step or 0 for rank in snapshot.ranks]


def all_step(snapshot: Snapshot) -> bool:
    return len(snapshot.ranks) == 4 and min(steps(snapshot)) > 0


def test_the_ranks_of_both_hosts_are_followed_without_any_log(job: Elsewhere) -> None:
    with job.watched() as watch:
        found = when(watch, "steps of all ranks", all_step)
        assert (found.state, found.world_size, len(found.nodes)) == ("running", 4, 2)
        assert [node.alive for node in found.nodes] == [True, True]
        assert "regrow: job mine (train.py, 4 workers on 2 nodes) is running" in found.story
        before = steps(found)
        when(watch, "later steps", lambda s: all(map(int.__gt__, steps(s)[:3], before[:3])))
        found = when(watch, "the phase", lambda s: s.ranks[3].phase == "checkpoint")
        assert [rank.phase for rank in found.ranks[:3]] == ["", "", ""]
        (job.hosts.folder / "saved").touch()
        when(watch, "the end of the phase", lambda s: s.ranks[3].phase == "")
        assert watch.job.runs[0].is_elsewhere


def test_a_restart_is_followed_to_the_next_round(job: Elsewhere) -> None:
    with job.watched() as watch:
        found = when(watch, "steps", all_step)
        assert found.ranks[2].pid is not None
        os.kill(found.ranks[2].pid, signal.SIGKILL)
        found = when(watch, "the next attempt", lambda s: s.attempt == 1 and all_step(s))
        (restart,) = found.restarts
        assert (restart.rank, restart.cause, restart.restarted) == (2, "signal", True)


def test_logs_and_answers_of_an_agent_are_one_node(job: Elsewhere) -> None:
    with job.watched(job.hosts.folder / "runs") as watch:
        found = when(watch, "steps of all ranks", all_step)
        assert len(found.nodes) == 2
        assert not any(run.is_elsewhere for run in watch.job.runs)


def test_a_view_that_is_stopped_or_killed_delays_no_agent(job: Elsewhere) -> None:
    command = f"-m regrow top --rdzv-endpoint {job.params.endpoint} --rdzv-id mine".split()
    env = os.environ | {"TERM": "xterm", "REGROW_TOKEN_FILE": f"{job.hosts.folder}/job.token"}
    ours, theirs = pty.openpty()
    with (
        subprocess.Popen([sys.executable, *command], stdin=theirs, stdout=theirs, env=env) as view,
        job.watched() as watch,
    ):
        os.close(theirs)
        wait_until(lambda: b"4 workers" in os.read(ours, 1 << 16), "the view shows the job")
        view.send_signal(signal.SIGSTOP)
        found = when(watch, "steps", all_step)
        assert found.ranks[1].pid is not None
        os.kill(found.ranks[1].pid, signal.SIGKILL)
        when(watch, "the next attempt", lambda s: s.attempt == 1 and len(s.ranks) == 4)
        view.kill()
        (job.hosts.folder / "saved").touch()
        (job.hosts.folder / "end").touch()
        assert [job.hosts.ended(agent)[0] for agent in job.agents] == [0, 0]
    os.close(ours)


def test_the_commands_of_the_page_show_a_job_with_a_token(job: Elsewhere) -> None:
    here = f"{job.params.endpoint} --rdzv-id mine"
    there = "node0:29400 --rdzv-id digits"
    top, web = (each.replace(there, here) for each in commands(PAGE) if there in each)
    done = typed(top, job.hosts.folder)
    assert done.code == 0, done.output
    rows = [line.split()[:2] for line in done.output.splitlines()]
    ranks = [row for row in rows if row and row[0].isdigit()]
    assert ranks == [[str(rank), "running"] for rank in range(4)]
    arguments = web.replace("~", str(job.hosts.folder)).split()[3:]
    with served(None, *arguments) as page:
        found = page.data(f"jobs/{page.job()}")
        assert (found["state"], found["fault"], len(found["nodes"])) == ("running", "", 2)
        assert found["nodes"][0]["answered_s"] is not None
        account = page.data(f"jobs/{page.job()}/account")
        assert (account["ledger"], account["explanations"]) == (None, [])


def test_a_wrong_token_and_another_job_are_refused(job: Elsewhere) -> None:
    job.hosts.regrow("token other.token")
    for view in ("top", "web"):
        asked = f"{view} --rdzv-endpoint 127.0.0.1:PORT --rdzv-id"
        done = job.hosts.regrow(f"{asked} mine --rdzv-token-file other.token")
        assert (done.code, done.output.count("\n")) == (1, 1)
        assert "refused the token" in done.output
        done = job.hosts.regrow(f"{asked} mine")
        assert (done.code, done.output.count("\n")) == (1, 1)
        assert "no token was given, and this job needs one" in done.output
        done = job.hosts.regrow(f"{asked} other --rdzv-token-file job.token")
        assert (done.code, done.output.count("\n")) == (75, 1)
        assert "does not run the rounds of this job" in done.output
