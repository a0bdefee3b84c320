"""What one node's story says of the others: whose fault it was, whoever noticed it first."""

from __future__ import annotations

from typing import Any

from regrow.events import story

Line = dict[str, Any]


def line(name: str, attempt: int, monotonic: float, **fields: Any) -> Line:
    common = {"run_id": "7f3a", "round": attempt + 1, "host": "here", "attempt": attempt}
    return {"name": f"regrow.{name}", **common, "monotonic": monotonic, **fields}


def failed(at: float, **fields: Any) -> Line:
    """The failure of a worker here."""
    known = {"rank": 0, "pid": 7, "exit_code": 1, "failed_monotonic": at, "root_cause": False}
    return line("worker.failed", 0, at + 0.01, **{**known, "message": "exit code 1", **fields})


def failed_elsewhere(at: float) -> Line:
    fields = {"host": "there", "rank": 5, "pid": 99, "exit_code": -9, "signal": "SIGKILL"}
    told = {"told_monotonic": at, "told_host": "here", "root_cause": True}
    return line("worker.failed", 0, at, **fields, **told)


def round_over(at: float, why: str, *, by_failure: bool) -> Line:
    return line("round.ended", 0, at, node="there/1/a", why=why, failed=by_failure)


def judged(at: float, why: str, *, charged: bool) -> Line:
    return line("round.judged", 0, at, node="there/1/a", why=why, charged=charged)


def tell(*events: Line) -> str:
    started = [
        line("job.started", 0, 100.0, command=["python", "train.py"], max_restarts=0),
        line("rendezvous.completed", 0, 100.0, group_world_size=2),
        line("attempt.started", 0, 100.1, world_size=4),
    ]
    went_on = [
        line("job.restarting", 0, 110.01, delay_s=0, reason="round 1 is over"),
        line("attempt.started", 1, 110.5, world_size=2),
        line("job.finished", 1, 120.0, state="SUCCEEDED", restarts=1),
    ]
    return story([*started, *events, *went_on]).render(200).partition("\n")[2]


def test_a_failure_on_another_host_is_named_with_its_host_and_timed_from_when_we_heard() -> None:
    why = "its workers failed"
    assert tell(round_over(110.0, why, by_failure=True), failed_elsewhere(110.0)) == (
        "  failure 1 (attempt 0): rank 5 on host there (pid 99) was killed by SIGKILL\n"
        "    restarted after  500.0 ms   (of the news; all 2 workers started again)\n"
        "    work lost        unknown: the script does not call regrow.step"
    )


def test_a_failure_here_that_followed_one_elsewhere_is_told_as_such() -> None:
    text = tell(
        failed(109.9), round_over(110.0, "its workers failed", by_failure=True),
        judged(110.0, "its workers failed", charged=True), failed_elsewhere(110.0),
    )  # fmt: skip
    assert "failure 1 (attempt 0): rank 5 on host there" in text
    assert "then also        rank 0 on host here (pid 7) exited with code 1" in text


def test_a_lost_host_is_the_cause_of_the_failures_that_it_left_behind() -> None:
    why = "its connection broke"
    text = tell(failed(109.9), judged(110.0, why, charged=False))
    assert text.startswith("  failure 1 (attempt 0): node there/1/a: its connection broke\n")
    assert "restarted after  500.0 ms   (of the news; all 2 workers started again)" in text
    assert "then also        rank 0 on host here (pid 7) exited with code 1" in text


def test_a_verdict_corrects_what_was_told_first() -> None:
    text = tell(
        round_over(110.0, "its workers failed", by_failure=True),
        failed_elsewhere(110.0),
        judged(110.1, "nothing was heard of it for 4 s", charged=False),
    )
    assert text.startswith("  failure 1 (attempt 0): node there/1/a: nothing was heard of it")
    assert "then also        rank 5 on host there" in text


def test_a_host_that_is_lost_while_nobody_fails_is_a_move_with_its_reason() -> None:
    assert tell(round_over(110.0, "its connection broke", by_failure=False)) == (
        "  attempt 0 was stopped without a failure: round 1 is over\n"
        "    restarted after  490.0 ms   (all 2 workers started again)"
    )
