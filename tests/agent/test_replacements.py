"""`Replacements`: the decision as tables, and the feature with fakes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE
from regrow._accounts import Reading
from regrow._progress import IN_WRAPPER, MAY_BE_REPLACED, NOT_IN_WRAPPER
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features import StartedWorkers
from regrow.agent.features.progress import WorkerReports, WorkerSteps
from regrow.agent.features.replacements import (
    EndedWorker,
    Replacements,
    ends_attempt,
    reason_not_to_replace,
)
from regrow.agent.job import Job
from regrow.rendezvous import PushingRendezvousHandler, RendezvousError
from regrow.workers import Guardian, PContext, WorkerChange
from regrow.workers.errors import ProcessFailure

NOT_WANTED = "the rendezvous does not count the restarts of all nodes together"

MAY = EndedWorker(wanted=True, incarnation=0, stepped=False, restarts=1)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (MAY, ""),
        (MAY._replace(stepped=True), ""),
        (MAY._replace(wanted=False), NOT_WANTED),
        (MAY._replace(leaving=True), "the job ends"),
        (MAY._replace(restarts=0), "no restarts are left (--max-restarts)"),
        (MAY._replace(incarnation=1, stepped=True), ""),
        (MAY._replace(incarnation=7, stepped=True), ""),
        (
            MAY._replace(incarnation=1),
            "it replaced another process, and ended before its first step (regrow.step)",
        ),
        (MAY._replace(incarnation=1, wanted=False), NOT_WANTED),
    ],
)
def test_whether_a_worker_may_be_replaced(place: EndedWorker, why: str) -> None:
    assert reason_not_to_replace(place) == why


@pytest.mark.parametrize(
    ("place", "ends"),
    [
        (MAY, False),
        (MAY._replace(restarts=0), False),
        (MAY._replace(incarnation=1, stepped=True), False),
        (MAY._replace(incarnation=1), True),
        (MAY._replace(incarnation=1, restarts=0), True),
        (MAY._replace(incarnation=1, wanted=False), False),
    ],
)
def test_whether_the_end_of_a_worker_ends_the_attempt(place: EndedWorker, ends: bool) -> None:
    assert ends_attempt(place) == ends


class Restarts(PlainHandler):
    """A rendezvous that counts restarts, or fails to."""

    def __init__(self, counts: list[int | RendezvousError | None]) -> None:
        super().__init__()
        self._counts = counts

    def spend_restart(self) -> int | None:
        """Count a restart; return the number of restarts so far."""
        count = self._counts.pop(0)
        if isinstance(count, RendezvousError):
            raise count
        return count


class Unhurried(PlainHandler):
    """A rendezvous whose first answer waits a moment for a second request."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self._second = threading.Event()

    def spend_restart(self) -> int | None:
        """Count a restart; return the number of restarts so far."""
        self.failures += 1
        if self.failures > 1:
            self._second.set()
        else:
            self._second.wait(0.2)
        return self.failures


class Context:
    """Replaces the workers' processes; records its calls."""

    def __init__(self, error_file: Path) -> None:
        self.error_files = {0: "", 1: str(error_file)}
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.vacant = True
        self.on_given_up: Callable[[], None] = lambda: None
        self.on_replaced: Callable[[], None] = lambda: None

    def ended(self, local_rank: int) -> ProcessFailure | None:
        """See `PContext`."""
        return None

    def replace(self, local_rank: int, env: Mapping[str, str]) -> bool:
        """See `PContext`."""
        if self.vacant:
            self.on_replaced()
        self.calls.put(("replace", local_rank, dict(env)))
        return self.vacant

    def sources(self) -> dict[int, str]:
        """See `PContext`."""
        return {1: "template"}

    def give_up(self, local_rank: int) -> bool:
        """See `PContext`."""
        self.on_given_up()
        self.calls.put(("give up", local_rank))
        return self.vacant


class Page:
    """Replaces the page of steps."""

    def __init__(self) -> None:
        self.state = {0: NOT_IN_WRAPPER, 1: IN_WRAPPER | MAY_BE_REPLACED}
        self.steps: dict[int, WorkerSteps] = {}
        self.cleared: list[int] = []

    def may_be_replaced(self, local_rank: int) -> bool:
        """See `WorkerReports`."""
        return bool(self.state[local_rank] & MAY_BE_REPLACED)

    def read(self) -> dict[int, WorkerSteps]:
        """See `WorkerReports`."""
        return self.steps

    def accounts(self) -> dict[int, Reading]:
        """See `WorkerReports`."""
        return {}

    def clear(self, local_rank: int) -> None:
        """See `WorkerReports`."""
        self.cleared.append(local_rank)
        self.steps.pop(local_rank, None)


