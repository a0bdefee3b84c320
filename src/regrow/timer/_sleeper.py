"""A sleep that ends at a deadline, or as soon as there is something to do.

An epoll waits for whole milliseconds and rounds up, so what is left of the last one is slept
without it: what comes within it waits that long, and the deadline is met within the 50 microseconds
that the kernel takes for a timer's precision.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress

LONGEST = 86400.0
"""Seconds in one wait, as an epoll's timeout is an int of milliseconds."""


class Sleeper:
    """Sleeps for one thread.

    Args:
        monotonic: the clock of the deadlines, in seconds.
    """

    __slots__ = ("_epoll", "_monotonic", "_wake")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._wake = -1  # as long as there is nothing to close
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add(self._wake)

    def add(self, fd: int) -> None:
        """From now on a sleep ends when `fd` is readable."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """No more. Closing it would not do, if a forked child has a copy."""
        self._epoll.unregister(fd)

    def sleep(self, until: float) -> list[int]:
        """Sleep until a time, at once if it has passed; infinity: for ever.

        Returns:
            the file descriptors that are readable.
        """
        while True:
            left = until - self._monotonic()
            milliseconds = int(min(left, LONGEST) * 1000)
            if milliseconds <= 0:
                time.sleep(max(0.0, left))
            # Half a millisecond less, lest it round up to one more.
            ready = self._epoll.poll(max(0.0, (milliseconds - 0.5) / 1000))
            if ready or left < 0.001:
                return self._woken([fd for fd, _ in ready])

    def _woken(self, ready: list[int]) -> list[int]:
        if self._wake in ready:
            ready.remove(self._wake)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return ready

    def wake(self) -> None:
        """End the sleep, or the next one, from any thread."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Give back the descriptors."""
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            self._epoll.close()
            os.close(wake)

    def __del__(self) -> None:
        self.close()
