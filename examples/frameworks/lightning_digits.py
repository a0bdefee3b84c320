"""PyTorch Lightning under regrow: checkpoints by Lightning, the rest by the callback.

    regrow run --standalone --nproc-per-node 2 --max-restarts 3 lightning_digits.py

After a failure it continues from the newest complete checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from regrow.integrations.lightning import RegrowCallback


class Digits(pl.LightningModule):
    """A linear net for 8x8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train from the last checkpoint on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    bunch = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(bunch[0] / 16).float(), torch.tensor(bunch[1]))
    processes, on_this_host = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    regrow_callback = RegrowCallback(save_to=args.dir / "stopped.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=on_this_host,
        num_nodes=processes // on_this_host,
        strategy="ddp",
        max_epochs=args.epochs,
        default_root_dir=args.dir,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(args.dir, every_n_train_steps=20, save_last=True),
            regrow_callback,
        ],
    )
    newest = max(args.dir.glob("*.ckpt"), key=lambda file: file.stat().st_mtime, default=None)
    trainer.fit(
        Digits(),
        DataLoader(data, batch_size=32, shuffle=True),
        DataLoader(data, batch_size=256),
        ckpt_path=newest,
    )
    if trainer.is_global_zero:
        end = "stopped early" if regrow_callback.stopped else "trained"
        print(f"{end} after step {trainer.global_step}: {trainer.callback_metrics}", flush=True)
    # On a CPU, a thread of gloo may abort a process that ends at once: see train_digits.py.
    time.sleep(0.1)


if __name__ == "__main__":
    main()
