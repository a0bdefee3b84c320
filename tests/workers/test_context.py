"""Groups of commands: `start_processes`, `PContext`, `SubprocessContext`."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.descriptors import in_use, open_files
from helpers.processes import PATIENCE, alive, children_of, marked, wait_until
from regrow.workers import (
    DefaultLogsSpecs,
    Guardian,
    PContext,
    RunProcsResult,
    SignalException,
    Std,
    SubprocessContext,
    WorkerChange,
    start_processes,
)


class Jobs:
    """Starts groups of shell scripts and closes what a test left open."""

    def __init__(self, guardian: Guardian, directory: Path) -> None:
        self._guardian = guardian
        self.directory = directory
        self._contexts: list[PContext] = []

    def start(self, *scripts: str, entrypoint: str = "sh", **more: Any) -> PContext:
        settings: dict[str, Any] = {
            "log_dir": str(self.directory),
            "redirects": Std.ALL,
            "guardian": self._guardian,
            "signals_to_handle": "",
        }
        context = start_processes(
            "test",
            entrypoint,
            {rank: ("-c", script) for rank, script in enumerate(scripts)},
            {rank: {"RANK": str(rank)} for rank in range(len(scripts))},
            **settings | more,
        )
        self._contexts.append(context)
        return context

    def run(self, *scripts: str, **more: Any) -> RunProcsResult:
        return _result(self.start(*scripts, **more))

    def close(self) -> None:
        for context in self._contexts:
            context.close(signal.SIGKILL, 0)


@pytest.fixture
def jobs(guardian: Guardian, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(guardian, tmp_path)
    yield jobs
    jobs.close()


def _result(context: PContext) -> RunProcsResult:
    result = context.wait(PATIENCE)
    assert result is not None
    return result


ERROR = """
import json, os, sys, time
stamps = {"py_callstack": "", "timestamp": str(int(time.time())), "monotonic": time.monotonic()}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": sys.argv[1], "extraInfo": stamps}}, file)
"""


def _error(jobs: Jobs, message: str) -> str:
    """A shell command that leaves an error file as `record` would."""
    program = jobs.directory / "error.py"
    program.write_text(ERROR)
    return f"{sys.executable} -I -S {program} {message}"


# --- results


def test_success_has_a_none_for_each_rank_and_the_paths_of_the_logs(jobs: Jobs) -> None:
    result = jobs.run("echo out $RANK; echo err $RANK >&2", "echo out $RANK")
    assert not result.is_failed()
    assert result.return_values == {0: None, 1: None}
    assert Path(result.stdouts[1]).read_text() == "out 1\n"
    assert Path(result.stderrs[0]).read_text() == "err 0\n"


@pytest.mark.parametrize(
    ("script", "code", "name"),
    [("exit 3", 3, "<N/A>"), ("kill -9 $$", -9, "SIGKILL"), ("kill -11 $$", -11, "SIGSEGV")],
)
def test_one_failure_ends_all_and_only_it_is_a_failure(
    jobs: Jobs, script: str, code: int, name: str
) -> None:
    context = jobs.start("sleep 1000", script, "sleep 1000")
    result = _result(context)
    assert list(result.failures) == [1]
    assert result.failures[1].exitcode == code
    assert result.failures[1].signal_name() == name
    assert result.failures[1].pid == context.pids()[1]
    assert result.return_values == {}
    assert not any(alive(pid) for pid in context.pids().values())


def test_the_failing_workers_output_is_complete_when_the_result_is_there(jobs: Jobs) -> None:
    result = jobs.run(f"{sys.executable} -I -S -c \"print('x' * 3000000)\"; echo end; exit 1")
    text = Path(result.stdouts[0]).read_text()
    assert len(text) == 3_000_005
    assert text.endswith("\nend\n")


def test_a_worker_that_lingered_after_its_error_is_the_root_cause(jobs: Jobs) -> None:
    # Rank 0 raises first and hangs in its own shutdown; rank 1 fails because of that.
    first = jobs.directory / "first"
    result = jobs.run(
        f"{_error(jobs, 'cause')}; touch {first}; sleep 1000",
        f"while ! test -e {first}; do sleep 0.01; done; exit 1",
    )
    failures = result.failures
    assert sorted(failures) == [0, 1]
    assert failures[0].failed_monotonic < failures[1].failed_monotonic
    assert failures[0].summary == "cause"


def test_an_error_that_the_stop_itself_caused_is_no_failure(jobs: Jobs) -> None:
    ready = jobs.directory / "ready"
    error = _error(jobs, "stopped")
    result = jobs.run(
        f"trap '{error}; exit 9' TERM; touch {ready}; while :; do sleep 0.01; done",
        f"while ! test -e {ready}; do sleep 0.01; done; exit 1",
    )
    error_file = Path(result.stdouts[0]).with_name("error.json")
    assert json.loads(error_file.read_text())["message"]["message"] == "stopped"
    assert list(result.failures) == [1]


def test_no_process_of_a_worker_is_left_when_the_result_is_known(jobs: Jobs) -> None:
    token = f"left-{os.urandom(8).hex()}"
    daemon = f"(setsid sh -c 'sleep 1000; : {token}' &); sleep 1000 &"
    result = jobs.run(f": {token}; {daemon} exit 0", f"{daemon} exit 0")
    assert not result.is_failed()
    assert marked(token) == []


def test_a_worker_that_ignores_sigterm_is_killed_after_the_configured_grace(jobs: Jobs) -> None:
    ready = jobs.directory / "ready"
    context = jobs.start(
        f"trap '' TERM; touch {ready}; while :; do sleep 1000; done",
        f"while ! test -e {ready}; do sleep 0.01; done; exit 1",
        shutdown_timeout=0.1,
    )
    assert list(_result(context).failures) == [1]
    assert not alive(context.pids()[0])


def test_the_grace_after_a_failure_is_read_at_the_failure(jobs: Jobs) -> None:
    ready, failing, saved = (jobs.directory / name for name in ("ready", "failing", "saved"))
    graces = [0.0]
    context = jobs.start(
        f"trap 'sleep 0.2; touch {saved}; exit 0' TERM; touch {ready};"
        " while :; do sleep 0.01; done",
        f"while ! test -e {failing}; do sleep 0.01; done; exit 1",
        failure_timeout=lambda: graces[-1],
    )
    wait_until(ready.exists, "rank 0 is ready")
    graces.append(PATIENCE)
    failing.touch()
    assert list(_result(context).failures) == [1]
    assert saved.exists()


def test_a_close_waits_for_the_grace_that_another_thread_lengthens(jobs: Jobs) -> None:
    ready, saved = jobs.directory / "ready", jobs.directory / "saved"
    context = jobs.start(
        f"trap 'sleep 0.2; touch {saved}; exit 0' TERM; touch {ready};"
        " while :; do sleep 0.01; done",
    )
    wait_until(ready.exists, "rank 0 is ready")
    context.lengthen(PATIENCE)
    context.close(timeout=0.0)
    assert saved.exists()
    assert not _result(context).is_failed()


# --- waiting and closing


def test_wait_returns_none_at_the_time_out_which_may_be_zero(jobs: Jobs) -> None:
    context = jobs.start("sleep 1000")
    assert context.wait(0) is None
    assert context.wait(0.01) is None
    context.close()
    assert context.wait(0) is not None


def test_closing_ends_the_workers_without_making_them_failures_and_may_be_repeated(
    jobs: Jobs,
) -> None:
    context = jobs.start("sleep 1000", "exit 0")
    context.close()
    context.close()
    result = _result(context)
    assert not result.is_failed()
    assert not any(alive(pid) for pid in context.pids().values())


def test_close_sends_the_given_signal(jobs: Jobs) -> None:
    ready, got = jobs.directory / "ready", jobs.directory / "got"
    script = f"trap 'touch {got}; exit' USR2; touch {ready}; while :; do sleep 0.01; done"
    context = jobs.start(script)
    wait_until(ready.exists, "the worker")
    context.close(signal.SIGUSR2)
    assert got.exists()


def test_closing_again_from_another_thread_cuts_the_grace_short(jobs: Jobs) -> None:
    ready = jobs.directory / "ready"
    context = jobs.start(f"trap '' TERM; touch {ready}; while :; do sleep 1000; done")
    wait_until(ready.exists, "the worker")
    patient = threading.Thread(target=context.close, args=(signal.SIGTERM, 10_000))
    patient.start()
    context.close(signal.SIGKILL, 0)
    patient.join(PATIENCE)
    assert not patient.is_alive()
    assert not alive(context.pids()[0])


def test_a_context_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    context = SubprocessContext("test", "sh", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    context.close()
    assert context.pids() == {}


def test_starting_twice_is_an_error(jobs: Jobs) -> None:
    context = jobs.start("sleep 1000")
    with pytest.raises(ValueError, match="start method got called twice"):
        context.start()


# --- starting


@pytest.mark.parametrize("what", ["args", "envs"])
def test_args_and_envs_must_cover_the_ranks(what: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"args": {0: (), 1: ()}, "envs": {0: {}, 1: {}}}
    given[what] = {0: given[what][0], 2: given[what][1]}
    with pytest.raises(RuntimeError) as caught:
        start_processes("test", "true", log_dir=str(tmp_path), **given)
    assert str(caught.value) == (
        f"{what}, local rank mapping mismatch, expected: {{0, 1}}, actual: {{0, 2}}"
    )


def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing(jobs: Jobs) -> None:
    jobs.run("true")
    gc.collect()  # leftovers of older tests of this process
    before = open_files()
    with pytest.raises(FileNotFoundError, match=r"no such program.*/no/such"):
        jobs.start("", "", entrypoint="/no/such")
    assert open_files() <= before


def test_arguments_are_converted_to_strings(jobs: Jobs) -> None:
    result = _result(
        start_processes(
            "test",
            "echo",
            {0: (1, [2, 3], Path("a"))},
            {0: {}},
            DefaultLogsSpecs(str(jobs.directory), redirects=Std.OUT),
        )
    )
    assert Path(result.stdouts[0]).read_text() == "1 [2, 3] a\n"


def test_a_text_in_place_of_logs_specs_is_the_log_directory(tmp_path: Path) -> None:
    context = start_processes(
        "test", "true", {0: ()}, {0: {}}, str(tmp_path), signals_to_handle="", tee=Std.OUT
    )
    assert _result(context).stdouts[0].startswith(str(tmp_path))


def test_a_context_without_a_guardian_makes_one_and_ends_it(tmp_path: Path) -> None:
    before = set(children_of(os.getpid()))
    context = start_processes(
        "test", "true", {0: ()}, {0: {}}, log_dir=str(tmp_path), signals_to_handle=""
    )
    _result(context)
    assert set(children_of(os.getpid())) == before


def test_a_group_outlives_the_thread_that_started_it(jobs: Jobs) -> None:
    started: list[PContext] = []
    thread = threading.Thread(target=lambda: started.append(jobs.start("sleep 0.2; exit 4")))
    thread.start()
    thread.join(PATIENCE)
    assert _result(started[0]).failures[0].exitcode == 4


def test_fifty_attempts_leak_no_descriptor_thread_or_process(
    jobs: Jobs, guardian: Guardian
) -> None:
    jobs.run("exit 1", "sleep 1000")
    before = in_use()
    for _ in range(50):
        context = jobs.start("exit 1", "sleep 1000")
        assert _result(context).is_failed()
        context.close()
    wait_until(lambda: in_use() <= before, lambda: f"{in_use() - before} are left")
    assert guardian.pid is not None
    assert children_of(guardian.pid) == []


# --- changes


def test_changes_are_reported_in_order_and_the_result_is_known_at_the_end(jobs: Jobs) -> None:
    changes: list[WorkerChange] = []
    ended = threading.Event()

    def on_change(change: WorkerChange) -> None:
        changes.append(change)
        if change.kind == "ended":
            ended.set()

    go = jobs.directory / "go"
    script = f"kill -STOP $$; while ! test -e {go}; do sleep 0.01; done; exit 5"
    context = jobs.start(script, on_change=on_change)
    wait_until(lambda: len(changes) == 1, "the suspension")
    os.kill(context.pids()[0], signal.SIGCONT)
    wait_until(lambda: len(changes) == 2, "the resumption")
    go.touch()
    assert ended.wait(PATIENCE)
    pid = context.pids()[0]
    assert [(change.kind, change.status, change.local_rank, change.pid) for change in changes] == [
        ("suspended", signal.SIGSTOP, 0, pid),
        ("resumed", signal.SIGCONT, 0, pid),
        ("exited", 5, 0, pid),
        ("ended", 0, -1, 0),
    ]
    stamps = [change.monotonic for change in changes]
    assert stamps == sorted(stamps)
    assert context.wait(0) is not None


def test_a_killed_guardian_is_reported_and_fails_all_workers_and_the_next_attempt_works(
    tmp_path: Path,
) -> None:
    guardian = Guardian()
    jobs = Jobs(guardian, tmp_path)
    changes: list[WorkerChange] = []
    context = jobs.start("sleep 1000 & wait", "sleep 1000", on_change=changes.append)
    assert guardian.pid is not None
    os.kill(guardian.pid, signal.SIGKILL)
    result = _result(context)
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: -9, 1: -9}
    assert [change.kind for change in changes].count("guardian_lost") == 1
    assert not any(alive(pid) for pid in context.pids().values())
    assert not jobs.run("exit 0").is_failed()
    assert guardian.close(30)


def test_workers_that_are_killed_at_the_end_of_their_lease_are_no_errors_to_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contexts: list[PContext] = []
    guardian = Guardian(on_lapse=lambda _: contexts[0].note_lapse())
    contexts.append(Jobs(guardian, tmp_path).start("sleep 1000"))
    guardian.renew(time.monotonic())
    assert _result(contexts[0]).failures[0].exitcode == -signal.SIGKILL
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert guardian.close(30)


# --- signals to the agent

AGENT = """
import os, signal, sys
from regrow.workers import SignalException, start_processes
script = "trap 'touch $0/got; exit' USR1; echo $$ > $0/pid; while :; do sleep 0.01; done"
context = start_processes("test", "sh", {0: ("-c", script, sys.argv[1])}, {0: {}}, sys.argv[1])
try:
    print("started", flush=True)
    context.wait()
