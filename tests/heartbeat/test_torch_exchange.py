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
HELPER = Path(__file__).parent.parent / "helpers" / "torch_beats.py"
Survivors = Callable[[str], list[Any]]
SUMS = [2**40, 2**40 + 1, 2**40 + 2]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank of the job found in each scene; of the killed one, its second life."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(HELPER)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    assert [rank.get("error") for rank in ranks] == [None] * 3, ranks
    return ranks


@pytest.fixture(scope="module")
def survivors(found: list[dict[str, Any]]) -> Survivors:
    """What the ranks that live on found in a scene."""
    return lambda scene: [rank[scene] for rank in found[:2]]


@pytest.mark.parametrize("scene", ["default group's store", "own store"])
def test_numbers_of_64_bits_are_summed_over_all_ranks(survivors: Survivors, scene: str) -> None:
    assert survivors(scene) == [SUMS, SUMS]


def test_a_training_group_that_is_stuck_does_not_stop_it(survivors: Survivors) -> None:
    assert survivors("while the training is stuck") == [SUMS, SUMS]


def test_it_goes_on_when_the_training_has_ended_its_groups(survivors: Survivors) -> None:
    assert survivors("without the training") == [SUMS, SUMS]


def test_a_heartbeat_over_gloo_tells_all_steps_to_all_and_ends_in_peace(
    survivors: Survivors,
) -> None:
    assert survivors("alarms") == [[], []]


def test_ranks_that_expect_different_world_sizes_are_told_so(survivors: Survivors) -> None:
    for expected, (text, *_) in zip((4, 3), survivors("wrong size"), strict=True):
        assert f"this one expects {expected}; give all the same world_size" in text


@pytest.mark.parametrize("misses", [1, 2])
def test_failed_exchanges_are_survived(survivors: Survivors, misses: int) -> None:
    for miss in range(misses):
        for failure in survivors(f"miss {miss} of {misses}"):
            assert isinstance(failure[0], str)
    assert survivors(f"after {misses}") == [SUMS, SUMS]


def test_the_second_failure_in_a_row_names_who_is_missing(survivors: Survivors) -> None:
    assert [failure[1:] for failure in survivors("miss 1 of 2")] == [[2], [2]]


def test_a_rank_that_comes_when_the_others_have_given_up_meets_them_next_time(
    survivors: Survivors,
) -> None:
    assert [isinstance(failure[0], str) for failure in survivors("late")] == [True, True]
    assert survivors("after late") == [SUMS, SUMS]


def test_a_killed_rank_is_named_at_once(survivors: Survivors) -> None:
    assert [failure[1:] for failure in survivors("killed")] == [[2], [2]]


def test_a_new_process_of_a_rank_meets_the_others(found: list[dict[str, Any]]) -> None:
    assert [rank["reborn"] for rank in found] == [SUMS, SUMS, SUMS]
