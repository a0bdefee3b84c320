"""The page that workers report their steps in can be read at any instant."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from helpers.descriptors import few_descriptors, open_files
from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE, wait_until
from regrow._progress import MAY_STAY, OTHERS_GO_ON, PARKED
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features.progress import WorkerReports
from regrow.agent.job import Job
from regrow.rendezvous.foreign import adapted
from regrow.views.pages import StepPage

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
    # A thread of another test may close descriptors meanwhile, so that there are more than meant.
    assert any(failures_with_few_descriptors() > 2 for _ in range(10))


def failures_with_few_descriptors() -> int:
    """Return with how many numbers of free descriptors, from 0, the page could not be opened."""
    before = open_files()
    for free in itertools.count():
        with suppress(OSError):
            with few_descriptors(free):
                page = page_of_one()
            break
        assert open_files() <= before
    page.close()
    assert open_files() <= before
    return free


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


BEATING = """
import regrow.heartbeat
ended = regrow.heartbeat.start(60)
print(flush=True)
input()
ended.set()
"""


def test_the_time_of_the_last_heartbeat_is_there_until_the_heartbeats_end(
    page: WorkerReports,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEATING],
        env=os.environ | page.environment(0) | {"RANK": "0", "WORLD_SIZE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"\n"
        assert page.heartbeats()[0] > 0
        worker.communicate(b"\n", PATIENCE)
    assert worker.returncode == 0
    assert page.heartbeats()[0] == 0


@pytest.fixture
def page() -> Iterator[WorkerReports]:
    page = page_of_one()
    yield page
    page.close()


def become(page: WorkerReports, state: int) -> None:
    """Write the state of the wrapper as the worker does, in a process of its own."""
    code = f"from regrow import _progress as p; p.set_restart_state({state}); p.wake_agent()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | page.environment(0), check=True)


def test_an_order_arrives_in_the_pipe_of_the_worker_alone(page: WorkerReports) -> None:
    assert page.order(0, kind="leave", attempt=3)
    with open(page.environment(0)["REGROW_ORDERS"], "rb", buffering=0) as orders:
        assert orders.read(100) == b'{"kind": "leave", "attempt": 3}\n'


def test_orders_that_no_worker_reads_are_refused_and_never_block(page: WorkerReports) -> None:
    sent = itertools.takewhile(bool, (page.order(0, text="x" * 4000) for _ in range(1000)))
    assert 0 < len(list(sent)) < 1000


def test_the_agent_is_woken_when_a_worker_has_left_its_round(page: WorkerReports) -> None:
    assert not page.all_parked(0, lambda: False)
    become(page, MAY_STAY)
    assert page.may_stay(0)
    assert not page.all_parked(0, lambda: False)
    thread = threading.Thread(target=become, args=(page, MAY_STAY | PARKED))
    thread.start()
    assert page.all_parked(PATIENCE, lambda: False)
    thread.join()


def test_the_next_attempt_does_not_see_the_steps_and_marks_of_the_last_one(
    page: WorkerReports,
) -> None:
    become(page, OTHERS_GO_ON | MAY_STAY | PARKED)
    subprocess.run(
        [sys.executable, "-c", "import regrow; regrow.step(4)"],
        env=os.environ | page.environment(0),
        check=True,
    )
    assert page.read()[0].last_step == 4
    page.move(7, [5])
    assert page.read() == {}
    assert not page.all_parked(0, lambda: False)
    assert (page.may_stay(0), page.owes_result(0), page.others_continue(0)) == (True, True, False)


def test_a_closed_page_sends_no_order() -> None:
    page = page_of_one()
    page.close()
    assert not page.order(0, kind="leave", attempt=3)


def test_the_address_of_the_page_leads_a_view_to_the_steps(page: WorkerReports) -> None:
    subprocess.run(
        [sys.executable, "-c", "import regrow; regrow.step(4)"],
        env=os.environ | page.environment(0),
        check=True,
    )
    view = StepPage(page.page())
    assert view.read()[0].last == 4
    view.close()
