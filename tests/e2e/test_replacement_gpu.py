"""A rank whose CUDA context is broken is replaced by a process with the same GPU. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs.replacing import Launch

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]
ASKS = Path(__file__).parents[1] / "helpers" / "ranks" / "gpu_rank.py"
MEGABYTES_OF_A_CONTEXT = 64
"""By how much the free memory may differ: the driver does not free everything at once."""

SCRIPT = """
import torch
import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.health_check import CudaHealthCheck

INCARNATION = int(os.environ.get("REGROW_INCARNATION") or 0)

@Wrapper(replace=True, health_check=CudaHealthCheck())
def train(call: CallWrapper):
    free, _ = torch.cuda.mem_get_info()
    values = torch.ones(64 << 20, device="cuda")
    regrow.step(INCARNATION)
    report(INCARNATION, os.getpid(), torch.cuda.current_device(), free >> 20, values.sum().item())
    if INCARNATION == 0:
        values[torch.tensor([1 << 30], device="cuda")].sum()  # a device-side assert
        torch.cuda.synchronize()

train()
"""


def test_a_device_side_assert_costs_one_process_on_the_same_gpu(launch: Launch) -> None:
    missing = subprocess.check_output([sys.executable, str(ASKS)], text=True).strip()
    if missing != "null":
        pytest.skip(missing.strip('"'))
    job = launch(SCRIPT, "--max-restarts=1", nproc=1)
    first, second = job.reports(2)
    assert job.finish() == 0, job.output
    print(job.stderr)  # with the times of the replacement
    assert [first[2], second[2]] == ["0", "1"], "the incarnations"
    assert first[3] != second[3], "another process"
    assert first[4] == second[4], "the same GPU"
    assert abs(int(first[5]) - int(second[5])) < MEGABYTES_OF_A_CONTEXT, "its memory is free again"
    assert first[6] == second[6]
    assert len(job.events("worker.replaced")) == 1
    assert len(job.events("attempt.started")) == 1
