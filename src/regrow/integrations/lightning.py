"""`RegrowCallback` for PyTorch Lightning."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.integrations.reports import TrainingReports

__all__ = ["RegrowCallback"]

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # Lightning is installed under two names, and the trainer of one refuses callbacks of the other.
    _OLD = "pytorch_lightning"
    _NAME = _OLD if _OLD in sys.modules and "lightning" not in sys.modules else "lightning.pytorch"
    try:
        Callback = importlib.import_module(_NAME).Callback
    except ModuleNotFoundError:
        Callback = importlib.import_module(_OLD).Callback


class RegrowCallback(Callback):
    """Reports steps and phases to regrow, and ends `fit` early when the job is to end.

    The number of a step is Lightning's `trainer.global_step`. The phases are "data" (the wait for
    the next batch), "eval" (the validation) and "checkpoint" (`trainer.save_checkpoint`, which
    ModelCheckpoint calls). Outside of regrow the callback does nothing.

    When `regrow.should_stop` is True, all ranks end `fit` after the same step. Lightning's minimum
    of epochs and steps does not prevent this. Afterwards the script should end as it does when the
    training is complete; `stopped` is True in the first case only.

    Args:
        save_to: where the callback saves a checkpoint when it ends `fit` early; None: it saves
            none. ModelCheckpoint saves one at the end of the validation only, and none without it.
    """

    def __init__(self, save_to: str | Path | None = None) -> None:
        self.stopped = False
        """Whether `fit` was ended early."""
        self._save_to = save_to
        self._reports = TrainingReports()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Name the time that the trainer saves checkpoints: Lightning has no hook at its end."""
        save = trainer.save_checkpoint
        if getattr(save, "__wrapped__", None) is not None:
            return  # an earlier `fit` of this trainer did it

        @functools.wraps(save)
        def timed(*args: Any, **kwargs: Any) -> None:
            self._reports.begin("checkpoint")
            try:
                save(*args, **kwargs)
            finally:
                self._reports.end()

        trainer.save_checkpoint = timed

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the phase "data"."""
        self._reports.end()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step, and end `fit` if the job is to end."""
        if self._reports.step_done(trainer.global_step):
            self.stopped = True
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            # Lightning validates before it ends, which may take longer than the job has.
            trainer.limit_val_batches = 0
            if self._save_to is not None:
                trainer.save_checkpoint(self._save_to)
        else:
            self._reports.begin("data")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the phase "eval"."""
        self._reports.begin("eval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the phase "eval"."""
        self._reports.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the open phase."""
        self._reports.end()
