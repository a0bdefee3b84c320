"""Ranks in a gloo all-reduce restart when another rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.stores.storing import ServerThread
from regrow.inprocess.group.group_service import InprocessService
from regrow.store import STORE_ENV, STORE_TOKEN_ENV

pytestmark = pytest.mark.training
CASES = ("raises", "killed", "fails before env://")
SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "wrapped_torch_ranks.py"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    server = ServerThread(services={"inprocess": InprocessService()})
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("REGROW_", "TORCHELASTIC"))}
    environ |= {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: server.token.decode()}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *CASES],
        env=environ,
        stdout=subprocess.PIPE,
        timeout=90,
        check=True,
    )
    server.stop()
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_ranks_that_wait_in_a_collective_restart_with_one_that_raised(
    results: dict[str, Any],
) -> None:
    assert results["raises"] == [[[0, 3.0], [1, 3.0], 1]] * 3


def test_ranks_that_wait_in_a_collective_restart_without_one_that_was_killed(
    results: dict[str, Any],
) -> None:
    restarted = [[0, 3.0], [1, 2.0], 1]
    assert results["killed"] == [restarted, None, restarted]


def test_ranks_that_initialize_by_the_environment_restart_without_a_missing_rank(
    results: dict[str, Any],
) -> None:
    assert results["fails before env://"] == [[[1, 3.0], 1]] * 3
