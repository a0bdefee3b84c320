"""Agents of several nodes in one process, with real workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from helpers.processes import wait_until
from helpers.rendezvous.fake_driver import FakeDriver, FakeRounds
from regrow.agent import LocalElasticAgent, RunResult, WorkerSpec, WorkerState
from regrow.agent.decisions import decide
from regrow.events import Event, as_record, story
from regrow.rendezvous import (
    DynamicRendezvousHandler,
    PushingRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    SoloRendezvousHandler,
)
from regrow.rendezvous.protocol.messages import NodeLost
from regrow.workers import ChildFailedError, DefaultLogsSpecs, SignalException

DEADLINE_S = 40.0


class Nodes:
    """The nodes of one job, each an agent in a thread of its own."""

    def __init__(self, directory: Path, least: int, most: int) -> None:
        limits = RendezvousTimeout(last_call=timedelta(seconds=0.2))
        beat = timedelta(seconds=1)
        self.settings = RendezvousSettings("job", least, most, limits, beat, 3)
        self.rounds = FakeRounds(least, most, self.settings.bounds)
        self.directory = directory
        self.agents: list[LocalElasticAgent] = []
        self.handlers: list[PushingRendezvousHandler] = []
        self.events: list[list[Event]] = []
        self.results: dict[int, RunResult | BaseException] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()

    def start(
        self,
        script: str,
        handler: PushingRendezvousHandler | None = None,
        **more: Any,
    ) -> int:
        """Start a node with a worker that runs a shell script; return the node's number."""
        number = len(self.agents)
        handler = handler or DynamicRendezvousHandler(
            FakeDriver(self.rounds),
            self.settings,
            backend="fake",
            local_addr=f"10.0.0.{number + 1}",
        )
        events: list[Event] = []

        def sink(event: Event) -> None:
            with self._changed:
                events.append(event)
                self._changed.notify_all()

        logs = DefaultLogsSpecs(log_dir=str(self.directory / str(number)))
        defaults: dict[str, Any] = {"max_restarts": 0, "local_world_size": 1, "entrypoint": "sh"}
        spec = WorkerSpec(role="w", rdzv_handler=handler, args=("-c", script), **defaults | more)
        agent = LocalElasticAgent(spec, logs, shutdown_timeout=5, event_sinks=(sink,))
        self.agents.append(agent)
        self.handlers.append(handler)
        self.events.append(events)
        thread = threading.Thread(target=self._run, args=(number,), name=f"node-{number}")
        self._threads.append(thread)
        thread.start()
        return number

    def _run(self, number: int) -> None:
        try:
            result: RunResult | BaseException = self.agents[number].run()
        except BaseException as error:  # noqa: BLE001 - checked by the test
            result = error
        if not isinstance(result, SignalException):  # as the launcher does
            self.handlers[number].shutdown()
        with self._changed:
            self.results[number] = result
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition is true; events and results may change it."""
        with self._changed:
            assert self._changed.wait_for(holds, DEADLINE_S), [
                [event.name for event in events] for events in self.events
            ]

    def wait_for_event(self, number: int, name: str, times: int = 1) -> list[dict[str, Any]]:
        """Wait until a node has emitted an event `times` times; return their metadata."""
        self.wait_until(lambda: len(self.of(number, name)) >= times)
        return self.of(number, name)

    def of(self, number: int, name: str) -> list[dict[str, Any]]:
        """Return the metadata of a node's events of one name."""
        return [e.metadata for e in self.events[number] if e.name == f"regrow.{name}"]

    def end(self) -> list[Any]:
        """Wait for the end of all nodes; return their results."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return [self.results[number] for number in range(len(self.agents))]

    def story(self, number: int) -> str:
        """Return a node's story."""
        return story(as_record(event) for event in self.events[number]).render(10_000)


@contextmanager
def nodes(directory: Path, least: int, most: int) -> Iterator[Nodes]:
    job = Nodes(directory, least, most)
    try:
        yield job
    finally:
        for agent in job.agents:  # agents are left if the test has failed
            agent.interrupt(signal.SIGKILL)


