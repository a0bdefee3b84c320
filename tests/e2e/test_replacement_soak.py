"""A thousand replacements in one job, without growth of what stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.jobs.replacing import Launch, Report, Training
from helpers.processes import children_of, wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

SIZE = 8
STAY = (0, 7)
"""Ranks that stay in their processes."""
ROUNDS = 175
"""Number of iterations; at the end of each, all other ranks are killed."""
FIRST_LOOK = 12
"""Iteration in which the test looks first. What is made once has been made by then."""
GROWTH_KIB = 4096
"""Growth of a process that the test allows: a page for each replacement."""

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
    (FOLDER / f"{call.iteration}.{RANK}.{os.getpid()}").touch()
    wait_for(lambda: len(list(FOLDER.glob(f"{call.iteration}.*"))) == 8)
    if call.iteration == FIRST_LOOK:
        wait_for((FOLDER / "looked").exists)
    if RANK == STAY[0]:  # all at once: the first death begins a restart
        for _, rank, pid in (path.name.split(".") for path in FOLDER.glob(f"{call.iteration}.*")):
            if int(rank) not in STAY:
                os.kill(int(pid), signal.SIGKILL)
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


def command_of(pid: int) -> str:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]


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
    agent = training.job.process.pid
    stay = [agent, *children_of(agent)]
    for rank in STAY:
        stay += [calls[rank].pid, *children_of(calls[rank].pid)]
    return {f"{pid} {command_of(pid)}": size_of(pid) for pid in stay}


def test_a_thousand_replacements_leave_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    values = f"ROUNDS, FIRST_LOOK, STAY = {ROUNDS}, {FIRST_LOOK}, {STAY}\n"
    training = Training(launch, tmp_path, "--max-restarts=1100", script=values + SCRIPT, size=SIZE)
    before = look(training, FIRST_LOOK)
    (tmp_path / "looked").touch()
    after = look(training, ROUNDS)
    print(before, after)
    assert training.finish() == 0, training.job.output
    assert training.attempts == 1
    assert len(training.results()) == SIZE
    assert len(training.events("replaced")) == (SIZE - len(STAY)) * ROUNDS >= 1000
    assert training.events("not_replaced") == []
    assert set(after) == set(before)
    for name, size in after.items():
        grown = size.kib - before[name].kib
        assert grown <= GROWTH_KIB, f"{name} grew by {grown} KiB: {before}, {after}"
        assert size.descriptors <= before[name].descriptors + 2, f"{name}: {before}, {after}"
        assert size.threads <= before[name].threads + 1, f"{name}: {before}, {after}"
