"""Heartbeats over gloo: a job of a few real ranks, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.training
HELPER = Path(__file__).parent.parent / "helpers" / "heartbeats" / "torch_beats.py"
Survivors = Callable[[str], list[Any]]
SUMS = [2**40, 2**40 + 1, 2**40 + 2]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Return the results of each rank in each scene; for the killed rank, of its second process."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(HELPER)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    assert [rank.get("error") for rank in ranks] == [None] * 3, ranks
    return ranks


@pytest.fixture(scope="module")
def survivors(found: list[dict[str, Any]]) -> Survivors:
    """Return the results of the surviving ranks in a scene."""
    return lambda scene: [rank[scene] for rank in found[:2]]


@pytest.mark.parametrize("scene", ["default group's store", "own store"])
def test_numbers_of_64_bits_are_summed_over_all_ranks(survivors: Survivors, scene: str) -> None:
    assert survivors(scene) == [SUMS, SUMS]


def test_a_training_group_that_is_stuck_does_not_stop_it(survivors: Survivors) -> None:
    assert survivors("while the training is stuck") == [SUMS, SUMS]


def test_it_works_after_destroy_process_group(survivors: Survivors) -> None:
    assert survivors("without the training") == [SUMS, SUMS]


def test_a_heartbeat_over_gloo_shares_all_steps(
    survivors: Survivors,
) -> None:
    assert survivors("alarms") == [[], []]


def test_different_world_sizes_are_reported(survivors: Survivors) -> None:
    for expected, (text, *_) in zip((4, 3), survivors("wrong size"), strict=True):
        assert f"and this rank {expected}: give all ranks the same world_size" in text


@pytest.mark.parametrize("misses", [1, 2])
def test_the_exchange_works_after_failures(survivors: Survivors, misses: int) -> None:
    for miss in range(misses):
        for failure in survivors(f"miss {miss} of {misses}"):
            assert isinstance(failure[0], str)
    assert survivors(f"after {misses}") == [SUMS, SUMS]


def test_the_second_failure_in_a_row_names_the_missing_ranks(survivors: Survivors) -> None:
    assert [failure[1:] for failure in survivors("miss 1 of 2")] == [[2], [2]]


def test_a_late_rank_meets_the_others_in_the_next_exchange(
    survivors: Survivors,
) -> None:
    assert [isinstance(failure[0], str) for failure in survivors("late")] == [True, True]
    assert survivors("after late") == [SUMS, SUMS]


def test_a_killed_rank_is_named_at_once(survivors: Survivors) -> None:
    assert [failure[1:] for failure in survivors("killed")] == [[2], [2]]


def test_a_new_process_of_a_rank_meets_the_others(found: list[dict[str, Any]]) -> None:
    assert [rank["reborn"] for rank in found] == [SUMS, SUMS, SUMS]
