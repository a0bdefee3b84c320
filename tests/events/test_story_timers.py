"""The story of expired timers: rank, timer, delay, and the place of the hang."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.stories import without_times
from regrow.events import story

Line = dict[str, Any]
MESSAGE = (
    "timer step of 2 s was exceeded by 12.3 ms; location: in load (data.py:7), called by step "
    "(train.py:42)"
)


def line(name: str, attempt: int, monotonic: float, **fields: Any) -> Line:
    common = {"run_id": "7f3a", "host": "foo", "attempt": attempt, "monotonic": monotonic}
    return {"name": f"regrow.{name}", **common, **fields}


def expired(at: float = 110.0123, **fields: Any) -> Line:
    defaults = {
        "rank": 1,
        "local_rank": 1,
        "pid": 42,
        "worker_pid": 42,
        "scope": "step",
        "after_s": 2.0,
        "over_s": 0.0123,
        "deadline_monotonic": 110.0,
        "noticed_monotonic": 110.002,
        "signal": "SIGKILL",
        "outcome": "dumped",
        "stood": "in load (data.py:7), called by step (train.py:42)",
        "compared": ["ranks 0, 2 are in recv (train.py:9)", "rank 1 alone is in load"],
        "stacks": "logs/attempt_0/1/stacks.42.txt",
        "message": MESSAGE,
    }
    return line("timer.expired", 0, at, **{**defaults, **fields})


def failed(**fields: Any) -> Line:
    defaults = {
        "rank": 1,
        "pid": 42,
        "exit_code": -9,
        "signal": "SIGKILL",
        "message": MESSAGE,
        "traceback": f"{MESSAGE}\nMain thread (most recent call first):\n  File ...",
        "error_file": "logs/attempt_0/1/error.json",
        "failed_monotonic": 110.0,
        "detected_monotonic": 110.0201,
        "root_cause": True,
    }
    return line("worker.failed", 0, 110.021, **{**defaults, **fields})


def job(*events: Line, state: str = "SUCCEEDED") -> list[Line]:
    return [
        line("job.started", 0, 100.0, command=["python3", "train.py"], max_restarts=1),
        line("attempt.started", 0, 101.0, world_size=3),
        *events,
        line("attempt.started", 1, 110.05, world_size=3),
        line("job.finished", 1, 120.0, state=state, duration_s=20.0, restarts=1),
    ]


def rendered(*events: Line, width: int = 200) -> list[str]:
    return without_times(story(job(*events)).render(width)).splitlines()


def test_a_hang_is_shown_with_its_timer_its_place_and_the_other_workers() -> None:
    assert rendered(expired(), failed())[1:] == [
        "  failure 1 (attempt 0): rank 1 on host foo (pid 42) hung: timer step of 2 s was exceeded "
        "by 12 ms, so it was killed by SIGKILL",
        "    location         in load (data.py:7), called by step (train.py:42)",
        "    compared         ranks 0, 2 are in recv (train.py:9)",
        "                     rank 1 alone is in load",
        "    stacks           logs/attempt_0/1/stacks.42.txt",
        "    error file       logs/attempt_0/1/error.json",
        "    detected after   2.0 s      (since its last sign of life)",
        "    restarted after  50 ms      (since it was given up; all 3 workers started again)",
        "  2.0 s of 20 s lost: detecting 2.0 s, starting 30 ms, redoing steps unknown: the script "
        "does not call regrow.step",
    ]


def test_the_timer_of_a_failure_is_not_repeated() -> None:
    made = story(job(expired(), failed()))
    assert made.expiries == ()
    (failure,) = made.failures
    assert failure.timer is not None
    assert (failure.timer.scope, failure.timer.over_s) == ("step", 0.0123)


def test_ranks_that_were_reaped_together_are_one_failure() -> None:
    other: dict[str, Any] = {"rank": 2, "pid": 43, "message": MESSAGE.replace("load", "recv")}
    second = failed(**other, root_cause=False, failed_monotonic=110.001, traceback=None)
    events = expired(), expired(110.013, worker_pid=43, **other), failed(), second
    lines = rendered(*events, width=300)
    assert sum("hung: " in each for each in lines) == 1
    (other_rank,) = (each for each in lines if each.startswith("    then also"))
    assert (
        " rank 2 on host foo (pid 43) hung and was killed by SIGKILL: timer step of 2 s"
        in other_rank
    )
    assert other_rank.endswith(", 1.0 ms later")


def test_ranks_with_timers_that_expired_during_the_stop_share_a_line() -> None:
    late = [expired(110.02, rank=rank, pid=50 + rank, worker_pid=50 + rank) for rank in (2, 0)]
    events = [expired(), *late, failed()]
    assert "    also hung        ranks 0, 2" in rendered(*events)
    made = story(job(*events))
    assert [each.rank for each in made.failures[0].hung_too] == [2, 0]
    assert made.expiries == ()


def test_a_timer_that_is_only_reported_is_no_failure() -> None:
    lines = rendered(expired(signal=None, compared=[]))
    assert lines[1:4] == [
        "  rank 1 on host foo (pid 42): timer step of 2 s was exceeded by 12 ms, which is only "
        "reported (attempt 0)",
        "    location         in load (data.py:7), called by step (train.py:42)",
        "    stacks           logs/attempt_0/1/stacks.42.txt",
    ]


def test_a_process_that_a_worker_started_is_shown_as_such() -> None:
    lines = rendered(expired(pid=50, compared=[]))
    assert any(
        each.startswith("  a process that rank 1 on host foo had started (pid 50): timer step")
        and "so it was sent SIGKILL" in each
        for each in lines
    )


def test_a_failure_of_something_else_is_not_blamed_on_a_timer() -> None:
    made = story(job(expired(signal="SIGUSR1"), failed(message="ValueError: x", exit_code=1)))
    assert made.failures[0].timer is None
    assert [expiry.signal for expiry in made.expiries] == ["SIGUSR1"]


def test_a_hang_on_another_node_is_shown_by_its_message() -> None:
    away = failed(host="bar", told_monotonic=110.03, told_host="foo", failed_monotonic=None)
    assert any(
        each.endswith(f"rank 1 on host bar (pid 42) hung and was killed by SIGKILL: {MESSAGE}")
        for each in rendered(away)
    )


def test_a_crowd_of_timers_is_cut_and_counted() -> None:
    lines = rendered(*(expired(signal=None, pid=n, message=None) for n in range(20)))
    assert sum("which is only reported" in each for each in lines) == 8
    assert "  ... 12 more expired timers" in lines


@pytest.mark.parametrize(
    "field", ["rank", "scope", "after_s", "over_s", "stood", "compared", "stacks", "worker_pid"]
)
@pytest.mark.parametrize("value", [None, "\x1b[2J", 1 << 70, [1], float("nan")])
def test_no_field_of_a_timer_makes_the_story_fail(field: str, value: object) -> None:
    odd: dict[str, Any] = {field: value}
    for events in ([expired(**odd)], [expired(**odd), failed()]):
        text = story(job(*events)).render()
        assert text.isascii()
        assert "\x1b" not in text


@pytest.mark.parametrize("away", [False, True])
def test_a_comparison_of_several_hosts_replaces_that_of_one(away: bool) -> None:
    events = [line("timer.compared", 0, 110.02, ranks=range(3), compared=["rank 7 alone is away"])]
    events += [line("timer.compared", 0, 110.03, ranks=[1], compared=["less"])]
    events += [line("timer.compared", 1, 110.04, ranks=range(9), compared=["of another attempt"])]
    told_of = {"host": "bar", "told_monotonic": 110.03, "failed_monotonic": None} if away else {}
    lines = rendered(*events, failed(**told_of), *([] if away else [expired()]))
    rows = [each for each in lines if "compared" in each or "alone" in each]
    assert rows == ["    compared         rank 7 alone is away"]


@pytest.mark.parametrize("value", [None, "\x1b[2J", 1 << 70, [[1], "\x1b[2J"], float("nan")])
@pytest.mark.parametrize("field", ["ranks", "compared", "attempt"])
def test_no_field_of_a_comparison_makes_the_story_fail(field: str, value: object) -> None:
    odd: dict[str, Any] = {"ranks": [0], "compared": ["x"], field: value}
    event = {**line("timer.compared", 0, 110.02), **odd}
    assert "\x1b" not in story(job(event, event, failed())).render()


def test_the_silence_of_a_hang_on_another_host_is_read_from_its_words() -> None:
    from regrow.events.silences import without_heartbeat_s

    scope = "s" * 130
    assert without_heartbeat_s("no heartbeat for 190 s: in load (data.py:7)") == 190
    assert without_heartbeat_s("no heartbeat for 8.1 s: in load (data.py:7)") == 8.1
    assert without_heartbeat_s(f"timer {scope} of 60 s was exceeded by 7.1 ms; location: x") == 60
    assert without_heartbeat_s("exited with code 1") is None
