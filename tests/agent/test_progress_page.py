"""The page that workers report their steps in can be read at any instant."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE, wait_until
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features.progress import WorkerReports
from regrow.agent.job import Job
from regrow.rendezvous.foreign import adapted

READS = 60_000

REPORTING = """
import regrow
while True:
    regrow.step(1)
    regrow.step(-2)
"""


def test_a_step_and_its_time_are_never_read_half_written() -> None:
    handler = PlainHandler()
    group = WorkerGroup(WorkerSpec("trainer", 1, handler, entrypoint="train"))
    page = WorkerReports(Job(group, adapted(handler), print))
    environment = os.environ | page.environment(0)
    with subprocess.Popen([sys.executable, "-c", REPORTING], env=environment) as worker:
        try:
            wait_until(lambda: bool(page.read()), "reported")
            found = [page.read()[0] for _ in range(READS)]
        finally:
            worker.kill()
            worker.wait(PATIENCE)
    page.close()
    assert {steps.last_step for steps in found} <= {1, -2}  # they differ in every bit
    times = [steps.last_monotonic for steps in found]
    assert times == sorted(times)
