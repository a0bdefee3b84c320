"""Worker of `replace.py`: all-reduces in a loop, until the file `finish` exists.

    python _replace_worker.py wrapped|plain

`wrapped` runs the loop in a `regrow.inprocess.Wrapper` whose lost ranks are replaced; `plain` runs
it as any script does, and ends when a rank is lost. The first all-reduce of each call writes a
stamp: rank, process id, nanoseconds of the monotonic clock.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["BENCH_FOLDER"])


def loop(**group: Any) -> None:
    """Reduce until the file exists on all ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **group)
    value = torch.ones(1)
    dist.all_reduce(value)
    with (FOLDER / "stamps").open("a") as stamps:
        stamps.write(f"{os.environ['RANK']} {os.getpid()} {time.monotonic_ns()}\n")
    while value:
        value = torch.tensor([0.0 if (FOLDER / "finish").exists() else 1.0])
        dist.all_reduce(value, dist.ReduceOp.MIN)
        time.sleep(0.002)
    dist.destroy_process_group()


def main() -> None:
    """Run the loop."""
    if sys.argv[1] == "plain":
        loop()
        return
    from regrow.inprocess import CallWrapper, Wrapper
    from regrow.store import worker_store
    from regrow.store.torch import TorchStore

    store = TorchStore(worker_store())

    @Wrapper(replace=True)
    def train(call: CallWrapper | None = None) -> None:
        assert call is not None
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        keys = dist.PrefixStore(str(call.iteration), store)
        loop(store=keys, rank=rank, world_size=world_size)

    train()


main()
