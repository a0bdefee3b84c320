"""Settings of a heartbeat that a worker and its agent share, and the rank of this worker.

Both sides import this file, so it imports nothing from regrow.
"""

from __future__ import annotations

import os
from typing import Final

HEARTBEAT_ENV: Final = "REGROW_HEARTBEAT"
"""Seconds between two beats; a worker with this variable starts its heartbeat automatically."""
TIMER_FILE: Final = "TORCHELASTIC_TIMER_FILE"
"""The pipe of the agent's timer server."""
SCOPE: Final = "regrow.heartbeat"
"""The timer by which an agent detects a worker without beats."""
STALLED: Final = "regrow.heartbeat.stalled: "
"""Scope prefix of a timer that only reports a stall to the agent."""

NAMES: Final = (("RANK", "WORLD_SIZE"), ("DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS"))
"""Variables with the rank and the number of workers, from torch's launchers and from DTensor."""
GROUP: Final = ("TORCHELASTIC_RUN_ID", "REGROW_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that differ between groups of workers."""

FAILURES: Final = 3
"""Number of consecutive failed exchanges that is fatal; TensorFlow's DTensor uses the same number.
"""

STALLED_AFTER: Final = 30
"""Beats without a new step before a stall is reported: longer than most checkpoints take."""

KILL_S: Final = 2.0
"""Seconds after a failure at which a process that has not ended is killed."""


def timeout_of(period: float) -> float:
    """Return the seconds that an exchange may take, by DTensor's rule.

    Args:
        period: seconds between two beats.
    """
    return max(period - 10.0, 2.0)


def bound(period: float, timeout: float | None = None, failures: int = FAILURES) -> float:
    """Return the seconds within which all workers detect a missing worker.

    Args:
        period: seconds between two beats.
        timeout: seconds that an exchange may take; None: see `timeout_of`.
        failures: number of consecutive failed exchanges that is fatal.
    """
    return failures * (period + (timeout_of(period) if timeout is None else timeout))


def lead(bound: float, timeout: float) -> float:
    """Return the seconds by which an agent acts before the workers detect a hung worker.

    The agent reads the stacks, kills the worker, and notifies the agents of the other hosts. So
    these agents see a failed worker instead of a silent one. The time is a tenth of the bound, at
    most a second, and at most half a time-out. The last limit is for heartbeats in which one
    failure is fatal: there, the next sign of life comes only one time-out before the bound.

    Args:
        bound: seconds within which all workers detect a missing worker.
        timeout: seconds that an exchange may take.
    """
    return min(1.0, bound / 10, timeout / 2)


def world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank of this worker and the number of workers.

    Args:
        rank: None: from the environment.
        world_size: None: from the environment.

    Raises:
        ValueError: the values are not known, or the rank is out of range.
    """
    if rank is None or world_size is None:
        names = next((pair for pair in NAMES if pair[0] in os.environ), None)
        if names is None:
            wanted = " or ".join(" and ".join(pair) for pair in NAMES)
            raise ValueError(
                f"the rank of this worker is not known: set {wanted} (launchers do), or pass rank "
                f"and world_size"
            )
        rank = _number(names[0]) if rank is None else rank
        world_size = _number(names[1]) if world_size is None else world_size
    check_rank(rank, world_size)
    return rank, world_size


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank outside of the world.

    Raises:
        ValueError: the rank is negative, or not below `world_size`.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not in a world of {world_size}: ranks are 0 to world_size - 1"
        )


def group_name() -> str:
    """Return the name of the heartbeat group of this worker."""
    return "/".join(os.environ.get(name, "") for name in GROUP)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} in the environment is not a number: set it to a whole number"
        ) from None
