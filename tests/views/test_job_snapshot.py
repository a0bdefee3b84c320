"""What the views show of a job: states, steps, restarts; and logs in any condition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.explained.record import STORIES, stories
from helpers.views.written_job import WrittenJob
from regrow.events import read_events
from regrow.explain import explain
from regrow.ledger import build_ledgers
from regrow.views import JobWatch, Library, Snapshot, snapshot
from regrow.views.job_snapshot import Source
from regrow.views.runs import OPEN_S


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WrittenJob]:
    written = WrittenJob(tmp_path)
    yield written
    written.close()


def watch(runs: Path) -> JobWatch:
    library = Library([str(runs)])
    (found,) = library.jobs()
    return JobWatch(library, found)


def seen(runs: Path) -> Snapshot:
    return watch(runs).snapshot()


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_a_job_waits_until_its_workers_run(job: WrittenJob, tmp_path: Path) -> None:
    assert (seen(tmp_path).state, seen(tmp_path).ranks) == ("waiting", ())
    job.start()
    found = seen(tmp_path)
    assert (found.state, found.attempt, found.world_size) == ("running", 0, 2)
    assert [(rank.rank, rank.state, rank.step) for rank in found.ranks] == [
        (0, "running", None),
        (1, "running", None),
    ]


def test_steps_come_from_the_page_and_show_which_rank_is_behind(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    job.step(0, 11)
    job.step(1, 7)
    found = seen(tmp_path)
    assert (found.step, [rank.behind for rank in found.ranks]) == (11, [0, 4])
    assert all(rank.step_age_s is not None and rank.step_age_s < 30 for rank in found.ranks)
    assert all(rank.pace is not None and rank.pace > 0 for rank in found.ranks)


@pytest.mark.parametrize(("steps", "late"), [(1001, True), (21, True), (3, False)])
def test_a_rank_that_makes_no_more_steps_has_no_pace(
    job: WrittenJob, tmp_path: Path, steps: int, late: bool
) -> None:
    job.start()
    job.begun -= 120
    for rank in range(2):
        job.step(rank, steps, ago=20 + rank)
    found = seen(tmp_path)
    assert [rank.pace == 0 for rank in found.ranks] == [late, late]
    assert (found.pace == 0, found.state) == (late, "running")
    assert found.step_age_s == found.ranks[0].step_age_s


def test_a_watch_follows_a_job_through_a_restart(job: WrittenJob, tmp_path: Path) -> None:
    job.start()
    follows = watch(tmp_path)
    job.step(0, 20)
    assert follows.snapshot().step == 20
    job.fail(1, "RuntimeError: loss is NaN")
    assert follows.snapshot().state == "stopping"
    assert [rank.state for rank in follows.snapshot().ranks] == ["stopped", "failed"]
    assert follows.snapshot().step == 20
    job.emit("job.restarting", restart_count=1, restarts_left=2, delay_s=0, reason="failed")
    assert (follows.snapshot().state, follows.snapshot().restarts_left) == ("restarting", 2)
    job.emit("attempt.ended", state="STOPPED", reason="stopped")
    assert follows.snapshot().state == "restarting", "while the next round forms"
    job.start()
    job.step(0, 12, first=11)
    job.emit("worker.first_step", rank=0, local_rank=0, step=11, step_monotonic=job.begun)
    found = follows.snapshot()
    assert (found.state, found.attempt, found.step) == ("running", 1, 12)
    (restart,) = found.restarts
    assert (restart.rung, restart.cause, restart.rank) == (3, "exception", 1)
    assert [name for name, _ in restart.phases] == ["detected", "restarted", "first step"]
    assert restart.lost_steps == found.lost_steps == 10
    assert "loss is NaN" in restart.what
    follows.close()


def test_a_rank_that_raised_and_was_then_stopped_is_shown_with_its_exception(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    job.fail(1, "ValueError: x", exit_code=-15, signal="SIGTERM", stopped=True)
    found = seen(tmp_path)
    assert (found.ranks[1].what, found.nodes[0].incident) == (
        "ValueError: x",
        "rank 1: ValueError: x",
    )


def test_a_job_whose_agent_is_gone_was_killed(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, pid=ended_pid())
    job.start()
    found = seen(tmp_path)
    assert (found.state, found.is_over) == ("killed", True)
    assert {rank.state for rank in found.ranks} == {"unknown"}
    job.close()


def test_a_killed_job_reached_at_least_the_steps_that_its_log_shows(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, 3, pid=ended_pid())
    job.start()
    for rank, step in enumerate((1461, 1461, 1460)):
        job.emit("worker.first_step", rank=rank, local_rank=rank, step=step, step_monotonic=1.0)
    accounts = {
        "0": {"highest_step": 1500, "counts": {"first_step": 1, "steps": 39}},
        "1": {"highest_step": 1560, "counts": {"first_repeated_step": 1, "repeated_steps": 9}},
    }
    job.emit("worker.accounts", accounts=accounts)
    job.close()  # as the kernel does when the agent is killed
    found = seen(tmp_path)
    assert [(rank.step, rank.step_is_minimum) for rank in found.ranks] == [
        (1500, True),
        (1461, True),  # the job had reached step 1560 before this attempt
        (1460, True),
    ]
    assert (found.step, found.step_is_minimum, found.state) == (1500, True, "killed")
    assert [rank.behind for rank in found.ranks] == [0, 0, 0]


def test_a_first_step_may_stand_before_the_start_of_its_attempt(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, pid=ended_pid())
    job.start()
    fields = {"local_rank": 1, "step_monotonic": 1.0}
    job.emit("worker.first_step", rank=0, step=1, **fields)
    job.end("FAILED")
    job.emit("worker.first_step", rank=1, step=7, **fields, attempt=1)
    job.start()
    job.close()
    assert [(rank.step, rank.step_is_minimum) for rank in seen(tmp_path).ranks] == [
        (None, False),
        (7, True),
    ]


def test_a_first_step_before_the_start_of_its_attempt_changes_no_step_of_the_attempt_before(
    tmp_path: Path,
) -> None:
    job = WrittenJob(tmp_path, pid=ended_pid())
    job.start()
    job.step(0, 50)
    job.step(1, 50)
    job.end("FAILED")
    fields = {"local_rank": 0, "step_monotonic": 1.0}
    job.emit("worker.first_step", rank=0, step=41, **fields, attempt=1)
    ranks = seen(tmp_path).ranks
    assert [(rank.step, rank.step_is_minimum) for rank in ranks] == [(50, False), (50, False)]


def test_the_age_of_a_step_that_is_out_of_reach_is_unknown(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, host="elsewhere")
    job.start()
    job.emit("worker.first_step", rank=0, local_rank=0, step=1, step_monotonic=1.0)
    found = seen(tmp_path)
    assert (found.step, found.step_is_minimum, found.step_age_s) == (1, True, None)
    job.close()


def test_a_process_with_the_same_id_is_not_the_agent(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    log = job.directory / "events.jsonl"
    event = json.loads(log.read_text())
    event["agent"]["start_ticks"] -= 1
    log.write_text(json.dumps(event) + "\n")
    assert seen(tmp_path).state == "killed"


def test_a_log_of_another_host_without_an_end_may_be_of_a_running_job(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path, host="elsewhere")
    job.start()
    job.step(0, 5)
    found = seen(tmp_path)
    assert (found.state, found.is_over, found.nodes[0].alive) == ("running", False, None)
    assert found.step is None  # its page is out of reach
    job.close()


def of_two_hosts(runs: Path, state: str, *, ago: float) -> Snapshot:
    """Return a job: a host has reported an end, and the log of another one ended `ago` s ago."""
    first, second = WrittenJob(runs, [0], host="a"), WrittenJob(runs, [1], host="b")
    for job in (first, second):
        job.start(world_size=2)
        job.close()
    first.end(state)
    first.finish(state)
    log = second.directory / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        event["time"] -= ago
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    return seen(runs)


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "STOPPED"])
def test_a_job_is_over_if_a_host_reported_its_end_and_another_log_just_ends(
    tmp_path: Path, state: str
) -> None:
    found = of_two_hosts(tmp_path, state, ago=OPEN_S)
    assert (found.state, found.is_over) == (state.lower(), True)
    assert [node.state for node in found.nodes] == ["unknown", state.lower()]
    assert found.duration_s is not None
    assert found.duration_s < OPEN_S, "until the end"
    assert {rank.rank: rank.state for rank in found.ranks}[1] == "unknown"


@pytest.mark.parametrize(("state", "ago"), [("SUCCEEDED", 0.0), ("SIGNALED", OPEN_S)])
def test_a_job_runs_on_if_a_host_may_have_left_or_may_report_its_end_yet(
    tmp_path: Path, state: str, ago: float
) -> None:
    found = of_two_hosts(tmp_path, state, ago=ago)
    assert (found.state, found.is_over) == ("running", False)


def of_two_agents(
    state: str, *, ended_s: float, silent_s: float, round_of_other: int = 1, **started: Any
) -> Snapshot:
    """Return an elastic job with a lease of 3 s and a shutdown timeout of 600 s.

    Args:
        state: how its first agent ended, in round 1.
        ended_s: seconds since that end.
        silent_s: seconds since the last event of its second agent, which recorded no end.
        round_of_other: the latest round of the second agent.
        started: further fields of the start of the job.
    """
    recorded = logs_of("host-lost")["host0.jsonl"][0]
    settings = {**recorded["settings"], "shutdown_timeout": 600}

    def log(rank: int, round_number: int, after_s: float, *last: dict[str, Any]) -> Source:
        events = [
            {**recorded, "settings": settings, **started},
            {"name": "regrow.rendezvous.completed", "round": round_number},
            {"name": "regrow.attempt.started", "attempt": round_number - 1, "ranks": [rank]},
            *last,
        ]
        common = {"time": 1000.0, "monotonic": 1000.0, "host": f"host{rank}"}
        events = [event | common for event in events]
        return Source(name=f"{rank}", events=events, alive=None, now=1000.0 + after_s)

    end = {"name": "regrow.job.finished", "state": state, "signal": "SIGTERM"}
    return snapshot([log(0, 1, ended_s, end), log(1, round_of_other, silent_s)])


FIXED = {"nnodes": 2, "settings": {}, "bounds": {}}


@pytest.mark.parametrize("state", ["SIGNALED", "ERROR"])
@pytest.mark.parametrize(("started", "after_s"), [(FIXED, OPEN_S), ({}, 603.0)])
def test_a_job_is_over_if_no_node_went_on_after_the_signal_or_the_error_of_one(
    state: str, started: dict[str, Any], after_s: float
) -> None:
    found = of_two_agents(state, ended_s=after_s, silent_s=after_s, **started)
    assert (found.state, found.is_over) == (state.lower(), True)
    assert [node.state for node in found.nodes] == [state.lower(), "unknown"]
    assert {rank.rank: rank.state for rank in found.ranks}[1] == "unknown"


@pytest.mark.parametrize("state", ["SIGNALED", "ERROR"])
@pytest.mark.parametrize("fields", [{}, {"nnodes": 2}, FIXED])
def test_a_node_in_a_later_round_went_on_after_the_signal_or_the_error_of_one(
    state: str, fields: dict[str, Any]
) -> None:
    found = of_two_agents(state, ended_s=9999, silent_s=9999, round_of_other=2, **fields)
    assert (found.state, found.is_over) == ("running", False)


@pytest.mark.parametrize(("ended_s", "silent_s"), [(602.0, 9999.0), (9999.0, 602.0)])
@pytest.mark.parametrize("fields", [{}, {"nnodes": 2}])
def test_a_node_may_go_on_or_save_for_the_lease_and_the_shutdown_timeout(
    ended_s: float, silent_s: float, fields: dict[str, Any]
) -> None:
    found = of_two_agents("SIGNALED", ended_s=ended_s, silent_s=silent_s, **fields)
    assert (found.state, found.is_over) == ("running", False)


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "STOPPED", "SIGNALED", "ERROR"])
def test_an_agent_that_recorded_its_end_was_not_killed(
    job: WrittenJob, tmp_path: Path, state: str
) -> None:
    job.start()
    job.end("SUCCEEDED")
    job.finish(state)
    found = seen(tmp_path)
    assert (found.state, found.nodes[0].state, found.is_over) == (*[state.lower()] * 2, True)


def test_a_finished_job_keeps_its_last_steps(job: WrittenJob, tmp_path: Path) -> None:
    job.start()
    job.step(0, 30)
    job.step(1, 29)
    job.end("SUCCEEDED")
    job.finish("SUCCEEDED")
    found = seen(tmp_path)
    assert (found.state, found.is_over, found.step) == ("succeeded", True, 30)
    assert not found.step_is_minimum
    assert [(rank.state, rank.step) for rank in found.ranks] == [
        ("succeeded", 30),
        ("succeeded", 29),
    ]


def test_the_hosts_of_a_job_are_one_job(tmp_path: Path) -> None:
    jobs = [WrittenJob(tmp_path, [0, 1]), WrittenJob(tmp_path, [2, 3], host="other")]
    for job in jobs:
        job.start(world_size=4)
    found = seen(tmp_path)
    assert [node.host for node in found.nodes] == [os.uname().nodename, "other"]
    assert [(rank.rank, rank.node) for rank in found.ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for job in jobs:
        job.close()


def test_the_latest_incident_of_a_node_names_the_host_that_was_lost(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    job.emit("round.ended", node="10.0.0.3/12/ab1/nodeC", why="its connection broke", lost=True)
    assert seen(tmp_path).nodes[0].incident == "host nodeC: its connection broke"
    job.emit("rendezvous.lost", why="the store cannot be reached")
    assert seen(tmp_path).nodes[0].incident == "the store cannot be reached"


def test_a_host_that_joins_later_is_found(job: WrittenJob, tmp_path: Path) -> None:
    from regrow.views.watch import SEARCH_S

    follows = watch(tmp_path)
    WrittenJob(tmp_path, [2, 3], host="other")
    deadline = time.monotonic() + SEARCH_S + 30
    while len(follows.snapshot().nodes) < 2:
        assert time.monotonic() < deadline


def test_in_process_restarts_and_replaced_processes_are_on_the_lower_rungs(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    common: dict[str, Any] = {"world_size": 2, "active_world_size": 2, "lost": [], "faults": 1}
    job.emit(
        "inprocess.restarted",
        **common,
        iteration=1,
        kind="exception",
        rank=0,
        message="ValueError: x",
        replaced=[],
        seconds={"all ranks stopped": 0.001, "restarted": 0.002},
    )
    job.emit("worker.vacated", rank=1, pid=1001, how="by SIGKILL", last_step=3, incarnation=0)
    assert [rank.state for rank in seen(tmp_path).ranks] == ["running", "replacing"]
    job.emit("worker.replaced", rank=1, pid=77, started_from="exec", incarnation=1, restarts_left=2)
    job.emit(
        "inprocess.restarted",
        **common,
        iteration=2,
        kind="lost",
        rank=1,
        message="it ended",
        replaced=[1],
        seconds={"restarted": 0.001},
    )
    found = seen(tmp_path)
    assert [(restart.rung, restart.phases[-1][1]) for restart in found.restarts] == [
        (1, 0.002),
        (2, 0.001),
    ]
    assert (found.ranks[1].pid, found.ranks[1].replaced, found.ranks[1].state) == (77, 1, "running")
    assert found.restarts_left == 2


def test_a_restart_of_a_rank_that_hung_begins_with_its_last_sign_of_life(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    job.emit(
        "inprocess.restarted",
        iteration=1,
        kind="SOFT_TIMEOUT",
        rank=1,
        message="no automatic progress for 4 s, at train.py:7 in load",
        replaced=[],
        seconds={"detected": 0.0, "called": 0.5},
    )
    (restart,) = seen(tmp_path).restarts
    assert restart.phases == (("detected", 4.0), ("called", 4.5))
    written = json.loads((job.directory / "events.jsonl").read_text().splitlines()[-1])
    assert restart.time == pytest.approx(written["time"] - 4.5)


def test_steps_that_were_done_again_after_in_process_restarts_are_counted(
    job: WrittenJob, tmp_path: Path
) -> None:
    job.start()
    job.emit("worker.first_step", rank=0, local_rank=0, step=1, step_monotonic=1.0)

    def restarted(iteration: int, repeated: int) -> None:
        job.emit(
            "inprocess.restarted",
            iteration=iteration,
            kind="EXCEPTION",
            rank=1,
            message="ValueError: x",
            replaced=[],
            seconds={"restarted": 0.001},
            last_step=20,
            repeated_steps=repeated,
        )

    def booked(*repeated: int) -> dict[str, Any]:
        counts = [{"first_repeated_step": 1, "repeated_steps": n - 1, "steps": 9} for n in repeated]
        return {str(rank): {"counts": each} for rank, each in enumerate(counts)}

    def lost() -> int:
        return seen(tmp_path).lost_steps

    restarted(1, 2)  # they were done again after the restart
    job.emit("worker.accounts", accounts=booked(10, 8))
    assert lost() == 10
    restarted(2, 12)
    assert lost() == 12
    job.emit("worker.vacated", rank=1, how="by SIGKILL", account=booked(15)["0"])
    assert lost() == 15
    restarted(3, 13)
    job.emit("attempt.ended", state="STOPPED", accounts=booked(17, 4))
    assert lost() == 15 + 4, "rank 1, with the process that was replaced"
    job.start()
    restarted(1, 5)  # lost by the attempt before
    job.emit("worker.accounts", accounts=booked(7, 11))
    assert lost() == 19 + 6


def test_steps_done_again_count_once_if_rank_0_moves_to_another_host(tmp_path: Path) -> None:
    first, second = WrittenJob(tmp_path, [0], host="a"), WrittenJob(tmp_path, [1], host="b")

    def restarted(host: WrittenJob, iteration: int, repeated: int) -> None:
        cause = {"kind": "LOST", "rank": 0, "seconds": {"restarted": 0.001}}
        host.emit("inprocess.restarted", iteration=iteration, repeated_steps=repeated, **cause)

    def ended(host: WrittenJob, repeated: int) -> None:
        account = {"counts": {"repeated_steps": repeated}}
        host.emit("attempt.ended", state="STOPPED", accounts={str(host.ranks[0]): account})

    for before, again, total in ((0, 10, 10), (5, 6, 16)):  # `before`: lost by another attempt
        first.start(world_size=2)
        second.start(world_size=2)
        restarted(first, 1, before)
        ended(first, before + 4)
        restarted(second, 2, before + 4)
        ended(second, before + again)
        assert seen(tmp_path).lost_steps == total
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("event", "fields", "state"),
    [
        ("worker.suspended", {"signal": "SIGSTOP"}, "suspended"),
        ("timer.expired", {"signal": "SIGKILL", "stood": "train.py:3"}, "hung"),
        ("heartbeat.stalled", {"message": "at step 3"}, "stalled"),
        ("inprocess.lost", {}, "lost"),
    ],
)
def test_a_rank_that_does_not_train_has_another_state(
    job: WrittenJob, tmp_path: Path, event: str, fields: dict[str, Any], state: str
) -> None:
    job.start()
    job.emit(event, rank=1, local_rank=1, pid=1001, **fields)
    assert [rank.state for rank in seen(tmp_path).ranks] == ["running", state]


NAMES = [
    *("job.started", "rendezvous.completed", "attempt.started", "attempt.ended", "job.restarting"),
    *("worker.failed", "worker.suspended", "worker.resumed", "timer.expired", "worker.vacated"),
    *("heartbeat.stalled", "inprocess.lost", "inprocess.restarted", "worker.replaced"),
    *("worker.first_step", "round.ended", "rendezvous.lost", "job.stopping", "job.finished", "x"),
    "worker.accounts",
]
FIELDS = [
    *("time", "monotonic", "rank", "attempt", "round", "ranks", "pids", "kept", "state", "page"),
    *("last_steps", "reason", "signal", "message", "command", "agent", "step", "step_monotonic"),
    *("incarnation", "restarts_left", "iteration", "seconds", "replaced", "why", "host", "kind"),
    *("accounts", "repeated_steps"),
]
KEYS = ["0", "1", "last_step", "pid", "fd", "counts", "steps", "highest_step", "repeated_steps"]
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.integers(),
        st.floats(),
        st.sampled_from(["FAILED", "SUCCEEDED", "0", "1", ""]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    ),
    max_leaves=5,
)
EVENTS = st.lists(
    st.builds(
        lambda name, fields: {"name": f"regrow.{name}", **fields},
        st.sampled_from(NAMES),
        st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    ),
    max_size=12,
)


@given(EVENTS, EVENTS)
def test_fields_of_any_type_never_raise(
    events: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    sources = [
        Source(name="a", events=events, alive=True, now=5.0),
        Source(name="b", events=others, alive=None, now=None),
    ]
    json.dumps(snapshot(sources).to_json())


def logs_of(story: str) -> dict[str, list[dict[str, Any]]]:
    return {log.name: list(read_events(log)) for log in (STORIES / story).glob("*.jsonl")}


def sources_of(logs: dict[str, list[dict[str, Any]]]) -> list[Source]:
    return [Source(name=log, events=events, alive=None, now=None) for log, events in logs.items()]


NO_RESTARTS = ("server", "stop")
NO_RESTART_IN_TIME = "rung 2 (one new process) was tried"
# explain has one page about the lost rendezvous, not one about a worker that its guardian killed.
WITHOUT_A_RENDEZVOUS = "rendezvous-lost"


@pytest.mark.parametrize("name", sorted({*stories()} - {WITHOUT_A_RENDEZVOUS}))
def test_the_views_name_the_causes_that_explain_names(name: str) -> None:
    logs = logs_of(name)
    (explained,) = explain(logs).values()
    expected = [
        (each.cause, each.rank)
        for each in explained
        if each.cause not in NO_RESTARTS and not each.outcome.startswith(NO_RESTART_IN_TIME)
    ]
    assert [(each.cause, each.rank) for each in snapshot(sources_of(logs)).restarts] == expected


@pytest.mark.parametrize("name", ["sigstop-heartbeat", "hang-timer", "host-lost", "sigkill"])
def test_a_recovery_lasts_as_long_as_in_its_explanation(name: str) -> None:
    logs = logs_of(name)
    (restart,) = snapshot(sources_of(logs)).restarts
    ((explained,),) = explain(logs).values()
    startup = next(phase for phase in explained.timeline if phase.name == "startup")
    # The views count up to the end of the first step.
    assert restart.phases[-1][0] == "first step"
    assert 0 <= restart.phases[-1][1] - startup.end_s < 0.06
    assert restart.time == pytest.approx(explained.time, abs=0.06)


@pytest.mark.parametrize("name", sorted(stories()))
def test_the_views_count_the_lost_steps_that_the_ledger_counts(name: str) -> None:
    logs = logs_of(name)
    (ledger,) = build_ledgers(logs)
    assert snapshot(sources_of(logs)).lost_steps == ledger.redone_steps