class Scene:
    """`Replacements` of a node with global ranks 4 and 5, of which rank 5 may be replaced."""

    def __init__(self, folder: Path, *counts: int | RendezvousError | None) -> None:
        self.context, self.page = Context(folder / "error.json"), Page()
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reported: queue.SimpleQueue[int] = queue.SimpleQueue()
        handler = cast("PushingRendezvousHandler", Restarts(list(counts)))
        spec = WorkerSpec("trainer", 2, handler, entrypoint="train", max_restarts=3)
        self.job = Job(WorkerGroup(spec), handler, self.posted.put)
        self.job.shared = True
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.job.recorder.emit = self._emit  # type: ignore[method-assign]
        self.replacements = Replacements(
            self.job, lambda: cast("WorkerReports", self.page), self.reported.put
        )
        self.start(2)
        self.context.on_replaced = partial(self.change, "replaced", 0)

    def start(self, attempt: int) -> None:
        """Begin an attempt."""
        context = cast("PContext", self.context)
        self.replacements.on_start(
            StartedWorkers(attempt, [4, 5], context, cast("Guardian", None), 8)
        )

    def _emit(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def change(self, kind: Any, status: int = -9) -> None:
        """Report a change of the local rank 1."""
        self.replacements.on_change(WorkerChange(1, 100, kind, status, 5.0))

    def call(self) -> tuple[Any, ...]:
        """Return the next call of the context."""
        return self.context.calls.get(timeout=PATIENCE)

    def names(self) -> list[str]:
        """Run what the threads have posted until they end; return the names of the events."""
        self.replacements.close()
        while not self.posted.empty():
            self.posted.get()()
        return [name.removeprefix("regrow.worker.") for name, _ in self.events]


Make = Callable[..., Scene]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    scenes: list[Scene] = []

    def make(*counts: int | RendezvousError | None) -> Scene:
        scenes.append(Scene(tmp_path, *counts))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.replacements.close()
    assert "regrow-replacement" not in [thread.name for thread in threading.enumerate()]


def test_a_place_is_filled_when_it_is_cleared_and_a_restart_is_spent(make: Make) -> None:
    scene = make(2)
    scene.page.steps[1] = WorkerSteps(3, 1.0, 7, 2.0)
    assert scene.replacements.vacates(1)
    scene.change("vacant")
    assert scene.context.calls.empty()
    scene.change("cleared", 0)
    kind, local_rank, env = scene.call()
    assert (kind, local_rank) == ("replace", 1)
    assert env.pop("REGROW_REPLACES").endswith(" ended by SIGKILL after step 7")
    assert env == {"REGROW_INCARNATION": "1", "REGROW_HEARTBEAT": ""}
    assert scene.names() == ["vacated", "replaced"]
    (_, vacated), (_, replaced) = scene.events
    assert (vacated["rank"], vacated["local_rank"], vacated["attempt"]) == (5, 1, 2)
    assert (vacated["pid"], vacated["exitcode"], vacated["how"]) == (100, -9, "by SIGKILL")
    assert (vacated["last_step"], vacated["incarnation"]) == (7, 0)
    assert replaced["incarnation"] == 1
    assert scene.page.cleared == [1]
    assert scene.replacements.incarnation(1) == 1
    assert (scene.job.failures, scene.job.remaining_restarts) == (2, 1)
    assert scene.reported.empty()


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (4, "no restarts are left (--max-restarts)"),
        (None, "the rendezvous does not count the restarts of all nodes together"),
        (RendezvousError("the server is gone"), "the server is gone"),
    ],
)
def test_a_place_for_which_no_restart_is_spent_is_given_up_when_it_is_cleared(
    make: Make, count: int | RendezvousError | None, why: str
) -> None:
    scene = make(count)
    # The context notifies its owner of the loss before `give_up` returns.
    scene.context.on_given_up = lambda: scene.change("lost")
    scene.change("vacant")
    assert scene.context.calls.empty()
    scene.change("cleared", 0)
    assert scene.call() == ("give up", 1)
    assert scene.reported.get(timeout=PATIENCE) == 5
    assert scene.names() == ["vacated", "not_replaced"], "the loss is reported once"
    assert scene.events[1][1]["reason"] == why
    assert scene.reported.empty()


def test_of_two_workers_that_end_at_once_one_is_replaced_with_the_last_restart(
    make: Make,
) -> None:
    scene = make()
    handler = Unhurried()
    scene.job.handler = cast("PushingRendezvousHandler", handler)
    scene.job.group.spec.max_restarts = 1
    for kind in ("vacant", "cleared"):
        for local_rank in (0, 1):
            scene.replacements.on_change(WorkerChange(local_rank, 100, kind, -9, 5.0))
    assert {scene.call()[0] for _ in range(2)} == {"replace", "give up"}


