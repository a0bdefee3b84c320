"""Worker of `preload.py`: `_steps.py STEPS`, a training with a step of some milliseconds.

Rank 0 prints the seconds of each step as a JSON list.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    batch = torch.randn(256, 256)
    seconds = []
    for _ in range(int(sys.argv[1])):
        begun = time.perf_counter()
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        print("seconds", json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
