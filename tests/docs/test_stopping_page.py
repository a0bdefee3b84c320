"""The page on early stops: its script, and its commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.commands import Ended
from helpers.pages import blocks, commands, typed
from helpers.processes import wait_until
from regrow.utils import PortReservation

PAGE = "docs/guides/stopping.md"
(SCRIPT,) = (block.text for block in blocks("python", PAGE))
START, STOP_HERE, STOP_THERE = commands(PAGE)
LONG = SCRIPT.replace("< 200", "< 100_000")

Start = Callable[[str], Future[Ended]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a command, and waits until the training makes steps."""
    (tmp_path / "train.py").write_text(LONG)
    with ThreadPoolExecutor(2) as threads:

        def started(command: str) -> Future[Ended]:
            job = threads.submit(typed, command, tmp_path)
            wait_until(lambda: job.done() or steps(tmp_path), "the first step")
            return job

        yield started


def steps(folder: Path) -> bool:
    logs = folder.glob("runs/*/events.jsonl")
    return any("regrow.worker.first_step" in log.read_text() for log in logs)


def saved(folder: Path) -> dict[str, int]:
    """Return the step that each rank has saved."""
    return {path.name: int(path.read_text()) for path in folder.glob("checkpoint-*")}


def test_the_script_of_the_page_completes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = typed(START, tmp_path)
    assert (ended.code, saved(tmp_path)) == (0, {}), ended.output


def test_the_directory_of_a_job_is_enough_to_stop_it(start: Start, tmp_path: Path) -> None:
    job = start(START)
    asked = typed(STOP_HERE, tmp_path)
    assert asked.code == 0, asked.output
    ended = job.result()
    assert ended.code == 85, ended.output
    first, second = saved(tmp_path).values()
    assert first == second


def test_the_endpoint_of_a_job_is_enough_to_stop_it(start: Start, tmp_path: Path) -> None:
    with PortReservation() as free:
        port = free.port
    where = f"--rdzv-id JOB --rdzv-endpoint 127.0.0.1:{port}"
    command = START.replace("--standalone", f"--nnodes 2 --rdzv-backend c10d {where}")
    second = threading.Timer(0, lambda: found.append(typed(command, tmp_path)))
    found: list[Ended] = []
    second.start()
    job = start(command)
    asked = typed(STOP_THERE.replace("node0:29400", f"127.0.0.1:{port}"), tmp_path)
    assert asked.code == 0, asked.output
    second.join()
    ended = [job.result(), *found]
    assert [each.code for each in ended] == [85, 85], ended
    assert len(saved(tmp_path)) == 4
    (step,) = set(saved(tmp_path).values())
    assert f"at call {step} of should_stop" in asked.output
