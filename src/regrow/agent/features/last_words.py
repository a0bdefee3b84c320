"""Adds the cause of a failure from the end of the worker's stderr.

A worker without an error file (its script does not import regrow, or it died before that) has often
written why it ends: a traceback, a message of a crash. The end of its stderr is read when the
worker has ended, and searched (`regrow.events.find_cause`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.agent.features import Feature

if TYPE_CHECKING:
    from regrow.agent.features import StartedWorkers
    from regrow.workers import PContext, ProcessFailure


class LastWords(Feature):
    """Explains the failures of workers that left no error file."""

    def __init__(self) -> None:
        self._context: PContext | None = None

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class."""
        self._context = workers.context

    def explain(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """See base class."""
        for failure in failures.values():
            unknown = not failure.has_error_file and isinstance(failure.message, str)
            if self._context is None or not unknown or failure.killed_with or failure.cause:
                continue
            from regrow.events import find_cause

            output = self._context.last_stderr(failure.local_rank)
            failure.cause = find_cause(output, failure.exitcode)
        return failures