def test_one_failure_is_every_nodes_root_cause_and_result(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, 3) as job:
        fail = 'test "$RANK" = 1 && exit 7; sleep 1000'
        for _ in range(3):
            job.start(fail)
        results = job.end()
    assert [result.state for result in results] == [WorkerState.FAILED] * 3
    reports = [ChildFailedError("sh", result.failures) for result in results]
    roots = [report.get_first_failure() for report in reports]
    assert [(rank, failure.exitcode) for rank, failure in roots] == [(1, 7)] * 3
    assert len({failure.pid for _, failure in roots}) == 1
    assert all("exited with code 7" in job.story(number) for number in range(3))


def test_a_failure_after_the_rendezvous_was_closed_is_every_nodes_failure(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, 2) as job:
        gate = tmp_path / "gate"
        fail = f'until test -e {gate}; do sleep 0.05; done; test "$RANK" = 1 && exit 7; sleep 1000'
        for _ in range(2):
            job.start(fail, max_restarts=3)
        for number in range(2):
            job.wait_for_event(number, "attempt.started")
        job.handlers[0].set_closed()
        gate.touch()
        results = job.end()
    assert [result.state for result in results] == [WorkerState.FAILED] * 2
    roots = [ChildFailedError("sh", result.failures).get_first_failure() for result in results]
    assert [(rank, failure.exitcode) for rank, failure in roots] == [(1, 7)] * 2
    for number in range(2):
        story = " ".join(job.story(number).split())
        assert "exited with code 7" in story
        assert "not restarted the rendezvous is closed (host " in story
        assert "it closed the rendezvous" in story
        assert "no restarts left" not in story


def test_all_nodes_count_the_same_failures_and_attempts(tmp_path: Path) -> None:
    # The failing worker waits for the other one: an attempt that ends before it begins is skipped.
    for gate in ("first", "second"):
        os.mkfifo(tmp_path / gate)
    script = (
        f"cd {tmp_path}; "
        'case "$RANK$REGROW_ATTEMPT" in 00) read _ <first; exit 3;; 11) read _ <second; exit 4;; '
        "10) echo >first;; 01) echo >second;; esac; "
        'test "$REGROW_ATTEMPT" = 2 || sleep 1000; '
        'test "$TORCHELASTIC_RESTART_COUNT $REGROW_FENCING_TOKEN" = "2 3"'
    )
    with nodes(tmp_path, 2, 2) as job:
        for _ in range(2):
            job.start(script, max_restarts=2)
        results = job.end()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    for number in range(2):
        started = job.of(number, "attempt.started")
        assert [(e["attempt"], e["restart_count"]) for e in started] == [(0, 0), (1, 1), (2, 2)]
        failed = [e for e in job.of(number, "worker.failed") if e["root_cause"]]
        assert [(e["attempt"], e["rank"], e["exit_code"]) for e in failed] == [(0, 0, 3), (1, 1, 4)]


def test_a_node_that_is_lost_costs_a_round_and_no_restart(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, 2) as job:
        for _ in range(2):
            job.start('test "$REGROW_ATTEMPT" = 1 || sleep 1000')
        for number in range(2):
            job.wait_for_event(number, "attempt.started")
        (lost,) = (id for id in job.rounds.state.members if id.startswith("10.0.0.2/"))
        job.rounds.post(NodeLost(lost, "its connection broke"))
        results = job.end()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert [e["restart_count"] for e in job.of(0, "attempt.started")] == [0, 0]
    assert "its connection broke" in job.story(0)


def test_nodes_that_come_within_a_moment_cost_one_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in ("GATHER_S", "GATHER_CAP_S"):  # however long the second takes to start here
        monkeypatch.setattr(decide, moment, DEADLINE_S)
    script = 'test "$WORLD_SIZE" = 3 || sleep 1000'
    with nodes(tmp_path, 1, 3) as job:
        job.start(script)
        job.wait_for_event(0, "attempt.started")
        job.start(script)
        job.wait_for_event(0, "job.gathering")
        job.start(script)
        results = job.end()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 3
    assert [e["world_size"] for e in job.of(0, "attempt.started")] == [1, 3]


