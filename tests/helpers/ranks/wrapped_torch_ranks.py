"""Program of test_wrapped_collectives.py: a process of its own, because it imports torch.

It loads torch once and forks three ranks for each case. One rank fails while the others wait in an
all-reduce. The program prints the ranks' results for each case as one JSON object.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from regrow.inprocess import CallWrapper, Wrapper
from regrow.store import PrefixStore, worker_store
from regrow.store.torch import TorchStore
from regrow.utils import PortReservation

SIZE = 3
#: Longer than an abort needs to wake a rank; a rank that hangs is killed before.
FOREVER = timedelta(minutes=10)


def begin_by_environment(keys: PrefixStore, iteration: int) -> None:
    """Create the default group with MASTER_PORT; at first rank 1 fails while the others wait."""
    rank = os.environ["RANK"]
    if rank == "0":
        held = PortReservation()  # until rank 0 has called this
        keys.set("port", str(held.port))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": keys.get("port").decode()}
    if iteration == 0 and rank == "1":
        # Rank 0's store ends with its call. Nothing wakes a rank that is not connected by then.
        keys.wait(["2 is connected"])
        raise ValueError("a mistake")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    made = rendezvous._create_c10d_store

    def make(*args: Any, **more: Any) -> Any:
        store = made(*args, **more)
        keys.set(f"{rank} is connected", "")
        return store

    with mock.patch.object(rendezvous, "_create_c10d_store", make):
        dist.init_process_group("gloo", timeout=FOREVER)


def rank_main(case: str, rank: int) -> list[Any]:
    returned: list[Any] = []

    @Wrapper()
    def train(call: CallWrapper) -> int:
        place, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        keys = PrefixStore(f"{case}/{call.iteration}", worker_store())
        store = TorchStore(keys)
        if case == "fails before env://":
            begin_by_environment(keys, call.iteration)
        else:
            dist.init_process_group(
                "gloo", store=store, rank=place, world_size=size, timeout=FOREVER
            )
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        returned.append([call.iteration, tensor.item()])
        if call.iteration == 0:
            keys.set(f"{rank} has said so", "")
            if rank == 1:
                keys.wait([f"{each} has said so" for each in range(SIZE)])
            if rank == 1 and case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                raise ValueError("a mistake")
            dist.all_reduce(tensor)
        dist.destroy_process_group()
        return call.iteration

    returned.append(train())  # type: ignore[call-arg]
    return returned


def play(case: str) -> list[Any]:
    pipes = []
    for rank in range(SIZE):
        reads, writes = os.pipe()
        if os.fork() == 0:
            try:
                faulthandler.dump_traceback_later(40, exit=True)
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(SIZE), TORCHELASTIC_RUN_ID=f"torch {case}"
                )
                os.write(writes, json.dumps(rank_main(case, rank)).encode())
            finally:
                os._exit(1)
        os.close(writes)
        pipes.append(reads)
    results = []
    for reads in pipes:
        with os.fdopen(reads, "rb") as pipe:
            text = pipe.read()
        results.append(json.loads(text) if text else None)
    return results


if __name__ == "__main__":
    print(json.dumps({case: play(case) for case in sys.argv[1:]}))
