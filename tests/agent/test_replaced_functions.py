"""Workers that call a function are replaced, too, and the value is that of the replacement."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.launch import LaunchConfig, elastic_launch
from regrow.workers import DefaultLogsSpecs

pytestmark = pytest.mark.thorough


@Wrapper(replace=True)
def train(call: CallWrapper) -> str:
    regrow.step(call.iteration)
    if call.iteration == 0 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if call.iteration == 0:
        threading.Event().wait()
    return f"{os.environ['RANK']}, incarnation {os.environ.get('REGROW_INCARNATION', 0)}"


def run() -> str | None:
    return train()  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_value_of_a_replaced_worker_is_that_of_its_last_process(
    tmp_path: Path, method: str
) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=3,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method=method,
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    assert elastic_launch(config, run)() == {
        0: "0, incarnation 0",
        1: "1, incarnation 1",
        2: "2, incarnation 0",
    }
