"""Agents on this host that a benchmark starts, waits for and kills."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress


def kill_at_once(pids: set[int]) -> int:
    """Stop all processes, then kill them; SIGSTOP comes first, so none reacts to another's end.

    Returns:
        When SIGKILL was sent, in nanoseconds of the monotonic clock.
    """
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        at_ns = time.monotonic_ns()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
    return at_ns


def listens(port: int) -> bool:
    """Return whether a process listens at a port of the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


def wait(done: Callable[[], bool], limit_s: float) -> bool:
    """Poll a condition; return False after a time limit."""
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
