"""The store server's process is killed while its agent lives, as by a host without free memory."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from helpers.jobs.agents import Hosts, store_server_of
from helpers.processes import alive, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT --max-restarts 1 --node-rank"
STATIC = "--nnodes 2 --master-addr 127.0.0.1 --master-port PORT --max-restarts 1 --node-rank"
# Each file lets the workers take one step: rank 1 fails, and the next attempt succeeds.
STEPS = """\
import time
from pathlib import Path
attempt = os.environ["REGROW_ATTEMPT"]
open(f"attempt-{attempt}-{rank}", "w").close()
while not Path(f"go-{attempt}").exists():
    time.sleep(0.02)
if attempt == "0":
    sys.exit(1) if rank == "1" else signal.pause()
"""


def started(hosts: Hosts, flags: str) -> list[subprocess.Popen[str]]:
    """Start two agents; the first one serves."""
    first = hosts.start(f"{flags} 0", STEPS)
    store_server_of(first)
    return [first, hosts.start(f"{flags} 1", STEPS)]


@pytest.mark.parametrize("flags", [C10D, STATIC])
def test_the_workers_run_on_the_budget_is_kept_and_the_story_names_the_cause(
    hosts: Hosts, flags: str
) -> None:
    agents = started(hosts, flags)
    for attempt in ("0", "1"):
        hosts.wait_for(f"attempt-{attempt}-0", f"attempt-{attempt}-1")
        server = store_server_of(agents[0])
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not alive(server), "the end of the server")  # noqa: B023
        assert store_server_of(agents[0]) != server
        (hosts.folder / f"go-{attempt}").touch()
    ended = [hosts.ended(agent) for agent in agents]
    for code, output in ended:
        assert code == 0, output
        assert "SUCCEEDED" in output
        assert "with 1 restart\n" in output, "the ends of the server cost none"
    story = " ".join(ended[0][1].split())
    assert story.count("was killed by SIGKILL; its agent had started another one after") == 2
    assert "the store server on host" in story


def test_a_job_whose_server_keeps_ending_fails_with_the_cause(hosts: Hosts) -> None:
    # The lease of a node is four intervals. It must outlast the starts of three servers, which take
    # seconds on a busy machine. A node without an answer for that long would lose contact first.
    agents = started(hosts, f"--rdzv-conf keep_alive_interval=3 {C10D}")
    hosts.wait_for("attempt-0-0", "attempt-0-1")
    for _ in range(4):
        server = store_server_of(agents[0])
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not alive(server), "the end of the server")  # noqa: B023
    for number, agent in enumerate(agents):
        code, output = hosts.ended(agent)
        assert code == 75, output
        if number == 0:
            story = " ".join(output.split())
            assert "was killed by SIGKILL, and no other one took over: 3 have ended" in story
