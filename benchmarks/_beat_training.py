"""The digits training of the example, in blocks with and without a heartbeat, one process a rank.

    RANK=... python benchmarks/_beat_training.py ENDPOINT TOKEN PERIOD PAIRS STEPS

Each block has STEPS steps, and every second block runs with a heartbeat. The order alternates from
pair to pair, so that other load on the machine affects both kinds of block alike. Rank 0 prints the
results of all blocks as JSON: [[without, with], ...]. Each of the two is the steps per second and
the processor time of rank 0's process per step, in milliseconds. Starting and stopping the
heartbeat is not part of a block.
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
    """Train, and print the results."""
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
        """Train `count` steps; return steps per second, and processor ms per step."""
        nonlocal done
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(count):
            at = done * BATCH % (len(labels) - BATCH)
            optimizer.zero_grad()
            loss_of(model(images[at : at + BATCH]), labels[at : at + BATCH]).backward()
            optimizer.step()
            done += 1
            heartbeat.step(done)  # in both kinds of block: its cost is not measured here
        dist.barrier()
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        return count / seconds, spent * 1000 / count

    def train_beating(count: int) -> tuple[float, float]:
        """Train `count` steps with a heartbeat; return the same figures as `train`."""
        stop = heartbeat.start(float(period), store=store)
        found = train(count)
        stop.set()
        for thread in threading.enumerate():
            if thread.name == "regrow-heartbeat":
                thread.join()
        dist.barrier()  # no rank starts a heartbeat again before all ranks have left
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
    os._exit(0)  # for the reason at the end of examples/train_digits.py


if __name__ == "__main__":
    main()
