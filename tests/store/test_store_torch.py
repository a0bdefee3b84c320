"""A regrow store under torch.distributed, and the two kinds of store meeting by mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "helpers" / "stores" / "torch_ranks.py"


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """The results of all calls that need torch; they run once, in a process of their own."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "2", "4"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"stderr": done.stderr}


pytestmark = [pytest.mark.training, pytest.mark.timeout(120)]


@pytest.mark.parametrize("size", [2, 4])
def test_gloo_groups_meet_in_a_regrow_store(outcome: dict[str, Any], size: int) -> None:
    for rank, found in enumerate(outcome[f"ranks {size}"]):
        assert found["errors"] == []
        assert found["sum"] == [size * (size + 1) / 2] * 3
        assert found["pair"] == rank // 2 * 4 + 1
        assert found["objects"] == [{"rank": other} for other in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_torch_uses_the_store_from_several_threads(outcome: dict[str, Any], size: int) -> None:
    assert [found["met"] for found in outcome[f"ranks {size}"]] == [3 * size] * size


@pytest.mark.parametrize("prefix", ["", "prefix"])
def test_the_store_answers_as_a_tcpstore_does(outcome: dict[str, Any], prefix: str) -> None:
    ours, theirs = outcome[f"ours {prefix}"], outcome[f"theirs {prefix}"]
    # A TCPStore counts keys of its own.
    assert ours[:-1] == theirs[:-1]
    assert ours[-1].startswith("num_keys: ")


def test_the_log_names_a_torchrun_that_connects_to_the_server(
    outcome: dict[str, Any],
) -> None:
    assert outcome["TCPStore at our port"]
    assert "it is a PyTorch TCPStore client (torchrun" in outcome["stderr"]


@pytest.mark.parametrize("kind", ["libuv", "old"])
def test_a_tcpstore_at_our_address_is_a_clear_error(outcome: dict[str, Any], kind: str) -> None:
    assert "a PyTorch TCPStore behaves like this" in outcome[f"we at TCPStore, {kind}"]


def test_a_prefix_store_may_use_a_c10d_store(outcome: dict[str, Any]) -> None:
    assert outcome["prefix over TCPStore"] == [5, "5"]
    error = outcome["delete_prefix over TCPStore"]
    assert "TCPStore' object has no attribute 'delete_prefix'" in error
