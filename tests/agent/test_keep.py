"""Rules for workers that go on in the next round, in their processes."""

from __future__ import annotations

import pytest

from regrow.agent.attempt.local import changed_variables
from regrow.agent.decisions.keep import (
    ParkedWorkers,
    RunningWorkers,
    reason_not_to_move,
    reason_to_end,
)

RUNNING = RunningWorkers(
    numbered=True, own_hooks=False, heartbeats=False, all_run=True, may_stay=True
)


def test_workers_in_an_elastic_wrapper_leave_the_round_and_live_on() -> None:
    assert reason_to_end(RUNNING) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"may_stay": False}, "Wrapper(elastic=True)"),
        ({"all_run": False}, "a worker has ended"),
        ({"numbered": False}, "does not number its rounds"),
        ({"own_hooks": True}, "in a way of its own"),
        ({"heartbeats": True}, "--heartbeat"),
    ],
)
def test_other_workers_are_ended(change: dict[str, bool], reason: str) -> None:
    assert reason in reason_to_end(RUNNING._replace(**change))


@pytest.mark.parametrize(
    ("parked", "reason"),
    [
        (ParkedWorkers(True, frozenset({0, 1}), frozenset({0, 1})), ""),
        (ParkedWorkers(False, frozenset({0, 1}), frozenset({0, 1})), "its lease expired"),
        (ParkedWorkers(True, frozenset({0, 1}), frozenset({0})), "another number of workers"),
    ],
)
def test_parked_workers_join_a_round_that_needs_all_of_them(
    parked: ParkedWorkers, reason: str
) -> None:
    assert reason in reason_not_to_move(parked)
    assert bool(reason) == bool(reason_not_to_move(parked))


def test_a_worker_changes_what_differs_in_its_environment_and_its_ranks() -> None:
    before = {"RANK": "1", "WORLD_SIZE": "4", "REGROW_STORE": "a:1", "REGROW_INCARNATION": "2"}
    after = {"RANK": "1", "WORLD_SIZE": "4", "REGROW_STORE": "b:2", "OMP_NUM_THREADS": "1"}
    assert changed_variables(before | {"OMP_NUM_THREADS": "1"}, after) == {
        "RANK": "1",  # the wrapper may have changed these two
        "WORLD_SIZE": "4",
        "REGROW_STORE": "b:2",
        "REGROW_INCARNATION": None,
    }
