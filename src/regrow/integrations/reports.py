"""What a framework's callback reports to regrow, in terms of the framework's events."""

from __future__ import annotations

from contextlib import AbstractContextManager

import regrow


class TrainingReports:
    """Reports steps, at most one open phase, and asks whether the job is to end early.

    A framework reports the begin and the end of a phase in two calls, and leaves out the end after
    an exception. So the next phase, or the next step, ends an open one.
    """

    def __init__(self) -> None:
        self._phase: AbstractContextManager[object] | None = None
        self._latest_step: int | None = None

    def begin(self, phase: str) -> None:
        """Begin a phase; it ends the one before."""
        self.end()
        self._phase = regrow.phase(phase)
        self._phase.__enter__()

    def end(self) -> None:
        """End the open phase, if there is one."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def step_done(self, step: int) -> bool:
        """Report a step, and return whether the training ends after it.

        Args:
            step: how many optimizer steps were done in the whole training. If it is that of the
                call before, because gradients accumulate, the call does nothing.

        Returns:
            True on all ranks after the same step, or False.
        """
        if step == self._latest_step:
            return False
        self._latest_step = step
        regrow.step(step)
        return regrow.should_stop()
