"""Program of test_on_a_gpu.py: a process of its own, because it uses CUDA: `gpu_rank.py [CASE]`.

Without a case it prints what the machine lacks for the cases, or null. With a case it prints one
JSON object.

A case with a wrapped function has two ranks. Rank 0 uses the GPU, with an NCCL group of its own.
Rank 1 does not load torch. It fails when rank 0 reports that it is stuck, or continues without it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from helpers.suite.unskipped import NO_GPU
from regrow.inprocess import CallWrapper, Compose, FrozenState, State, Wrapper
from regrow.inprocess.abort import Abort, AbortTorchDistributed
from regrow.inprocess.exception import HealthCheckError, TimeoutError
from regrow.inprocess.health_check import CudaHealthCheck
from regrow.store import PrefixStore, worker_store

#: Longer than any case; a rank that hangs is killed before.
FOREVER = timedelta(minutes=10)
LONG = 60.0
PATIENCE_S = 120.0
"""Seconds after which a case fails; the first use of CUDA may take long."""
KERNEL_S = 5.0
"""Seconds for which a kernel keeps the device busy, approximately; nothing can end it earlier."""


def lacks() -> str | None:
    """Return what this machine or its torch lacks; None if nothing."""
    import torch

    if torch.cuda.is_available():
        return None
    devices = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
    if not devices:
        return NO_GPU
    return f"torch {torch.__version__} cannot use {', '.join(devices)}: install one that can"


def keep_busy() -> None:
    """Launch a kernel that runs for a while."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10_000_000
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    torch.cuda._sleep(int(cycles * 1000 * KERNEL_S / begin.elapsed_time(end)))


def is_busy() -> bool:
    import torch

    return not torch.cuda.default_stream().query()


def context() -> int:
    """Return the id of this thread's CUDA context; no other context of the process ever has it."""
    number = ctypes.c_ulonglong()
    error = ctypes.CDLL("libcuda.so.1").cuCtxGetId(None, ctypes.byref(number))
    assert error == 0, f"CUDA error {error}"
    return number.value


class Note(Abort):
    """Records its call, and whether the device was busy."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name = name
        self.seen = seen

    def __call__(self, state: FrozenState) -> FrozenState:
        self.seen.append([self.name, is_busy()])
        return state


def is_stuck(others: PrefixStore) -> dict[str, Any]:
    """Wait for a collective behind a running kernel, while another rank fails."""
    import torch
    import torch.distributed as dist

    from regrow.store.torch import TorchStore

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    kept = torch.arange(1 << 20, device=device)
    expected, where = int(kept.sum().item()), kept.data_ptr()
    result: dict[str, Any] = {"pids": [os.getpid()], "contexts": [context()]}
    seen: list[Any] = []

    @Wrapper(abort=Compose(Note("aborted", seen), AbortTorchDistributed(), Note("notified", seen)))
    def train(call: CallWrapper) -> list[float]:
        keys = TorchStore(PrefixStore(f"group {call.iteration}", others))
        dist.init_process_group(
            "nccl", store=keys, rank=0, world_size=1, device_id=device, timeout=FOREVER
        )
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        if call.iteration == 0:
            torch.cuda.synchronize()
            keep_busy()
            dist.all_reduce(total)
            others.set("stuck", "")
            try:
                torch.cuda.synchronize()
                time.sleep(LONG)  # until the restart interrupts it
            finally:
                seen.append(["left", dist.is_initialized()])
        value = [call.iteration, total.item()]
        dist.destroy_process_group()
        return value

    result["value"] = train()  # type: ignore[call-arg]
    result["pids"].append(os.getpid())
    result["contexts"].append(context())
    kept += 1
    result["kept"] = [kept.data_ptr() == where, int(kept.sum().item()) - expected == len(kept)]
    return result | {"seen": seen}


def is_checked() -> dict[str, Any]:
    """Check a device that is idle, busy, and idle again."""
    import torch

    state = State(0, 1).freeze()
    seen: list[Any] = []
    torch.ones(1, device="cuda")
    seen.append(CudaHealthCheck()(state) is state)
    keep_busy()
    try:
        CudaHealthCheck(timedelta(milliseconds=10))(state)
    except TimeoutError as error:
        seen += [str(error), is_busy()]
    seen.append(CudaHealthCheck()(state) is state)
    return {"seen": seen}


def is_broken(_: PrefixStore) -> dict[str, Any]:
    """Break the CUDA context, so that no further call can succeed."""
    import torch

    @Wrapper(health_check=CudaHealthCheck())
    def train(call: CallWrapper) -> None:
        table = torch.zeros(4, device="cuda")
        table[torch.tensor([7], device="cuda")].sum().item()

    try:
        train()  # type: ignore[call-arg]
    except HealthCheckError as error:
        return {"raised": str(error), "cause": str(error.__cause__)}
    return {}


def beside(others: PrefixStore) -> None:
    """Run rank 1."""

    @Wrapper()
    def train(call: CallWrapper) -> None:
        if call.iteration == 0:
            others.wait(["stuck"], FOREVER)
            raise ValueError("a mistake")

    train()  # type: ignore[call-arg]


def rank_1(case: str) -> int:
    """Fork rank 1 before this process uses CUDA; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["RANK"] = "1"
            beside(PrefixStore(case, worker_store()))
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def main(case: str) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    os.environ.update(RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID=case)
    if case == "is_checked":
        result = is_checked()
    else:
        other = rank_1(case)
        result = {"is_stuck": is_stuck, "is_broken": is_broken}[case](
            PrefixStore(case, worker_store())
        )
        result["beside"] = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
    print(json.dumps(result), flush=True)
    os._exit(0)  # a broken context cannot be shut down


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        print(json.dumps(lacks()))
