"""Groups of functions: `MultiprocessContext`, by every start method."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.descriptors import open_files
from helpers.processes import GROUP_SIGNALS, PATIENCE, alive, children_of, wait_until
from helpers.workers import functions as work
from regrow.workers import Guardian, MultiprocessContext, RunProcsResult, Std, start_processes

METHODS = ("spawn", "fork", "forkserver")
every_method = pytest.mark.parametrize("method", METHODS)


class Calls:
    """Starts functions as workers."""

    def __init__(self, guardian: Guardian, directory: Path) -> None:
        self._guardian = guardian
        self._directory = directory
        self.context = None

    def start(
        self, method: str, function: Callable[..., Any], *args: tuple[Any, ...], **more: Any
    ) -> MultiprocessContext:
        settings: dict[str, Any] = {
            "log_dir": str(self._directory),
            "redirects": Std.ALL,
            "guardian": self._guardian,
            "signals_to_handle": "",
        }
        context = start_processes(
            "test",
            function,
            dict(enumerate(args)),
            {rank: {"WORD": "here", "RANK": str(rank)} for rank in range(len(args))},
            start_method=method,
            **settings | more,
        )
        assert isinstance(context, MultiprocessContext)
        return context

    def run(
        self, method: str, function: Callable[..., Any], *args: tuple[Any, ...], **more: Any
    ) -> RunProcsResult:
        result = self.start(method, function, *args, **more).wait(PATIENCE)
        assert result is not None
        return result


@pytest.fixture
def calls(guardian: Guardian, tmp_path: Path) -> Calls:
    return Calls(guardian, tmp_path)


# --- arguments, environment and results of a function


@every_method
def test_a_function_runs_in_its_environment_session_and_streams(calls: Calls, method: str) -> None:
    result = calls.run(method, work.describe, ("a",), ("b",))
    assert result.failures == {}
    for rank, word in enumerate("ab"):
        value = result.return_values[rank]
        # A fork shares the imports of the agent.
        assert value.pop("at_import") == (None if method == "fork" else "here")
        assert value == {"word": word, "env": "here", "session": True, "sigterm": True}
        lines = Path(result.stdouts[rank]).read_text().splitlines()
        assert sorted(lines) == ["raw", f"to stdout {word}"]
        assert Path(result.stderrs[rank]).read_text() == f"to stderr {word}\n"


@every_method
@pytest.mark.parametrize("size", [100_000, 100_000_000])
def test_return_values_of_any_size_arrive(calls: Calls, method: str, size: int) -> None:
    result = calls.run(method, work.big, (size,), (0,))
    assert {rank: len(value) for rank, value in result.return_values.items()} == {0: size, 1: 0}


@pytest.mark.thorough
@every_method
def test_arguments_of_any_size_arrive(calls: Calls, method: str) -> None:
    assert calls.run(method, work.length, (bytes(30_000_000),)).return_values == {0: 30_000_000}


@pytest.mark.thorough
@every_method
def test_a_queue_of_the_agents_can_be_an_argument(calls: Calls, method: str) -> None:
    queue = multiprocessing.get_context(method).Queue()
    calls.run(method, work.put, (queue, 3), (queue, 4))
    assert sorted(queue.get(timeout=PATIENCE) for _ in range(2)) == [3, 4]
    queue.close()
    queue.join_thread()


@every_method
def test_leaving_with_0_returns_none(calls: Calls, method: str) -> None:
    assert calls.run(method, work.leave, (0,), (None,)).return_values == {0: None, 1: None}


# --- failures


@every_method
def test_an_exception_comes_with_its_traceback_and_ends_the_others(
    calls: Calls, method: str
) -> None:
    pids: dict[int, int] = {}
    context = calls.start(method, _boom_or_sleep, (0,), (1,))
    pids = context.pids()
    result = context.wait(PATIENCE)
    assert result is not None
    assert list(result.failures) == [1]
    failure = result.failures[1]
    assert failure.exitcode == 1
    assert failure.summary == "ValueError: rank 1"
    assert "in boom" in (failure.traceback or "")
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.thorough
@every_method
def test_exit_codes_and_signals_are_reported(calls: Calls, method: str) -> None:
    assert calls.run(method, work.leave, (3,)).failures[0].exitcode == 3
    assert calls.run(method, work.vanish, (4,)).failures[0].exitcode == 4
    killed = calls.run(method, work.kill_self, ()).failures[0]
    assert killed.exitcode == -signal.SIGKILL
    assert killed.signal_name() == "SIGKILL"


@pytest.mark.thorough
@every_method
def test_an_exit_with_0_before_the_return_is_a_failure_with_this_reason(
    calls: Calls, method: str
) -> None:
    failure = calls.run(method, work.vanish, (0,)).failures[0]
    assert failure.exitcode == 0
    assert "ended with exit code 0 before vanish returned" in failure.summary
    without_file = calls.run(method, work.vanish, (0,), log_dir=os.devnull).failures[0]
    assert "before vanish returned" in str(without_file.message)


def test_a_return_value_that_cannot_be_pickled_is_a_failure_of_its_worker(calls: Calls) -> None:
    failure = calls.run("spawn", work.unpicklable, ()).failures[0]
    assert "cannot pickle the worker's return value, of type function" in failure.summary


def test_a_return_value_that_cannot_be_unpickled_is_a_failure_with_this_reason(
    calls: Calls,
) -> None:
    failure = calls.run("spawn", work.poison, ("here",)).failures[0]
    assert "cannot unpickle the return value: LookupError: poisoned" in failure.summary
    assert failure.exitcode == 0


def test_an_argument_that_cannot_be_unpickled_leaves_an_error_file(calls: Calls) -> None:
    failure = calls.run("spawn", work.drink, (work.Poison("elsewhere"),)).failures[0]
    assert failure.summary == "LookupError: poisoned"
    assert failure.has_error_file


def test_the_environment_is_in_place_when_arguments_are_unpickled(calls: Calls) -> None:
    for method in ("spawn", "forkserver"):
        result = calls.run(method, work.drink, (work.Poison("here"),))
        assert result.return_values == {0: "here"}


def test_arguments_that_cannot_be_pickled_are_an_error_at_once_and_leave_nothing(
    calls: Calls, guardian: Guardian
) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        calls.start("spawn", work.length, (b"",), (lambda: 1,))
    assert guardian.pid is not None
    assert children_of(guardian.pid) == []


def test_an_unknown_start_method_is_refused(calls: Calls) -> None:
    with pytest.raises(
        ValueError, match="unknown start method 'thread': use spawn, fork, forkserver"
    ):
        calls.start("thread", work.sleep, ())


# --- stopping


@pytest.mark.thorough
@every_method
def test_closing_ends_functions_and_all_they_started(
    calls: Calls, method: str, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    context = calls.start(method, work.with_family, (str(pids), "sleep"))
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "the family")
    context.close(signal.SIGTERM, 20)
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    assert not alive(context.pids()[0])


@pytest.mark.thorough
@every_method
@pytest.mark.parametrize("then", ["return", "killed"])
def test_no_process_of_a_function_is_left_when_the_result_is_known(
    calls: Calls, method: str, then: str, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    result = calls.run(method, work.with_family, (str(pids), then))
    assert result.is_failed() == (then == "killed")
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


@pytest.mark.thorough
@every_method
def test_a_function_that_ignores_sigterm_is_killed_after_the_grace(
    calls: Calls, method: str, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    context = calls.start(method, _stubborn, (str(ready),))
    wait_until(ready.exists, "the worker")
    context.close(signal.SIGTERM, 0.1)
    assert not alive(context.pids()[0])


@pytest.mark.thorough
@every_method
def test_function_workers_end_with_a_killed_guardian(tmp_path: Path, method: str) -> None:
    guardian = Guardian()
    calls = Calls(guardian, tmp_path)
    pids = tmp_path / "pids"
    context = calls.start(method, work.with_family, (str(pids), "sleep"))
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "the family")
    assert guardian.pid is not None
    os.kill(guardian.pid, signal.SIGKILL)
    result = context.wait(PATIENCE)
    assert result is not None
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    assert not alive(context.pids()[0])
    assert guardian.close(30)


AGENT = """
import sys, time
from helpers.workers import functions as work
from regrow.workers import Std, start_processes
if __name__ == "__main__":
    method, directory = sys.argv[1:]
    context = start_processes("t", work.with_family, {0: (f"{directory}/pids", "sleep")}, {0: {}},
                              directory, start_method=method, redirects=Std.ALL)
    print(context.pids()[0], flush=True)
    time.sleep(1000)
