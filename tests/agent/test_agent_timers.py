"""An agent's timer server: its reports of hung workers, and its effect on the agent."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.processes import PATIENCE
from regrow.agent import LocalElasticAgent, WorkerSpec
from regrow.agent.attempt.environment import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE
from regrow.agent.decisions import decide
from regrow.agent.features import StartedWorkers
from regrow.agent.features import hang as _hang
from regrow.agent.features.timer_server import AgentTimerServer, includes, owner, timer_files
from regrow.events import Event, handlers
from regrow.launch import LaunchConfig, elastic_launch
from regrow.rendezvous import SoloRendezvousHandler
from regrow.timer import FileTimerRequest
from regrow.timer.stacks.report import Dump, Frame, Thread
from regrow.workers import ChildFailedError, DefaultLogsSpecs

STACK = (Frame("/home/me/train.py", 14, "step"), Frame("/home/me/train.py", 30, "<module>"))
DUMP = Dump(77, "dumped", threads=(Thread(1, True, True, STACK),), path="logs/0/1/stacks.77.txt")


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
        compared=["ranks 4, 6 are in recv (train.py:9)", "rank 5 alone is in step"],
        over=0.0123,
    )
    return found._replace(**known)


# --- texts and fields


def test_a_hang_is_one_line_that_names_scope_time_and_place() -> None:
    line = "timer step of 2 s was exceeded by 12.3 ms; location: in step (train.py:14)"
    assert _hang.message(hang()) == line
    announced = _hang.announcement(hang())
    assert announced == (
        f"rank 5 (pid 77) hangs: {line}; sending SIGKILL; stacks in logs/0/1/stacks.77.txt"
    )


def test_a_timer_of_torchs_client_is_reported_without_its_length() -> None:
    request = FileTimerRequest(77, "a\nscope", 1e9, 0, monotonic=100.0)
    announced = _hang.announcement(hang(request=request, signum=0, rank=None, worker_pid=60))
    assert announced.startswith(
        "a worker (its process 77) hangs: timer a scope was exceeded by 12.3 ms;"
    )
    assert "no signal is sent, because the timer requests none" in announced


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (0, None), (-1, None)])
def test_the_event_of_a_hang_has_plain_values_only(signum: int, name: str | None) -> None:
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
        "  ranks 4, 6 are in recv (train.py:9)",
        "  rank 5 alone is in step",
        "Stacks of all threads: logs/0/1/stacks.77.txt",
    ]


def test_a_deep_stack_is_cut_in_the_report() -> None:
    deep = Thread(1, True, True, tuple(Frame("f.py", n, "f") for n in range(1, 100)))
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
    assert _hang.message(hang(request=request)).startswith(f"timer {shown} was exceeded by")


# --- the path of the pipe, and the processes that may write into it


def test_the_pipe_is_where_the_variable_says() -> None:
    given = {TORCHELASTIC_TIMER_FILE: "/run/timers"}
    assert timer_files(given, "/logs") == ["/run/timers"]
    assert timer_files(given | {"REGROW_WORKER": "/1/2/"}) == ["/run/timers"]
    paths = {path for _ in range(2) for path in timer_files({})}
    assert len(paths) == 2
    assert all(Path(path).name.startswith("watchdog_timer_") for path in paths)


def test_where_no_temporary_file_can_be_made_the_pipe_is_among_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    shown = tmp_path / "shown"
    script = f'test -p "$TORCHELASTIC_TIMER_FILE" && echo "$TORCHELASTIC_TIMER_FILE" > {shown}'
    folder = str(tmp_path / "logs")
    config = LaunchConfig(
        1,
        1,
        1,
        DefaultLogsSpecs(log_dir=folder),
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        timers=True,
    )
    elastic_launch(config, "sh")("-c", script)
    assert shown.read_text().startswith(f"{folder}/job_")
    assert not list((tmp_path / "logs").glob("*/watchdog*"))  # the agent removed it


def test_an_agent_in_a_worker_of_another_leaves_that_one_its_pipe(tmp_path: Path) -> None:
    pipe = str(tmp_path / "timers")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    environ = {TORCHELASTIC_TIMER_FILE: pipe}
    assert timer_files(environ) == [pipe]  # an error, when the pipe is made
    inner = environ | {"REGROW_WORKER": "/1/2/"}
    assert timer_files(inner) != [pipe]
    os.close(reader)
    assert timer_files(inner) == [pipe]


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
    guardian = cast(Any, SimpleNamespace(pid=None))
    workers = StartedWorkers(0, [4, 5], cast(Any, context), guardian)
    assert [owner(workers, pid) for pid in (worker, child)] == [1, 1]
    assert workers.pids() == {4: 1, 5: worker}
    assert includes(workers, child)
    assert owner(workers, os.getpid()) is None
    assert not includes(workers, os.getpid())
    assert not includes(workers, 1 << 30)


def test_all_that_is_below_the_guardian_is_of_a_worker_but_not_the_guardian(
    family: tuple[int, int],
) -> None:
    guardian, worker = family  # one that is just being started
    context = SimpleNamespace(pids=dict)
    by = cast(Any, SimpleNamespace(pid=guardian))
    workers = StartedWorkers(0, [0], cast(Any, context), by)
    assert includes(workers, worker)
    assert owner(workers, worker) is None
    assert not includes(workers, guardian)


def test_a_timer_of_an_ended_helper_is_refused_as_one_of_a_process_that_is_gone(
    tmp_path: Path,
) -> None:
    server = AgentTimerServer(str(tmp_path / "pipe"), "job", native_s=0.0, on_hang=print)
    context, guardian = SimpleNamespace(pids=dict), SimpleNamespace(pid=None)
    server.watch(StartedWorkers(0, [0], cast(Any, context), cast(Any, guardian)))
    with subprocess.Popen(["true"]) as helper:
        helper.wait()
    refusals = [server.refusal(pid) or "" for pid in (helper.pid, os.getppid())]
    server.stop()
    assert refusals[0] == "is of a process that is gone"
    assert "neither a worker of this agent" in refusals[1]


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
    assert re.search(r"traceback : timer step of 0\.[45]\d* s was exceeded by", str(error))
    assert ", in <module>\n" in str(error)


def test_a_hung_worker_is_killed_although_its_log_directory_hangs(tmp_path: Path) -> None:
    # Opening a pipe without a reader never returns.
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
    assert re.search(r"traceback : timer step of 0\.[45]\d* s was exceeded by", str(error))
    waiting = [thread for thread in threading.enumerate() if thread.name == "regrow-hang"]
    assert len(waiting) == 1
    (pipe,) = tmp_path.glob("*/attempt_0/0/stacks.*.txt")
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # unblocks the thread
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
    monkeypatch.setattr(decide, "QUICK_S", 0.0)  # no pause between attempts
    seen: list[tuple[int, int]] = []

    def count_resources(event: Event) -> None:
        if event.name == "regrow.attempt.started":
            seen.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))

    launch(
        config(str(tmp_path), max_restarts=5, event_sinks=(count_resources,)), HANG.format(first="")
    )
    assert len(seen) == 6
    # Leftovers of one attempt may exist for a moment; permanent leftovers of each would add up.
    assert all(last < second + 4 for last, second in zip(seen[-1], seen[1], strict=True)), seen


def test_what_the_server_does_is_recorded_as_torchs_agent_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Event] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.event)  # type: ignore[attr-defined]

    monkeypatch.setitem(handlers._log_handlers, "kept", Keep())
    launch(config(str(tmp_path), event_log_handler="kept"), HANG.format(first=""))
    (killed,) = (event for event in records if event.name == "kill worker process")
    about = json.loads(killed.metadata["metadata"])
    assert killed.metadata["state"] == "RUNNING"
    assert (about["scope_id"], about["signal"]) == ("step", "9")
    names = {event.name for event in records}
    assert {"watchdog started", "timer expired", "watchdog stopped"} <= names


def run_untimed(logs: Path, entrypoint: str, *args: str) -> list[Event]:
    """Run an agent that is not asked for timers; returns its events."""
    seen: list[Event] = []
    handler = SoloRendezvousHandler("job")
    spec = WorkerSpec("r", 1, handler, entrypoint=entrypoint, args=args, max_restarts=0)
    logs_specs = DefaultLogsSpecs(log_dir=str(logs))
    LocalElasticAgent(spec, logs_specs, event_sinks=(seen.append,)).run()
    handler.shutdown()
    return seen


@pytest.mark.parametrize("value", ["0", "", "yes", "1"])
def test_only_1_in_torchs_variable_turns_timers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, value)
    seen = run_untimed(tmp_path, "true")
    bounds = cast(Any, seen[0].metadata["bounds"])
    assert ("a hung worker is killed" in bounds) == (value == "1")


def test_the_pipe_of_another_timer_server_is_passed_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TORCHELASTIC_TIMER_FILE, "/run/timers")
    shown = tmp_path / "shown"
    script = f'echo "$TORCHELASTIC_TIMER_FILE" > {shown}'
    run_untimed(tmp_path / "logs", "sh", "-c", script)
    assert shown.read_text() == "/run/timers\n"
