"""`Job`: what the parts of an agent share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from regrow._accounts import NO_STEP
from regrow.agent.api import RunResult, WorkerGroup, WorkerState
from regrow.agent.attempt.leftovers import Leftovers
from regrow.agent.records.recorder import Recorder
from regrow.agent.records.torch_events import TorchEvents

if TYPE_CHECKING:
    from regrow.agent.features import Feature
    from regrow.agent.inbox import Message
    from regrow.rendezvous import PushingRendezvousHandler


@dataclass(slots=True)
class Job:
    """One agent's job: its workers, its rendezvous, its records and its counters.

    The part in parentheses writes the field.
    """

    group: WorkerGroup
    handler: PushingRendezvousHandler
    """The rendezvous."""
    post: Callable[[Message], None]
    """Puts a message into the agent's inbox; safe from any thread."""
    shutdown_timeout: float = 30.0
    """Seconds between the stop signal and SIGKILL, if the job ends or nothing has failed."""
    restart_timeout: float = 5.0
    """The same, for a restart after a failure."""
    kill_at: float | None = None
    """Monotonic seconds at which the workers are killed at the latest; None: not known."""
    stopping: bool = False
    """Whether all ranks are to stop at the same step (`EarlyStop`)."""
    recorder: Recorder = field(init=False)
    torch_events: TorchEvents = field(init=False)
    leftovers: Leftovers = field(default_factory=Leftovers)
    """Keys to delete from the stores of the rounds."""
    features: list[Feature] = field(default_factory=list)
    """Called in this order."""
    remaining_restarts: int = field(init=False)
    """Failures that the job may still recover from.

    Written by `Loop`, `count_failures` and a subclass's own loop.
    """
    failures: int | None = None
    """Failures of the job so far, if all nodes count them together (`count_failures`)."""
    attempt: int = -1
    """Number of the latest start of workers; the first start is 0 (`Attempt`)."""
    highest_step: int = NO_STEP
    """Highest step that the workers of this node had reported before they began
    (`WorkerReports`)."""
    round: int = -1
    """Number of the latest round that this node formed (`Attempt`)."""
    numbered: bool = False
    """Whether `round` is the rendezvous's number, which all nodes share (`Attempt`)."""
    shared: bool = False
    """Whether all nodes count the failures of the job together (`Attempt`)."""
    over: int = 0
    """Number of the latest round that the rendezvous has reported as ended (`Peers`)."""
    caused_elsewhere: bool = False
    """Whether another node caused the end of the attempt (`Peers`)."""
    hopeless: bool = False
    """Whether a restart cannot help, because new workers would fail in the same way."""
    leaving: bool = False
    """Whether the agent is leaving the job; it then starts no workers."""
    own_loop: bool = False
    """Whether a subclass's own `_invoke_run` runs; it does not read the inbox."""
    raised_at: float = -math.inf
    """Monotonic seconds at which a signal raised in that loop."""
    result: RunResult = field(default_factory=lambda: RunResult(WorkerState.INIT))
    """Result of the latest check of the workers (`Attempt`)."""

    def __post_init__(self) -> None:
        self.recorder, self.torch_events = Recorder(self), TorchEvents(self)
        self.remaining_restarts = self.group.spec.max_restarts

    @property
    def restart_count(self) -> int:
        """Number of spent restarts: failures, and replaced worker processes."""
        if self.failures is not None:
            return self.failures
        return self.group.spec.max_restarts - self.remaining_restarts

    @property
    def next_attempt(self) -> int:
        """Number of the attempt in the latest round.

        All nodes that use the round's number agree on it, including nodes that joined late.
        """
        return self.round - 1 if self.numbered else self.attempt + 1

    @property
    def round_is_over(self) -> bool:
        """Whether the latest round of this node is known to have ended."""
        return self.numbered and self.over >= self.round

    @property
    def final_grace(self) -> float:
        """Seconds between the stop signal and SIGKILL, if the job ends now."""
        left = self.shutdown_timeout if self.kill_at is None else self.kill_at - monotonic()
        return max(0.0, min(left, self.shutdown_timeout))

    def count_failures(self, failures: int) -> None:
        """Store the number of failures that the job has had on all nodes together."""
        self.failures = failures
        self.remaining_restarts = max(0, self.group.spec.max_restarts - failures)

    def begin_attempt(self) -> None:
        """Count a start of workers, and clear the result of the last attempt."""
        self.attempt = self.next_attempt
        self.caused_elsewhere = False
        self.result = RunResult(WorkerState.INIT)
