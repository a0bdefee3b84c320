"""Train a small convolutional net on scikit-learn's handwritten digits, on any number of workers.

It is plain PyTorch: DistributedDataParallel over gloo, a checkpoint after every epoch, and a start
that resumes from the newest checkpoint. A script needs only this to survive a crash of its workers:

    regrow run --standalone --nproc-per-node 2 --max-restarts 3 examples/train_digits.py

It runs unchanged under torchrun.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# The one optional line of regrow: with the reported steps, the launcher can print after a crash
# how much work was lost. Without it, and under torchrun, everything works the same.
try:
    from regrow import step as report_step
except ImportError:

    def report_step(n: int) -> None:
        """Do nothing: regrow is not installed."""


SEED = 2024
TEST_SHARE = 0.2


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, split the same way in every process and attempt."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    images, labels = images[order], labels[order]
    held_out = int(len(labels) * TEST_SHARE)
    return (
        TensorDataset(images[held_out:], labels[held_out:]),
        TensorDataset(images[:held_out], labels[:held_out]),
    )


def network() -> nn.Module:
    """Return the net: two convolutions and two linear layers for 8x8 images of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def save_checkpoint(directory: Path, epochs_done: int, state: dict[str, Any]) -> None:
    """Write `epoch-NNNN.pt` atomically: a crash leaves the complete file or none."""
    target = directory / f"epoch-{epochs_done:04d}.pt"
    unfinished = target.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(target)


def load_newest_checkpoint(directory: Path) -> dict[str, Any] | None:
    """Return the state of the newest finished checkpoint, or None if there is none."""
    newest = max(directory.glob("epoch-*.pt"), default=None)
    return None if newest is None else torch.load(newest, weights_only=True)


def accuracy(model: nn.Module, data: TensorDataset, rank: int, world_size: int) -> float:
    """Return the share of `data` that is classified right; each worker evaluates its part."""
    images, labels = (column[rank::world_size] for column in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return int(right) / len(data)


def train(args: argparse.Namespace) -> None:
    """Train from the newest checkpoint on; print a line per epoch and the final test accuracy."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    loss_of = nn.CrossEntropyLoss()

    # Every worker reads the same file: rank 0 writes the next one only after all workers have
    # joined a whole epoch.
    first_epoch = 0
    if checkpoint := load_newest_checkpoint(args.checkpoint_dir):
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epochs_done"]
        if rank == 0:
            print(f"resuming after epoch {first_epoch}", flush=True)
    model = DistributedDataParallel(net)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total_loss = 0.0
        for step, (images, labels) in enumerate(loader, start=epoch * len(loader) + 1):
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
            report_step(step)
        right = accuracy(net, test_set, rank, world_size)
        if rank == 0:
            state = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs_done": epoch + 1,
            }
            save_checkpoint(args.checkpoint_dir, epoch + 1, state)
            mean_loss = total_loss / len(loader)
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {mean_loss:.4f}, test accuracy {right:.4f}",
                flush=True,
            )

    final = accuracy(net, test_set, rank, world_size)
    if rank == 0:
        print(f"final test accuracy {final:.4f}", flush=True)


def main() -> None:
    """Join the other workers, train, and leave."""
    parser = argparse.ArgumentParser(description="Train a digit classifier with DDP on CPU.")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("runs/digits"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(args)
    # torch 2.13: if a gloo thread still holds the last all-reduce when the interpreter ends, the
    # process aborts, about once in a hundred runs. The sleep lets the thread release it.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
