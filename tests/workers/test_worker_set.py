"""`WorkerSet` with the events of a guardian, without processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from regrow.workers import Guardian
from regrow.workers.guardian.events import (
    Exited,
    Gone,
    GuardianLost,
    Refused,
    Resumed,
    Started,
    Suspended,
)
from regrow.workers.worker_set import Launcher, Overdue, WorkerSet

GRACE = 7.0
DEADLINE = pytest.approx(GRACE, abs=5.0)
#: The guardian's numbers of the workers, by local rank.
NUMBERS = (10, 11, 12)


class Recorded(Launcher):
    """Records its calls; returns the explanation that the test sets."""

    def __init__(self, explained: str | None = None) -> None:
        self.calls: list[str] = []
        self.explained = explained

    def launch(self, *_: object) -> int:
        """See `Launcher`; the test adds the workers itself."""
        raise NotImplementedError

    def explain(self, rank: int, code: int) -> str | None:
        """See `Launcher`."""
        return self.explained

    def stopping(self) -> None:
        """See `Launcher`."""
        self.calls.append("stopping")

    def lost(self) -> None:
        """See `Launcher`."""
        self.calls.append("lost")

    def kill(self, rank: int) -> None:
        """See `Launcher`."""
        self.calls.append(f"kill {rank}")


class Stops:
    """Replaces the guardian; records its stops."""

    def __init__(self) -> None:
        self.stops: list[tuple[list[int], int, Any]] = []

    def stop(self, workers: Sequence[int], signum: int, grace: float) -> None:
        """See `Guardian`."""
        self.stops.append((list(workers), signum, grace))


class Workers:
    """Three workers; the test starts some."""

    def __init__(self, launcher: Recorded | None = None, started: int = 3, **options: Any) -> None:
        self.launcher, self.guardian = launcher or Recorded(), Stops()
        self.grace = GRACE
        options = {"others_continue": lambda _: False, "owes_result": lambda _: False} | options
        self.set = WorkerSet(
            "test", 3, lambda: self.grace, cast("Guardian", self.guardian), self.launcher, **options
        )
        for rank in range(started):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Report the start of a worker."""
        self.set.handle(rank, Started(NUMBERS[rank], 100 + rank, 1.0))

    def exit(self, rank: int, code: int, *, stopping: bool = False) -> str:
        """Report the end of a worker's process; return the kind of the change."""
        change = self.set.handle(rank, Exited(NUMBERS[rank], code, stopping, 2.0))
        assert change is not None
        assert (change.local_rank, change.pid, change.status) == (rank, 100 + rank, code)
        return change.kind


def test_a_failure_stops_all_workers_once_after_a_notice_to_the_launcher() -> None:
    workers = Workers()
    assert workers.exit(1, 3) == "exited"
    assert workers.guardian.stops == [([10, 11, 12], signal.SIGTERM, GRACE)]
    assert workers.exit(2, 3) == "exited"
    assert workers.launcher.calls == ["stopping"]
    assert workers.set.group.failed == (1, 2)


def test_the_workers_that_sigkill_ended_after_their_grace_are_known() -> None:
    workers = Workers()
    workers.exit(1, 3)
    over = workers.set.deadline
    workers.set.handle(0, Exited(NUMBERS[0], -signal.SIGKILL, True, over + 0.1))
    workers.set.handle(2, Exited(NUMBERS[2], -signal.SIGKILL, True, over - 0.1))
    for rank in range(3):
        workers.set.handle(rank, Gone(NUMBERS[rank], 1, 0, over + (0.2 if rank == 0 else -0.1)))
    assert workers.set.overdue == Overdue(killed=frozenset({0}))


