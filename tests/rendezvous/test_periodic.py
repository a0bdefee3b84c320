"""Periodic tasks of the nodes of one process: few threads, and no task delays another."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from helpers.processes import PATIENCE, wait_until
from regrow.rendezvous.node.periodic import PeriodicTask, PeriodicTasks

LONG = 1000.0  # seconds
FEW = 10


@pytest.fixture
def tasks() -> Iterator[PeriodicTasks]:
    before = set(threading.enumerate())
    yield PeriodicTasks()
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads end with the last task")


def test_many_tasks_that_are_due_together_are_run_by_few_threads(tasks: PeriodicTasks) -> None:
    """Threads that wait for the interpreter wake up every 5 ms, so hundreds starve each other."""
    runs, threads = 0, set[threading.Thread]()
    counting, done = threading.Lock(), threading.Event()

    def run() -> None:
        nonlocal runs
        with counting:
            runs += 1
            threads.add(threading.current_thread())
            if runs == 500:
                done.set()

    for _ in range(500):
        tasks.add(run, 0.02)
    assert done.wait(PATIENCE)
    assert len(threads) <= FEW


def test_tasks_that_are_stuck_delay_no_other_task(tasks: PeriodicTasks) -> None:
    go_on, ran = threading.Event(), threading.Event()

    def stuck() -> None:
        go_on.wait(PATIENCE)

    for _ in range(3):
        tasks.add(stuck, 0.0)
    tasks.add(ran.set, 0.01)
    assert ran.wait(PATIENCE)
    assert not go_on.is_set()
    go_on.set()


def test_a_task_runs_again_after_its_pause(tasks: PeriodicTasks) -> None:
    pauses = [0.01, 0.02, None]
    done = threading.Event()

    def run() -> float | None:
        pause = pauses.pop(0)
        if pause is None:
            done.set()
        return pause

    tasks.add(run, 0.0)
    assert done.wait(PATIENCE)
    assert not pauses


def test_a_task_can_be_run_before_it_is_due(tasks: PeriodicTasks) -> None:
    ran = threading.Event()

    def run() -> float:
        ran.set()
        return LONG

    task = tasks.add(run, LONG)
    task.run_soon()
    assert ran.wait(PATIENCE)
    task.end()


def test_a_task_that_is_to_run_soon_while_it_runs_runs_once_more(tasks: PeriodicTasks) -> None:
    began, go_on, again = threading.Event(), threading.Event(), threading.Event()

    def run() -> float:
        if began.is_set():
            again.set()
        began.set()
        go_on.wait(PATIENCE)
        return LONG

    task = tasks.add(run, 0.0)
    assert began.wait(PATIENCE)
    task.run_soon()
    go_on.set()
    assert again.wait(PATIENCE)
    task.end()


def test_an_ended_task_is_awaited_and_runs_no_more(tasks: PeriodicTasks) -> None:
    began, go_on, runs = threading.Event(), threading.Event(), list[int]()

    def run() -> float:
        began.set()
        go_on.wait(PATIENCE)
        runs.append(1)
        return 0.0

    task = tasks.add(run, 0.0)
    assert began.wait(PATIENCE)
    task.end()
    task.join(0.01)  # it still runs
    assert not runs
    go_on.set()
    task.join(PATIENCE)
    assert runs == [1]
    task.run_soon()
    later = threading.Event()
    tasks.add(later.set, 0.02)
    assert later.wait(PATIENCE)
    assert runs == [1]


def test_a_task_may_end_itself(tasks: PeriodicTasks) -> None:
    found, ended = list[PeriodicTask](), threading.Event()
    known = threading.Event()

    def run() -> float:
        known.wait(PATIENCE)
        found[0].end()
        found[0].join(PATIENCE)  # returns at once
        ended.set()
        return 0.0

    found.append(tasks.add(run, 0.0))
    known.set()
    assert ended.wait(PATIENCE)


def test_a_task_that_raises_ends_alone_and_later_tasks_run(
    tasks: PeriodicTasks, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> float:
        raise ZeroDivisionError

    tasks.add(fails, 0.0)
    wait_until(lambda: "ZeroDivisionError" in caplog.text, "the error is logged")
    before = {thread for thread in threading.enumerate() if thread.name == "rendezvous tasks"}
    wait_until(lambda: not before & set(threading.enumerate()), "no task is left")
    ran = threading.Event()
    tasks.add(ran.set, 0.0)
    assert ran.wait(PATIENCE)


def test_a_forked_child_runs_its_own_tasks_and_not_those_of_its_parent(
    tasks: PeriodicTasks,
) -> None:
    task = tasks.add(lambda: LONG, LONG)
    _in_a_child(lambda: _run_one(tasks))
    task.end()


def _run_one(tasks: PeriodicTasks) -> bool:
    ran = threading.Event()
    tasks.add(ran.set, 0.0)
    return ran.wait(PATIENCE)


def _in_a_child(check: Callable[[], bool]) -> None:
    with warnings.catch_warnings():  # newer Pythons warn about such forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
