"""`LocalElasticAgent` with real processes, used as a library."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import regrow
from regrow._progress import IN_RESTARTER, PROGRESS_ENV, STANDS_ALONE, _open_reporter
from regrow.agent import LocalElasticAgent, WorkerSpec, WorkerState
from regrow.agent._health import HealthCheckServer
from regrow.agent._progress import ProgressBoard
from regrow.agent._sleepers import UninterruptibleSleepers
from regrow.events import Event
from regrow.launch import LaunchConfig, elastic_launch
from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
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
def test_the_events_tell_the_job_in_order(tmp_path: Path) -> None:
    events: list[Event] = []
    elastic_launch(config(tmp_path, event_sinks=(events.append,)), fail_once_and_report_steps)()
    told = [event.name for event in events if "step" not in event.name]
    once = ["regrow.rendezvous.completed", "regrow.attempt.started"]
    assert told == [
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
    def left() -> tuple[int, int]:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and thread.name.startswith("regrow"):
                thread.join(20)
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    elastic_launch(config(tmp_path), "true")()
    before = left()
    for _ in range(3):
        elastic_launch(config(tmp_path), "true")()
    assert left() == before


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


def test_a_guardian_that_is_killed_while_it_starts_workers_costs_a_restart_and_no_more(
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
    board = ProgressBoard(2, lambda: None)
    board.close()
    assert board.read() == {}


@pytest.mark.parametrize("period", [0, -1.0, float("nan"), float("inf"), 0.09])
def test_what_is_no_period_of_heartbeats_is_refused(tmp_path: Path, period: float) -> None:
    with pytest.raises(ValueError, match=f"heartbeat: {period} is no period; give the seconds"):
        config(tmp_path, heartbeat=period)


def test_heartbeats_turn_timers_on_and_are_among_the_bounds(tmp_path: Path) -> None:
    agent = LocalElasticAgent(spec("true"), DefaultLogsSpecs(log_dir=str(tmp_path)), heartbeat=10)
    assert agent._timers
    assert agent._job["bounds"]["a missing heartbeat ends all workers"] == 36 + 2
    without = LocalElasticAgent(spec("true"), DefaultLogsSpecs(log_dir=str(tmp_path)))
    assert not without._timers
    assert "a missing heartbeat ends all workers" not in without._job["bounds"]


def test_a_worker_can_see_how_far_it_said_it_is_and_that_it_is_being_stopped() -> None:
    board = ProgressBoard(2, lambda: None)
    reporter = _open_reporter(board.environment(1)[PROGRESS_ENV])
    assert reporter is not None
    assert (reporter.latest(), reporter.stopping()) == (None, False)
    reporter.report(7)
    reporter.report(8)
    board.stop()
    assert (reporter.latest(), reporter.stopping()) == (8, True)
    assert board.read()[1].last_step == 8
    board.close()
    board.stop()  # nobody is left to see it


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
def test_a_health_port_that_cannot_be_had_costs_no_training(
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
    agent = LocalElasticAgent(
        spec("sleep", "1000", max_restarts=3),
        DefaultLogsSpecs(log_dir=str(tmp_path)),
        uninterruptible_state_timeout=0.001,
        shutdown_timeout=1,
    )
    agent._sleepers._states = lambda pids: dict.fromkeys(pids, "D")
    result = agent.run()
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    assert result.state is WorkerState.FAILED
    assert "uninterruptible sleep" in result.failures[0].message
    assert agent._attempt == 0


def test_a_worker_says_by_the_board_that_it_is_replaceable_and_what_is_an_event() -> None:
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    steps: queue.SimpleQueue[None] = queue.SimpleQueue()
    board = ProgressBoard(2, lambda: steps.put(None), told.put)
    reporter = _open_reporter(board.environment(1)[PROGRESS_ENV])
    assert reporter is not None
    assert [board.replaceable(rank) for rank in (0, 1)] == [False, False]
    reporter.stand(IN_RESTARTER)
    reporter.send(b'{"name": "quick"}\n')
    reporter.report(7)
    reporter.send(b'{"name": "q"}\n')
    assert [told.get(timeout=30) for _ in range(2)] == [b'{"name": "quick"}', b'{"name": "q"}']
    steps.get(timeout=30)
    assert [board.replaceable(rank) for rank in (0, 1)] == [False, True]
    assert board.read()[1].last_step == 7
    reporter.stand(STANDS_ALONE)
    assert not board.replaceable(1)
    board.close()
    assert not board.replaceable(1)
