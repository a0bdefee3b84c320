"""The story of in-process restarts: faulty rank, lost ranks, duration of each phase."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.explained.record import STORIES
from helpers.stories import without_times
from regrow.events import Story, read_events, story
from regrow.explain import explain

Line = dict[str, Any]


def rendered(*events: Line) -> list[str]:
    common = {"run_id": "7f3a", "host": "foo", "attempt": 0}
    lines = [
        {"name": "regrow.job.started", "monotonic": 100.0, "command": ["python3", "train.py"]},
        *events,
        {"name": "regrow.job.finished", "monotonic": 120.0, "state": "SUCCEEDED"},
    ]
    text = without_times(story(common | line for line in lines).render(1000))
    return [" ".join(each.split()) for each in text.splitlines()]


def restarted(iteration: int, **fields: Any) -> Line:
    return {
        "name": "regrow.inprocess.restarted",
        "monotonic": 105.0 + iteration,
        "iteration": iteration,
        "world_size": 3,
        "kind": "EXCEPTION",
        "rank": 2,
        "message": "ValueError('x')",
        "lost": [],
        "lost_count": 0,
        "seconds": {"detected": 0.0005, "notified": 0.001, "met": 0.004, "called": 0.005},
        **fields,
    }


def test_the_faulty_rank_and_the_end_of_each_phase_are_shown() -> None:
    lines = rendered(restarted(1))
    assert "in-process restart (iteration 1): rank 2 raised an exception: ValueError('x')" in lines
    parts = "times since the fault: detected 0.5 ms, notified 1.0 ms, met 4.0 ms"
    assert f"called after 5.0 ms ({parts})" in lines
    assert not any(line.startswith("without") for line in lines)


def test_the_restarts_of_two_calls_with_the_same_iteration_are_both_shown() -> None:
    lines = rendered(restarted(1), restarted(1, monotonic=115.0, message="ValueError('y')"))
    assert lines[0].endswith("SUCCEEDED with 2 in-process restarts")
    assert [line[-15:] for line in lines[1:] if "in-process restart" in line] == [
        "ValueError('x')",
        "ValueError('y')",
    ]


def test_control_characters_in_the_name_of_a_phase_do_not_reach_the_terminal() -> None:
    lines = rendered(restarted(1, seconds={"\x1b[2J": 0.001, "\x1b[3J": 0.002}))
    assert any("\\x1b[2J" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_the_lost_ranks_and_the_number_of_the_others_are_shown() -> None:
    assert "without rank 2; 3 continue" in rendered(restarted(1, lost=[2], lost_count=1))
    many = restarted(1, lost=[4, 5], lost_count=9)
    assert "without ranks 4, 5 and 7 more; 3 continue" in rendered(many)


def test_the_state_that_ranks_received_is_shown_with_its_size() -> None:
    sent = {"name": "regrow.state.sent", "monotonic": 106.1, "step": 7, "rank": 0, "iteration": 1}
    moved = {"targets": [2], "bytes": 3_250_000, "duration_s": 0.04}
    lines = rendered(restarted(1), sent | moved, sent | moved | {"iteration": 2})
    assert lines.count("state step 7 from rank 0 to rank 2: 3.2 MB in 40 ms") == 1
    many = rendered(restarted(1), sent | moved | {"targets": [1, 2], "duration_s": None})
    assert "state step 7 from rank 0 to ranks 1, 2: 3.2 MB" in many


def test_the_reason_why_a_lost_rank_was_not_replaced_is_shown() -> None:
    why = {"name": "regrow.worker.not_replaced", "monotonic": 106.1, "reason": "no restarts left"}
    lines = rendered(restarted(1, lost=[2], lost_count=1), why | {"rank": 2}, why | {"rank": 1})
    assert "not replaced rank 2: no restarts left" in lines
    assert not any("rank 1" in line for line in lines)


def vacated(rank: int, incarnation: int = 0, **fields: Any) -> Line:
    at = {"monotonic": 104.1 + incarnation, "ended_monotonic": 104.0 + incarnation}
    ended = {"pid": 70 + incarnation, "how": "by SIGKILL", "last_step": 5}
    name = "regrow.worker.vacated"
    return {"name": name, "rank": rank, "incarnation": incarnation, **at, **ended, **fields}


def replaced(rank: int, incarnation: int = 1, **fields: Any) -> Line:
    at = {"monotonic": 103.3 + incarnation, "started_monotonic": 103.2 + incarnation}
    more = {"pid": 70 + incarnation, "started_from": "exec", "restarts_left": 2}
    name = "regrow.worker.replaced"
    return {"name": name, "rank": rank, "incarnation": incarnation, **at, **more, **fields}


def test_the_processes_that_took_the_places_of_others_are_shown() -> None:
    lines = rendered(vacated(1), replaced(1), restarted(1, replaced=[1]))
    assert (
        "replaced rank 1: pid 70 ended by SIGKILL after step 5; pid 71 started by a cold start "
        "200 ms later; 2 restarts left"
    ) in lines
    ended = vacated(1, last_step=None, how="with exit code 1")
    forked = replaced(1, started_from="template", restarts_left=1)
    lines = rendered(ended, forked, restarted(1, replaced=[1]))
    assert (
        "replaced rank 1: pid 70 ended with exit code 1; pid 71 started from the template 200 ms "
        "later; 1 restart left"
    ) in lines


def test_each_restart_has_its_own_replacements() -> None:
    again = vacated(1, 1), replaced(1, 2)
    lines = rendered(
        vacated(1), replaced(1), restarted(1, replaced=[1]), *again, restarted(2, replaced=[1])
    )
    shown = [line for line in lines if line.startswith("replaced")]
    assert ["pid 70 ended" in line for line in shown] == [True, False]
    assert ["pid 72 started" in line for line in shown] == [False, True]


def test_a_replacement_on_another_host_is_shown_as_its_process_has_described_it() -> None:
    origins = ["pid 9 on b ended by SIGKILL; pid 11 started from the template", "a\nb"]
    lines = rendered(restarted(1, replaced=[3, 4, 5], origins=origins))
    assert f"replaced rank 3: {origins[0]}" in lines
    assert "rank 4: a b" in lines
    assert "rank 5: the agent of its host has the details" in lines
    for rubbish in (None, "text", [7]):
        lines = rendered(restarted(1, replaced=[3], origins=rubbish))
        assert "replaced rank 3: the agent of its host has the details" in lines


def test_of_many_restarts_the_first_and_the_last_are_shown() -> None:
    lines = rendered(*(restarted(n) for n in range(1, 100)))
    assert "... 79 more in-process restarts ..." in lines
    assert sum(line.startswith("in-process restart") for line in lines) == 20


@pytest.mark.parametrize(
    "fields", [{"lost": None}, {"seconds": 3}, {"rank": "one"}, {"kind": None, "message": None}]
)
def test_a_malformed_event_is_shown_as_far_as_possible(fields: Line) -> None:
    assert any(line.startswith("in-process restart") for line in rendered(restarted(1, **fields)))


def gave_up(**fields: Any) -> Line:
    failed = {
        "name": "regrow.worker.failed",
        "monotonic": 107.0,
        "failed_monotonic": 106.5,
        "rank": 2,
        "pid": 12,
        "exit_code": 1,
        "message": "RestartAbort: no further restart",
        "traceback": "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\nRestartAbort: no further restart",
    }
    return failed | fields


def test_a_wrapper_that_gave_up_did_not_restart_its_function() -> None:
    failed = gave_up()
    lines = rendered(restarted(1), failed)
    assert not any("in-process restart" in line for line in lines)
    did = "raised an exception: ValueError('x'); the wrapper gave up"
    assert f"failure 1 (attempt 0): rank 2 on host foo (pid 12) {did}" in lines
    assert any(
        "in-process restart" in line for line in rendered(restarted(1), failed | {"message": "x"})
    )


def of_a_wrapper_that_gave_up(**last_steps: Any) -> list[Line]:
    """Return a recorded job, in which steps were done again in attempt 0 and after its end."""
    lines = [dict(line) for line in read_events(STORIES / "wrapper-gives-up" / "host0.jsonl")]
    (ended,) = (e for e in lines if e["name"] == "regrow.attempt.ended" and e["attempt"] == 1)
    ended["last_steps"] = {rank: e | last_steps for rank, e in ended["last_steps"].items()}
    return lines


def test_the_work_lost_takes_no_steps_that_an_in_process_restart_repeated() -> None:
    lines = of_a_wrapper_that_gave_up()
    (failure,) = story(lines).failures
    (explained,) = explain({"log": lines}).values()
    assert failure.work_lost_s is not None
    assert failure.work_lost_s == pytest.approx(explained[-1].cost.redone_s)
    assert failure.work_lost_s / (failure.work_lost or 0) == pytest.approx(0.021, abs=0.001)


def test_the_pace_tells_the_work_lost_if_not_all_of_it_was_done_again() -> None:
    (all_again,) = story(of_a_wrapper_that_gave_up()).failures
    (a_part,) = story(of_a_wrapper_that_gave_up(last_step=33)).failures
    assert a_part.work_lost == all_again.work_lost
    assert (a_part.work_lost_s or 0.0) > (all_again.work_lost_s or 0.0)


def expired(**fields: Any) -> Line:
    timer = {"scope": "load", "after_s": 2.0, "over_s": 0.012, "signal": "SIGKILL"}
    place = {"stood": "in load (data.py:7)", "compared": ["rank 2 alone is in load"]}
    more = {"rank": 2, "pid": 72, "stacks": "stacks.72.txt", "monotonic": 106.0}
    message = "timer load of 2 s was exceeded by 12.0 ms; location: in load (data.py:7)"
    name = "regrow.timer.expired"
    return {"name": name, "message": message} | timer | place | more | fields


def without_rank_2(*events: Line, **lost: Any) -> list[Line]:
    """Return the events of a restart without rank 2, whose process ended by SIGKILL."""
    ended = {"name": "regrow.inprocess.lost", "monotonic": 106.01, "rank": 2, "pid": 72} | lost
    fields = {"kind": "TERMINATED", "message": "process 72 on foo has ended"}
    restart = restarted(1, lost=[2], lost_count=1, monotonic=106.02, **fields)
    return [*events, {"exitcode": -9} | ended, restart]


def story_of(*events: Line) -> Story:
    common = {"run_id": "7f3a", "host": "foo", "attempt": 0}
    return story(common | line for line in events)


def test_a_rank_that_its_timer_ended_is_shown_once_with_its_place_and_its_stacks() -> None:
    lines = rendered(*without_rank_2(expired()))
    did = "timer load of 2 s was exceeded by 12 ms, so it was killed by SIGKILL"
    assert f"in-process restart (iteration 1): rank 2 on host foo (pid 72) hung: {did}" in lines
    assert sum("was exceeded" in line for line in lines) == 1
    assert "location in load (data.py:7)" in lines
    assert "compared rank 2 alone is in load" in lines
    assert "stacks stacks.72.txt" in lines
    assert "detected after 2.0 s (since its last sign of life)" in lines


@pytest.mark.parametrize(("heartbeat", "cause"), [(False, "hang"), (True, "heartbeat")])
def test_the_cause_of_a_restart_is_the_timer_whose_signal_ended_the_process(
    heartbeat: bool, cause: str
) -> None:
    found = story_of(*without_rank_2(expired(heartbeat=heartbeat)))
    (restart,) = found.in_place
    assert restart.cause == cause
    assert restart.did == f"hung and was killed by SIGKILL: {expired()['message']}"
    assert not found.expiries


@pytest.mark.parametrize(
    "fields", [{"signal": None}, {"signal": "SIGTERM"}, {"pid": 71}, {"host": "bar"}]
)
def test_a_timer_that_did_not_end_the_lost_process_is_shown_on_its_own(fields: Line) -> None:
    found = story_of(*without_rank_2(expired(**fields)))
    assert found.in_place[0].cause == "signal"
    assert found.in_place[0].timer is None
    assert len(found.expiries) == 1


def test_a_timer_of_a_replaced_process_is_part_of_its_restart() -> None:
    ended = vacated(2, pid=72, exitcode=-9, monotonic=106.01, ended_monotonic=106.0)
    fields = {"kind": "TERMINATED", "monotonic": 106.02}
    found = story_of(expired(), ended, replaced(2), restarted(1, replaced=[2], **fields))
    assert found.in_place[0].cause == "hang"
    assert not found.expiries


def test_the_silence_of_a_rank_that_hung_begins_with_its_last_step_and_is_lost_by_detecting() -> (
    None
):
    account = {"since_monotonic": 105.0}
    times: Line = {"monotonic": 106.01, "ended_monotonic": 106.0}
    ended = vacated(2, pid=72, exitcode=-9, account=account, **times)
    fields = {"kind": "TERMINATED", "monotonic": 106.02}
    found = story_of(expired(), ended, replaced(2), restarted(1, replaced=[2], **fields))
    assert found.in_place[0].silent_s == pytest.approx(106.0 - 105.0)
    assert found.losses is not None
    assert found.losses.detecting_s == found.in_place[0].silent_s


def test_the_silence_before_a_time_out_of_the_wrapper_is_lost_by_detecting() -> None:
    message = "no automatic progress for 4 s, at train.py:7 in train"
    found = story_of(restarted(1, kind="SOFT_TIMEOUT", message=message))
    assert found.losses is not None
    assert found.losses.detecting_s == 4.0


def test_a_later_failure_does_not_show_the_timer_of_a_restart_as_its_own() -> None:
    own = expired(rank=0, pid=70, monotonic=118.0, message="timer step of 2 s was exceeded")
    failed = {"name": "regrow.worker.failed", "rank": 0, "pid": 70, "message": own["message"]}
    failed |= {"exit_code": -9, "monotonic": 118.0, "failed_monotonic": 118.0}
    (failure,) = story_of(*without_rank_2(expired()), own, failed).failures
    assert failure.timer is not None
    assert failure.hung_too == ()


@pytest.mark.parametrize("timers", [[], [expired()]])
def test_the_loss_after_which_the_wrapper_gave_up_is_one_failure_also_if_it_is_a_failure_itself(
    timers: list[Line],
) -> None:
    own = {"rank": 2, "pid": 72, "exit_code": -9, "signal": "SIGKILL", "root_cause": True}
    own |= {"traceback": None, "message": timers[0]["message"] if timers else "Signal 9"}
    lost = gave_up(monotonic=107.1, failed_monotonic=106.0, **own)
    found = story_of(*without_rank_2(*timers), gave_up(rank=0, pid=70), lost)
    (failure,) = found.failures
    assert (failure.rank, failure.pid, failure.gave_up) == (2, 72, "no further restart")
    assert (failure.timer is not None) == bool(timers)
    assert not found.in_place
    assert not found.expiries
    assert "; the wrapper gave up" in found.render(1000)
