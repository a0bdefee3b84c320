"""Plug-ins that report the state of the wrapper to an outer launcher.

A launcher that restarts jobs must not restart a job that is recovering by itself. So one rank
announces the state of the inner restarter: initialize, then handling (starting, completed), and
at the end finalized or aborted. The plug-ins are given to the wrapper beside its other plug-ins:

    Wrapper(
        initialize=Compose(RetryController(), NestedRestarterHandlingCompleted()),
        abort=Compose(AbortTorchDistributed(), NestedRestarterHandlingStarting()),
        completion=NestedRestarterFinalized(),
        terminate=NestedRestarterAborted(),
    )

The sink receives each announcement. The default sink writes a line to standard output, where
launchers of nvidia-resiliency-ext expect it. Under `regrow run` these plug-ins are not needed,
because the wrapper reports to the agent directly.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import ClassVar, NamedTuple

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
    """Current state of the inner restarter."""

    state: str
    """"initialize", "handling", "finalized" or "aborted"."""
    stage: str | None = None
    """"starting" or "completed"; set only if `state` is "handling"."""

    def __str__(self) -> str:
        stage = "" if self.stage is None else f" stage={self.stage}"
        return f"[NestedRestarter] name=[InProcess] state={self.state}{stage}"


def write_line(announcement: Announcement) -> None:
    """Write an announcement with the time to standard output, at every log level."""
    form = logging.Formatter("[%(asctime)s] [ALWAYS] [%(name)s] %(message)s")
    record = {"name": "InprocessRestarter.Restarter", "msg": str(announcement)}
    sys.stdout.write(form.format(logging.makeLogRecord(record)) + "\n")
    sys.stdout.flush()


class NestedRestarterCallback:
    """Announce one state; base class of the plug-ins below.

    Args:
        restarter_state: the state: initialize, handling, finalized or aborted.
        restarter_stage: the stage of handling: starting or completed.
        special_rank: the initial rank that announces; the other ranks announce nothing.
        sink: function that receives each announcement.
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
        """Announce the state if this is the special rank, and return `state`."""
        if state.initial_rank == self.special_rank:
            self.sink(Announcement(self.restarter_state, self.restarter_stage))
        return state


class _FixedState(NestedRestarterCallback):
    """Base class of plug-ins that announce the state in their attribute `announced`."""

    announced: ClassVar[Announcement]

    def __init__(
        self, special_rank: int = 0, sink: Callable[[Announcement], None] = write_line
    ) -> None:
        super().__init__(*self.announced, special_rank, sink)


class NestedRestarterHandlingCompleted(_FixedState, Initialize):
    """Announce a new iteration: the wrapper starts, or has handled a fault."""

    announced = Announcement("initialize")

    def __call__(self, state: FrozenState) -> FrozenState:
        """Announce initialize before the first iteration, handling completed before the others."""
        announced = ("handling", "completed") if state.iteration else self.announced
        self.restarter_state, self.restarter_stage = announced
        return super().__call__(state)


class NestedRestarterHandlingStarting(_FixedState, Abort):
    """Announce that the wrapper starts to handle a fault."""

    announced = Announcement("handling", "starting")


class NestedRestarterFinalized(_FixedState, Completion):
    """Announce that the wrapped function has completed."""

    announced = Announcement("finalized")


class NestedRestarterAborted(_FixedState, Terminate):
    """Announce that the wrapper has aborted the call."""

    announced = Announcement("aborted")
