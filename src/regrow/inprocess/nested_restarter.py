"""Plug-ins that tell an outer launcher what the wrapper inside is doing.

A launcher that restarts jobs must not restart one that is healing itself. So one rank announces the
state of the inner restarter: initialize, handling (starting, then completed), and in the end
finalized or aborted. They are given to the wrapper beside its other plug-ins:

    Wrapper(
        initialize=Compose(RetryController(), NestedRestarterHandlingCompleted()),
        abort=Compose(AbortTorchDistributed(), NestedRestarterHandlingStarting()),
        completion=NestedRestarterFinalized(),
        terminate=NestedRestarterAborted(),
    )

Where an announcement goes is up to its sink: unless another is given, a line on standard output,
as launchers of nvidia-resiliency-ext look for it. Under `regrow run` none of this is needed: the
wrapper tells the agent by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import NamedTuple

from .abort import Abort
from .completion import Completion
from .initialize import Initialize
from .state import FrozenState
from .terminate import Terminate

__all__ = [
    "Announcement",
    "NestedRestarterAborted",
    "NestedRestarterCallback",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
    "write_line",
]


class Announcement(NamedTuple):
    """What the inner restarter is at."""

    state: str
    """initialize, handling, finalized or aborted."""
    stage: str | None = None
    """Of handling: starting or completed."""

    def __str__(self) -> str:
        stage = "" if self.stage is None else f" stage={self.stage}"
        return f"[NestedRestarter] name=[InProcess] state={self.state}{stage}"


def write_line(announcement: Announcement) -> None:
    """Write an announcement to standard output, with the time, whatever the log's level is."""
    form = logging.Formatter("[%(asctime)s] [ALWAYS] [%(name)s] %(message)s")
    record = {"name": "InprocessRestarter.Restarter", "msg": str(announcement)}
    sys.stdout.write(form.format(logging.makeLogRecord(record)) + "\n")
    sys.stdout.flush()


class NestedRestarterCallback:
    """Announces one state; what the plug-ins below have in common.

    Args:
        restarter_state: what is announced: initialize, handling, finalized or aborted.
        restarter_stage: of handling: starting or completed.
        special_rank: the initial rank that announces; the others say nothing.
        sink: what an announcement is given to.
    """

    def __init__(
        self,
        restarter_state: str,
        restarter_stage: str | None = None,
        special_rank: int = 0,
        sink: Callable[[Announcement], None] = write_line,
    ) -> None:
        self.restarter_state = restarter_state
        self.restarter_stage = restarter_stage
        self.special_rank = special_rank
        self.sink = sink

    def __call__(self, state: FrozenState) -> FrozenState:
        """Announce it, on that one rank, and return `state`."""
        if state.initial_rank == self.special_rank:
            self.sink(Announcement(self.restarter_state, self.restarter_stage))
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """Announces a new iteration: that the wrapper begins, or that it has handled a fault."""

    def __init__(
        self, special_rank: int = 0, sink: Callable[[Announcement], None] = write_line
    ) -> None:
        super().__init__("initialize", None, special_rank, sink)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Announce initialize before the first iteration, handling completed before any other."""
        healed = state.iteration > 0
        self.restarter_state = "handling" if healed else "initialize"
        self.restarter_stage = "completed" if healed else None
        return super().__call__(state)


class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """Announces that a fault is being handled."""

    def __init__(
        self, special_rank: int = 0, sink: Callable[[Announcement], None] = write_line
    ) -> None:
        super().__init__("handling", "starting", special_rank, sink)


class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """Announces that the wrapped function has completed."""

    def __init__(
        self, special_rank: int = 0, sink: Callable[[Announcement], None] = write_line
    ) -> None:
        super().__init__("finalized", None, special_rank, sink)


class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """Announces that the wrapper has given up."""

    def __init__(
        self, special_rank: int = 0, sink: Callable[[Announcement], None] = write_line
    ) -> None:
        super().__init__("aborted", None, special_rank, sink)
