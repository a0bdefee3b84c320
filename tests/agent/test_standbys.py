"""The feature that keeps standbys for `--standby`: how many, with which variables, and when."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features.standbys import Standbys
from regrow.agent.features.templates import DelayedStart
from regrow.agent.job import Job
from regrow.rendezvous.foreign import adapted
from regrow.workers.guardian.events import HelperChanged

ROUND = {"WORLD_SIZE": "8", "MASTER_ADDR": "node0", "REGROW_ATTEMPT": "1", "REGROW_STORE": "x:1"}


class FakeGuardian:
    """Records the requests for standbys."""

    def __init__(self) -> None:
        self.on_standby: Callable[[HelperChanged], None] = lambda changed: None
        self.started: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        self.count = 0
        self.dismissed: list[bool] = []

    def stand_by(self, argv: Sequence[str], env: Mapping[str, str], output: int) -> int:
        self.count += 1
        self.started.put(env)
        return self.count

    def dismiss(self, *, only_starting: bool = False) -> None:
        self.dismissed.append(only_starting)


class Host:
    """A feature with one standby for each attempt of three workers, without processes."""

    def __init__(self) -> None:
        spec = WorkerSpec("trainer", 3, PlainHandler(), entrypoint="python", args=("x.py",))
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        job = Job(WorkerGroup(spec), adapted(PlainHandler()), inbox.put)
        self.events: list[tuple[str, Any]] = []
        job.recorder.emit = lambda name, **more: self.events.append((name, more))  # type: ignore[method-assign]
        self.guardian, self._inbox = FakeGuardian(), inbox
        start = DelayedStart(cores=4, workers=3)
        self.feature = Standbys(job, cast(Any, self.guardian), 1, None, start)

    def wait(self) -> None:
        """Wait for a place."""
        self.feature.on_wait({"RANK": "0", "MINE": "1", **ROUND})

    def start(self) -> None:
        """Start the workers of an attempt."""
        self.feature.before_start({0: {"RANK": "0", "MINE": "1", **ROUND}, 1: {}, 2: {}})
        self.feature.on_start(cast(Any, None))

    def started(self, count: int) -> list[Mapping[str, str]]:
        """Return the environments of the next standbys that are started."""
        return [self.guardian.started.get(timeout=PATIENCE) for _ in range(count)]

    def change(self, kind: str, number: int, why: str = "") -> None:
        self.guardian.on_standby(HelperChanged("standby", kind, 100 + number, 5, why, 2.0, number))
        self._inbox.get(timeout=PATIENCE)()

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("regrow.standby.") for name, _ in self.events]


def test_a_host_that_waits_has_a_standby_for_each_worker_without_the_round() -> None:
    host = Host()
    host.wait()
    for environment in host.started(3):
        assert environment["MINE"] == "1"
        assert not {"RANK", *ROUND} & environment.keys()
    host.wait()
    assert host.guardian.count == 3


def test_the_first_workers_take_the_standbys_and_the_attempt_has_its_own() -> None:
    host = Host()
    host.wait()
    host.started(3)
    for number in (1, 2):
        host.change("ready", number)
    host.start()
    assert host.guardian.dismissed == [True], "the third has not come to its wrapped call"
    (environment,) = host.started(1)
    assert ROUND.items() <= environment.items()
    for number in (1, 2):
        host.change("taken", number)
    host.change("ready", 4)
    host.change("taken", 4)
    host.started(1)
    assert host.guardian.count == 5
    assert host.names == ["ready"] * 3


@pytest.mark.parametrize("kind", ["unfit", "gone"])
def test_a_script_that_cannot_stand_by_while_its_host_waits_may_do_so_in_an_attempt(
    kind: str,
) -> None:
    host = Host()
    host.wait()
    host.started(3)
    for number in (1, 2, 3):
        host.change(kind, number, "it reads WORLD_SIZE")
    host.wait()
    assert host.guardian.count == 3
    ((name, fields),) = host.events
    assert (name, fields["is_final"]) == ("regrow.standby.gone", False)
    host.start()
    host.started(1)
    host.change("ready", 4)
    assert host.names == ["gone", "ready"]


def test_a_standby_that_is_lost_while_its_host_waits_is_followed_by_another_one() -> None:
    host = Host()
    host.wait()
    host.started(3)
    host.change("ready", 2)
    host.change("gone", 2, "it has ended")
    host.started(1)
    assert host.guardian.count == 4


def test_a_late_end_of_a_standby_starts_none_in_the_next_attempt() -> None:
    host = Host()
    host.start()
    host.started(1)
    host.change("ready", 1)
    host.feature.before_stop()
    assert host.guardian.dismissed == [True, False]
    host.change("gone", 1, "it has ended")
    host.start()
    host.started(1)
    host.change("gone", 1, "it has ended")
    host.change("ready", 2)
    assert host.guardian.count == 2
    assert host.names == ["ready", "ready"]