except SignalException as error:
    print(error.sigval.name, error, flush=True)
    context.close(signal.SIGUSR1)
"""


def _agent(directory: Path, program: str = AGENT, **env: str) -> subprocess.Popen[str]:
    agent = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "started\n"
    pid = directory / "pid"
    wait_until(lambda: pid.exists() and pid.read_text() != "", "the worker")
    return agent


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_raised_in_the_main_thread_as_torch_does(
    tmp_path: Path, signum: signal.Signals
) -> None:
    agent = _agent(tmp_path)
    agent.send_signal(signum)
    output, _ = agent.communicate(timeout=PATIENCE)
    assert output == f"{signum.name} Process {agent.pid} got signal: {int(signum)}\n"
    assert agent.returncode == 0
    assert (tmp_path / "got").exists()


ASIDE = """
import signal, sys, threading
def aside():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=aside).start()
"""


def test_a_signal_that_the_kernel_delivers_to_another_thread_is_handled(tmp_path: Path) -> None:
    """A signal right before the main thread falls asleep does not wake Python either."""
    agent = _agent(tmp_path, ASIDE + AGENT)
    output, _ = agent.communicate("now\n", timeout=PATIENCE)
    assert output == f"SIGTERM Process {agent.pid} got signal: {int(signal.SIGTERM)}\n"


AS_IT_ENTERS = """
import signal, sys, threading
enter = threading.Condition.__enter__.__code__
def profile(frame, event, arg):
    if event == "c_return" and frame.f_code is enter and sys._getframe(2).f_code.co_name == "wait":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGTERM)
