"""Train on the handwritten digits, and lose a rank and a step without starting the job again.

This is the training of train_digits.py, with its loop in a function. When a rank fails,
`regrow.inprocess.Wrapper` calls the function again in the remaining processes. They do not import,
load or read anything again. After a fault, ranks may differ by a step; `regrow.State` brings all to
the last complete one. The training needs no checkpoint as long as one rank is left:

    regrow run --standalone --nproc-per-node 3 examples/inprocess_digits.py

Rank 0 is killed at one step, and rank 1 fails at a later one. Each step divides one batch among the
remaining ranks. So the result is the same as without faults (`--kill-at 0 --fail-at 0`), except for
rounding.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_digits import SEED, accuracy, digits, network  # type: ignore[import-not-found]

import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.initialize import RetryController
from regrow.store import worker_store
from regrow.store.torch import TorchStore


class Training:
    """State that a restart must keep; it lives outside the wrapped function."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.train_set, self.test_set = digits()
        self.net = network()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        self.state = regrow.State({"net": self.net, "optimizer": self.optimizer})
        self.initial_rank = int(os.environ["RANK"])  # a restart may assign another rank
        self.failed = False
        self.store = TorchStore(worker_store())

    def batches(self, done: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each step after `done`, and its image indices; the same on all ranks."""
        step = 0
        for epoch in range(self.args.epochs):
            order = torch.Generator().manual_seed(SEED + epoch)
            shuffled = torch.randperm(len(self.train_set), generator=order)
            for batch in shuffled.split(self.args.batch_size):
                step += 1
                if step > done:
                    yield step, batch

    def fail(self, step: int) -> None:
        """Kill rank 0 at one step, and raise on rank 1 at a later step."""
        if step == self.args.kill_at and self.initial_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.args.fail_at and self.initial_rank == 1 and not self.failed:
            self.failed = True
            raise RuntimeError(f"step {step} fails")


@Wrapper(initialize=RetryController(max_iterations=10))
def train(training: Training, call: CallWrapper) -> None:
    """Train from the last complete step; called again after each fault."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = dist.PrefixStore(f"gloo/{call.iteration}", training.store)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=world_size)
    done = training.state.recover(call, default=lambda: 0)
    if rank == 0:
        print(f"{world_size} ranks continue after step {done}", flush=True)
    model = DistributedDataParallel(training.net)
    loss_of = nn.CrossEntropyLoss(reduction="sum")
    for step, batch in training.batches(done):
        images, labels = training.train_set[batch[rank::world_size]]
        training.optimizer.zero_grad()
        loss = loss_of(model(images), labels) * world_size / len(batch)  # DDP takes the mean
        training.fail(step)
        loss.backward()
        with training.state.commit(step):  # all or nothing, at any time that another rank fails
            training.optimizer.step()
    right = accuracy(training.net, training.test_set, rank, world_size)
    if rank == 0:
        print(f"final test accuracy {right:.4f}", flush=True)
    time.sleep(0.1)  # for the reason given in train_digits.py
    del model  # before its group: torch may hang in the other order
    dist.destroy_process_group()


def main() -> None:
    """Create the state, and train."""
    parser = argparse.ArgumentParser(description="Train a digit classifier that loses a rank.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images of all ranks and a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate")
    parser.add_argument("--kill-at", type=int, default=100, help="step at which rank 0 is killed")
    parser.add_argument("--fail-at", type=int, default=200, help="step at which rank 1 raises")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    train(Training(args))  # type: ignore[call-arg] # the wrapper adds `call`


if __name__ == "__main__":
    main()
