"""`Wrapper(replace=True)` under an agent: another process takes the place of a lost rank.

The ranks are plain processes, except in the tests marked `training`. `Training.end` checks in every
job that no process is left, that no two processes had one rank at the same time, and that the
processes of a rank have the same RANK, LOCAL_RANK and WORLD_SIZE.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.replacing import SCRIPT, SIZE, Act, Call, Launch, Training
from helpers.processes import children_of, state_of, wait_until

NO_RESTARTS = "no restarts are left (--max-restarts)"
BEFORE_ITS_FIRST_STEP = "it replaced another process, and ended before its first step (regrow.step)"


@pytest.fixture
def start(launch: Launch, tmp_path: Path) -> Callable[..., Training]:
    """Return a function that starts a job; see `Training`."""

    def start(*flags: str, **more: object) -> Training:
        return Training(launch, tmp_path, *flags, **more)  # type: ignore[arg-type]

    return start


Start = Callable[..., Training]


def same_ranks(calls: dict[int, Call]) -> None:
    """Assert that every rank has the number that it had at the start."""
    assert {each.initial_rank: each.rank for each in calls.values()} == {
        rank: rank for rank in range(len(calls))
    }


def same_processes(before: dict[int, Call], after: dict[int, Call], *but: int) -> None:
    """Assert that all ranks but some are in the same processes as before."""
    changed = {rank for rank, call in after.items() if call.pid != before[rank].pid}
    assert changed == set(but)


def all_returned(training: Training, **incarnations: int) -> None:
    """Assert that the function returned on all ranks in the first attempt."""
    expected = {rank: (0, incarnations.get(f"rank_{rank}", 0)) for rank in range(training.size)}
    assert training.results() == expected, training.job.output
    assert training.attempts == 1, training.job.output


# --- one rank, several ranks, one after the other


@pytest.mark.parametrize(
    "rank",
    [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.thorough)],
)
def test_another_process_takes_the_place_of_a_killed_rank(start: Start, rank: int) -> None:
    training = start("--max-restarts=1")
    before = training.await_all()
    training.kill(before, rank)
    after = training.await_all(**{f"rank_{rank}": 1})
    same_ranks(after)
    same_processes(before, after, rank)
    assert {each.initial_rank: each.joined for each in after.values()} == {
        each: each == rank for each in range(SIZE)
    }
    assert {each.replaced for each in after.values()} == {(rank,)}
    assert training.finish() == 0, training.job.output
    all_returned(training, **{f"rank_{rank}": 1})
    assert training.events("vacated") == [(rank, 0)]
    assert training.events("replaced") == [(rank, 1)]
    assert training.events("not_replaced") == []
    (vacated,) = training.job.events("worker.vacated")
    assert (vacated["pid"], vacated["exitcode"]) == (before[rank].pid, -signal.SIGKILL)
    assert vacated["last_step"] == 0


def test_two_ranks_are_replaced_at_once(start: Start) -> None:
    training = start("--max-restarts=2")
    before = training.await_all()
    training.kill(before, 0, 2)
    after = training.await_all(rank_0=1, rank_2=1)
    same_ranks(after)
    same_processes(before, after, 0, 2)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_0=1, rank_2=1)
    assert training.events("replaced") == [(0, 1), (2, 1)]


@pytest.mark.thorough
def test_a_rank_is_replaced_again_after_its_first_step(start: Start) -> None:
    training = start("--max-restarts=3")
    calls = training.await_all()
    for incarnation in (1, 2, 3):
        training.kill(calls, 1)
        calls = training.await_all(rank_1=incarnation)
        same_ranks(calls)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_1=3)
    assert training.events("vacated") == [(1, 0), (1, 1), (1, 2)]


def test_a_rank_that_dies_while_another_is_replaced_is_replaced_too(start: Start) -> None:
    """The replacement of rank 1 waits in its import until rank 2 has been killed."""
    training = start("--max-restarts=2", acts=[Act(1, 1, "import", -1, "stop")])
    before = training.await_all()
    training.kill(before, 1)
    training.await_start(1, 1)
    training.kill(before, 2)
    training.await_start(2, 1)
    resume(training, 1)
    after = training.await_all(rank_1=1, rank_2=1)
    same_ranks(after)
    same_processes(before, after, 1, 2)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_1=1, rank_2=1)


# --- the end of a replacement before its first step


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("kill", "import"),
        pytest.param("raise", "import", marks=pytest.mark.thorough),
        pytest.param("exit 1", "import", marks=pytest.mark.thorough),
        pytest.param("_exit 0", "import", marks=pytest.mark.thorough),
        pytest.param("unhealthy", "check", marks=pytest.mark.thorough),
    ],
)
def test_a_replacement_that_ends_before_its_first_step_ends_the_attempt(
    start: Start, how: str, place: str
) -> None:
    places = ("first check", "check after a fault") if place == "check" else (place,)
    training = start("--max-restarts=2", acts=[Act(2, 1, each, -1, how) for each in places])
    before = training.await_all()
    training.kill(before, 2)
    again = training.await_calls(dict.fromkeys(range(SIZE), 0), attempt=1)
    same_ranks(again)
    same_processes(before, again, *range(SIZE))
    assert training.finish() == 0, training.job.output
    assert training.attempts == 2, training.job.output
    assert training.results() == dict.fromkeys(range(SIZE), (1, 0))
    assert training.events("replaced") == [(2, 1)]
    failed = {(event["rank"], event["attempt"]) for event in training.job.events("worker.failed")}
    assert failed == {(2, 0)}


@pytest.mark.thorough
def test_a_replacement_that_is_killed_while_it_waits_to_join_ends_the_attempt(start: Start) -> None:
    """Rank 3 stays in its health check, so the replacement of rank 2 waits for the meeting."""
    training = start(
        "--max-restarts=2",
        acts=[
            Act(3, 0, "check after a fault", -1, "block"),
            Act(2, 1, "before the call", -1, "die soon"),
        ],
        timeouts={"hard_timeout": 20.0, "barrier_timeout": 40.0},
    )
    before = training.await_all()
    training.kill(before, 2)
    training.await_calls(dict.fromkeys(range(SIZE), 0), attempt=1)
    assert training.finish() == 0, training.job.output
    assert training.attempts == 2
    assert {call.attempt for call in training.calls() if call.iteration} == set()


@pytest.mark.thorough
def test_a_rank_without_steps_is_replaced_once(start: Start) -> None:
    training = start("--max-restarts=5", env={"NO_STEPS": "1"})
    before = training.await_all()
    training.kill(before, 1)
    after = training.await_all(rank_1=1)
    training.kill(after, 1)
    training.await_calls(dict.fromkeys(range(SIZE), 0), attempt=1)
    assert training.finish() == 0, training.job.output
    assert training.attempts == 2


# --- ways to end


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("exit 1", 1, marks=pytest.mark.thorough),
        pytest.param("leave", 1, marks=pytest.mark.thorough),
        ("replace me", 1),
        pytest.param("stop", None, marks=pytest.mark.thorough),
        pytest.param("hold", None, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_is_replaced_however_it_ends(start: Start, how: str, code: int | None) -> None:
    training = start("--max-restarts=1", acts=[Act(1, 0, "function", 0, how)])
    after = training.await_all(rank_1=1)
    same_ranks(after)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_1=1)
    (vacated,) = training.job.events("worker.vacated")
    assert vacated["rank"] == 1
    assert code is None or vacated["exitcode"] == code
    if how == "replace me":
        (restarted,) = training.job.events("inprocess.restarted")
        assert "this GPU is slow" in restarted["message"]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["stop", "hold"])
def test_the_monitor_also_ends_a_replacement_that_hangs(start: Start, how: str) -> None:
    training = start("--max-restarts=2", acts=[Act(1, 1, "function", -1, how)])
    training.kill(training.await_all(), 1)
    after = training.await_all(rank_1=2)
    same_ranks(after)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_1=2)


@pytest.mark.thorough
def test_a_rank_that_fails_its_health_check_is_replaced(start: Start) -> None:
    """The health check after a fault of another rank fails on rank 1."""
    training = start("--max-restarts=2", acts=[Act(1, 0, "check after a fault", -1, "unhealthy")])
    before = training.await_all()
    training.kill(before, 3)
    after = training.await_all(rank_1=1, rank_3=1)
    same_ranks(after)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_1=1, rank_3=1)
    codes = {each["rank"]: each["exitcode"] for each in training.job.events("worker.vacated")}
    assert codes == {1: 1, 3: -signal.SIGKILL}
    assert "HealthCheckError" in training.job.stderr


def test_an_exit_with_0_in_the_function_is_not_replaced_and_ends_the_attempt(start: Start) -> None:
    training = start("--max-restarts=1", acts=[Act(1, 0, "function", 0, "_exit 0")])
    training.await_calls(dict.fromkeys(range(SIZE), 0), attempt=1)
    assert training.finish() == 0, training.job.output
    assert training.attempts == 2
    assert training.events("vacated") == []


@pytest.mark.thorough
def test_a_rank_that_dies_in_the_second_call_is_replaced_in_that_call(
    start: Start, tmp_path: Path
) -> None:
    training = start("--max-restarts=1", env={"CALLS": "first,finish"})
    before = training.await_all()
    (tmp_path / "first").touch()
    training.await_number_of_calls(2 * SIZE)
    training.kill(before, 2)
    after = training.await_all(rank_2=1)
    same_ranks(after)
    assert after[2].joined
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_2=1)


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [[], ["--heartbeat=0.5"]])
def test_a_rank_whose_script_starts_a_heartbeat_is_replaced(start: Start, flags: list[str]) -> None:
    """The heartbeat of the others ends with the loss; the replacement does not wait for them."""
    script = "from regrow import heartbeat\nheartbeat.start(0.5, start_timeout=20)\n" + SCRIPT
    training = start("--max-restarts=1", *flags, script=script)
    training.kill(training.await_all(), 2)
    training.await_all(rank_2=1)
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_2=1)


# --- no other process


def test_without_restarts_the_others_continue_at_once(start: Start) -> None:
    training = start("--max-restarts=0")
    before = training.await_all()
    training.kill(before, 0)
    after = training.await_calls({1: 0, 2: 0, 3: 0})
    same_processes(before, after)
    assert training.finish() == 0, training.job.output
    assert training.results() == dict.fromkeys((1, 2, 3), (0, 0))
    assert training.events("vacated") == []
    assert training.reasons() == [(0, NO_RESTARTS)]


def test_with_a_budget_of_one_the_second_death_is_not_replaced(start: Start) -> None:
    training = start("--max-restarts=1")
    before = training.await_all()
    training.kill(before, 1)
    after = training.await_all(rank_1=1)
    training.kill(after, 3)
    last = training.await_calls({0: 0, 1: 1, 2: 0})
    same_ranks(last)
    assert training.finish() == 0, training.job.output
    assert training.results() == {0: (0, 0), 1: (0, 1), 2: (0, 0)}
    assert training.events("replaced") == [(1, 1)]
    assert training.reasons() == [(3, NO_RESTARTS)]


@pytest.mark.thorough
def test_with_a_budget_of_one_only_one_of_two_deaths_at_once_is_replaced(start: Start) -> None:
    training = start("--max-restarts=1")
    before = training.await_all()
    training.kill(before, 1, 3)
    training.await_report(lambda each: each.what == "called" and each.words[2] == "3")
    assert training.finish() == 0, training.job.output
    assert training.attempts == 1
    assert len(training.results()) == 3
    assert len(training.events("replaced")) == len(training.reasons()) == 1


@pytest.mark.thorough
def test_a_wrapper_without_replace_is_not_replaced(start: Start) -> None:
    training = start("--max-restarts=3", env={"NOT_REPLACED": "1"})
    before = training.await_all()
    training.kill(before, 2)
    training.await_calls({0: 0, 1: 0, 3: 0})
    assert training.finish() == 0, training.job.output
    for kind in ("vacated", "replaced", "not_replaced"):
        assert training.events(kind) == []
    assert [event["rank"] for event in training.job.events("inprocess.lost")] == [2]


@pytest.mark.thorough
def test_a_replacement_that_is_too_slow_joins_in_the_next_restart(start: Start) -> None:
    training = start(
        "--max-restarts=2",
        acts=[Act(1, 1, "before the call", -1, "stop")],
        timeouts={"replace_timeout": 3.0},
    )
    training.kill(training.await_all(), 1)
    without = training.await_calls({0: 0, 2: 0, 3: 0})
    resume(training, 1)
    training.kill(without, 0)
    after = training.await_calls({1: 1, 2: 0, 3: 0})
    assert after[1].joined
    assert training.finish() == 0, training.job.output
    assert training.attempts == 1
    assert training.results().items() >= {1: (0, 1), 2: (0, 0), 3: (0, 0)}.items()


@pytest.mark.thorough
@pytest.mark.parametrize("joins", [True, False])
def test_a_replacement_that_is_too_slow_does_not_delay_the_end_of_the_others(
    start: Start, joins: bool
) -> None:
    """The replacement joins before the end of the call, or comes when the call is over."""
    training = start(
        "--max-restarts=1",
        acts=[Act(1, 1, "import", -1, "stop")],
        timeouts={"replace_timeout": 0.5},
    )
    training.kill(training.await_all(), 1)
    training.await_calls({0: 0, 2: 0, 3: 0})
    if joins:
        resume(training, 1)
    training.let_return()
    training.await_returns(0, 2, 3)
    if not joins:
        resume(training, 1)
    assert training.end() == 0, training.job.output
    assert training.attempts == 1
    assert training.results().keys() >= {0, 2, 3}


def resume(training: Training, rank: int) -> None:
    """Continue the first replacement of a rank, which has stopped itself."""
    pid = training.await_start(rank, 1)
    wait_until(lambda: state_of(pid) == "T", "the replacement is stopped")
    os.kill(pid, signal.SIGCONT)


# --- ranks in reserve


def test_a_reserve_rank_takes_over_and_the_replacement_becomes_the_reserve(start: Start) -> None:
    """Each replacement waits in its import until the reserve has taken over."""
    acts = [Act(rank, 1, "import", -1, "stop") for rank in (0, 1)]
    training = start("--max-restarts=2", env={"ACTIVE": "3"}, acts=acts)
    training.kill(training.await_calls({0: 0, 1: 0, 2: 0}), 1)
    active = training.await_calls({0: 0, 2: 0, 3: 0})
    assert training.await_start(1, 1)
    resume(training, 1)
    training.kill(active, 0)
    active = training.await_calls({1: 1, 2: 0, 3: 0})
    assert active[1].joined
    resume(training, 0)
    assert training.finish() == 0, training.job.output
    assert training.attempts == 1
    assert training.events("replaced") == [(0, 1), (1, 1)]


# --- the agent, the guardian, the template


@pytest.mark.thorough
def test_an_agent_that_gets_sigterm_while_a_place_is_vacant_ends(start: Start) -> None:
    """A child of rank 1 ignores SIGTERM, so that the place stays vacant for the grace."""
    training = start(
        "--max-restarts=1",
        "--shutdown-timeout=5",
        acts=[Act(1, 0, "function", 0, "leave a child")],
    )
    training.await_report(lambda each: each.what == "ignores")
    training.kill(training.await_all(), 1)
    training.job.await_event("worker.vacated")
    training.job.signal(signal.SIGTERM)
    assert training.end() == 128 + signal.SIGTERM, training.job.output
    assert training.events("replaced") == []


@pytest.mark.thorough
def test_an_agent_that_gets_sigterm_while_a_replacement_starts_ends(start: Start) -> None:
    training = start("--max-restarts=1", acts=[Act(1, 1, "import", -1, "stop")])
    before = training.await_all()
    training.kill(before, 1)
    training.await_start(1, 1)
    training.job.signal(signal.SIGTERM)
    assert training.end() == 128 + signal.SIGTERM, training.job.output


@pytest.mark.thorough
def test_the_loss_of_the_guardian_restarts_all_workers(start: Start) -> None:
    training = start("--max-restarts=2")
    before = training.await_all()
    training.kill(before, 1)
    training.await_all(rank_1=1)
    os.kill(guardian_of(training), signal.SIGKILL)
    training.await_calls(dict.fromkeys(range(SIZE), 0), attempt=1)
    assert training.finish() == 0, training.job.output
    assert training.results() == dict.fromkeys(range(SIZE), (1, 0))


@pytest.mark.thorough
def test_the_loss_of_the_guardian_while_a_rank_is_replaced_restarts_all_workers(
    start: Start,
) -> None:
    training = start("--max-restarts=2", acts=[Act(1, 1, "import", -1, "stop")])
    before = training.await_all()
    training.kill(before, 1)
    training.await_start(1, 1)
    os.kill(guardian_of(training), signal.SIGKILL)
    training.await_calls(dict.fromkeys(range(SIZE), 0), attempt=1)
    assert training.finish() == 0, training.job.output
    assert training.results() == dict.fromkeys(range(SIZE), (1, 0))


def guardian_of(training: Training) -> int:
    """Return the process id of the guardian of a job."""
    agent = training.job.process.pid
    return next(
        child
        for child in children_of(agent)
        if b"guardian" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [False, True])
def test_a_replacement_is_forked_from_the_template_if_there_is_one(
    start: Start, killed: bool
) -> None:
    training = start("--max-restarts=1", "--preload=decimal")
    before = training.await_all()
    template = training.job.await_event("template.ready")["pid"]
    if killed:
        os.kill(template, signal.SIGKILL)
        training.job.await_event("template.gone")
    training.kill(before, 0)
    after = training.await_all(rank_0=1)
    same_ranks(after)
    imported = training.await_report(lambda each: each.what == "imported" and each.incarnation == 1)
    assert imported.words == (("no",) if killed else ("yes",))
    restart = training.job.await_event("inprocess.restarted")
    source = "by a cold start" if killed else "from the template"
    assert restart["origins"][0].endswith(f"; pid {after[0].pid} started {source}")
    assert training.finish() == 0, training.job.output
    all_returned(training, rank_0=1)


# --- logs


@pytest.mark.parametrize(
    "flags", [["--redirects=3"], pytest.param(["--tee=3"], marks=pytest.mark.thorough)]
)
def test_the_lines_of_the_dead_and_of_the_new_process_are_in_one_file_in_order(
    start: Start, flags: list[str]
) -> None:
    training = start("--max-restarts=2", *flags)
    calls = training.await_all()
    for incarnation in (1, 2):
        training.kill(calls, 1)
        calls = training.await_all(rank_1=incarnation)
    assert training.finish() == 0, training.job.output
    lines = logged(training, 1)
    expected: list[str] = []
    for call in training.calls():
        if call.initial_rank == 1:
            if not expected or not expected[-1].startswith(
                f"rank 1 incarnation {call.incarnation} "
            ):
                expected.append(f"rank 1 incarnation {call.incarnation} starts")
            expected.append(f"rank 1 incarnation {call.incarnation} runs {call.iteration}")
    assert lines == [*expected, "rank 1 incarnation 2 returns"]
    if "--tee=3" in flags:
        shown = [line.partition("]:")[2] for line in training.job.stdout.splitlines()]
        assert [line for line in shown if line.startswith("rank 1 ")] == lines


@pytest.mark.thorough
@pytest.mark.parametrize("flag", ["--redirects=3", "--tee=3"])
def test_no_line_of_a_process_that_dies_in_a_flood_is_lost(start: Start, flag: str) -> None:
    acts = [Act(1, incarnation, "function", -1, "flood") for incarnation in (0, 1)]
    training = start("--max-restarts=2", flag, acts=acts)
    training.await_all(rank_1=2)
    assert training.finish() == 0, training.job.output
    flood = [f"line {n} of {incarnation}" for incarnation in (0, 1) for n in range(5000)]
    assert [line for line in logged(training, 1) if line.startswith("line ")] == flood
    if flag == "--tee=3":
        shown = [line.partition("]:")[2] for line in training.job.stdout.splitlines()]
        assert [line for line in shown if line.startswith("line ")] == flood


def logged(training: Training, rank: int) -> list[str]:
    """Return the lines in a rank's stdout.log."""
    (path,) = training.job.log_dir.glob(f"*/attempt_0/{rank}/stdout.log")
    return path.read_text().splitlines()
