"""`LocalElasticAgent` with real processes, used as a library."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import regrow
from helpers.descriptors import in_use
from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE, wait_until
from regrow._progress import IN_WRAPPER, LONGEST, NOT_IN_WRAPPER, PROGRESS_ENV, _open_reporter
from regrow.agent import LocalElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent.features import progress
from regrow.agent.features.health import HealthCheckServer
from regrow.agent.features.progress import FIRST_STEP, WorkerReports, messages
from regrow.agent.features.state_d import UninterruptibleSleepers
from regrow.agent.job import Job
from regrow.events import Event, as_record
from regrow.launch import LaunchConfig, elastic_launch
from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
from regrow.rendezvous.foreign import adapted
from regrow.store import MemoryStore
from regrow.utils import PortReservation
from regrow.workers import ChildFailedError, DefaultLogsSpecs


def config(tmp_path: Path, nproc: int = 2, **more: Any) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
        **more,
    )


def spec(entrypoint: Any, *args: Any, nproc: int = 2, max_restarts: int = 0) -> WorkerSpec:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    return WorkerSpec(
        role="trainer",
        local_world_size=nproc,
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=args,
        max_restarts=max_restarts,
    )


def job(nproc: int, post: Callable[[Any], None]) -> Job:
    handler = PlainHandler()
    group = WorkerGroup(WorkerSpec("trainer", nproc, handler, entrypoint="train"))
    return Job(group, adapted(handler), post)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_grace_that_no_worker_can_be_given_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"shutdown_timeout must be .*, got {seconds}"):
        config(tmp_path, shutdown_timeout=seconds)


def rank_and_argument(argument: str) -> str:
    return os.environ["RANK"] + argument


def fail_once_and_report_steps() -> int:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(10 + 3 * attempt, 15 + 3 * attempt):
        regrow.step(step)
    if attempt == 0 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0:
        signal.pause()
    return attempt


def raise_with_rank() -> None:
    raise ValueError(f"rank {os.environ['RANK']} has had enough")


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_functions_return_their_values_by_global_rank(tmp_path: Path, method: str) -> None:
    launched = elastic_launch(config(tmp_path, start_method=method), rank_and_argument)
    assert launched("!") == {0: "0!", 1: "1!"}


@pytest.mark.thorough
def test_a_function_that_raises_is_the_root_cause_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, max_restarts=0), raise_with_rank)()
    assert "has had enough" in str(caught.value)
    assert "Traceback" in str(caught.value)


def test_the_older_form_of_the_constructor_runs(tmp_path: Path) -> None:
    agent = LocalElasticAgent(spec(rank_and_argument, "?"), "fork", 10, str(tmp_path))
    assert agent.run().return_values == {0: "0?", 1: "1?"}
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    assert [path.name.split("_")[0] for path in tmp_path.iterdir()] == ["job"]


def test_steps_are_exact_though_the_worker_was_killed(tmp_path: Path) -> None:
    events: list[Event] = []
    result = elastic_launch(
        config(tmp_path, event_sinks=(events.append,)), fail_once_and_report_steps
    )()
    assert result == {0: 1, 1: 1}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event.metadata)
    first, last = by_name["regrow.attempt.ended"]
    assert (first["state"], last["state"]) == ("FAILED", "SUCCEEDED")
    steps = first["last_steps"]["0"]
    assert (steps["first_step"], steps["last_step"]) == (10, 14)
    assert steps["first_monotonic"] <= steps["last_monotonic"]
    assert last["last_steps"]["1"]["first_step"] == 13
    resumed = {e["rank"]: e["step"] for e in by_name["regrow.worker.first_step"] if e["attempt"]}
    assert resumed.items() <= {0: 13, 1: 13}.items()


@pytest.mark.thorough
def test_the_events_of_a_job_are_in_order(tmp_path: Path) -> None:
    events: list[Event] = []
    elastic_launch(config(tmp_path, event_sinks=(events.append,)), fail_once_and_report_steps)()
    names = [event.name for event in events if "step" not in event.name]
    once = ["regrow.rendezvous.completed", "regrow.attempt.started"]
    assert names == [
        "regrow.job.started",
        *once,
        "regrow.worker.failed",
        "regrow.attempt.ended",
        "regrow.job.restarting",
        *once,
        "regrow.attempt.ended",
        "regrow.job.finished",
    ]
    stamps = [event.metadata["monotonic"] for event in events]
    assert stamps == sorted(stamps)
    (log,) = tmp_path.glob("job_*/events.jsonl")
    assert [json.loads(line)["name"] for line in log.read_text().splitlines()] == [
        event.name for event in events
    ]


def test_an_agent_leaves_no_thread_and_no_descriptor_behind(tmp_path: Path) -> None:
    elastic_launch(config(tmp_path), "true")()
    before = in_use()
    for _ in range(3):
        elastic_launch(config(tmp_path), "true")()

    def left() -> set[object]:
        gc.collect()
        return in_use() - before

    wait_until(lambda: not left(), lambda: f"{left()} are left")


def test_all_event_sinks_see_one_time_of_day(tmp_path: Path) -> None:
    seen = list[dict[str, Any]](), list[dict[str, Any]]()
    first, second = (lambda event, its=its: its.append(as_record(event)) for its in seen)
    elastic_launch(config(tmp_path, event_sinks=(first, second)), "true")()
    assert seen[0]
    assert seen[0] == seen[1]


def test_an_event_sink_that_raises_costs_neither_the_job_nor_the_other_sinks(
    tmp_path: Path,
) -> None:
    def broken(event: Event) -> None:
        raise ConnectionResetError("the dashboard is gone")

    seen: list[Event] = []
    sinks = (broken, seen.append)
    assert elastic_launch(config(tmp_path, event_sinks=sinks), "true")() == {0: None, 1: None}
    assert seen[-1].name == "regrow.job.finished"
    assert seen[-1].metadata["state"] == "SUCCEEDED"


def test_a_guardian_that_is_killed_while_it_starts_workers_costs_one_restart(
    tmp_path: Path,
) -> None:
    kill = 'test "$REGROW_ATTEMPT" = 1 || kill -KILL $PPID'
    launched = elastic_launch(config(tmp_path, nproc=16, max_restarts=1), "sh")
    assert launched("-c", kill) == dict.fromkeys(range(16))


def test_an_agent_whose_health_server_breaks_leaves_no_guardian_behind(tmp_path: Path) -> None:
    class Broken(HealthCheckServer):
        def start(self) -> None:
            raise RuntimeError("no certificate")

    def children() -> set[str]:
        found: set[str] = set()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError):  # a thread that has just ended
                found.update((task / "children").read_text().split())
        return found

    before = children()
    server = Broken(lambda: 0, 0, 60)
    agent = LocalElasticAgent(spec("true"), DefaultLogsSpecs(), health_check_server=server)
    with pytest.raises(RuntimeError, match="no certificate"):
        agent.run()
    assert children() <= before


def test_an_event_handler_that_does_not_exist_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="unknown event log handler 'nope'"):
        elastic_launch(config(tmp_path, event_log_handler="nope"), "true")()
    assert not list(tmp_path.iterdir())


def test_steps_are_none_once_the_board_is_closed() -> None:
    page = WorkerReports(job(2, print))
    page.close()
    assert page.read() == {}


@pytest.mark.parametrize("period", [0, -1.0, float("nan"), float("inf"), 0.09])
def test_an_invalid_heartbeat_period_is_refused(tmp_path: Path, period: float) -> None:
    with pytest.raises(ValueError, match=f"heartbeat: {period} is not a heartbeat period"):
        config(tmp_path, heartbeat=period)


def test_heartbeats_turn_timers_on_and_are_among_the_bounds(tmp_path: Path) -> None:
    def bounds(**more: Any) -> dict[str, float]:
        events: list[Event] = []
        elastic_launch(config(tmp_path, event_sinks=(events.append,), **more), "true")()
        found: dict[str, float] = events[0].metadata["bounds"]
        return found

    with_heartbeats = bounds(heartbeat=10)
    assert with_heartbeats["a missing heartbeat ends all workers"] == 36 + 2
    assert "a hung worker is killed" in with_heartbeats
    without = bounds()
    assert "a missing heartbeat ends all workers" not in without
    assert "a hung worker is killed" not in without


def test_a_worker_reads_its_latest_step_and_that_it_is_being_stopped() -> None:
    page = WorkerReports(job(2, print))
    reporter = _open_reporter(page.environment(1)[PROGRESS_ENV])
    assert reporter is not None
    assert (reporter.latest(), reporter.stopping()) == (None, False)
    reporter.report(7)
    reporter.report(8)
    page.stop()
    assert (reporter.latest(), reporter.stopping()) == (8, True)
    assert page.read()[1].last_step == 8
    page.close()
    page.stop()  # no worker is left to see it


def test_the_health_server_is_healthy_while_the_loop_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = PortReservation()
    port = held.port
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))
    answers: list[int] = []
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def ask(event: Event) -> None:
        if event.name == "regrow.attempt.started":
            threading.Thread(target=answer).start()

    def answer() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=20) as response:
            answers.append(response.status)
        gate.write_text("done")

    elastic_launch(config(tmp_path / "logs", 1, event_sinks=(ask,)), "cat")(str(gate))
    assert answers == [200]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=20)
    held.close()


@pytest.mark.parametrize("port", ["none", "99999", "taken"])
def test_an_unusable_health_port_does_not_stop_the_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    port: str,
) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        text = str(other.getsockname()[1]) if port == "taken" else port
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", text)
        elastic_launch(config(tmp_path), "true")()
    assert "no health server" in caplog.text
    assert text in caplog.text


def test_a_worker_stuck_in_uninterruptible_sleep_is_found_after_the_time_out() -> None:
    states = {7: "D", 8: "S"}
    sleepers = UninterruptibleSleepers(5.0, lambda _: dict(states))
    assert sleepers.stuck([7, 8], now=100.0) == set()
    assert sleepers.stuck([7, 8], now=104.9) == set()
    states[7] = "R"
    assert sleepers.stuck([7, 8], now=105.0) == set()
    states[7] = "D"
    assert sleepers.stuck([7, 8], now=106.0) == set()
    assert sleepers.stuck([7, 8], now=111.0) == {7}


def test_a_stuck_worker_ends_the_job_without_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = "regrow.agent.features.state_d.process_states"
    monkeypatch.setattr(patched, lambda pids: dict.fromkeys(pids, "D"))
    events: list[Event] = []
    agent = LocalElasticAgent(
        spec("sleep", "1000", max_restarts=3),
        DefaultLogsSpecs(log_dir=str(tmp_path)),
        uninterruptible_state_timeout=0.001,
        event_sinks=(events.append,),
        shutdown_timeout=1,
    )
    result = agent.run()
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    assert result.state is WorkerState.FAILED
    assert "uninterruptible sleep" in result.failures[0].message
    assert [each.name for each in events].count("regrow.attempt.started") == 1


def test_half_a_message_delays_neither_the_next_ones_nor_the_end_of_an_attempt() -> None:
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    page = WorkerReports(job(1, received.put))
    reporter = _open_reporter(page.environment(0)[PROGRESS_ENV])
    assert reporter is not None
    reporter.send(b'{"name": "cut')
    reporter.report(7)
    assert received.get(timeout=30).args == (FIRST_STEP,)
    reporter.send(b'{"name": "whole"}\n{"name": "cut')
    assert received.get(timeout=30).args == (b'{"name": "whole"}',)
    page.close()  # does not return if it waits for the rest


def test_messages_of_any_kind_are_split_and_bounded() -> None:
    assert messages(b"a\n\0b\n") == ([b"a", FIRST_STEP, b"b"], b"")
    assert messages(b"half\0b\nrest") == ([FIRST_STEP, b"b"], b"rest")
    assert messages(b"q") == ([], b"q")
    assert messages(b"x" * 100_000) == ([], b"")
    rest = b""
    for _ in range(1000):
        found, rest = messages(rest + b"x" * 1000)
        assert (found, len(rest) < 4096) == ([], True)


NESTED = b"[" * 2000


@pytest.mark.parametrize(
    "line", [b"", b"{", b"\xff", b"7", b"[]", b"null", b"{}", b'{"name": 1, "fields": {}}', NESTED]
)
def test_a_malformed_event_is_recognized(line: bytes) -> None:
    assert progress.event(line) is None


def test_a_worker_can_forge_no_field_of_an_event() -> None:
    forged = {"name": "x", "run_id": "other", "attempt": 9, "host": "other", "monotonic": -1}
    wrong = {"iteration": "1", "rank": -1, "lost": [1, "2", None], "seconds": {"a": "b", "c": 1}}
    line = json.dumps({"name": progress.RESTARTED, "fields": forged | wrong}).encode()
    name, fields = progress.event(line) or ("", {})
    assert name == progress.RESTARTED
    assert not forged.keys() & fields.keys()
    assert (fields["iteration"], fields["rank"], fields["lost"]) == (None, None, [1])
    assert fields["seconds"] == {"c": 1}
    assert progress.event(b'{"name": "unknown", "fields": {"name": "x"}}') == ("unknown", {})
    raised = {"name": progress.RAISED, "fields": {"rank": "1", "traceback": "x" * 10_000}}
    _, fields = progress.event(json.dumps(raised).encode()) or ("", {})
    assert (fields["rank"], len(fields["traceback"])) == (None, LONGEST)


FORGER = """
import json, os, sys, time
pipe = os.open(os.environ["REGROW_PROGRESS"].split("|")[1], os.O_WRONLY)
fields = {"name": "x", "run_id": "other", "attempt": 9, "host": "other", "iteration": 1}
for line in ({"name": "regrow.inprocess.restarted", "fields": fields}, [], {"name": {}}):
    os.write(pipe, json.dumps(line).encode() + b"\\n")
