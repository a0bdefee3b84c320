"""Who is reaped, for what, and by which signal: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from regrow.timer._file_request import FileTimerRequest

SHOWN = 16
"""Expired timers of one worker that are told of one by one."""


class Reaping(NamedTuple):
    """A worker that is about to be reaped."""

    pid: int
    expired: list[FileTimerRequest]
    """Its timers that have expired, the earliest first; `monotonic` and `armed` are set."""
    signal: int
    """What it will be sent: what the earliest of them asks for that asks for any. Zero: nothing,
    none of them does; they are only reported."""
    deadline: float
    """When the earliest of the timers expired, in seconds on the monotonic clock."""
    noticed: float
    """When that was noticed."""
    pidfd: int
    """Names the process for ever; -1: the descriptors are used up, or it has ended."""

    @property
    def shown(self) -> list[FileTimerRequest]:
        """Those of the expired timers that are told of."""
        return self.expired[:SHOWN]

    @property
    def scopes(self) -> list[str]:
        """What these are about."""
        return [request.scope_id for request in self.shown]

    @property
    def cause(self) -> FileTimerRequest:
        """The request whose signal is sent; the earliest, if there is none."""
        asking = (request for request in self.expired if request.signal > 0)
        return next(asking, self.expired[0])


def reapings(
    due: Mapping[int, list[FileTimerRequest]], noticed: float, pidfd: Callable[[int], int]
) -> list[Reaping]:
    """What is to be done about expired timers.

    Args:
        due: by pid, the earliest first.
        noticed: the time, in seconds on the monotonic clock.
        pidfd: that of a process.
    """
    found = []
    for pid, expired in due.items():
        signal = next((request.signal for request in expired if request.signal > 0), 0)
        deadline = expired[0].monotonic
        if deadline is None:
            deadline = noticed
        found.append(Reaping(pid, expired, signal, deadline, noticed, pidfd(pid)))
    return found
