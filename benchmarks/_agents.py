"""Agents on this host that a benchmark starts, waits for and kills."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def launched(
    command: Sequence[str], output: Path, limit_s: float, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a launcher in the block; stop it at the end, and wait for that.

    Args:
        command: the command line.
        output: file for its output.
        limit_s: seconds within which it ends.
        env: environment; None for that of this process.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(limit_s)


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
