"""An abort ends waits in torch's collectives, and harms no other connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "helpers" / "ranks" / "aborting_ranks.py"
CALLS = (
    "all_reduce",
    "large all_reduce",
    "all_reduce in a group of the user's",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "broadcast_object_list",
    "all_gather_object",
    "wait",
)

pytestmark = [pytest.mark.training, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of all calls that need torch; they run once, in a process of their own."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_FR_BUFFER_SIZE": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    errors = [rank["error"] for rank in found if "error" in rank]
    assert not errors, "\n".join((*errors, done.stderr))
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_waits_for_a_rank_is_woken(ranks: list[dict[str, Any]], call: str) -> None:
    ended = [rank[call] for rank in ranks]
    assert ended[0] == "left"
    assert all(other.endswith("Error") for other in ended[1:])


def test_aborted_groups_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    assert [rank["after"] for rank in ranks] == [rank["before"] for rank in ranks]


def test_exactly_the_connections_of_all_gloo_groups_are_ended(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nothing to end"] for rank in ranks] == [0] * 3
    # Two groups with two peers each; a rank has fewer connections left if a peer was faster.
    assert sum(rank["connections"] for rank in ranks) in range(6, 13)


@pytest.mark.parametrize("other", ["torch's store", "regrow's store", "bystander"])
def test_what_is_not_of_a_group_survives(ranks: list[dict[str, Any]], other: str) -> None:
    expected = {"torch's store": ["yes"] * 3, "regrow's store": "yes", "bystander": True}
    assert [rank[other] for rank in ranks] == [expected[other]] * 3


def test_groups_that_were_half_made_are_forgotten(ranks: list[dict[str, Any]]) -> None:
    assert [rank["half made"] for rank in ranks] == [0] * 3


def test_a_wait_in_a_regrow_store_is_interrupted(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["in init"] == "interrupted"


def test_a_wait_in_a_torch_store_of_the_function_is_ended(
    ranks: list[dict[str, Any]],
) -> None:
    *made_by_it, outside = ranks[0]["in torch's stores"]
    assert set(made_by_it) <= {"interrupted", "DistNetworkError"}
    assert outside == "DistStoreError"  # its own time-out; the abort leaves it alone


def test_the_collective_that_was_waited_in_is_in_the_trace(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks[1:]:
        assert rank["trace"][-1:] == ["gloo:all_reduce"]
