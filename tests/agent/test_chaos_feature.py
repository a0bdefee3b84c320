"""Faults of `--chaos` on one of several nodes."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.processes import wait_until
from regrow.agent.features import StartedWorkers
from regrow.agent.features.chaos import Chaos
from regrow.chaos import parse
from regrow.events import Event, EventSource
from regrow.store import MemoryStore


class Recorder:
    """Keeps the events, and passes them on to the sinks."""

    def __init__(self) -> None:
        self.sinks: tuple[Any, ...] = ()
        self.further_fields: Any = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def emit(self, name: str, **fields: Any) -> None:
        if self.further_fields is not None:
            fields |= self.further_fields(name, fields)
        with self._lock:
            self.events.append((name, fields))
        for sink in self.sinks:
            sink(Event(name, EventSource.AGENT, metadata=fields))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.events if each == name]


class Node:
    """The feature of one node with two ranks, which are processes that sleep."""

    def __init__(self, plan: str, first_rank: int) -> None:
        self.recorder = Recorder()
        self.ranks = [first_rank, first_rank + 1]
        self.processes = [subprocess.Popen(["sleep", "100"]) for _ in self.ranks]
        self.chaos = Chaos(cast(Any, SimpleNamespace(recorder=self.recorder)), parse(plan))
        self.chaos.open()

    def start(self) -> None:
        pids = {str(r): p.pid for r, p in zip(self.ranks, self.processes, strict=True)}
        nothing = cast(Any, None)
        self.chaos.on_start(StartedWorkers(0, self.ranks, nothing, nothing, world_size=4))
        self.recorder.emit("regrow.attempt.started", pids=pids)

    def close(self) -> None:
        self.chaos.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """The nodes that a test has started."""
    started: list[Node] = []
    yield started
    for node in started:
        node.close()


def test_each_node_injects_what_concerns_its_own_ranks(nodes: list[Node]) -> None:
    plan = "kill rank=1 at=50ms; kill rank=2 at=60ms"
    nodes += [Node(plan, 0), Node(plan, 2)]
    for node in nodes:
        node.start()
    one, other = nodes
    assert one.processes[1].wait(20) == -9
    assert other.processes[0].wait(20) == -9
    assert [each["rank"] for each in one.recorder.of("regrow.chaos.injected")] == [1]
    assert [each["rank"] for each in other.recorder.of("regrow.chaos.injected")] == [2]
    assert one.processes[0].poll() is other.processes[1].poll() is None


def test_a_failure_of_another_nodes_rank_is_marked_as_well(nodes: list[Node]) -> None:
    nodes.append(Node("kill rank=2 at=0s; kill rank=1 at=10ms", 0))
    nodes[0].start()
    assert nodes[0].processes[1].wait(20) == -9
    nodes[0].recorder.emit("regrow.worker.failed", rank=2)
    nodes[0].recorder.emit("regrow.worker.failed", rank=3)
    marks = [each.get("injected") for each in nodes[0].recorder.of("regrow.worker.failed")]
    assert marks == ["kill", None]


def test_an_exception_of_a_rank_with_an_injected_fault_is_marked_on_its_own_node(
    nodes: list[Node],
) -> None:
    nodes.append(Node("kill rank=1 at=0s", 0))
    nodes[0].start()
    assert nodes[0].processes[1].wait(20) == -9
    for rank in (1, 0):
        nodes[0].recorder.emit("regrow.inprocess.raised", rank=rank)
    marks = [each.get("injected") for each in nodes[0].recorder.of("regrow.inprocess.raised")]
    assert marks == ["kill", None]


def test_a_node_that_joins_later_goes_on_where_the_others_are(nodes: list[Node]) -> None:
    store = MemoryStore()
    plan = "stop rank=0 at=0s for=1ms; stop rank=1 every=100ms for=1ms times=1; kill rank=3 at=1h"
    nodes.append(Node(plan, 0))
    nodes[0].start()
    wait_until(lambda: len(nodes[0].recorder.of("regrow.chaos.injected")) == 2, "two faults")
    nodes[0].chaos.before_ranks(store)
    nodes.append(Node(plan, 0))
    nodes[1].chaos.after_ranks(store)
    nodes[1].start()
    nodes[1].close()  # a fault whose time was over would be injected at once
    assert nodes[1].recorder.of("regrow.chaos.injected") == []


def test_a_rank_that_the_job_does_not_have_yet_is_waited_for(nodes: list[Node]) -> None:
    nodes.append(Node("kill rank=9 at=0s; kill rank=1 at=10ms", 0))
    nodes[0].start()
    assert nodes[0].processes[1].wait(20) == -9
    nodes[0].chaos.close()
    (skipped,) = nodes[0].recorder.of("regrow.chaos.skipped")
    assert skipped["reason"] == "until the end of the job: the job has 4 ranks now"


@pytest.mark.parametrize(
    "sent",
    [b"x" * 100_000, b"[]\n", b'{"id": [], "why": 1}\n', b'{"id": 7, "why": "no"}\n', b"[" * 4000],
)
def test_a_process_that_sends_no_report_is_disconnected(nodes: list[Node], sent: bytes) -> None:
    nodes.append(Node("kill rank=0 at=200ms", 0))
    variables: dict[str, str] = {}
    nodes[0].chaos.before_start({0: variables})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect("\0" + variables["REGROW_CHAOS"])
        with suppress(ConnectionError):
            connection.sendall(sent)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
    nodes[0].start()
    assert nodes[0].processes[0].wait(20) == -9


def test_no_fault_is_injected_while_the_workers_are_stopped(nodes: list[Node]) -> None:
    nodes.append(Node("kill rank=0 every=100ms times=1", 0))
    nodes[0].start()
    nodes[0].chaos.before_stop()
    wait_until(lambda: nodes[0].recorder.of("regrow.chaos.skipped"), "the fault is skipped")
    assert nodes[0].processes[0].poll() is None