def test_the_workers_whose_descendants_outlived_the_grace_are_known() -> None:
    workers = Workers()
    workers.exit(1, 3)
    over = workers.set.deadline
    workers.set.handle(0, Exited(NUMBERS[0], -signal.SIGTERM, True, over - 5))
    workers.set.handle(0, Gone(NUMBERS[0], 2, 0, over + 0.1))
    workers.set.handle(1, Gone(NUMBERS[1], 0, 0, over + 0.1))
    assert workers.set.overdue == Overdue(killed_descendants=frozenset({0}))


def test_workers_that_are_killed_at_once_have_outlived_no_grace() -> None:
    workers = Workers()
    workers.set.close(signal.SIGKILL, 0.0)
    workers.set.handle(0, Exited(NUMBERS[0], -signal.SIGKILL, True, workers.set.deadline + 0.1))
    workers.set.handle(0, Gone(NUMBERS[0], 1, 0, workers.set.deadline + 0.1))
    assert workers.set.overdue == Overdue()


def test_workers_that_outlived_a_grace_that_became_shorter_are_known() -> None:
    workers = Workers()
    workers.set.close(signal.SIGTERM, 30.0)
    first = workers.set.deadline
    workers.set.hurry(5.0)
    assert first - workers.set.deadline == pytest.approx(25, abs=1)
    workers.set.handle(0, Exited(NUMBERS[0], -signal.SIGKILL, True, workers.set.deadline + 0.1))
    assert workers.set.overdue == Overdue(killed=frozenset({0}))
    workers.set.hurry(60.0)
    assert workers.set.deadline < first


def test_a_success_stops_no_worker() -> None:
    workers = Workers()
    assert workers.exit(0, 0) == "exited"
    assert workers.guardian.stops == []


def test_closing_stops_the_workers_that_are_left_and_again_with_another_grace() -> None:
    workers = Workers()
    workers.exit(0, 0)
    workers.set.handle(0, Gone(10, 0, 0, 3.0))
    workers.set.close(signal.SIGINT, 5.0)
    workers.set.close(signal.SIGKILL, 0.0)
    assert workers.guardian.stops == [
        ([11, 12], signal.SIGINT, 5.0),
        ([11, 12], signal.SIGKILL, 0.0),
    ]
    for rank in (1, 2):
        workers.exit(rank, -9, stopping=True)
        workers.set.handle(rank, Gone(NUMBERS[rank], 0, 0, 3.0))
    workers.set.close(signal.SIGTERM, 1.0)
    assert len(workers.guardian.stops) == 2
    assert workers.set.group.failed == ()


def test_a_worker_that_starts_while_the_group_is_stopped_has_the_rest_of_the_grace() -> None:
    workers = Workers(started=2)
    workers.exit(0, 1)
    workers.start(2)
    assert workers.guardian.stops[1:] == [([12], signal.SIGTERM, DEADLINE)]


def test_the_set_is_settled_when_each_worker_runs_or_one_was_refused() -> None:
    workers = Workers(started=2)
    before = workers.set.settled
    workers.set.handle(2, Refused(12, OSError("no such program")))
    assert (before, workers.set.settled) == (False, True)
    assert str(workers.set.refusals[2]) == "no such program"


def test_when_no_more_workers_start_the_group_is_over_with_those_that_did() -> None:
    workers = Workers(started=1)
    workers.set.add_no_more()
    assert not workers.set.group.over
    workers.exit(0, 0)
    workers.set.handle(0, Gone(10, 0, 0, 3.0))
    assert workers.set.group.over


def test_a_worker_without_which_the_others_continue_stops_no_other() -> None:
    workers = Workers(others_continue=lambda rank: rank == 1)
    assert workers.exit(1, -9) == "lost"
    assert workers.guardian.stops == []
    assert workers.launcher.calls == ["lost"]


def test_a_worker_that_exits_with_0_and_owes_a_result_has_failed() -> None:
    workers = Workers(others_continue=lambda _: True, owes_result=lambda _: True)
    assert workers.exit(1, 0) == "exited"
    assert workers.set.group.failed == (1,)
    failure = workers.set.failure(1, "")
    assert "has no result" in failure.summary


