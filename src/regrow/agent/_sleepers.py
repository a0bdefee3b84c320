"""Workers stuck in uninterruptible sleep (Linux state D), which not even SIGKILL ends.

Such a worker holds a kernel resource (a GPU, a network card, a dead file server) that a fresh
worker on the same host would run into as well. The kernel has no event for it, so the watch is off
unless asked for, and looks at /proc when the agent's loop turns.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping

from regrow.workers import ProcessFailure, process_states

TIMEOUT_ENV = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class UninterruptibleSleepers:
    """Remembers since when each worker has been seen in state D.

    Args:
        timeout: seconds after which a sleeper counts as stuck; 0 or less is off.
        states: how to read the states of processes, by pid.
    """

    def __init__(
        self,
        timeout: float,
        states: Callable[[Collection[int]], Mapping[int, str]] = process_states,
    ) -> None:
        self.timeout = timeout
        self._states = states
        self._since: dict[int, float] = {}

    def stuck(self, pids: Collection[int], now: float) -> set[int]:
        """Those of `pids` seen in state D, and nothing else, for `timeout` seconds up to `now`."""
        if self.timeout <= 0:
            return set()
        sleeping = {pid for pid, state in self._states(pids).items() if state == "D"}
        self._since = {pid: self._since.get(pid, now) for pid in sleeping}
        return {pid for pid, since in self._since.items() if now - since >= self.timeout}

    def failure(self, local_rank: int, pid: int) -> ProcessFailure:
        """What is reported of a worker that is stuck."""
        failure = ProcessFailure(local_rank, pid, -signal.SIGKILL, "<N/A>")
        failure.message = (
            f"in uninterruptible sleep (state D) for {self.timeout} s or more:"
            " it holds a device that no new worker could use, so there is no restart here"
        )
        return failure


def timeout_from_environment(environ: Mapping[str, str]) -> float:
    """The time-out in `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`; 0 (off) when absent or bad."""
    text = environ.get(TIMEOUT_ENV)
    if text is None:
        return 0.0
    try:
        return max(float(text), 0.0)
    except ValueError:
        import warnings

        warnings.warn(f"{TIMEOUT_ENV}={text!r} is not a number of seconds; off", stacklevel=2)
        return 0.0
