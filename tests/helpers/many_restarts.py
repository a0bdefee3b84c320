"""Events of jobs with many restarts, and how much work is done for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Line = dict[str, Any]


def line(name: str, at: float, attempt: int, **fields: Any) -> Line:
    known = {"run_id": "job", "host": "here", "attempt": attempt, "monotonic": at}
    return {"name": f"regrow.{name}", **known, **fields}


def started(at: float, attempt: int) -> list[Line]:
    return [
        line("rendezvous.completed", at, attempt, joined=["there/7/a"]),
        line("attempt.started", at + 1, attempt, world_size=2, ranks=[0, 1]),
    ]


def failing(restarts: int) -> list[Line]:
    """A job whose workers start again so many times."""
    found = [line("job.started", 0.0, -1, time=0.0, nproc_per_node=2)]
    for attempt in range(restarts + 1):
        at = 60.0 * attempt
        found += started(at, attempt)
        found.append(line("worker.failed", at + 9, attempt, rank=1, pid=7, exit_code=1))
        found.append(line("attempt.ended", at + 10, attempt, state="FAILED"))
    return found


def replaced(restarts: int) -> list[Line]:
    """A job in which a rank is replaced so many times."""
    found = [line("job.started", 0.0, -1, time=0.0, nproc_per_node=2), *started(0.0, 0)]
    for number in range(restarts):
        at = 60.0 * (number + 1)
        known = {"rank": 1, "incarnation": number}
        found.append(line("worker.vacated", at, 0, **known, pid=number, how="by SIGKILL"))
        found.append(line("worker.replaced", at + 1, 0, rank=1, incarnation=number + 1))
        fields = {"iteration": number + 1, "rank": 1, "replaced": [1]}
        found.append(line("inprocess.restarted", at + 3, 0, **fields))
        found.append(line("state.sent", at + 4, 0, iteration=number + 1, rank=2, targets=[1]))
    return found


def on_many_hosts(restarts: int) -> list[Line]:
    """A job on so many hosts, with as many in-process restarts of the last rank."""
    found = [line("job.started", 0.0, -1, time=0.0, nproc_per_node=1)]
    for rank in range(restarts):
        known = {"world_size": restarts, "ranks": [rank], "pids": {str(rank): rank + 1}}
        found.append(line("attempt.started", 1.0, 0, **known))
    for number in range(restarts):
        fields = {"iteration": number + 1, "rank": restarts - 1, "kind": "EXCEPTION"}
        found.append(line("inprocess.restarted", 60.0 * (number + 1), 0, **fields))
    return found


def calls_of(work: Callable[[list[Line]], object], events: list[Line]) -> int:
    """Return how many functions are called while something is derived from events."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    work(events[:1])  # imports what it needs
    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work(events)
    finally:
        sys.setprofile(before)
    return count
