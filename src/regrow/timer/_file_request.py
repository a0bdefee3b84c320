"""A request that travels through a file timer's pipe, and the line that it is there.

A line is one JSON object, with the names that torch's client and server use, so that either may be
at the other end, and two of our own. Torch says when a timer expires in seconds since the epoch,
and that clock may be set between the two ends; so the deadline on the monotonic clock, which is the
same for all processes of a host, goes with it.

What a pipe guarantees is that a write of up to PIPE_BUF bytes (4096) arrives in one piece. A longer
one may have anything in the middle of it, so no line is longer.
"""

from __future__ import annotations

import json
import select

from regrow.timer._api import TimerRequest

__all__ = ["MAX_LINE", "FileTimerRequest"]

VERSION = 1
"""Of the line, as torch counts."""
MAX_LINE = select.PIPE_BUF
"""Bytes of a line, the newlines around it included."""


class FileTimerRequest(TimerRequest):
    """That a timer of a process be armed, or released.

    Args:
        worker_pid: the process.
        scope_id: what the timer is about; a process has one timer in each scope.
        expiration_time: when it expires, in seconds since the epoch; negative: release it.
        signal: what the process is sent when it expires; zero or less: nothing, the expiration is
            reported only.
        monotonic: when it expires, in seconds on CLOCK_MONOTONIC. Default: the server finds out on
            arrival.
        armed: when it was asked for, in seconds on CLOCK_MONOTONIC. Default: on arrival.
    """

    __slots__ = ("armed", "monotonic", "signal", "version")
    __hash__ = None  # it can be changed

    def __init__(
        self,
        worker_pid: int,
        scope_id: str,
        expiration_time: float,
        signal: int = 0,
        *,
        monotonic: float | None = None,
        armed: float | None = None,
    ) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = VERSION
        self.signal = signal
        self.monotonic = monotonic
        self.armed = armed

    @property
    def worker_pid(self) -> int:
        """The process: `worker_id` by the name that it has here."""
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        """Whether the same is asked for; when, and on which clock, makes no difference."""
        return (
            isinstance(other, FileTimerRequest)
            and super().__eq__(other)
            and (self.version, self.signal) == (other.version, other.signal)
        )

    def __repr__(self) -> str:
        return (
            f"FileTimerRequest({self.worker_pid!r}, {self.scope_id!r}, {self.expiration_time!r},"
            f" {self.signal!r})"
        )

    def to_json(self) -> str:
        """The line, without a newline."""
        content = {
            "version": self.version,
            "pid": self.worker_pid,
            "scope_id": self.scope_id,
            "expiration_time": self.expiration_time,
            "signal": self.signal,
        }
        if self.monotonic is not None:
            content["monotonic"] = self.monotonic
        if self.armed is not None:
            content["armed"] = self.armed
        return json.dumps(content)
