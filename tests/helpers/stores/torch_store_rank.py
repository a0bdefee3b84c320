"""A rank with a default group over torch's store, or the agent's; its arguments select a case.

late STORE: rank 0 ends; then rank 1 uses the store, and creates a group over it.
restarted STORE: rank 1 fails in the first attempt, after the group was used.
killed STORE: rank 0 kills the process that serves the store in the first attempt.
again STORE: all ranks create the default group three times, and groups within it.
private PORT: all ranks create the default group at an address of their own.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from regrow.store import worker_store
from regrow.store.torch import TorchStore

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STORE = TorchStore(worker_store())


def make_group(kind: str, prefix: str = "") -> dist.Store:
    if kind == "torch's":
        dist.init_process_group("gloo")
        return dist.distributed_c10d._get_default_store()
    keys = dist.PrefixStore(prefix, STORE)
    dist.init_process_group("gloo", store=keys, rank=RANK, world_size=WORLD_SIZE)
    return keys


def add_up(group: dist.ProcessGroup | None = None, size: int = WORLD_SIZE) -> None:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == size


def late(kind: str) -> None:
    store = make_group(kind)
    add_up()
    if RANK == 0:
        store.set("pid", str(os.getpid()))
        store.get("rank 1 watches")
        dist.destroy_process_group()
        return
    pidfd = os.pidfd_open(int(store.get("pid")))
    store.set("rank 1 watches", "1")
    select.select([pidfd], [], [])
    assert store.add("late", 2) == 2
    add_up(dist.new_group([1], use_local_synchronization=True), 1)
    dist.destroy_process_group()


def restarted(kind: str) -> None:
    store = make_group(kind)
    add_up()
    assert store.add("attempts", 1) <= WORLD_SIZE, "the store of an older attempt"
    dist.barrier()
    if RANK == 1 and os.environ["REGROW_ATTEMPT"] == "0":
        raise RuntimeError("the first attempt fails")
    dist.destroy_process_group()


def killed(kind: str) -> None:
    store = make_group(kind)
    add_up()
    if os.environ["REGROW_ATTEMPT"] == "0":
        if RANK == 0:
            guardian = Path(f"/proc/{os.getppid()}/stat").read_text()
            agent = guardian.rpartition(")")[2].split()[1]
            for children in Path(f"/proc/{agent}/task").glob("*/children"):
                for pid in children.read_text().split():
                    if b"torch_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)
        store.get("never set")
    dist.destroy_process_group()


def again(kind: str) -> None:
    for turn in range(3):
        make_group(kind, str(turn))
        add_up()
        add_up(dist.new_group(list(range(WORLD_SIZE))))
        dist.destroy_process_group()


def private(port: str) -> None:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=RANK, world_size=WORLD_SIZE)
    add_up()
    dist.destroy_process_group()


if __name__ == "__main__":
    cases = {c.__name__: c for c in (late, restarted, killed, again, private)}
    cases[sys.argv[1]](*sys.argv[2:])
    os.write(1, b"rank done\n")
