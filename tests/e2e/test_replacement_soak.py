"""Some hundred replacements in one job, without growth of what stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.jobs.replacing import Launch, Report, Training
from helpers.processes import wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]

SIZE = 8
STAY = (0, 7)
"""Ranks that stay in their processes."""
ROUNDS = 50
"""Number of iterations; at the end of each, all other ranks are killed."""
FIRST_LOOK = 12
"""Iteration in which the test looks first. What is made once has been made by then."""
GROWTH_KIB = 4096
"""Growth of a process that the test allows. A page for each replacement would be 1200 KiB."""

SCRIPT = """
from datetime import timedelta
from pathlib import Path
import regrow
from regrow.inprocess import CallWrapper, Wrapper

FOLDER, INCARNATION = Path(os.environ["FOLDER"]), int(os.environ.get("REGROW_INCARNATION") or 0)

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

@Wrapper(replace=True, last_call_wait=timedelta(seconds=0.3))
def train(call: CallWrapper):
    regrow.step(call.iteration)
    report(INCARNATION, os.getpid(), "called", call.iteration, RANK, 8, 0, "-")
    if call.iteration >= ROUNDS:
        wait_for((FOLDER / "finish").exists)
        return
    (FOLDER / f"{call.iteration}.{RANK}").touch()
    wait_for(lambda: len(list(FOLDER.glob(f"{call.iteration}.*"))) == 8)
    if call.iteration == FIRST_LOOK:
        wait_for((FOLDER / "looked").exists)
    if RANK not in STAY:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(lambda: False)

train()
report(INCARNATION, os.getpid(), "returns", RANK)
"""


class Size(NamedTuple):
    """What a process holds."""

    kib: int
    descriptors: int
    threads: int


def size_of(pid: int) -> Size:
    """Return what a process holds, as the kernel counts it."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Size(int(status["VmRSS"].split()[0]), descriptors, int(status["Threads"]))


def called(rank: int, iteration: int) -> Callable[[Report], bool]:
    """Return whether a report is that of a rank's call in an iteration."""
    words = "called", str(iteration)
    return lambda each: (each.rank, each.what, *each.words[:1]) == (rank, *words)


def look(training: Training, iteration: int) -> dict[str, Size]:
    """Wait until all ranks are in an iteration; return the sizes of the processes that stay."""
    calls = [training.await_report(called(rank, iteration)) for rank in range(SIZE)]
    replaced = sum(call.incarnation for call in calls)
    # The event of a replacement is recorded by the thread that started it.
    wait_until(
        lambda: len(training.job.events("worker.replaced")) == replaced, "all are recorded", 30
    )
    pids = {"agent": training.job.process.pid} | {f"rank {rank}": calls[rank].pid for rank in STAY}
    return {name: size_of(pid) for name, pid in pids.items()}


def test_hundreds_of_replacements_leave_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    values = f"ROUNDS, FIRST_LOOK, STAY = {ROUNDS}, {FIRST_LOOK}, {STAY}\n"
    training = Training(launch, tmp_path, "--max-restarts=400", script=values + SCRIPT, size=SIZE)
    before = look(training, FIRST_LOOK)
    (tmp_path / "looked").touch()
    after = look(training, ROUNDS)
    print(before, after)
    assert training.finish() == 0, training.job.output
    assert training.attempts == 1
    assert len(training.results()) == SIZE
    assert len(training.events("replaced")) >= 250
    assert training.events("not_replaced") == []
    for name, size in after.items():
        grown = size.kib - before[name].kib
        assert grown <= GROWTH_KIB, f"{name} grew by {grown} KiB: {before}, {after}"
        assert size.descriptors <= before[name].descriptors + 2, f"{name}: {before}, {after}"
        assert size.threads <= before[name].threads + 1, f"{name}: {before}, {after}"
