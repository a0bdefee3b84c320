"""The worker of `spare_host.py`: trains a small model over gloo, in a wrapped function.

It appends a line `step round rank pid nanoseconds step` to the file that BENCH_STAMPS names after
each step. With ELASTIC=1 its process goes on in the next round. BENCH_BUILD_S are the seconds that
it takes to build its model. torchrun has no number of the round; MASTER_PORT differs between two
rounds.
"""

import os
import time

import torch
import torch.distributed as dist

import regrow
from regrow.inprocess import CallWrapper, Wrapper

time.sleep(float(os.environ.get("BENCH_BUILD_S", 0)))
elastic = os.environ.get("ELASTIC") == "1"
weights = torch.zeros(1000)
state = regrow.State({"weights": weights})


def stamp(step: int) -> None:
    """Append one line about this worker, in a single write."""
    number = os.environ.get("REGROW_FENCING_TOKEN") or os.environ["MASTER_PORT"]
    words = ("step", number, os.environ["RANK"], os.getpid(), time.monotonic_ns(), step)
    fd = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


@Wrapper(replace=elastic, elastic=elastic)
def train(call: CallWrapper) -> None:
    """Train until the process is ended."""
    dist.init_process_group("gloo")
    step = state.recover(call, default=lambda: 0) if elastic else 0
    while True:
        gradient = torch.full((1000,), float(step))
        dist.all_reduce(gradient)
        if elastic:
            with state.commit(step + 1):
                weights.sub_(gradient)
        else:
            weights.sub_(gradient)
        step += 1
        stamp(step)
        time.sleep(0.02)


if __name__ == "__main__":
    train()  # type: ignore[call-arg]
