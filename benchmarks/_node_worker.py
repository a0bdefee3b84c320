"""The worker of `node_loss.py`: repeats an all-reduce over gloo until it is stopped.

It records when it runs, before it imports anything, and when its first all-reduce is done. The
records are lines `WHAT rank world_size pid nanoseconds`, appended to the file that BENCH_STAMPS
names. The times are of the monotonic clock, which all processes of a host share.
"""

import os
import time


def stamp(what: str) -> None:
    """Append one line about this worker, in a single write."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    line = f"{what} {rank} {world_size} {os.getpid()} {time.monotonic_ns()}\n"
    fd = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


stamp("started")

import torch  # noqa: E402 - imported after the stamp, because the stamp marks the start
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
stamp("reduced")
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