def test_a_signal_to_one_agent_leaves_the_other_nodes_running(tmp_path: Path) -> None:
    script = 'test "$WORLD_SIZE" = 1 || sleep 1000'
    with nodes(tmp_path, 1, 2) as job:
        for _ in range(2):
            job.start(script)
        for number in range(2):
            job.wait_for_event(number, "attempt.started")
        job.agents[1].interrupt(signal.SIGTERM)
        stays, leaves = job.end()
    assert stays.state is WorkerState.SUCCEEDED
    assert isinstance(leaves, SignalException)
    assert "its agent got SIGTERM" in job.story(0)
    assert [e["restart_count"] for e in job.of(0, "attempt.started")] == [0, 0]


def test_a_node_knows_at_once_that_another_one_has_spent_the_last_restart(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path, 2, 2) as job:
        for _ in range(2):
            job.start("sleep 1000", max_restarts=1)
        for number in range(2):
            job.wait_for_event(number, "attempt.started")
        job.handlers[0].spend_restart()  # as for a replacement
        wait_until(lambda: job.agents[1]._remaining_restarts == 0, "the restart is counted")
        for agent in job.agents:
            agent.interrupt(signal.SIGTERM)
        assert all(isinstance(result, SignalException) for result in job.end())


def test_a_node_that_has_succeeded_starts_again_with_one_that_has_not(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with nodes(tmp_path, 2, 2) as job:
        for _ in range(2):
            job.start(
                f'test "$RANK$REGROW_ATTEMPT" = 10 || exit 0; read line < {gate}; exit 1',
                max_restarts=1,
            )
        first, second = (job.wait_for_event(n, "attempt.started")[0]["ranks"][0] for n in range(2))
        waiting = 0 if first == 0 else 1
        assert {first, second} == {0, 1}
        job.wait_for_event(waiting, "attempt.ended")
        gate.write_text("now\n")
        results = job.end()
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert len(job.of(waiting, "attempt.started")) == 2


def test_an_agent_that_cannot_continue_is_the_root_cause_for_all(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, 2) as job:
        job.start("sleep 1000")
        job.start("sleep 1000", entrypoint="/no/such/program")
        other, broken = job.end()
    assert isinstance(broken, FileNotFoundError)
    assert other.state is WorkerState.FAILED
    assert "/no/such/program" in str(ChildFailedError("sh", other.failures))


class WithLease(SoloRendezvousHandler):
    """A handler with a lease that the test renews.

    Args:
        begun: whether the lease has begun; if not, it is over at first.
    """

    def __init__(self, *, begun: bool) -> None:
        super().__init__("job")
        self._begun = begun

    def keep_lease(self, renewed: Callable[[float], None]) -> Callable[[], None]:
        self.renew = renewed
        if not self._begun:
            renewed(monotonic())
        return super().keep_lease(renewed)


def test_no_worker_starts_before_the_lease_begins(tmp_path: Path) -> None:
    with nodes(tmp_path, 1, 1) as job:
        handler = WithLease(begun=False)
        job.start("true", handler)
        job.wait_for_event(0, "rendezvous.completed")
        assert job.of(0, "attempt.started") == []
        handler.renew(monotonic() + 1000)
        (result,) = job.end()
    assert result.state is WorkerState.SUCCEEDED


def test_workers_whose_lease_is_over_are_killed_and_none_start_before_the_next(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path, 1, 1) as job:
        handler = WithLease(begun=True)
        job.start('test "$REGROW_ATTEMPT" = 1 || sleep 1000', handler)
        job.wait_for_event(0, "attempt.started")
        handler.renew(monotonic())
        job.wait_for_event(0, "lease.over")
        job.wait_for_event(0, "rendezvous.completed", times=2)
        assert len(job.of(0, "attempt.started")) == 1
        handler.renew(monotonic() + 1000)
        (result,) = job.end()
    assert result.state is WorkerState.SUCCEEDED
    assert [e["restart_count"] for e in job.of(0, "attempt.started")] == [0, 0]