while not os.path.exists(sys.argv[1]):  # the agent may end before it has read the last messages
    time.sleep(0.005)
"""


def test_no_message_of_a_worker_ends_the_job(tmp_path: Path) -> None:
    seen: list[Event] = []
    received = tmp_path / "received"

    def sink(event: Event) -> None:
        seen.append(event)
        if event.name == progress.RESTARTED:
            received.touch()

    settings = config(tmp_path, 1, event_sinks=(sink,))
    elastic_launch(settings, sys.executable)("-c", FORGER, str(received))
    (event,) = [event for event in seen if event.name == progress.RESTARTED]
    assert event.metadata["run_id"] == "job"
    assert (event.metadata["attempt"], event.metadata["host"]) == (0, socket.gethostname())


def test_the_loss_of_a_worker_without_which_the_others_continue_by_any_signal_ends_no_job(
    tmp_path: Path,
) -> None:
    others_continue = "from regrow import _progress; _progress.set_restart_state(1)"
    killed = f"{others_continue}; os.kill(os.getpid(), 44)"
    script = f"import os\nif os.environ['RANK'] == '1': {killed}"
    seen: list[Event] = []
    elastic_launch(config(tmp_path, event_sinks=(seen.append,)), sys.executable)("-c", script)
    (lost,) = [event for event in seen if event.name == "regrow.inprocess.lost"]
    assert lost.metadata["exitcode"] == -44


def test_the_page_shows_without_which_workers_the_others_continue_and_the_pipe_their_events() -> (
    None
):
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    page = WorkerReports(job(2, received.put))
    reporter = _open_reporter(page.environment(1)[PROGRESS_ENV])
    assert reporter is not None
    assert [page.others_continue(rank) for rank in (0, 1)] == [False, False]
    reporter.set_restart_state(IN_WRAPPER)
    reporter.send(b'{"name": "quick"}\n')
    reporter.report(7)
    reporter.send(b'{"name": "q"}\n')
    sent = [b'{"name": "quick"}', FIRST_STEP, b'{"name": "q"}']
    assert [received.get(timeout=30).args[0] for _ in range(3)] == sent
    assert [page.others_continue(rank) for rank in (0, 1)] == [False, True]
    assert page.read()[1].last_step == 7
    reporter.set_restart_state(NOT_IN_WRAPPER)
    assert not page.others_continue(1)
    page.close()
    assert not page.others_continue(1)


def save_when_stopped_or_fail(folder: str) -> None:
    def save(*_: object) -> None:
        time.sleep(0.3)
        Path(folder, "saved").touch()
        os._exit(0)

    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, save)
        Path(folder, "ready").touch()
    while os.environ["RANK"] == "0" or not Path(folder, "fail").exists():
        time.sleep(0.01)
    os._exit(3)


def test_workers_have_the_whole_grace_if_the_last_restart_was_spent_during_the_attempt(
    tmp_path: Path,
) -> None:
    local = WorkerSpec(
        "trainer",
        2,
        PlainHandler(round=(MemoryStore(), 0, 1)),
        entrypoint=save_when_stopped_or_fail,
        args=(str(tmp_path),),
        max_restarts=1,
    )
    agent = LocalElasticAgent(local, "spawn", 10, str(tmp_path / "logs"), restart_timeout=0)
    results: queue.SimpleQueue[WorkerState] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: results.put(agent.run().state))
    thread.start()
    wait_until((tmp_path / "ready").exists, "rank 0 is ready")
    agent._remaining_restarts = 0  # as a replacement does, or a subclass
    (tmp_path / "fail").touch()
    assert results.get(timeout=PATIENCE) is WorkerState.FAILED
    thread.join(PATIENCE)
    assert (tmp_path / "saved").exists()
