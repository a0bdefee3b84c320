"""`RegrowCallback` for the Trainer of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from regrow.integrations.reports import TrainingReports

__all__ = ["RegrowCallback"]


class RegrowCallback(TrainerCallback):
    """Reports steps and phases to regrow, and ends `train` early when the job is to end.

    The number of a step is the Trainer's `state.global_step`. The phases are "data" (the wait for
    the next batch), "eval" and "checkpoint". Outside of regrow the callback does nothing.

    When `regrow.should_stop` is True, all ranks save a checkpoint, without an evaluation before it,
    and end `train` after the same step. Afterwards the script should end as it does when the
    training is complete; `stopped` is True in the first case only.
    """

    def __init__(self) -> None:
        self.stopped = False
        """Whether `train` was ended early."""
        self._reports = TrainingReports()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """End the phase "data"."""
        self._reports.end()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Report the step, and end `train` if the job is to end.

        The Trainer's own callback runs before, and has decided whether an evaluation or a save
        follows.
        """
        if self._reports.step_done(state.global_step):
            self.stopped = True
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False
        self._begin_next(control)
        return control

    def _begin_next(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self._reports.begin("eval")
        elif control.should_save:
            self._reports.begin("checkpoint")
        else:
            self._reports.begin("data")

    def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """End the phase "eval"."""
        self._reports.end()
        if control.should_save:
            self._reports.begin("checkpoint")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """End the phase "checkpoint"; what follows is the wait for the next batch."""
        self._reports.begin("data")

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Begin the evaluation or the save at the end of an epoch, if there is one."""
        if not self.stopped:
            self._begin_next(control)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """End the open phase."""
        self._reports.end()