"""
AS_IT_LOGS = """
import logging, signal, sys
class Interrupted(logging.StreamHandler):
    def emit(self, record):
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            self.handleError(record)
"""
AS_IT_DELETES = """
import signal
class Deleted:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
"""


AS_IT_IS_COLLECTED = """
import signal, weakref
class Collected: pass
known, key = weakref.WeakValueDictionary(), Collected()
known[1] = key
def profile(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "remove":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("prelude", "before_wait"),
    [
        (AS_IT_ENTERS, "sys.setprofile(profile)"),
        (AS_IT_LOGS, "logging.getLogger().handlers = [Interrupted()]; logging.warning('a line')"),
        (AS_IT_DELETES, "Deleted()"),
        (AS_IT_IS_COLLECTED, "sys.setprofile(profile); del key"),
    ],
    ids=["a lock is taken", "a line is logged", "an object is deleted", "a weak one is"],
)
def test_a_signal_is_raised_where_its_exception_is_not_lost_and_leaves_no_lock_held(
    tmp_path: Path, prelude: str, before_wait: str
) -> None:
    # The worker handles SIGUSR1 once it has written its pid.
    ready = 'while not (os.path.exists(f"{sys.argv[1]}/pid")): pass'
    waits = f"{before_wait}; context.wait()"
    program = prelude + AGENT.replace("try:", f"{ready}\ntry:").replace("context.wait()", waits)
    agent = _agent(tmp_path, program)
    try:
        output, _ = agent.communicate(timeout=PATIENCE)
    finally:
        agent.kill()
    assert output == f"SIGTERM Process {agent.pid} got signal: {int(signal.SIGTERM)}\n"
    assert (tmp_path / "got").exists()


