"""Workers book their seconds in memory that the agent can read at any instant."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE, wait_until
from regrow import _accounts
from regrow._accounts import ACCOUNT_BYTES, NO_STEP, Reading, blank, read
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features import progress
from regrow.agent.features.progress import WorkerReports
from regrow.agent.job import Job
from regrow.events import Event
from regrow.rendezvous.foreign import adapted

SLEEP = 0.1  # seconds


@pytest.fixture
def job() -> Job:
    handler = PlainHandler()
    group = WorkerGroup(WorkerSpec("trainer", 1, handler, entrypoint="train"))
    return Job(group, adapted(handler), print)


@pytest.fixture
def page(job: Job) -> Iterator[WorkerReports]:
    page = WorkerReports(job)
    yield page
    page.close()


PRELUDE = f"""
import os, signal, subprocess, sys, threading, time
import regrow
from regrow import _progress
def sleep():
    time.sleep({SLEEP})
"""


def account_after(page: WorkerReports, script: str, status: int = 0) -> Reading:
    """Return the account of a worker that ran the script."""
    command = [sys.executable, "-c", PRELUDE + script]
    done = subprocess.run(command, env=os.environ | page.environment(0), timeout=60, check=False)
    assert done.returncode == status
    return page.accounts()[0]


def partitions(account: Reading) -> bool:
    """Return whether the rows fill the time from the first mark to the last one."""
    length = account.since_monotonic - account.opened_monotonic
    return math.isclose(sum(account.seconds.values()), length, abs_tol=1e-6)


def test_the_time_of_a_nested_phase_counts_for_it_alone(page: WorkerReports) -> None:
    account = account_after(
        page,
        """
with regrow.phase("outer"):
    sleep()
    with regrow.phase("inner"):
        sleep(); sleep()
        with regrow.phase("outer"):
            sleep()
    sleep()
""",
    )
    assert account.seconds["phase:outer"] >= 3 * SLEEP
    assert account.seconds["phase:inner"] >= 2 * SLEEP
    assert partitions(account)


def test_steps_get_the_time_outside_of_phases_and_count_once(page: WorkerReports) -> None:
    account = account_after(
        page,
        """
with regrow.phase("load"):
    sleep()
for n in (1, 2, 3, 2, 3, 4):
    with regrow.phase("data"):
        sleep()
    regrow.step(n)
""",
    )
    assert account.counts == {"first_step": 1, "steps": 3, "repeated_steps": 2}
    assert account.seconds["phase:data"] >= 4 * SLEEP
    assert account.seconds["repeated_phases"] >= 2 * SLEEP
    assert (account.highest_step, account.starting, account.open) == (4, False, "pending")
    assert partitions(account)


def test_a_phase_around_all_steps_is_redone_with_them(page: WorkerReports) -> None:
    script = """
with regrow.phase("epoch"):
    for n in (1, 2, 1, 2):
        sleep()
        with regrow.phase("data"):
            sleep()
        regrow.step(n)
"""
    account = account_after(page, script)
    assert account.seconds["repeated_phases"] >= 4 * SLEEP
    assert account.seconds["phase:epoch"] >= 2 * SLEEP
    assert account.seconds["phase:data"] >= 2 * SLEEP
    assert partitions(account)


def test_the_open_phase_of_a_killed_worker_is_known(page: WorkerReports) -> None:
    script = """
regrow.step(1)
with regrow.phase("data"):
    with regrow.phase("decode"):
        os.kill(os.getpid(), signal.SIGKILL)
"""
    account = account_after(page, script, -9)
    assert (account.open, account.highest_step) == ("phase:decode", 1)
    assert partitions(account)


def test_a_phase_that_an_exception_leaves_has_ended(page: WorkerReports) -> None:
    script = """
try:
    with regrow.phase("a"):
        with regrow.phase("b"):
            raise ValueError
except ValueError:
    regrow.step(1)
"""
    account = account_after(page, script)
    assert account.open == "pending"
    assert {"phase:a", "phase:b", "first_step"} <= account.seconds.keys()


def test_other_threads_and_children_book_nothing(page: WorkerReports) -> None:
    script = """
regrow.step(1)
def book():
    with regrow.phase("elsewhere"):
        regrow.step(100)
thread = threading.Thread(target=book)
thread.start(); thread.join()
if not (pid := os.fork()):
    book()
    os._exit(0)
os.waitpid(pid, 0)
code = "import regrow\\nwith regrow.phase('child'): regrow.step(200)"
subprocess.run([sys.executable, "-c", code], check=True)
"""
    account = account_after(page, script)
    assert (account.counts, account.highest_step) == ({"first_step": 1}, 1)


def test_the_program_that_follows_another_one_has_an_account(page: WorkerReports) -> None:
    account_after(page, "regrow.step(1)")
    account = account_after(page, "regrow.step(1); regrow.step(2)")
    assert account.counts == {"first_repeated_step": 1, "steps": 1}


def test_names_beyond_the_limit_and_empty_ones_are_booked_as_other(page: WorkerReports) -> None:
    script = """