def test_suspensions_are_reported() -> None:
    workers = Workers()
    suspended = workers.set.handle(0, Suspended(10, signal.SIGSTOP, 2.0))
    resumed = workers.set.handle(0, Resumed(10, signal.SIGCONT, 3.0))
    assert suspended is not None
    assert resumed is not None
    assert (suspended.kind, suspended.status) == ("suspended", signal.SIGSTOP)
    assert (resumed.kind, resumed.status) == ("resumed", signal.SIGCONT)


def test_the_workers_of_a_lost_guardian_have_failed_and_the_owner_is_notified_once() -> None:
    workers = Workers()
    changes = [
        workers.set.handle(rank, GuardianLost(NUMBERS[rank], 2.0, "the guardian was killed"))
        for rank in range(3)
    ]
    assert [change and change.kind for change in changes] == ["guardian_lost", None, None]
    assert workers.set.group.over
    assert workers.set.group.failed == (0, 1, 2)
    failure = workers.set.failure(2, "")
    assert failure.killed_with == "the guardian was killed"
    assert [call for call in workers.launcher.calls if call != "stopping"] == [
        "kill 0",
        "kill 1",
        "kill 2",
    ]


def test_workers_that_were_stopped_before_the_guardian_was_lost_have_not_failed() -> None:
    workers = Workers()
    workers.set.close(signal.SIGTERM, GRACE)
    for rank in range(3):
        workers.set.handle(rank, GuardianLost(NUMBERS[rank], 2.0))
    assert workers.set.group.failed == ()


def test_only_the_grace_of_workers_that_are_being_stopped_is_shortened() -> None:
    workers = Workers()
    workers.set.hurry(1.0)
    assert workers.guardian.stops == []
    workers.set.close(signal.SIGINT, GRACE)
    workers.exit(0, 0, stopping=True)
    workers.set.handle(0, Gone(10, 0, 0, 3.0))
    workers.set.hurry(1.0)
    assert workers.guardian.stops == [
        ([10, 11, 12], signal.SIGINT, GRACE),
        ([11, 12], 0, 1.0),
    ]


def test_the_launchers_explanation_goes_to_the_error_file_unless_there_is_one(
    tmp_path: Path,
) -> None:
    workers, path = Workers(Recorded("it called os._exit")), tmp_path / "error.json"
    workers.exit(1, 0)
    failure = workers.set.failure(1, str(path))
    assert (failure.summary, failure.error_file) == ("it called os._exit", str(path))
    path.write_text(json.dumps({"message": "its own"}))
    failure = workers.set.failure(1, str(path))
    assert failure.summary == "its own"
    nowhere = workers.set.failure(1, os.devnull)
    assert nowhere.summary == "it called os._exit"


# --- another process in the place of a worker


def vacant(*ranks: int) -> Workers:
    """Return three workers of which some have ended, and whose places other processes may take."""
    workers = Workers(others_continue=lambda _: True, vacates=lambda _: True)
    for rank in ranks:
        assert workers.exit(rank, -9) == "vacant"
    return workers


def clear(workers: Workers, rank: int) -> str:
    """Report that no process of a worker is left; return the kind of the change."""
    change = workers.set.handle(rank, Gone(NUMBERS[rank], 0, 0, 3.0))
    return "" if change is None else change.kind


def test_a_place_becomes_free_when_no_process_of_its_worker_is_left() -> None:
    workers = vacant(1)
    assert not workers.set.replace(1)
    assert clear(workers, 1) == "cleared"
    assert workers.set.replace(1)
    assert not workers.set.replace(1), "the next process has the place"
    assert workers.guardian.stops == []
    assert workers.launcher.calls == []


def test_only_a_vacant_place_is_replaced_or_given_up() -> None:
    workers = vacant()
    assert workers.exit(0, 0) == "exited"
    assert clear(workers, 0) == ""
    for rank in (0, 2):
        assert not workers.set.replace(rank)
        assert workers.set.give_up(rank) is None