"""


@pytest.mark.thorough
@every_method
def test_no_function_outlives_a_killed_agent(tmp_path: Path, method: str) -> None:
    program, pids = tmp_path / "agent.py", tmp_path / "pids"
    program.write_text(AGENT)
    path = f"{os.path.dirname(work.__file__)}:{os.environ.get('PYTHONPATH', '')}"
    agent = subprocess.Popen(
        [sys.executable, str(program), method, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "the family")
    agent.kill()
    agent.communicate()
    family = [worker, *map(int, pids.read_text().split())]
    wait_until(lambda: not any(alive(pid) for pid in family), "the family dead with its agent")


NOTIFIED = """
import sys
from helpers.workers import functions as work
from regrow.workers import start_processes
if __name__ == "__main__":
    method, directory = sys.argv[1:]
    args = {0: (f"{directory}/go",)}
    context = start_processes("t", work.wait_for_file, args, {0: {}}, directory,
                              start_method=method)
    print(context.pids()[0], flush=True)
    print(context.wait().return_values, flush=True)
"""


@every_method
def test_a_signal_to_all_processes_of_a_job_ends_no_helper_of_its_functions(
    tmp_path: Path, method: str
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(NOTIFIED)
    path = f"{os.path.dirname(work.__file__)}:{os.environ.get('PYTHONPATH', '')}"
    agent = subprocess.Popen(
        [sys.executable, str(program), method, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    helpers = [pid for pid in children_of(agent.pid) if pid != worker]
    for signum in GROUP_SIGNALS:
        for pid in helpers:
            os.kill(pid, signum)
    (tmp_path / "go").touch()
    output, complaints = agent.communicate(timeout=PATIENCE)
    assert (output, complaints) == (b"{0: 'went'}\n", b"")
    assert len(helpers) == {"spawn": 2, "fork": 1, "forkserver": 3}[method]


@pytest.mark.thorough
@every_method
def test_attempts_leak_no_descriptor(calls: Calls, method: str) -> None:
    calls.run(method, work.leave, (0,))
    gc.collect()  # leftovers of older tests of this process
    before = open_files()
    for _ in range(5):
        calls.run(method, work.leave, (0,), (1,))
    assert open_files() <= before


def test_a_worker_outlives_the_thread_that_forked_it(calls: Calls) -> None:
    results: list[MultiprocessContext] = []
    thread = threading.Thread(target=lambda: results.append(calls.start("fork", _slow, ())))
    thread.start()
    thread.join(PATIENCE)
    result = results[0].wait(PATIENCE)
    assert result is not None
    assert result.return_values == {0: "done"}


def test_a_fork_prints_into_its_log_also_where_the_agents_stdout_is_no_file(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    result = calls.run("fork", work.describe, ("a",))
    assert "to stdout a\n" in Path(result.stdouts[0]).read_text()


def _boom_or_sleep(rank: int) -> None:
    if rank == 1:
        work.boom("rank 1")
    work.sleep()


def _stubborn(ready: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(ready).touch()
    work.sleep()


def _slow() -> str:
    threading.Event().wait(0.3)
    return "done"
