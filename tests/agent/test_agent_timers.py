"""An agent's timer server: what it says of a hung worker, and what it costs the agent."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from processes import PATIENCE

from regrow.agent import LocalElasticAgent, WorkerSpec, _decide, _hang
from regrow.agent._environment import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE
from regrow.agent._probed import ProbedAgent
from regrow.agent._timers import Watchdog, timer_file
from regrow.agent._watched import Watched
from regrow.events import Event, register_logging_handler
from regrow.launch import LaunchConfig, elastic_launch
from regrow.timer import FileTimerRequest
from regrow.timer._frames import Dump, Frame, Thread
from regrow.workers import ChildFailedError, DefaultLogsSpecs

STACK = (Frame("/home/me/train.py", 14, "step"), Frame("/home/me/train.py", 30, "<module>"))
DUMP = Dump(
    77, "dumped", threads=(Thread(1, "", True, True, STACK),), path="logs/0/1/stacks.77.txt"
)


def hang(**known: Any) -> _hang.Hang:
    """Rank 5 had 2 s from 98 to 100 on the monotonic clock, and is killed at 100.0123."""
    request = FileTimerRequest(77, "step", 1e9, 9, monotonic=100.0, armed=98.0)
    found = _hang.Hang(
        attempt=3,
        local_rank=1,
        rank=5,
        pid=77,
        worker_pid=77,
        request=request,
        deadline=100.0,
        noticed=100.002,
        signum=9,
        dump=DUMP,
        compared=["ranks 4, 6 stand in recv (train.py:9)", "rank 5 alone stands in step"],
        over=0.0123,
    )
    return found._replace(**known)


# --- what is said


def test_a_hang_is_one_line_that_names_scope_time_and_place() -> None:
    line = "timer step of 2 s was over by 12.3 ms: in step (train.py:14)"
    assert _hang.message(hang()) == line
    told = _hang.announcement(hang())
    assert told == (
        f"rank 5 (pid 77) hangs: {line}; it is sent SIGKILL; stacks in logs/0/1/stacks.77.txt"
    )


def test_a_timer_of_torchs_client_does_not_say_how_long_it_was() -> None:
    request = FileTimerRequest(77, "a\nscope", 1e9, 0, monotonic=100.0)
    told = _hang.announcement(hang(request=request, signum=0, rank=None, worker_pid=60))
    assert told.startswith("a worker (its process 77) hangs: timer a scope was over by 12.3 ms:")
    assert "it is left alone, as the timer asks for no signal" in told


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (0, None), (-1, None)])
def test_the_event_says_all_there_is_in_plain_values(signum: int, name: str | None) -> None:
    event = _hang.event(hang(signum=signum))
    assert json.loads(json.dumps(event)) == event
    assert (event["rank"], event["pid"], event["scope"], event["signal"]) == (5, 77, "step", name)
    assert (event["after_s"], event["over_s"]) == (2.0, 0.0123)
    assert (event["deadline_monotonic"], event["noticed_monotonic"]) == (100.0, 100.002)
    assert event["stood"] == "in step (train.py:14)"
    assert event["stacks"] == "logs/0/1/stacks.77.txt"


def test_the_error_file_is_of_the_form_that_record_writes_with_the_deadline_as_its_moment() -> None:
    error = _hang.error(hang(), wall=1000.0)["message"]
    assert error["message"] == _hang.message(hang())
    assert error["extraInfo"]["monotonic"] == 100.0
    assert error["extraInfo"]["timestamp"] == "999"
    assert error["extraInfo"]["py_callstack"].splitlines() == [
        _hang.message(hang()),
        "Main thread (most recent call first):",
        '  File "/home/me/train.py", line 14, in step',
        '  File "/home/me/train.py", line 30, in <module>',
        "Workers of this host:",
        "  ranks 4, 6 stand in recv (train.py:9)",
        "  rank 5 alone stands in step",
        "Stacks of all threads: logs/0/1/stacks.77.txt",
    ]


def test_a_deep_stack_is_cut_in_the_report() -> None:
    deep = Thread(1, "", True, True, tuple(Frame("f.py", n, "f") for n in range(1, 100)))
    stack = _hang.callstack(hang(dump=DUMP._replace(threads=(deep,))))
    assert stack.count("File") == _hang.MOST_FRAMES
    assert f"... {99 - _hang.MOST_FRAMES} more frames" in stack


@pytest.mark.parametrize(
    ("scope", "shown"),
    [
        ("/home/me/train.py#42", "train.py#42"),
        ("/home/my files/train.py#42@7f", "train.py#42@7f"),
        ("data/epoch", "data/epoch"),
        ("a#b/c", "a#b/c"),
        ("/no/line", "/no/line"),
        ("", ""),
        ("two\nlines \x1b[2J", r"two lines \x1b[2J"),
        ("x" * 4000, "x" * 120 + "..."),
    ],
)
def test_a_scope_is_shown_in_a_short_line_and_a_place_without_its_folders(
    scope: str, shown: str
) -> None:
    request = FileTimerRequest(77, scope, 1e9, 9, monotonic=100.0)
    assert _hang.message(hang(request=request)).startswith(f"timer {shown} was over by")


# --- where the pipe is, and whose processes may write into it


def test_the_pipe_is_where_the_variable_says() -> None:
    given = {TORCHELASTIC_TIMER_FILE: "/run/timers"}
    assert timer_file(given) == "/run/timers"
    assert timer_file(given | {"REGROW_WORKER": "/1/2/"}) == "/run/timers"
    paths = {timer_file({}) for _ in range(2)}
    assert len(paths) == 2
    assert all(Path(path).name.startswith("watchdog_timer_") for path in paths)


def test_an_agent_in_a_worker_of_another_leaves_that_one_its_pipe(tmp_path: Path) -> None:
    pipe = str(tmp_path / "timers")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    environ = {TORCHELASTIC_TIMER_FILE: pipe}
    assert timer_file(environ) == pipe  # an error, when the pipe is made
    inner = environ | {"REGROW_WORKER": "/1/2/"}
    assert timer_file(inner) != pipe
    os.close(reader)
    assert timer_file(inner) == pipe


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process with a session of its own, as workers have, and its child."""
    with subprocess.Popen(
        ["sh", "-c", "(exec sleep 1000) & echo $!; wait"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as worker:
        assert worker.stdout is not None
        yield worker.pid, int(worker.stdout.readline())
        os.killpg(worker.pid, signal.SIGKILL)


def test_a_process_is_known_by_the_worker_that_started_it(family: tuple[int, int]) -> None:
    worker, child = family
    context = SimpleNamespace(pids=lambda: {0: 1, 1: worker})
    watched = Watched(0, [4, 5], cast(Any, context), cast(Any, SimpleNamespace(pid=None)))
    assert [watched.owner(pid) for pid in (worker, child)] == [1, 1]
    assert watched.pids() == {4: 1, 5: worker}
    assert watched.includes(child)
    assert watched.owner(os.getpid()) is None
    assert not watched.includes(os.getpid())
    assert not watched.includes(1 << 30)


def test_all_that_is_below_the_guardian_is_of_a_worker_but_not_the_guardian(
    family: tuple[int, int],
) -> None:
    guardian, worker = family  # one that is just being started
    context = SimpleNamespace(pids=dict)
    watched = Watched(0, [0], cast(Any, context), cast(Any, SimpleNamespace(pid=guardian)))
    assert watched.includes(worker)
    assert watched.owner(worker) is None
    assert not watched.includes(guardian)


def test_a_helper_that_has_ended_meanwhile_is_not_taken_for_a_stranger(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path / "pipe"), "job", native_s=0.0, on_hang=print)
    context, guardian = SimpleNamespace(pids=dict), SimpleNamespace(pid=None)
    watchdog.watch(Watched(0, [0], cast(Any, context), cast(Any, guardian)))
    with subprocess.Popen(["true"]) as helper:
        helper.wait()
    refusals = [watchdog._refusal(pid) or "" for pid in (helper.pid, os.getppid())]
    watchdog.stop()
    assert refusals[0] == "is of a process that is gone"
    assert "none of this agent's workers" in refusals[1]


# --- the agent


def config(logs: str, **more: Any) -> LaunchConfig:
    return LaunchConfig(
        1,
        1,
        1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        timers=True,
        **{"max_restarts": 0, **more},
    )


HANG = """
import os, time
from regrow.timer import expires
{first}
with expires(after=0.5, scope="step"):
    time.sleep(1000)
"""


def launch(configured: LaunchConfig, script: str) -> ChildFailedError:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(configured, sys.executable)("-c", script)
    return caught.value


def test_without_a_log_directory_the_failure_is_explained_all_the_same() -> None:
    error = launch(config(os.devnull), HANG.format(first=""))
    assert re.search(r"traceback : timer step of 0\.[45]\d* s was over by", str(error))
    assert ", in <module>\n" in str(error)


def test_a_log_directory_that_hangs_spares_no_hung_worker(tmp_path: Path) -> None:
    # To open a pipe that nobody reads takes for ever.
    first = """
from regrow.timer import FileTimerClient
folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
os.mkfifo(os.path.join(folder, f"stacks.{os.getpid()}.txt"))
reported = FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=0)
for n in range(3):
    with expires(after=0.01, client=reported):
        time.sleep(0.1)
"""
    error = launch(config(str(tmp_path)), HANG.format(first=first))
    assert re.search(r"traceback : timer step of 0\.[45]\d* s was over by", str(error))
    waiting = [thread for thread in threading.enumerate() if thread.name == "regrow-hang"]
    assert len(waiting) == 1
    (pipe,) = tmp_path.glob("*/attempt_0/0/stacks.*.txt")
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # lets it go on
    for thread in waiting:
        thread.join(PATIENCE)


def test_workers_are_compared_when_one_of_them_is_to_be_killed_and_not_for_a_helper(
    tmp_path: Path,
) -> None:
    first = """
if os.environ["LOCAL_RANK"] == "1":
    time.sleep(1000)
if (helper := os.fork()) == 0:
    with expires(after=0.05, scope="helper"):
        time.sleep(1000)
os.waitpid(helper, 0)
"""
    seen: list[Event] = []
    several = replace(config(str(tmp_path), event_sinks=(seen.append,)), nproc_per_node=2)
    launch(several, HANG.format(first=first))
    hangs = [event.metadata for event in seen if event.name == "regrow.timer.expired"]
    assert [(each["scope"], len(cast(Any, each["compared"]))) for each in hangs] == [
        ("helper", 0),
        ("step", 2),
    ]


@pytest.mark.thorough
def test_five_restarts_leave_no_thread_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_decide, "QUICK_S", 0.0)  # no pause between attempts
    seen: list[tuple[int, int]] = []

    def look(event: Event) -> None:
        if event.name == "regrow.attempt.started":
            seen.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))

    launch(config(str(tmp_path), max_restarts=5, event_sinks=(look,)), HANG.format(first=""))
    assert len(seen) == 6
    # What one attempt leaves for a moment may be there; what each leaves for good would add up.
    assert all(last < second + 4 for last, second in zip(seen[-1], seen[1], strict=True)), seen


