"""A view on a host of its own follows a job through the loss of the host that serves it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.hosts.jobs import Job
from helpers.hosts.losses import listed, settled
from helpers.hosts.netns import Host, Process

pytestmark = [pytest.mark.hosts, pytest.mark.thorough, pytest.mark.timeout(120)]

VIEW = """
import sys, time
from regrow.rendezvous import RendezvousParameters
from regrow.views import JobWatch, Library, RemoteJob

remote = RemoteJob(RendezvousParameters("c10d", sys.argv[1], "job", 1, 1))
remote.wait(30)
library = Library([], remote)
watch = JobWatch(library, library.jobs()[0])
while True:
    found = watch.snapshot()
    fresh = [node.host for node in found.nodes if node.answered_s < 2]
    steps = [rank.rank for rank in found.ranks if rank.step is not None]
    print(*sorted(fresh), "attempt", found.attempt, "ranks with steps", *steps, flush=True)
    time.sleep(0.1)
"""


def test_a_view_follows_a_job_to_the_host_that_takes_over(
    start_job: Callable[..., Job], hosts: list[Host], tmp_path: Path
) -> None:
    endpoint = listed(hosts[:3])
    job = start_job(
        None, endpoint=endpoint, nodes="2:3", mode="replaced", conf="last_call_timeout=1"
    )
    agents = [job.agent(host) for host in hosts[:3]]
    world = job.world(3)
    settled(job, 1, *agents)
    output = tmp_path / "view"
    with output.open("wb") as stream:
        env = {**job.env, "HOME": str(tmp_path)}
        view = Process(hosts[3], [sys.executable, "-c", VIEW, endpoint], env, stream)

    def shows(text: str) -> None:
        job.wait_until(
            lambda: text in output.read_text() or None, f"{text!r} in {output.read_text()[-999:]}"
        )

    shows("node1 node2 node3 attempt 0 ranks with steps 0 1 2\n")
    hosts[0].signal(signal.SIGKILL)
    job.world(2, after=world)
    shows("node2 node3 attempt 1 ranks with steps 0 1\n")
    os.kill(view.pid, signal.SIGSTOP)  # no agent waits for a view
    job.finish(*agents[1:])
