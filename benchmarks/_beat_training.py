"""The digits training of the example, in turn without and with a heartbeat, in one process a rank.

    RANK=... python benchmarks/_beat_training.py ENDPOINT TOKEN PERIOD PAIRS STEPS

Blocks of STEPS steps follow each other, every second one with a heartbeat, the first of each pair
alternating, so that what a machine does besides falls on both alike. Rank 0 prints of all blocks
the steps per second and the processor time of its process for a step, in milliseconds, as JSON:
[[without, with], ...], each a pair of the two. Starting and stopping the heartbeat is not part of a
block.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow import heartbeat
from regrow.store import connect

sys.path.append(str(Path(__file__).parent.parent))
from examples.train_digits import digits, network

BATCH = 16
WARM_UP = 100


def main() -> None:
    """Train, and print."""
    endpoint, token, period, pairs, steps = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    images, labels = (column[rank::size] for column in digits()[0].tensors)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_of = nn.CrossEntropyLoss()
    store = connect(endpoint, token=token.encode())
    done = 0

    def train(count: int) -> tuple[float, float]:
        """Return the steps per second of so many steps, and the milliseconds of processor time."""
        nonlocal done
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(count):
            at = done * BATCH % (len(labels) - BATCH)
            optimizer.zero_grad()
            loss_of(model(images[at : at + BATCH]), labels[at : at + BATCH]).backward()
            optimizer.step()
            done += 1
            heartbeat.step(done)  # in both: what it costs to be told is another matter
        dist.barrier()
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        return count / seconds, spent * 1000 / count

    def train_beating(count: int) -> tuple[float, float]:
        """Do the same with a heartbeat."""
        stop = heartbeat.start(float(period), store=store)
        found = train(count)
        stop.set()
        for thread in threading.enumerate():
            if thread.name == "regrow-heartbeat":
                thread.join()
        dist.barrier()  # nobody begins anew before all have left
        return found

    train(WARM_UP)
    blocks = []
    for pair in range(int(pairs)):
        if pair % 2:
            beating = train_beating(int(steps))
            blocks.append((train(int(steps)), beating))
        else:
            blocks.append((train(int(steps)), train_beating(int(steps))))
    if rank == 0:
        print(json.dumps(blocks), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # see the end of the example


if __name__ == "__main__":
    main()