def test_the_next_process_has_the_guardians_next_number_and_is_stopped_with_the_others() -> None:
    workers = vacant(1)
    clear(workers, 1)
    workers.set.replace(1)
    workers.set.add(1, 21)
    workers.set.handle(1, Started(21, 201, 4.0))
    assert workers.set.pids == {0: 100, 1: 201, 2: 102}
    workers.exit(0, 0)
    workers.set.close(signal.SIGTERM, 1.0)
    assert workers.guardian.stops == [([10, 12, 21], signal.SIGTERM, 1.0)]


def test_a_place_that_is_given_up_is_a_loss_of_which_owner_and_launcher_are_notified() -> None:
    workers = vacant(1)
    change = workers.set.give_up(1)
    assert change is not None
    assert change[:4] == (1, 101, "lost", -9)
    assert workers.launcher.calls == ["lost"]
    assert workers.guardian.stops == []
    assert workers.set.give_up(1) is None


def test_the_workers_have_failed_when_the_last_place_is_given_up() -> None:
    workers = vacant(0, 1, 2)
    changes = [workers.set.give_up(rank) for rank in range(3)]
    assert [change and change.kind for change in changes] == ["lost", "lost", "exited"]
    assert workers.set.group.failed == (0, 1, 2)
    assert workers.launcher.calls == ["lost", "lost", "stopping"]


def test_a_stop_gives_all_places_up() -> None:
    workers = vacant(1)
    clear(workers, 1)
    workers.set.close(signal.SIGTERM, GRACE)
    assert not workers.set.replace(1)
    assert workers.set.give_up(1) is None
    for rank in (0, 2):
        workers.exit(rank, -15, stopping=True)
        clear(workers, rank)
    assert workers.set.group.over
    assert workers.set.group.failed == ()


def test_a_process_that_cannot_be_started_in_a_free_place_has_failed() -> None:
    by_the_owner, by_the_guardian = vacant(1), vacant(1)
    for workers in (by_the_owner, by_the_guardian):
        clear(workers, 1)
        workers.set.replace(1)
    by_the_owner.set.refuse(1)
    change = by_the_guardian.set.handle(1, Refused(21, OSError("no such program")))
    assert change is not None
    assert (change.kind, change.status) == ("exited", 127)
    for workers in (by_the_owner, by_the_guardian):
        assert workers.set.group.failed == (1,)
        assert workers.set.failure(1, "").exitcode == 127
        assert [signum for _, signum, _ in workers.guardian.stops] == [signal.SIGTERM]
    assert 1 in by_the_owner.set.group.gone
    assert by_the_owner.set.left == [0, 2]


def test_the_grace_after_a_failure_is_that_of_the_moment_of_the_failure() -> None:
    workers = Workers()
    workers.grace = 2 * GRACE
    workers.exit(1, 3)
    assert workers.guardian.stops == [([10, 11, 12], signal.SIGTERM, 2 * GRACE)]


def test_a_grace_is_lengthened_before_and_after_the_stop_but_no_kill_is_delayed() -> None:
    workers = Workers()
    workers.exit(1, 3)
    before = workers.set.deadline
    workers.set.lengthen(3 * GRACE)
    assert workers.guardian.stops[1:] == [([10, 11, 12], 0, 3 * GRACE)]
    assert workers.set.deadline == pytest.approx(before + 2 * GRACE)
    workers = Workers()
    workers.set.lengthen(3 * GRACE)
    workers.set.close(signal.SIGTERM, GRACE)
    workers.set.close(signal.SIGKILL, 0.0)
    assert workers.guardian.stops == [
        ([10, 11, 12], signal.SIGTERM, 3 * GRACE),
        ([10, 11, 12], signal.SIGKILL, 0.0),
    ]
