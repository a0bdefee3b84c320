"""What the beating worker tells the agent on its host, by the countdown timers that this serves.

A worker that hangs cannot say so, but the agent can see that it says nothing any more. So each turn
of the thread that beats, whether its exchange succeeds or not, arms a timer anew: what the agent
watches is this process, and not whether the others are there. When the timer runs out, the agent
asks for the stacks, writes the error file and kills, shortly before the others notice that this
worker is missing (`_terms.lead`), so that the job's first failure is the one that was its cause.

A training that stands still while its process beats is told of by a timer that is due at once and
asks for no signal: the agent then looks where the worker stands, and reports it.

Without an agent that serves timers, nothing happens here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regrow.heartbeat._terms import SCOPE, STALLED, lead

if TYPE_CHECKING:
    from regrow.timer import FileTimerClient

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class AgentTimer:
    """The timer of this process's heartbeat, in its agent's keeping.

    Args:
        bound: seconds within which all others know of a worker that is missing.
        timeout: seconds that an exchange may take.
    """

    __slots__ = ("_client", "_lead")

    def __init__(self, bound: float, timeout: float) -> None:
        self._lead = lead(bound, timeout)
        self._client = _client()

    def alive(self, seconds: float) -> None:
        """Put off the time at which the agent takes this process for hung.

        Args:
            seconds: after which all others know, should this be its last sign of life.
        """
        if self._client is not None:
            self._client.acquire_in(SCOPE, max(seconds - self._lead, 0.0))

    def release(self) -> None:
        """Nobody need beat here any more."""
        if self._client is not None:
            self._client.release(SCOPE)


def tell_stall(what: str) -> None:
    """Tell the agent that the training of this worker stands still; it goes on.

    Args:
        what: who, where and for how long, in one line.
    """
    client = _client(signal=0)
    if client is not None:
        client.acquire_in(STALLED + what.removeprefix("heartbeat: "), 0.0)


def _client(**how: int) -> FileTimerClient | None:
    path = os.environ.get(TIMER_FILE)
    if not path:
        return None
    from regrow.timer import FileTimerClient

    return FileTimerClient(path, **how)
