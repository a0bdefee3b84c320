"""The Trainer of Hugging Face Transformers under regrow.

    regrow run --standalone --nproc-per-node 2 --max-restarts 3 transformers_digits.py

After a failure it continues from the newest complete checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from regrow.integrations.transformers import RegrowCallback


class Digits(Dataset[dict[str, Tensor]]):
    """Images of digits, as the Trainer takes them."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16).float(), torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Net(nn.Module):
    """A linear net; the Trainer takes the loss from its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    """Train from the last checkpoint on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=Path("runs/transformers"))
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    regrow_callback = RegrowCallback()
    trainer = Trainer(
        model=Net(),
        args=TrainingArguments(
            output_dir=str(args.dir),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            ddp_find_unused_parameters=False,
            save_steps=20,
            eval_strategy="epoch",
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Digits(),
        eval_dataset=Digits(),
        callbacks=[regrow_callback],
    )
    # The Trainer writes this file last. Its own `get_last_checkpoint` also returns a checkpoint
    # that a killed process has not finished.
    complete = [file.parent for file in args.dir.glob("checkpoint-*/trainer_state.json")]
    newest = max(complete, key=lambda folder: int(folder.name.split("-")[1]), default=None)
    trainer.train(resume_from_checkpoint=newest and str(newest))
    if trainer.is_world_process_zero():
        end = "stopped early" if regrow_callback.stopped else "trained"
        print(f"{end} after step {trainer.state.global_step}", flush=True)
    # On a CPU, a thread of gloo may abort a process that ends at once: see train_digits.py.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