def test_an_agent_whose_timer_server_has_ended_is_as_old_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProbedAgent, "_age", lambda agent: 0.5)  # its loop turns
    spec = WorkerSpec("r", 1, cast(Any, SimpleNamespace()), entrypoint="x")
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), timers=True)
    assert agent._age() == 0.5
    server = SimpleNamespace(get_last_progress_time=lambda: time.time() - 300)
    agent._watchdog = cast(Any, server)
    assert 299 < agent._age() < 300 + PATIENCE
    assert agent._get_alive_time() <= time.time() - 299


def test_what_the_server_does_is_recorded_as_torchs_agent_records_it(tmp_path: Path) -> None:
    records: list[Event] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.event)  # type: ignore[attr-defined]

    register_logging_handler("kept", Keep())
    launch(config(str(tmp_path), event_log_handler="kept"), HANG.format(first=""))
    (killed,) = (event for event in records if event.name == "kill worker process")
    about = json.loads(killed.metadata["metadata"])
    assert killed.metadata["state"] == "RUNNING"
    assert (about["scope_id"], about["signal"]) == ("step", "9")
    names = {event.name for event in records}
    assert {"watchdog started", "timer expired", "watchdog stopped"} <= names


@pytest.mark.parametrize("value", ["0", "", "yes"])
def test_only_1_in_torchs_variable_turns_timers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    spec = WorkerSpec("r", 1, cast(Any, SimpleNamespace()), entrypoint="x")
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, value)
    assert not LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))._timers
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    assert LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))._timers


def test_a_pipe_that_somebody_else_serves_is_handed_on_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = WorkerSpec("r", 1, cast(Any, SimpleNamespace()), entrypoint="x")
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))
    assert agent._timer_file() is None
    monkeypatch.setenv(TORCHELASTIC_TIMER_FILE, "/run/timers")
    assert agent._timer_file() == "/run/timers"
