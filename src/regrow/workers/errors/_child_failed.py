"""`ChildFailedError`: the report of a job whose workers failed, what failed first last of all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from regrow.workers.errors._failure import NOT_AVAILABLE, first_of, tail

if TYPE_CHECKING:
    from regrow.workers.errors._failure import ProcessFailure

MAX_MESSAGE = 64 << 10  # characters, of each failure
MAX_RULE_WIDTH = 60


class ChildFailedError(Exception):
    """Workers failed.

    Raised through a function under `record`, it hands on the error file of the worker that
    failed first rather than a traceback of its own.

    Args:
        name: of what failed: the script or function.
        failures: by global rank; at least one.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        self.name = name
        self.failures = failures
        if not failures:
            raise AssertionError("a ChildFailedError tells of at least one failure; got none")
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The root cause, with its global rank; see `first_of`."""
        rank = first_of(self.failures)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report.

        Args:
            boarder_delim: character of the rules above and below.
            section_delim: character of the rules between sections.
        """
        root, _ = self.get_first_failure()
        entries = {
            rank: _entry(index, rank, failure)
            for index, (rank, failure) in enumerate(self.failures.items())
        }
        title = f"{self.name} FAILED"
        lines = [title, *(line for entry in entries.values() for line in entry.splitlines())]
        width = min(MAX_RULE_WIDTH, max(len(line) for line in lines))
        border, section = boarder_delim * width, section_delim * width
        others = [entry for rank, entry in entries.items() if rank != root]
        return "\n".join(
            [
                "",
                border,
                title,
                section,
                "Failures:",
                *(others or ["  <NO_OTHER_FAILURES>"]),
                section,
                "Root Cause (first observed failure):",
                entries[root],
                border,
            ]
        )


def _entry(index: int, rank: int, failure: ProcessFailure) -> str:
    signal_name = failure.signal_name()
    by_signal = f" ({signal_name})" if signal_name != NOT_AVAILABLE else ""
    message = failure.message
    if isinstance(message, dict):
        message = failure.traceback or str(message.get("message", NOT_AVAILABLE))
    message = tail(message, MAX_MESSAGE).replace("\n", "\n  ")
    return (
        f"[{index}]:\n"
        f"  time      : {failure.timestamp_isoformat()}\n"
        f"  host      : {failure.host or os.uname().nodename}\n"
        f"  rank      : {rank} (local_rank: {failure.local_rank})\n"
        f"  exitcode  : {failure.exitcode} (pid: {failure.pid}){by_signal}\n"
        f"  error_file: {failure.error_file}\n"
        f"  traceback : {message}"
    )
