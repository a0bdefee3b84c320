"""The story of missed heartbeats: the rank named first, the reports of the others, stalls."""

from __future__ import annotations

from typing import Any

from helpers.stories import without_times
from regrow.events import story

Line = dict[str, Any]
SAID = (
    "HeartbeatFailure: heartbeat of rank 0 of 3, beat 7: rank 2 is missing; all were there 9 s ago"
)


def line(name: str, monotonic: float, **fields: Any) -> Line:
    common = {"run_id": "7f3a", "host": "foo", "attempt": 0, "monotonic": monotonic}
    return {"name": f"regrow.{name}", **common, **fields}


def rendered(*events: Line) -> list[str]:
    job = [
        line("job.started", 100.0, command=["python3", "train.py"], max_restarts=0),
        line("attempt.started", 101.0, world_size=3),
        *events,
        line("job.finished", 120.0, state="FAILED", duration_s=20.0, restarts=0),
    ]
    return [" ".join(each.split()) for each in without_times(story(job).render(1000)).splitlines()]


def failed(rank: int, at: float, signal: str, message: str, *, root: bool = False) -> Line:
    return line(
        "worker.failed",
        at,
        rank=rank,
        pid=40 + rank,
        exit_code=-6,
        signal=signal,
        message=message,
        failed_monotonic=at,
        root_cause=root,
    )


def expired(message: str, scope: str, **fields: Any) -> Line:
    return line(
        "timer.expired",
        110.0,
        rank=2,
        pid=42,
        worker_pid=42,
        scope=scope,
        after_s=8.1,
        over_s=0.002,
        signal="SIGKILL",
        stood="stopped by a signal",
        compared=[],
        message=message,
        **fields,
    )


def test_a_missed_heartbeat_is_shown_as_such() -> None:
    message = "no heartbeat for 8.1 s: stopped by a signal"
    about = rendered(
        expired(message, "regrow.heartbeat", heartbeat=True),
        failed(2, 110.0, "SIGKILL", message, root=True),
    )
    assert about[1:3] == [
        "failure 1 (attempt 0): rank 2 on host foo (pid 42) hung: no heartbeat for 8.1 s, so it "
        "was killed by SIGKILL",
        "location stopped by a signal",
    ]


def test_a_timer_of_that_name_is_a_timer() -> None:
    message = (
        "timer regrow.heartbeat of 8.1 s was exceeded by 2.0 ms; location: stopped by a signal"
    )
    about = rendered(
        expired(message, "regrow.heartbeat"), failed(2, 110.0, "SIGKILL", message, root=True)
    )
    assert "hung: timer regrow.heartbeat of 8.1 s was exceeded by 2.0 ms" in about[1]


def test_the_missing_rank_is_named_before_the_rank_that_detected_it() -> None:
    missing = f"rank 0 ended because of this rank: {SAID}"
    about = rendered(
        failed(0, 110.0, "SIGABRT", SAID), failed(2, 110.0, "SIGTERM", missing, root=True)
    )
    assert about[1].startswith("failure 1 (attempt 0): rank 2 on host foo (pid 42) was killed by")
    assert (
        f"then also rank 0 on host foo (pid 40) was killed by SIGABRT: {SAID}, 0.0 ms later"
        in about
    )


def stalled(**fields: Any) -> Line:
    return line("heartbeat.stalled", 105.0, **fields)


def test_a_stall_is_shown_with_the_place_of_the_worker() -> None:
    did = "beats, but stands still at step 5 for 6 beats; the others are at up to step 9"
    where = {"stood": "in load (data.py:7)", "stacks": "s.txt"}
    about = rendered(stalled(rank=1, pid=41, message=f"rank 1 {did}", **where))
    assert about[1:] == [
        f"rank 1 on host foo (pid 41) {did} (attempt 0)",
        "location in load (data.py:7)",
        "stacks s.txt",
    ]


def test_many_stalls_are_cut_and_a_stall_without_fields_is_shown() -> None:
    about = rendered(*[stalled() for _ in range(10)])
    assert about[1] == "a worker on host foo stalled: it made no progress (attempt 0)"
    assert about[-1] == "... 2 more stalls"
