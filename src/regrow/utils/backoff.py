"""Growing pauses between the attempts of a retry loop, up to a limit."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from threading import Event
    from typing import Final


class Backoff:
    """Growing pauses; neither sleeps nor reads a clock.

        backoff = Backoff(0.05, 5.0)
        while not connect():
            stopping.wait(backoff.next(deadline - monotonic()))

    Args:
        first: the first pause, in seconds.
        most: the longest pause, in seconds.
        factor: the ratio of each pause to the pause before.
        jitter: a share of the pause, from 0 to 1. A pause is drawn evenly between `(1 - jitter)`
            times its length and its full length. So processes that failed together do not retry
            together.
        source: random source of the jitter.
    """

    __slots__ = ("_factor", "_first", "_jitter", "_most", "_source", "failures")

    def __init__(
        self,
        first: float,
        most: float,
        factor: float = 2.0,
        jitter: float = 0.0,
        source: Random | None = None,
    ) -> None:
        self._first: Final = first
        self._most: Final = most
        self._factor: Final = factor
        self._jitter: Final = jitter
        self._source = source
        self.failures = 0
        """Number of pauses that `next` returned since the start or the last `reset`."""

    def next(self, left: float = math.inf) -> float:
        """Return the next pause in seconds, at most `left` seconds, at least 0."""
        self.failures += 1
        return max(0.0, min(self.pause(self.failures), left))

    def pause(self, failures: int) -> float:
        """Return the pause in seconds after this many consecutive failures; 0 after none."""
        if failures <= 0:
            return 0.0
        try:
            pause = min(self._first * self._factor ** (failures - 1), self._most)
        except OverflowError:
            pause = self._most
        if not self._jitter:
            return pause
        if self._source is None:
            from random import Random  # takes 5 ms, only for a caller with jitter

            self._source = Random()
        return pause * (1 - self._jitter * self._source.random())

    def reset(self) -> None:
        """Restart with the first pause, after a success."""
        self.failures = 0


def poll_until(
    ready: Callable[[], bool], backoff: Backoff, timeout: float, interrupted: Event
) -> bool:
    """Poll a condition that wakes no process, until it holds.

    Args:
        ready: returns whether the condition holds; its exceptions pass through.
        backoff: the pauses between two calls of `ready`.
        timeout: seconds.
        interrupted: ends the wait when it is set.

    Returns:
        Whether the condition holds; False after the timeout or an interruption.
    """
    deadline = time.monotonic() + timeout
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0 or interrupted.is_set():
            return False
        interrupted.wait(backoff.next(left))
    return True