def test_the_environment_chooses_which_signals_are_raised(tmp_path: Path) -> None:
    agent = _agent(tmp_path, TORCHELASTIC_SIGNALS_TO_HANDLE="SIGUSR2,NONSENSE")
    agent.send_signal(signal.SIGUSR2)
    assert agent.communicate(timeout=PATIENCE)[0].startswith("SIGUSR2 ")
    (tmp_path / "pid").unlink()
    agent = _agent(tmp_path, TORCHELASTIC_SIGNALS_TO_HANDLE="SIGUSR2")
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=PATIENCE)
    assert agent.returncode == -signal.SIGTERM
    worker = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(worker), "the worker dead with its agent")


def test_signals_to_handle_empty_leaves_the_handlers_alone(jobs: Jobs) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    jobs.run("true", signals_to_handle="")
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_exception_names_its_signal() -> None:
    assert SignalException("text", signal.SIGTERM).sigval is signal.SIGTERM


def test_a_killed_agent_leaves_no_worker_and_no_log_unwritten(tmp_path: Path) -> None:
    token = f"agent-{os.urandom(8).hex()}"
    code = (
        "import os, sys, time\n"
        "from regrow.workers import Std, start_processes\n"
        "c = start_processes('t', 'sh', {0: ('-c', sys.argv[1])}, {0: {}}, sys.argv[2],"
        " redirects=Std.ALL)\n"
        "print(c.stdouts[0], flush=True)\n"
        "time.sleep(1000)\n"
    )
    script = "trap '' TERM; n=0; while :; do echo line $n; n=$((n + 1)); done"
    agent = subprocess.Popen(
        [sys.executable, "-c", code, script, str(tmp_path)],
        env=os.environ | {"TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    log = Path(agent.stdout.readline().strip())
    wait_until(lambda: log.exists() and log.stat().st_size > 10_000, "output")
    agent.kill()
    agent.communicate(timeout=PATIENCE)
    wait_until(lambda: marked(token) == [], "nothing left of the job")
    lines = log.read_text().splitlines()
    assert len(lines) > 100
    # All that was printed, once and in order; the last may be cut short by the worker's own death.
    assert lines[:-1] == [f"line {n}" for n in range(len(lines) - 1)]


def test_time_is_monotonic_and_failures_are_stamped_before_their_result(jobs: Jobs) -> None:
    result = jobs.run("exit 1")
    exited = result.failures[0].exited_monotonic
    assert exited is not None
    assert exited <= time.monotonic()
