"""The text of the status line: a reducer and a renderer, without a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.cli.screen.status_line import JobStatus, advance, render

STARTED = ("regrow.job.started", {"monotonic": 100.0})
MET = ("regrow.rendezvous.completed", {"world_size": 4})
RUNNING = ("regrow.attempt.started", {"attempt": 0, "ranks": [0, 1], "world_size": 4})
AGAIN = ("regrow.attempt.started", {"attempt": 1, "ranks": [0, 1], "world_size": 4})
KILLED = ("regrow.worker.failed", {"rank": 1, "signal": "SIGKILL", "message": "Signal 9"})
RAISED = ("regrow.worker.failed", {"rank": 0, "signal": None, "message": "ValueError: x"})
ENDED = ("regrow.attempt.ended", {"state": "FAILED"})
RESTARTING = ("regrow.job.restarting", {"delay_s": 0.0, "reason": "worker failure"})


def after(*events: tuple[str, dict[str, Any]]) -> JobStatus:
    status = JobStatus()
    for name, metadata in events:
        status = advance(status, name, metadata)
    return status


def line(*events: tuple[str, dict[str, Any]], now: float = 165.0, width: int = 120) -> str:
    return render(after(*events), width, now)


def test_a_running_job_shows_attempt_world_and_living_workers() -> None:
    shown = line(STARTED, MET, RUNNING)
    assert shown == "regrow: running | 01:05 | attempt 0 | 2/2 alive | world 4"


def test_a_missed_heartbeat_and_a_stalled_training_are_shown() -> None:
    expired = {"rank": 1, "scope": "regrow.heartbeat", "signal": "SIGKILL", "heartbeat": True}
    silent, still = ("regrow.timer.expired", expired), ("regrow.heartbeat.stalled", {"rank": 0})
    assert line(STARTED, RUNNING, silent).endswith(" | rank 1 hangs: no heartbeat")
    assert line(STARTED, RUNNING, still).endswith(" | rank 0 makes no progress")


def test_the_world_is_left_out_where_it_is_this_node() -> None:
    alone = ("regrow.attempt.started", {"attempt": 0, "ranks": [0, 1], "world_size": 2})
    assert "world" not in line(STARTED, alone)


def test_the_first_failure_stays() -> None:
    assert "1/2 alive | world 4 | rank 1: SIGKILL" in line(STARTED, RUNNING, KILLED)
    shown = line(STARTED, RUNNING, KILLED, RAISED)
    assert "0/2 alive" in shown
    assert "rank 1: SIGKILL" in shown


def test_an_expired_timer_stays_after_the_death_of_its_worker() -> None:
    hung = ("regrow.timer.expired", {"rank": 1, "scope": "step", "signal": "SIGKILL"})
    hang = "rank 1 hangs: timer step"
    assert f"2/2 alive | world 4 | {hang}" in line(STARTED, RUNNING, hung)
    assert f"1/2 alive | world 4 | {hang}" in line(STARTED, RUNNING, hung, KILLED)
    assert "rank 1: SIGKILL" in line(STARTED, RUNNING, hung, RUNNING, KILLED)
    unknown = ("regrow.timer.expired", {"rank": None, "scope": "load", "signal": "SIGKILL"})
    assert "a process of a worker hangs: timer load" in line(STARTED, RUNNING, unknown)


def test_a_restart_is_counted_and_its_cause_stays() -> None:
    shown = line(STARTED, RUNNING, KILLED, ENDED, RESTARTING)
    assert shown.startswith("regrow: restarting | 01:05 | attempt 0")
    shown = line(STARTED, RUNNING, KILLED, ENDED, RESTARTING, AGAIN)
    assert "running" in shown
    assert "attempt 1 | 2/2 alive | world 4 | 1 restart | rank 1: SIGKILL" in shown


def test_a_failure_on_another_host_is_shown_but_not_counted() -> None:
    elsewhere = {"rank": 3, "signal": "SIGKILL", "host": "b", "told_monotonic": 1.0}
    shown = line(STARTED, RUNNING, ("regrow.worker.failed", elsewhere))
    assert "2/2 alive" in shown
    assert shown.endswith("| rank 3 on host b: SIGKILL")
    agent = elsewhere | {"rank": None, "signal": None, "message": "no program"}
    shown = line(STARTED, RUNNING, ("regrow.worker.failed", agent))
    assert shown.endswith("| the agent on host b: no program")


def test_a_worker_that_raised_and_was_then_stopped_is_shown_with_its_exception() -> None:
    name, raised = RAISED
    stopped = raised | {"signal": "SIGTERM", "stopped": True}
    assert line(STARTED, RUNNING, (name, stopped)).endswith("| rank 0: ValueError: x")
    elsewhere = stopped | {"host": "b", "told_monotonic": 1.0}
    assert line(STARTED, RUNNING, (name, elsewhere)).endswith("| rank 0 on host b: ValueError: x")


def test_incidents_of_other_nodes_are_shown() -> None:
    lost = ("regrow.round.ended", {"why": "its connection broke", "node": "n2"})
    assert line(STARTED, RUNNING, lost).endswith("| its connection broke")
    assert line(STARTED, RUNNING, KILLED, lost).endswith("| rank 1: SIGKILL")
    gathering = ("regrow.job.gathering", {"waiting": 2, "delay_s": 1.0})
    assert line(STARTED, RUNNING, gathering).endswith("| 2 nodes waiting to join")
    cut_off = ("regrow.rendezvous.lost", {"why": "no reply"})
    assert line(STARTED, RUNNING, cut_off).endswith("| no reply")


def test_a_back_off_is_shown_with_its_length() -> None:
    shown = line(STARTED, ("regrow.job.restarting", {"delay_s": 8.2, "reason": "crash loop"}))
    assert "restarting in 8 s" in shown
    assert "crash loop" in shown


def test_the_first_step_after_a_restart_is_shown_for_a_while() -> None:
    step = ("regrow.worker.first_step", {"rank": 0, "step": 41, "monotonic": 160.0})
    assert "step" not in line(STARTED, RUNNING, step)
    resumed = (STARTED, RUNNING, KILLED, ENDED, RESTARTING, AGAIN, step)
    assert line(*resumed, now=165.0).endswith("| 1 restart | rank 0 continued with step 41")
    assert line(*resumed, now=500.0).endswith("| 1 restart")


def test_an_incident_after_that_first_step_stays() -> None:
    step = ("regrow.worker.first_step", {"rank": 0, "step": 41, "monotonic": 160.0})
    shown = line(STARTED, RUNNING, KILLED, ENDED, RESTARTING, AGAIN, step, KILLED, now=500.0)
    assert shown.endswith("| rank 1: SIGKILL")


def test_a_suspended_worker_is_shown_until_it_is_resumed() -> None:
    halted = ("regrow.worker.suspended", {"rank": 1, "signal": "SIGSTOP"})
    resumed = ("regrow.worker.resumed", {"rank": 1, "signal": "SIGCONT"})
    assert "1 paused | rank 1 is paused by SIGSTOP" in line(STARTED, RUNNING, halted)
    assert "1 paused" not in line(STARTED, RUNNING, halted, resumed)


def test_the_end_is_shown() -> None:
    assert "regrow: failed" in line(STARTED, ("regrow.job.finished", {"state": "FAILED"}))


def test_unknown_events_change_nothing() -> None:
    assert after(STARTED, ("torchelastic.worker.status.FAILED", {})) == after(STARTED)


@pytest.mark.parametrize(
    ("seconds", "clock"), [(0, "00:00"), (59.9, "00:59"), (3599, "59:59"), (90061, "25:01:01")]
)
def test_the_time_is_a_clock(seconds: float, clock: str) -> None:
    assert f"| {clock}" in line(STARTED, now=100.0 + seconds)


@given(st.text(), st.integers(0, 200))
def test_the_line_is_plain_and_fits_for_every_message(message: str, width: int) -> None:
    failed = ("regrow.worker.failed", {"rank": 0, "signal": None, "message": message})
    shown = line(STARTED, RUNNING, failed, width=width)
    assert len(shown) <= width
    assert shown.isascii()
    assert shown.isprintable()


def test_a_lost_worker_and_an_in_process_restart_are_shown() -> None:
    lost = ("regrow.inprocess.lost", {"rank": 1})
    assert "1/1 alive" in line(STARTED, RUNNING, lost)
    assert line(STARTED, RUNNING, lost).endswith(" | rank 1 is lost; the others continue")
    restarted = ("regrow.inprocess.restarted", {"kind": "TERMINATED"})
    assert line(STARTED, RUNNING, lost, restarted).endswith("in-process restart after TERMINATED")


def test_the_memory_of_the_template_and_of_the_standbys_is_shown() -> None:
    def ready(kind: str, pid: int) -> tuple[str, dict[str, Any]]:
        return f"regrow.{kind}.ready", {"pid": pid, "resident_bytes": 250_000_000}

    all_ready = STARTED, RUNNING, ready("template", 7), ready("standby", 8), ready("standby", 9)
    assert line(*all_ready).endswith(" | template 250 MB | 2 standbys 500 MB")
    replaced = ("regrow.worker.replaced", {"rank": 1, "pid": 9})
    assert line(*all_ready, replaced).endswith(" | template 250 MB | standby 250 MB")
    assert line(*all_ready, ENDED).endswith(" | template 250 MB")
    assert "MB" not in line(*all_ready, ENDED, ("regrow.template.gone", {"pid": 7}))
