"""Limits of the numbers in a user's configuration, and the default of `--restart-timeout`.

A larger number is a typing error, or means "without end". Neither may end in an OverflowError hours
later: a wait in the kernel takes at most 2**31 ms, and a message holds 64-bit numbers.
"""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 1_000_000
"""Longest duration in seconds: eleven days. The sum of two fits into the kernel's wait."""
MOST_NODES: Final = 1_000_000
"""Most nodes of a job; node ranks are below this number."""
MOST_WORKERS: Final = 10_000
"""Most workers of a node. A host with more workers soon runs out of processes."""
MOST_FAILURES: Final = 1_000_000_000
"""Most failures that a job may survive."""
DEFAULT_RESTART_TIMEOUT_S: Final = 5.0


def restart_grace(restart_timeout: float | None, shutdown_timeout: float) -> float:
    """Return the seconds between SIGTERM and SIGKILL for a restart after a failure.

    Args:
        restart_timeout: the requested seconds; None means the default, 5 s, or `shutdown_timeout`
            if that is shorter.
        shutdown_timeout: the seconds that workers get at the end of the job.

    Raises:
        ValueError: `restart_timeout` is negative, or longer than `shutdown_timeout`.
    """
    if restart_timeout is None:
        return min(DEFAULT_RESTART_TIMEOUT_S, shutdown_timeout)
    if not 0 <= restart_timeout <= shutdown_timeout:
        raise ValueError(
            f"the restart timeout must be from 0 to the shutdown timeout ({shutdown_timeout} s),"
            f" got {restart_timeout}: give a shorter --restart-timeout, or a longer"
            " --shutdown-timeout"
        )
    return restart_timeout
