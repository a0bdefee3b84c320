"""What the heartbeat of a worker and the agent that started it agree on: names, figures, the bound.

Both sides import this file, so it imports nothing.
"""

from __future__ import annotations

from typing import Final

HEARTBEAT_ENV: Final = "REGROW_HEARTBEAT"
"""Seconds between two beats; where it is set, a worker beats by itself."""
SCOPE: Final = "regrow.heartbeat"
"""The timer by which an agent notices that a worker does not beat at all."""
STALLED: Final = "regrow.heartbeat.stalled: "
"""How a timer's scope begins that only tells the agent of a training that stands still."""

FAILURES: Final = 3
"""The failed exchange in a row that is fatal; TensorFlow's DTensor has the same."""

STALLED_AFTER: Final = 30
"""Beats for which a step may stay the same until that is reported: longer than most checkpoints."""

KILL_S: Final = 2.0
"""Seconds after a fatal verdict at which a process is killed that could not end by itself."""


def timeout_of(period: float) -> float:
    """Return the seconds that an exchange may take, as DTensor has it.

    Args:
        period: seconds between two beats.
    """
    return max(period - 10.0, 2.0)


def bound(period: float, timeout: float | None = None, failures: int = FAILURES) -> float:
    """Return the seconds within which all know that a worker is missing.

    Args:
        period: seconds between two beats.
        timeout: seconds that an exchange may take; None: see `timeout_of`.
        failures: the failed exchange in a row that is fatal.
    """
    return failures * (period + (timeout_of(period) if timeout is None else timeout))


def lead(bound: float, timeout: float) -> float:
    """Return the seconds by which an agent acts before the others notice a worker that is hung.

    It has to look at the stacks, kill, and tell the agents of the other hosts: what they then see
    is a worker that failed, and not the silence that it leaves. A tenth of the bound, a second at
    most; and no more than half a time-out, as where one failure is fatal the next sign of life is
    only a time-out ahead of the bound.

    Args:
        bound: seconds within which all know.
        timeout: seconds that an exchange may take.
    """
    return min(1.0, bound / 10, timeout / 2)
