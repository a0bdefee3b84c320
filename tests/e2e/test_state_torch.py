"""Trainings on gloo with a `regrow.State`: ranks are killed, and the weights are bitwise equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import Job
from helpers.jobs.state_job import Finished, schedule, start
from helpers.jobs.torch_state_job import POINTS, REPLICAS, SHARD_POINTS, SHARDS

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]
Launch = Callable[..., Job]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def train(launch: Launch, folder: Path, script: str, seed: int | None, points: int) -> Finished:
    """Run a training with one kill for each of its points, or without (seed None)."""
    names = POINTS if script == REPLICAS else SHARD_POINTS
    kills = [] if seed is None else schedule(seed, 4, names)
    steps = str(2 * points + 2)
    return Finished(start(launch, folder, script, kills, nproc=4, STEPS=steps, **QUIET), 200)


@pytest.mark.parametrize("seed", [11])
def test_weights_are_bitwise_those_of_a_run_without_faults(
    seed: int, launch: Launch, tmp_path: Path
) -> None:
    expected = train(launch, tmp_path, REPLICAS, None, len(POINTS))
    weights = {value.split()[0] for value in expected.results().values()}
    assert len(weights) == 1
    found = train(launch, tmp_path, REPLICAS, seed, len(POINTS))
    assert found.results() == expected.results()
    assert len(found.job.events("worker.replaced")) == len(POINTS)
    assert len(found.of("default")) == 4  # no checkpoint was read, and no attempt began again
    assert max(Counter(map(tuple, found.of("step"))).values()) <= 2


@pytest.mark.thorough
def test_sharded_weights_are_bitwise_those_of_a_run_without_faults(
    launch: Launch, tmp_path: Path
) -> None:
    expected = train(launch, tmp_path, SHARDS, None, len(SHARD_POINTS)).results()
    assert expected["0"] == expected["2"] != expected["1"] == expected["3"]
    found = train(launch, tmp_path, SHARDS, 13, len(SHARD_POINTS))
    assert found.results() == expected
    assert len(found.job.events("worker.replaced")) == len(SHARD_POINTS)
