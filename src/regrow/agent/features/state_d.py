"""Detects workers stuck in uninterruptible sleep (Linux state D), which SIGKILL does not end.

Such a worker holds a kernel resource (a GPU, a network card, a dead file server). A new worker on
the same host would get stuck on it as well. The kernel has no event for this state. So the check is
off by default, and reads /proc at each turn of the agent's loop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping

from regrow.workers import ProcessFailure, process_states

TIMEOUT_ENV = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class UninterruptibleSleepers:
    """Stores since when each worker has been in state D.

    Args:
        timeout: seconds in state D after which a worker counts as stuck; 0 or less is off.
        states: returns the states of processes by pid; None reads /proc.
    """

    def __init__(
        self,
        timeout: float,
        states: Callable[[Collection[int]], Mapping[int, str]] | None = None,
    ) -> None:
        self.timeout = timeout
        self._states = states or process_states
        self._since: dict[int, float] = {}

    def stuck(self, pids: Collection[int], now: float) -> set[int]:
        """Return the `pids` that have been in state D at each check for `timeout` seconds."""
        if self.timeout <= 0:
            return set()
        sleeping = {pid for pid, state in self._states(pids).items() if state == "D"}
        self._since = {pid: self._since.get(pid, now) for pid in sleeping}
        return {pid for pid, since in self._since.items() if now - since >= self.timeout}

    def failure(self, local_rank: int, pid: int) -> ProcessFailure:
        """Return the failure of a stuck worker."""
        failure = ProcessFailure(local_rank, pid, -signal.SIGKILL, "<N/A>")
        failure.message = (
            f"in uninterruptible sleep (state D) for {self.timeout} s or more:"
            " it holds a device that no new worker could use, so the job does not restart"
        )
        return failure


def timeout_from_environment(environ: Mapping[str, str]) -> float:
    """Return the time-out in `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`.

    It is 0 (off) if the variable is missing or not a number.
    """
    text = environ.get(TIMEOUT_ENV)
    if text is None:
        return 0.0
    try:
        return max(float(text), 0.0)
    except ValueError:
        import warnings

        warnings.warn(
            f"{TIMEOUT_ENV}={text!r} is not a number of seconds: the check for state D is off",
            stacklevel=2,
        )
        return 0.0
