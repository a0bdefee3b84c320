"""The story of a job with a guardian that was killed or stopped."""

from __future__ import annotations

from typing import Any

from helpers.stories import without_times
from regrow.events import story

Line = dict[str, Any]
KILLED = "the guardian (pid 7) was killed by SIGKILL"


def line(name: str, attempt: int, monotonic: float, **fields: Any) -> Line:
    common = {"run_id": "7f3a", "round": attempt + 1, "host": "here", "attempt": attempt}
    return {"name": f"regrow.{name}", **common, "monotonic": monotonic, **fields}


def failed(rank: int, at: float, **fields: Any) -> Line:
    known = {"rank": rank, "pid": 10 + rank, "exit_code": -9, "signal": "SIGKILL"}
    times = {"failed_monotonic": at, "detected_monotonic": at + 0.003}
    return line("worker.failed", 0, at + 0.01, **known, **times, message="Signal 9", **fields)


def rendered(*failures: Line) -> list[str]:
    lines = [
        line("job.started", 0, 100.0, command=["python", "train.py"], max_restarts=1),
        line("attempt.started", 0, 100.1, world_size=2),
        *failures,
        line("attempt.ended", 0, 110.1, state="FAILED"),
        line("job.restarting", 0, 110.2, delay_s=0, reason="worker failure"),
        line("attempt.started", 1, 110.5, world_size=2),
        line("job.finished", 1, 120.0, state="SUCCEEDED", restarts=1),
    ]
    return without_times(story(lines).render(200)).splitlines()[1:]


def test_a_killed_guardian_is_the_cause_and_not_the_death_of_rank_0() -> None:
    both = (failed(rank, 110.0, killed_with=KILLED, root_cause=rank == 0) for rank in (0, 1))
    assert rendered(*both) == [
        f"  failure 1 (attempt 0): on host here: {KILLED}, and the workers of this host with it",
        "    detected after   3.0 ms",
        "    restarted after  500 ms     (all 2 workers started again)",
        "  500 ms lost: detecting 3.0 ms, stopping 97 ms, starting 400 ms, redoing steps "
        "unknown: the script does not call regrow.step",
    ]


def test_a_failed_worker_of_another_host_gets_a_line() -> None:
    first = failed(0, 110.0, killed_with=KILLED, root_cause=True)
    other = failed(1, 110.2, host="there", killed_with="the guardian (pid 9) was killed by SIGKILL")
    text = "\n".join(rendered(first, other))
    assert "then also        rank 1 on host there (pid 11) the guardian (pid 9) was killed" in text


def test_a_death_during_a_suspension_of_the_guardian_has_an_unknown_delay() -> None:
    assert rendered(failed(0, 110.0, noticed_late=True, root_cause=True)) == [
        "  failure 1 (attempt 0): rank 0 on host here (pid 10) was killed by SIGKILL",
        "    detected after   an unknown delay: the guardian, which watches the workers, was "
        "paused",
        "    restarted after  500 ms     (since its detection; all 2 workers started again)",
        "  500 ms lost: stopping 100 ms, starting 400 ms, redoing steps "
        "unknown: the script does not call regrow.step",
    ]
