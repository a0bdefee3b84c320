"""A rank with a GPU: NCCL and its own health restart with it, in the same CUDA context.

One GPU is enough. Each case is a process of its own (`gpu_rank.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.stores.storing import ServerThread
from regrow.inprocess.group.group_service import InprocessService
from regrow.store import STORE_ENV, STORE_TOKEN_ENV

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]
SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "gpu_rank.py"

Play = Callable[..., Any]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Runs a case, and returns its result; skips the test where no GPU can be used."""
    server = ServerThread(services={"inprocess": InprocessService()})
    unwanted = ("REGROW_", "TORCHELASTIC_", "LOCAL_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    environ |= {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: server.token.decode()}

    def play(*case: str) -> Any:
        script = [sys.executable, str(SCRIPT), *case]
        return json.loads(subprocess.check_output(script, env=environ, timeout=150))

    missing = play()
    if missing is not None:
        server.stop()
        pytest.skip(missing)
    yield play
    server.stop()


@pytest.fixture(scope="module")
def stuck(play: Play) -> Any:
    """The result of a rank that was stuck in a synchronization when another rank failed."""
    return play("is_stuck")


def test_a_rank_that_waits_for_a_kernel_and_a_collective_behind_it_restarts(stuck: Any) -> None:
    (notified, was_busy), (aborted, _), (left, has_group) = stuck["seen"]
    assert [notified, aborted, left] == ["notified", "aborted", "left"]
    assert was_busy, "nothing was stuck when the others were notified"
    assert not has_group, "the function was interrupted before its group was aborted"
    assert stuck["value"] == [1, 1.0], "no new group in the same process"
    assert stuck["beside"] == 0


def test_a_restart_keeps_the_cuda_context_and_what_is_in_its_memory(stuck: Any) -> None:
    for before, after in (stuck["pids"], stuck["contexts"]):
        assert before == after
    assert stuck["kept"] == [True, True]


def test_a_device_is_fit_when_it_is_through_and_not_while_it_is_busy(play: Play) -> None:
    idle, late, was_busy, idle_again = play("is_checked")["seen"]
    assert idle
    assert late == "CudaHealthCheck-0 did not finish within 0.01 s"
    assert was_busy
    assert idle_again


def test_a_rank_with_a_broken_context_leaves_and_the_others_continue(play: Play) -> None:
    result = play("is_broken")
    assert result["raised"].startswith(
        "rank 0 (initial rank 0) is not healthy enough to continue: "
    )
    assert "CUDA error" in result["cause"]
    assert result["beside"] == 0
