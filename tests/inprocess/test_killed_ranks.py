"""Ranks with a store of torch restart without a rank that was killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.training
SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "killed_torch_ranks.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("REGROW_", "TORCHELASTIC"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("store") / "file")],
        env=environ,
        stdout=subprocess.PIPE,
        timeout=150,
        check=True,
    )
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("store", ["TCPStore", "FileStore"])
def test_ranks_restart_at_once_without_one_that_was_killed_and_know_which_process_that_was(
    results: dict[str, Any], store: str
) -> None:
    pid, *survivors = results[store]
    assert [each["returned"] for each in survivors] == [[1, 0, 2], [1, 1, 2]]
    cause = f"TERMINATED on initial rank 1: process {pid} on {socket.gethostname()} has ended;"
    for each in survivors:
        assert [cause in line for line in each["log"]] == [True]
