"""The story of a job: its text, and that no content of a log makes it fail."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.stories import without_times
from regrow.events import Event, EventLog, EventSource, after_report, print_story, story

Line = dict[str, Any]
# On a busy machine an example may take any time.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def line(name: str, attempt: int, monotonic: float, **fields: Any) -> Line:
    common = {"source": "AGENT", "time": 1.7e9, "run_id": "7f3a", "round": attempt, "host": "foo"}
    return {
        "name": f"regrow.{name}",
        **common,
        "attempt": attempt,
        "monotonic": monotonic,
        **fields,
    }


def started(**fields: Any) -> Line:
    command = ["/usr/bin/python3", "-u", "examples/train_digits.py", "--epochs", "3"]
    defaults = {"command": command, "nnodes": "1:1", "nproc_per_node": 2, "max_restarts": 3}
    return line("job.started", 0, 100.0, **{**defaults, **fields})


def attempt(number: int, at: float, world_size: int = 2, **fields: Any) -> Line:
    return line("attempt.started", number, at, world_size=world_size, **fields)


def failed(number: int, at: float, **fields: Any) -> Line:
    defaults = {
        "rank": 1,
        "local_rank": 1,
        "pid": 4242,
        "exit_code": -9,
        "signal": "SIGKILL",
        "message": "Signal 9 (SIGKILL) received by PID 4242",
        "traceback": None,
        "error_file": None,
        "failed_monotonic": at,
        "detected_monotonic": at + 0.0004,
        "root_cause": True,
    }
    return line("worker.failed", number, at + 0.01, **{**defaults, **fields})


def raised(number: int, at: float, traceback: str, **fields: Any) -> Line:
    return failed(number, at, **{"exit_code": 1, "signal": None, "traceback": traceback, **fields})


def ended(number: int, at: float, state: str, first: int = 0, last: int = 0, **fields: Any) -> Line:
    steps = {
        "first_step": first,
        "first_monotonic": at - 10.0,
        "last_step": last,
        "last_monotonic": at - 0.1,
    }
    last_steps = {"0": steps, "1": steps} if last else {}
    return line("attempt.ended", number, at, state=state, last_steps=last_steps, **fields)


def stepped(number: int, at: float, step: int, rank: int = 0, **fields: Any) -> Line:
    return line(
        "worker.first_step", number, at + 0.01, rank=rank, step=step, step_monotonic=at, **fields
    )


def finished(number: int, at: float, state: str = "SUCCEEDED", **fields: Any) -> Line:
    return line("job.finished", number, at, **{"state": state, "duration_s": at - 100.0, **fields})


def recovered() -> list[Line]:
    """Two workers; one is killed at 110 s, which costs 17 steps."""
    return [
        started(),
        line("rendezvous.completed", 0, 100.01, group_world_size=1, world_size=2),
        attempt(0, 100.1),
        stepped(0, 101.0, 1),
        failed(0, 110.0),
        ended(0, 110.01, "FAILED", 1, 137),
        line("job.restarting", 0, 110.011, restart_count=1, restarts_left=2, delay_s=0),
        attempt(1, 110.0121),
        stepped(1, 112.31, 121),
        ended(1, 131.0, "SUCCEEDED", 121, 400),
        finished(1, 131.2, restarts=1, exit_code=0),
    ]


def rendered(lines: list[Line], width: int = 100) -> str:
    return without_times(story(lines).render(width + 15))


def test_the_story_of_a_killed_worker_gives_the_cause_and_the_four_figures() -> None:
    assert rendered(recovered()) == (
        "regrow: job 7f3a (train_digits.py, 2 workers on 1 node) "
        "SUCCEEDED after 31 s with 1 restart\n"
        "  failure 1 (attempt 0): rank 1 on host foo (pid 4242) was killed by SIGKILL\n"
        "    detected after   0.4 ms\n"
        "    restarted after  12 ms      (all 2 workers started again; 2 restarts left)\n"
        "    first step after 2.3 s      (rank 0 had made step 121)\n"
        "    work lost        17 steps   (step 137 reached, resumed from step 120; "
        "about 1.2 s the first\n                     time)\n"
        "  3.5 s of 31 s lost: detecting 0.4 ms, stopping 9.6 ms, starting 2.2 s, redoing steps "
        "1.2 s"
    )


@pytest.mark.parametrize(("other", "step"), [(400, " at step 400"), (399, "")])
def test_the_story_of_an_early_stop_names_the_step_that_all_ranks_have_reached(
    other: int, step: str
) -> None:
    reason = "all ranks stopped at the same step, by SIGTERM; run it again to go on"
    ends = ended(0, 131.0, "SUCCEEDED", 1, 400)
    ends["last_steps"]["1"] = ends["last_steps"]["0"] | {"last_step": other}
    stops = finished(0, 131.2, "STOPPED", restarts=0, exit_code=85, reason=reason)
    text = rendered([started(), attempt(0, 100.1), stepped(0, 101.0, 1), ends, stops], 200)
    assert text.partition("\n")[0].endswith(f"STOPPED (exit code 85) after 31 s{step}: {reason}")


def test_the_story_after_the_report_does_not_repeat_it() -> None:
    cause = {"exit_code": 1, "signal": None, "message": "KeyError: 'no such layer'"}
    lines = [started(max_restarts=0), attempt(0, 100.1)]
    lines += [failed(0, 110.0, error_file="/logs/0/1/error.json", **cause)]
    lines += [ended(0, 110.01, "FAILED"), finished(0, 111.0, state="FAILED", exit_code=1)]
    assert without_times(after_report(story(lines), 1, 4242).render(115)).splitlines()[1:] == [
        "  failure 1 (attempt 0): rank 1 on host foo (pid 4242) exited with code 1 (reported "
        "above)",
        "    detected after   0.4 ms",
        "    not restarted    no restarts allowed (--max-restarts=0)",
    ]


def test_the_story_names_the_failures_before_the_one_in_the_report() -> None:
    lines = [*recovered()[:-2], failed(1, 131.0, pid=7, exit_code=1, signal=None, message="late")]
    lines += [ended(1, 131.0, "FAILED", 121, 400), finished(1, 131.2, state="FAILED", exit_code=1)]
    earlier, _, last = without_times(after_report(story(lines), 1, 7).render(115)).partition(
        "ure 2"
    )
    assert earlier.endswith("\n  fail")
    assert "(pid 4242) was killed by SIGKILL\n" in earlier
    assert "(pid 7) exited with code 1 (reported above)\n" in last
    of_another = without_times(after_report(story(lines), 1, 4242).render(115))
    assert "(pid 7) exited with code 1: late\n" in of_another


def test_the_story_below_a_report_says_raised_of_a_worker_that_was_stopped_after_it() -> None:
    root = raised(0, 101.0, "ValueError: bad", pid=7, exit_code=-15, signal="SIGTERM", stopped=True)
    lines = [*recovered()[:4], root, *recovered()[5:]]
    text = without_times(after_report(story(lines), 1, 7).render(115))
    assert "rank 1 on host foo (pid 7) raised its exception (reported above)\n" in text
    assert "SIGTERM" not in text


def test_a_long_path_stays_on_the_line_of_its_label() -> None:
    path = "/logs/" + "x" * 100 + "/error.json"
    lines = [*recovered()[:4], failed(0, 110.0, error_file=path), *recovered()[5:]]
    assert f"    error file       {path}\n" in rendered(lines)


def test_a_number_and_its_unit_are_on_one_line() -> None:
    for width in range(60, 110):
        assert not re.search(r"^ +m?s\b", rendered(recovered(), width), re.MULTILINE), width


def test_the_figures_are_the_same_for_machines() -> None:
    data = json.loads(json.dumps(story(recovered()).to_json()))
    (failure,) = data["failures"]
    assert {key: data[key] for key in ("run_id", "script", "state", "restarts", "workers")} == {
        "run_id": "7f3a",
        "script": "train_digits.py",
        "state": "SUCCEEDED",
        "restarts": 1,
        "workers": [2],
    }
    assert failure["detected_after_s"] == pytest.approx(0.0004)
    assert failure["restarted_after_s"] == pytest.approx(0.0121)
    assert failure["first_step_after_s"] == pytest.approx(2.31)
    assert failure["first_step"] == {"rank": 0, "step": 121, "attempt": 1}
    assert (failure["last_step"], failure["resumed_from"], failure["work_lost"]) == (137, 120, 17)
    assert failure["work_lost_s"] == pytest.approx(17 * 9.9 / 136)


def test_the_order_of_the_lines_does_not_change_the_figures() -> None:
    expected = story(recovered())
    assert story(reversed(recovered())).failures == expected.failures


def test_a_job_without_a_failure_is_one_line() -> None:
    lines = [started(), attempt(0, 100.1), finished(0, 131.2, restarts=0)]
    assert rendered(lines) == (
        "regrow: job 7f3a (train_digits.py, 2 workers on 1 node) SUCCEEDED after 31 s"
    )


def test_an_exception_is_shown_as_one_line_and_the_file_with_the_rest() -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "    main()\n"
        "ValueError: loss is nan:\n"
        "step 17: nan\n"
    )
    text = rendered([started(), raised(0, 101.0, traceback, error_file="/logs/0/1/error.json")])
    shown = " ".join(text.split())
    assert "(pid 4242) exited with code 1: ValueError: loss is nan: (train.py:3) error" in shown
    assert "    error file       /logs/0/1/error.json\n" in text


def test_the_last_line_of_the_users_code_is_shown_with_an_exception() -> None:
    files = [
        ("/job/train.py", 7),
        ("/job/model.py", 12),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1775),
        ("/usr/lib/python3.11/contextlib.py", 81),
        ("<frozen importlib._bootstrap>", 1204),
    ]
    frames = "".join(f'  File "{file}", line {line}, in f\n    f()\n' for file, line in files)
    traceback = f"Traceback (most recent call last):\n{frames}ValueError: no\n"
    what = story([raised(0, 101.0, traceback)]).failures[0].what
    assert what == "exited with code 1: ValueError: no (model.py:12)"


def test_of_chained_exceptions_the_last_one_is_shown() -> None:
    traceback = (
        "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'b'\nRuntimeError\n"
    )
    assert story([raised(0, 101.0, traceback)]).failures[0].what == (
        "exited with code 1: RuntimeError"
    )


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"exit_code": 3, "signal": None}, "exited with code 3"),
        ({"exit_code": 3, "signal": None, "message": "exit code 3"}, "exited with code 3"),
        ({"exit_code": 1, "signal": None, "message": "boom\nx"}, "exited with code 1: boom x"),
        ({"exit_code": -11, "signal": None}, "was killed by SIGSEGV"),
        ({"exit_code": -63, "signal": None}, "was killed by SIGRTMIN+29"),
        ({"exit_code": None, "signal": None}, "failed"),
    ],
)
def test_the_end_of_a_worker_in_words(fields: Line, what: str) -> None:
    assert story([failed(0, 101.0, **fields)]).failures[0].what == what


def test_the_first_failure_is_the_cause_and_later_ones_get_a_line_each() -> None:
    crash = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: Connection reset\n"
    lines = [raised(0, 101.003, crash, rank=0, pid=41, root_cause=False), failed(0, 101.0)]
    lines += [failed(0, 101.0 + n, rank=n, pid=n, root_cause=False) for n in range(2, 7)]
    text = rendered([started(), *lines], 200)
    assert "failure 1 (attempt 0): rank 1 on host foo" in text
    assert (
        "    as a result      rank 0 on host foo (pid 41) failed with RuntimeError: "
        "Connection reset, 3.0 ms later, and exited with code 1\n" in text
    )
    assert text.count("    then also        rank 2 on host foo") == 1
    assert "                     and 1 more of 7 failed workers" in text


def test_errors_that_follow_from_the_end_of_a_peer_share_one_line() -> None:
    lost = (
        "Traceback (most recent call last):\n  File 'x'\nRuntimeError: Connection closed by peer\n"
    )
    follow = [raised(0, 101.0 + n, lost, rank=n, pid=n, root_cause=False) for n in (4, 2, 3)]
    text = rendered([started(), failed(0, 101.0), *follow], 300)
    assert (
        "    as a result      rank 2 on host foo (pid 2) failed with RuntimeError: "
        "Connection closed by peer, 2.0 s later, and exited with code 1; ranks 3, 4 failed in the "
        "same way\n" in text
    )
    assert "then also" not in text


def test_a_worker_that_the_agent_stopped_after_its_exception_raised_it() -> None:
    root = raised(0, 112.0, "ValueError: bad batch", rank=0, pid=41, root_cause=True)
    traceback = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer"
    times = {"failed_monotonic": 112.5, "detected_monotonic": 113.0, "exited_monotonic": 113.1}
    other = failed(0, 112.5, exit_code=-15, signal="SIGTERM", traceback=traceback, **times)
    other["root_cause"] = False
    assert (
        "as a result      rank 1 on host foo (pid 4242) raised RuntimeError: Connection closed by"
        " peer, 500 ms later; the agent then stopped it with SIGTERM"
        in " ".join(rendered([started(), attempt(0, 100.1), root, other], 400).split("\n"))
    )


def test_without_a_mark_the_earliest_failure_is_the_cause() -> None:
    lines = [failed(0, 101.0 - n, rank=n, root_cause=None) for n in range(3)]
    assert story(lines).failures[0].rank == 2


def test_an_attempt_that_failed_without_a_failed_worker_has_a_reason() -> None:
    lines = [started(), attempt(0, 100.1), ended(0, 105.0, "FAILED", reason="the guardian is gone")]
    assert "  failure 1 (attempt 0): on host foo: the guardian is gone\n" in rendered(lines)


def test_used_up_restarts_are_shown() -> None:
    lines = [
        started(max_restarts=1),
        *(attempt(0, 100.1), failed(0, 101.0), attempt(1, 101.1), failed(1, 102.0)),
        finished(1, 103.0, "FAILED", exit_code=1, restarts=1, reason="was killed by SIGKILL"),
    ]
    text = rendered(lines, width=120)
    assert text.startswith(
        "regrow: job 7f3a (train_digits.py, 2 workers on 1 node) "
        "FAILED (exit code 1) after 3.0 s with 1 restart\n"
    )
    assert "  failure 2 (attempt 1): " in text
    assert "    not restarted    no restarts left (--max-restarts=1)" in text


def test_a_failure_in_a_closed_rendezvous_names_the_node_that_closed_it() -> None:
    lines = [
        started(max_restarts=3),
        *(attempt(0, 100.1), failed(0, 101.0)),
        line("rendezvous.closed", 0, 101.1, node="a/7/1", why="it closed the rendezvous"),
        finished(0, 102.0, "FAILED", exit_code=1, restarts=0, restarts_left=3),
    ]
    text = rendered(lines, width=120)
    assert "not restarted    the rendezvous is closed (host a: it closed the rendezvous)" in text
    lines[-1] = finished(0, 102.0, "FAILED", exit_code=1, restarts=0, restarts_left=0)
    assert "not restarted    no restarts left (--max-restarts=3)" in rendered(lines)


def test_a_job_without_restarts_shows_this_reason() -> None:
    lines = [started(max_restarts=0), failed(0, 101.0), finished(0, 102.0, "FAILED")]
    assert "not restarted    no restarts allowed (--max-restarts=0)" in rendered(lines)


def test_a_job_that_a_signal_stopped_names_the_signal() -> None:
    lines = [started(), finished(0, 103.2, "SIGNALED", signal="SIGTERM", exit_code=143)]
    assert (
        rendered(lines) == "regrow: job 7f3a (train_digits.py) was stopped by SIGTERM after 3.2 s"
    )


def test_a_job_that_ended_by_an_error_of_the_launcher_gives_its_text() -> None:
    reason = "RendezvousTimeoutError: 1 of 2 nodes came"
    lines = [started(), finished(0, 103.2, "ERROR", reason=reason)]
    assert rendered(lines, width=200).endswith(f"ended with an ERROR after 3.2 s: {reason}")


def test_a_log_without_the_end_of_the_job_is_unfinished() -> None:
    text = rendered(recovered()[:7], width=300)
    assert text.splitlines()[0].endswith(
        "is UNFINISHED: last record 10 s after its start, at step 137 or later; "
        "the agent's end is not recorded: it was killed, still runs, or its disk was full"
    )
    assert "not restarted    the log ends here" in text


def test_the_story_of_a_killed_agent_names_the_last_recorded_step() -> None:
    killed = recovered()[:-2]  # the second attempt has made step 121
    assert "last record 12 s after its start, at step 121 or later;" in rendered(killed, width=300)
    accounts = {"0": {"highest_step": 380}, "1": {"highest_step": None}}
    later = line("worker.accounts", 1, 130.0, accounts=accounts)
    text = rendered([*killed, later], width=300)
    assert "last record 30 s after its start, at step 380 or later;" in text


def test_a_pause_before_a_restart_is_not_mistaken_for_slowness() -> None:
    lines = recovered()
    lines[6] = line("job.restarting", 0, 110.011, delay_s=2.0)
    lines[7] = attempt(1, 112.02)
    assert story(lines).failures[0].backoff_s == 2.0
    assert "2.0 s      (all 2 workers started again; including a pause of 2.0 s)" in rendered(lines)
    lost = "lost: detecting 0.4 ms, pausing before restarts 2.0 s, stopping 9.6 ms, starting 227 ms"
    assert lost in rendered(lines, 200)


def test_a_failure_without_an_error_file_shows_none() -> None:
    lines = [started(), failed(0, 101.0, error_file="<N/A>")]
    assert story(lines).failures[0].error_file is None
    assert "error file" not in rendered(lines)


def test_a_script_without_steps_gets_advice() -> None:
    lines = [entry for entry in recovered() if "step" not in entry["name"]]
    lines = [{**entry, "last_steps": {}} for entry in lines]
    text = rendered(lines)
    assert "redoing steps unknown: the script does not call regrow.step" in " ".join(text.split())
    assert "work lost" not in text
    assert "first step after" not in text


def test_an_attempt_that_failed_before_its_first_step_lost_no_work() -> None:
    lines = recovered()
    again = [failed(1, 111.0, rank=0), ended(1, 111.1, "FAILED"), attempt(2, 111.2)]
    lines[8:10] = [*again, stepped(2, 114.0, 121)]
    first, second = story(lines).failures
    assert (first.work_lost, second.work_lost) == (17, 0)
    assert first.first_step_after_s == pytest.approx(4.0)
    assert second.first_step_after_s == pytest.approx(3.0)
    text = rendered(lines)
    assert "first step after 4.0 s      (rank 0 had made step 121, attempt 2)" in text
    assert "work lost        0 steps    (the attempt made no step)" in text


@pytest.mark.parametrize(("first", "lost"), [(0, 138), (1, 137)])
def test_a_script_without_a_checkpoint_started_over(first: int, lost: int) -> None:
    lines = recovered()
    lines[8] = stepped(1, 112.31, first)
    lines[9] = ended(1, 131.0, "SUCCEEDED", first, 400)
    assert f"{lost} steps  (step 137 reached, started over; about" in rendered(lines)


def test_a_script_that_reports_only_some_steps_never_loses_negative_work() -> None:
    lines = recovered()
    lines[8] = stepped(1, 112.31, 140)
    lines[9] = ended(1, 131.0, "SUCCEEDED", 140, 400)
    assert story(lines).failures[0].work_lost == 0


def test_durations_are_never_taken_between_the_clocks_of_two_hosts() -> None:
    lines = recovered()
    lines[7] = attempt(1, 5.0, host="bar")
    lines[8] = stepped(1, 6.0, 121, host="bar")
    lines[9] = ended(1, 15.0, "SUCCEEDED", 121, 400, host="bar")
    (failure,) = story(lines).failures
    assert (failure.restarted_attempt, failure.restarted_after_s) == (1, None)
    assert (failure.first_step_after_s, failure.work_lost) == (None, 17)
    assert "restarted after  unknown" in rendered(lines)


def test_a_planned_restart_is_shown_with_its_reason() -> None:
    lines = [
        started(),
        attempt(0, 100.1),
        ended(0, 105.0, "STOPPED"),
        line("job.restarting", 0, 105.1, reason="1 node waits to join"),
        attempt(1, 106.0, world_size=4),
        finished(1, 110.0, restarts=1),
    ]
    assert rendered(lines, 200) == (
        "regrow: job 7f3a (train_digits.py, 2 to 4 workers on 1 node) "
        "SUCCEEDED after 10 s with 1 membership change\n"
        "  attempt 0 was stopped without a failure: 1 node waits to join\n"
        "    restarted after  900 ms     (all 4 workers started again)\n"
        "  900 ms of 10 s lost: starting 900 ms, redoing steps unknown: the script does not call "
        "regrow.step"
    )


def test_the_cost_of_a_planned_restart_is_shown_as_for_a_failure() -> None:
    lines = [
        started(),
        attempt(0, 100.1),
        stepped(0, 101.0, 1),
        ended(0, 105.0, "STOPPED", 1, 40),
        line("job.restarting", 0, 105.1, reason="1 node waits to join"),
        attempt(1, 106.0, world_size=4),
        stepped(1, 108.0, 31),
        finished(1, 110.0, restarts=1),
    ]
    assert rendered(lines, 200).splitlines()[2:] == [
        "    restarted after  900 ms     (all 4 workers started again)",
        "    first step after 2.9 s      (rank 0 had made step 31)",
        "    work lost        10 steps   (step 40 reached, resumed from step 30; "
        "about 2.5 s the first time)",
        "  5.2 s of 10 s lost: starting 2.6 s, redoing steps 2.5 s",
    ]


def test_paused_workers_are_shown_with_the_duration() -> None:
    suspended = {"rank": 0, "pid": 7, "signal": "SIGSTOP"}
    lines = [
        line("worker.suspended", 0, 101.0, **suspended),
        line("worker.resumed", 0, 104.0, **suspended),
        line("worker.suspended", 0, 105.0, **suspended),
    ]
    text = rendered([started(), *lines])
    assert "  rank 0 on host foo (pid 7) was paused by SIGSTOP for 3.0 s (attempt 0)" in text
    assert "  rank 0 on host foo (pid 7) was paused by SIGSTOP and not resumed" in text


def test_events_that_could_not_be_written_are_counted() -> None:
    lines = [*recovered(), {"name": "regrow.log.gap", "lost": 3}]
    assert rendered(lines).endswith("  3 events could not be written to the log")


def test_the_events_of_another_job_in_the_same_file_are_left_out() -> None:
    other = [{**entry, "run_id": "old"} for entry in recovered()]
    assert story([*other, *recovered()]).failures == story(recovered()).failures
    assert story([*other, *recovered()]).events == len(recovered())


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["/usr/bin/python3.11", "-u", "a/train.py", "-x"], "train.py"),
        (["python", "-u", "-m", "pkg.train"], "pkg.train"),
        (["/opt/bin/trainer", "--x"], "trainer"),
        (["train"], "train"),
        (["python"], "python"),
        ([], None),
        ("train.py", None),
    ],
)
def test_a_job_is_called_by_the_name_of_what_it_runs(command: object, script: str | None) -> None:
    assert story([started(command=command)]).script == script


def test_texts_of_the_job_cannot_play_with_the_terminal() -> None:
    evil = "Traceback (most recent call last):\n x\nE: \x1b[2J\u2028\u00e9\x07" + "x" * 10_000
    text = rendered([started(), raised(0, 101.0, evil, host="h\x1b[0m")])
    assert text.isascii()
    assert all(part.isprintable() for part in text.splitlines())
    assert len(text) < 2000


def test_a_crash_loop_is_shown_by_its_beginning_and_its_end() -> None:
    lines = [started()]
    for number in range(500):
        lines += [attempt(number, 101.0 + number), failed(number, 101.5 + number)]
    text = rendered(lines)
    assert "failure 1 (attempt 0)" in text
    assert "failure 500 (attempt 499)" in text
    assert "  ... 480 more failures ...\n" in text
    assert text.count("was killed by SIGKILL") == 20


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_asked_for(width: int) -> None:
    assert max(map(len, story(recovered()).render(width).splitlines())) <= width


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 ms"),
        (0.00042, "0.4 ms"),
        (0.0121, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min 0 s"),
        (3725, "62 min 5 s"),
        (7200, "2 h 0 min"),
        (90061, "25 h 1 min"),
        (math.inf, "an unknown time"),
        (math.nan, "an unknown time"),
    ],
)
def test_durations_read_naturally(seconds: float, shown: str) -> None:
    from regrow.events.story_incidents import duration

    assert duration(seconds) == shown


@pytest.mark.parametrize("far", [1e308, math.inf, math.nan])
def test_times_that_no_clock_can_have_are_unknown(far: float) -> None:
    restart = line("inprocess.restarted", 0, 110.0, iteration=1, seconds={"called": far})
    found = story([started(), restart, restart | {"iteration": 2}])
    assert found.render(100)
    json.dumps(found.to_json(), allow_nan=False)


_ALL = [
    *recovered(),
    line("worker.suspended", 1, 113.0, rank=0, pid=7, signal="SIGSTOP"),
    line("worker.resumed", 1, 114.0, rank=0, pid=7, signal="SIGCONT"),
    raised(1, 120.0, "Traceback (most recent call last):\n x\nE: y", rank=0, root_cause=False),
    line("timer.expired", 1, 119.0, rank=0, pid=8, scope="step", compared=["rank 0: x"]),
    {"name": "regrow.log.gap", "lost": 2},
    {"name": "torchelastic.worker.status.SUCCEEDED", "metadata_x": 1},
    {},
]
_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def _mangled(draw: st.DrawFn) -> list[Mapping[str, Any]]:
    """Some of the events of a job in any order, some with fields missing or nonsensical."""
    lines: list[Line] = draw(st.lists(st.sampled_from(_ALL), max_size=25))
    mangled: list[Mapping[str, Any]] = []
    for entry in lines:
        changed = dict(entry)
        for key in draw(st.lists(st.sampled_from(sorted(entry)), max_size=2)) if entry else []:
            if draw(st.booleans()):
                changed.pop(key, None)
            else:
                changed[key] = draw(_junk)
        mangled.append(changed)
    return mangled


@UNHURRIED
@given(_mangled())
def test_no_log_makes_the_story_fail(lines: list[Mapping[str, Any]]) -> None:
    made = story(lines)
    assert made.render().isascii()
    json.dumps(made.to_json(), allow_nan=False)


@UNHURRIED
@given(st.permutations(_ALL[:13]))
def test_the_figures_of_a_job_do_not_depend_on_the_order_of_its_events(lines: list[Line]) -> None:
    assert story(lines) == story(_ALL[:13])


@pytest.mark.parametrize("length", range(len(_ALL)))
def test_a_log_may_end_after_any_line(length: int) -> None:
    assert rendered(_ALL[:length]).lstrip().startswith("regrow: job ")


def test_print_story_prints_text_or_json_and_remarks_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for entry in recovered():
        fields = {key: value for key, value in entry.items() if key not in ("name", "source")}
        del fields["time"]
        log(Event(entry["name"], EventSource.AGENT, metadata=fields))
    with open(log.path, "a") as file:
        file.write("{broken")

    out = io.StringIO()
    assert print_story(tmp_path, as_json=False, out=out) == 0
    assert without_times(out.getvalue()) == rendered(recovered(), 85)
    assert "line 12 left out: incomplete" in capsys.readouterr().err

    out = io.StringIO()
    assert print_story(tmp_path, as_json=True, out=out) == 0
    printed, expected = (
        json.loads(out.getvalue()),
        json.loads(json.dumps(story(recovered()).to_json())),
    )
    assert printed | {"started_at": 0} == expected | {"started_at": 0}


@pytest.mark.parametrize("content", [None, "", "rubbish\n"])
def test_print_story_without_a_log_is_a_line_and_exit_code_2(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    out = io.StringIO()
    assert print_story(tmp_path, as_json=False, out=out) == 2
    assert out.getvalue() == ""
    err = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in err[-1]
    assert ("no event" in err[-1]) or ("no events.jsonl" in err[-1])
