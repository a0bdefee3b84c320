"""Hugging Face Accelerate under regrow: the loop is the user's, so it calls regrow itself.

    regrow run --standalone --nproc-per-node 2 --max-restarts 3 accelerate_digits.py

After a failure it continues from the newest complete checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import regrow


def main() -> None:
    """Train from the last checkpoint on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(data, batch_size=32, shuffle=True)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if (newest := max(args.dir.glob("step-*[0-9]"), default=None)) is not None:
        accelerator.load_state(str(newest))
    batches: Iterator[Any] = iter(())
    while progress.step < args.steps:
        with regrow.phase("data"):
            if (batch := next(batches, None)) is None:
                batches = iter(loader)
                batch = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        accelerator.backward(loss)
        optimizer.step()
        progress.step += 1
        regrow.step(progress.step)
        stop = regrow.should_stop()
        if stop or progress.step % 20 == 0:
            with regrow.phase("checkpoint"):
                save(accelerator, args.dir / f"step-{progress.step:06}")
        if stop:
            break
    end = "trained" if progress.step == args.steps else "stopped early"
    accelerator.print(f"{end} after step {progress.step}", flush=True)
    # On a CPU, a thread of gloo may abort a process that ends at once: see train_digits.py.
    time.sleep(0.1)
    accelerator.end_training()


def save(accelerator: Accelerator, target: Path) -> None:
    """Save a checkpoint under its name when it is complete: a process may be killed meanwhile."""
    unfinished = target.with_suffix(".unfinished")
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if target.exists():  # saved before, in an attempt that went back further
            shutil.rmtree(target)
        unfinished.rename(target)


class Progress:
    """How far the training is; Accelerate saves and loads it with the rest."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


if __name__ == "__main__":
    main()