for name in [*map(str, range(20)), "", "0"]:
    with regrow.phase(name):
        pass
"""
    names = {f"phase:{n}" for n in range(_accounts.PHASES)}
    assert account_after(page, script).seconds.keys() - {"pending"} == names | {"phase:other"}


@pytest.mark.parametrize(
    ("name", "read"),
    [("ä" * 40, "ä" * 16), ("x" * 31 + "ä", "x" * 31), ("a\nb\x1b[2J", "a?b?[2J"), ("\ud800", "?")],
)
def test_names_are_cut_and_printable(page: WorkerReports, name: str, read: str) -> None:
    account = account_after(page, f"with regrow.phase({name!a}): pass")
    assert account.seconds.keys() - {"pending"} == {f"phase:{read}"}


def test_an_in_process_restart_is_booked_in_its_parts(page: WorkerReports) -> None:
    script = """
ends = dict(detected=0.01, notified=0.02, aborted=0.03, finalized=0.03, checked=0.04, met=0.07)
regrow.step(5)
phase = regrow.phase("left by an interrupt").__enter__()
sleep()
_progress.restarted(ends | dict(called=0.08))
regrow.step(5)
sleep(); sleep()
_progress.restarted(ends | dict(called=0.08))
with regrow.phase("load"):
    sleep()
regrow.step(4)
regrow.step(6)
"""
    account = account_after(page, script)
    spent = account.seconds
    # The first restart has interrupted a phase; its time is not booked twice.
    assert 0.0199 < spent["detection"] < 0.04
    assert spent["stopping"] == pytest.approx(spent["detection"])
    assert spent["meeting"] == pytest.approx(1.5 * spent["detection"])
    assert spent["restart"] == pytest.approx(0.5 * spent["detection"])
    assert spent["unfinished"] >= 2 * SLEEP - 0.08
    assert account.counts == {"first_step": 1, "first_repeated_step": 2, "steps": 1}
    assert partitions(account)


def test_the_highest_step_of_a_node_outlives_an_attempt(job: Job, page: WorkerReports) -> None:
    account_after(page, "regrow.step(7)")
    page.close()
    assert job.highest_step == 7
    following = WorkerReports(job)
    assert account_after(following, "regrow.step(7); regrow.step(8)").counts == {
        "first_repeated_step": 1,
        "steps": 1,
    }
    following.clear(0)
    assert following.accounts() == {}
    assert account_after(following, "regrow.step(8)").counts == {"first_repeated_step": 1}
    following.close()


def test_the_accounts_are_recorded_while_the_workers_run(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: Queue[Any] = Queue()
    recorded: list[Event] = []
    job.post = lambda message: posted.put(message)
    job.recorder.sinks = (recorded.append,)
    monkeypatch.setattr(progress, "ACCOUNTS_EVERY_S", 0.05)
    page = WorkerReports(job)
    posted.get(timeout=PATIENCE)()
    assert recorded == []  # no worker has an account yet
    account_after(page, "regrow.step(7)")
    wait_until(lambda: posted.get(timeout=PATIENCE)() or "worker.accounts" in str(recorded), "")
    page.close()
    accounts = recorded[-1].metadata["accounts"]
    assert [account["highest_step"] for account in accounts.values()] == [7]


def test_outside_of_regrow_a_phase_does_nothing() -> None:
    code = "import regrow\nwith regrow.phase('data'): regrow.step(1)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REGROW")}
    subprocess.run([sys.executable, "-c", code], env=clean, check=True, timeout=60)


def test_an_account_can_be_read_while_it_is_written(page: WorkerReports) -> None:
    script = """
while True:
    for n in range(5):
        with regrow.phase("data"):
            regrow.step(n)
"""
    command = [sys.executable, "-c", PRELUDE + script]
    with subprocess.Popen(command, env=os.environ | page.environment(0)) as worker:
        try:
            wait_until(lambda: bool(page.accounts()), "booked")
            found = [account for _ in range(5000) for account in page.accounts().values()]
        finally:
            worker.kill()
            worker.wait(PATIENCE)
    assert {account.open for account in found} <= {"pending", "phase:data"}
    assert {account.opened_monotonic for account in found} == {found[0].opened_monotonic}


def test_a_page_with_any_content_can_be_read() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        memory = bytearray(chance.randbytes(ACCOUNT_BYTES))
        if (account := read(memory, 0)) is not None:
            assert all(0 < each < math.inf for each in account.seconds.values())
            assert all(name.isprintable() for name in (*account.seconds, *account.counts))
    memory = bytearray(ACCOUNT_BYTES)
    blank(memory, 0, NO_STEP)
    assert read(memory, 0) is None
