"""The page that workers report their steps in can be read at any instant."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from helpers.descriptors import few_descriptors, open_files
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


def page_of_one() -> WorkerReports:
    handler = PlainHandler()
    group = WorkerGroup(WorkerSpec("trainer", 1, handler, entrypoint="train"))
    return WorkerReports(Job(group, adapted(handler), print))


def test_nothing_stays_open_if_the_descriptors_do_not_suffice() -> None:
    # Another test's thread may close a descriptor meanwhile, so the needed number is not fixed.
    before = open_files()
    for free in itertools.count():
        with suppress(OSError):
            with few_descriptors(free):
                page = page_of_one()
            break
        assert open_files() <= before
    page.close()
    assert free > 2
    assert open_files() <= before


def test_nothing_stays_open_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = open_files()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        page_of_one()
    assert open_files() <= before


def test_a_closed_page_leaves_nothing_open() -> None:
    before = open_files()
    page_of_one().close()
    assert open_files() <= before


def test_a_step_and_its_time_are_never_read_half_written() -> None:
    page = page_of_one()
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