def test_a_place_that_is_not_vacant_any_more_is_not_reported(make: Make) -> None:
    scene = make(1)
    scene.context.vacant = False
    scene.change("vacant")
    scene.change("cleared", 0)
    assert scene.call()[0] == "replace"
    assert scene.names() == ["vacated"]


def test_a_worker_that_is_lost_or_exits_with_0_is_reported_to_ranks_that_would_wait(
    make: Make,
) -> None:
    scene = make()
    scene.job.remaining_restarts = 0
    assert not scene.replacements.vacates(1)
    scene.change("lost")
    assert scene.reported.get(timeout=PATIENCE) == 5
    scene.job.remaining_restarts = 1
    scene.change("exited", 0)
    assert scene.reported.get(timeout=PATIENCE) == 5
    assert scene.names() == ["not_replaced"] * 2
    assert [fields["reason"] for _, fields in scene.events] == [
        "no restarts are left (--max-restarts)",
        "it ended with exit code 0",
    ]


def test_a_worker_whose_wrapper_does_not_replace_it_is_not_reported(make: Make) -> None:
    scene = make()
    scene.page.state[1] = IN_WRAPPER
    assert not scene.replacements.vacates(1)
    scene.change("lost")
    scene.change("exited", 0)
    assert scene.names() == []


def test_a_failure_that_ends_the_attempt_is_not_reported(make: Make) -> None:
    scene = make()
    scene.change("exited", 1)
    assert scene.names() == []


def test_a_rendezvous_that_does_not_count_for_all_nodes_replaces_nobody(make: Make) -> None:
    scene = make()
    scene.job.shared = False
    assert not scene.replacements.vacates(1)


def test_only_a_replacement_without_a_step_ends_the_attempt(make: Make) -> None:
    scene = make(1)
    assert not scene.replacements.ends_attempt(1)
    scene.change("vacant")
    scene.change("cleared", 0)
    scene.call()
    assert scene.names() == ["vacated", "replaced"]
    assert scene.replacements.ends_attempt(1)
    assert not scene.replacements.vacates(1)
    scene.page.steps[1] = WorkerSteps(0, 1.0, 0, 1.0)
    assert not scene.replacements.ends_attempt(1)
    assert scene.replacements.vacates(1)


def test_the_error_file_of_a_worker_is_kept_beside_that_of_its_replacement(
    make: Make, tmp_path: Path
) -> None:
    scene = make(1)
    (tmp_path / "error.json").write_text("the first")
    scene.change("vacant")
    scene.change("cleared", 0)
    scene.call()
    assert [path.name for path in tmp_path.iterdir()] == ["error.json.0"]


def test_the_end_of_the_agent_ends_the_wait_for_a_place(make: Make) -> None:
    scene = make(1)
    scene.context.vacant = False
    scene.change("vacant")
    scene.replacements.before_stop()
    assert scene.names() == ["vacated"]
    assert scene.context.calls.empty()
    assert scene.page.cleared == []


def test_no_restart_is_spent_for_a_place_of_an_attempt_that_is_being_stopped(make: Make) -> None:
    scene = make()
    handler = Unhurried()
    scene.job.handler = cast("PushingRendezvousHandler", handler)
    scene.replacements.before_stop()
    scene.change("vacant")
    assert scene.names() == ["vacated"]
    assert handler.failures == 0


def test_a_restart_that_is_spent_late_changes_nothing_in_the_next_attempt(make: Make) -> None:
    scene = make()
    spending, released = threading.Event(), threading.Event()

    class Slow(PlainHandler):
        def spend_restart(self) -> int | None:
            spending.set()
            released.wait(PATIENCE)
            return 1

    scene.job.handler = cast("PushingRendezvousHandler", Slow())
    scene.change("vacant")
    assert spending.wait(PATIENCE)
    scene.replacements.before_stop()
    scene.start(3)
    released.set()
    for thread in threading.enumerate():
        if thread.name == "regrow-replacement":
            thread.join(PATIENCE)
    assert scene.names() == ["vacated"]
    assert scene.replacements.incarnation(1) == 0
    assert scene.page.cleared == []
    assert scene.context.calls.empty()


def test_a_later_attempt_begins_with_first_processes(make: Make) -> None:
    scene = make(1)
    scene.change("vacant")
    scene.change("cleared", 0)
    scene.call()
    assert scene.names() == ["vacated", "replaced"]
    scene.start(3)
    assert scene.replacements.incarnation(1) == 0


def test_a_replacement_owes_a_result_from_its_start(make: Make) -> None:
    """So an exit with 0 before it joins the call is no success."""
    reports = WorkerReports(make().job)
    try:
        reports.clear(1)
        assert reports.owes_result(1)
        assert not reports.others_continue(1)
        assert not reports.may_be_replaced(1)
        assert reports.read() == {}
    finally:
        reports.close()
