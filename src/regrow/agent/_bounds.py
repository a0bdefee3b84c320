"""What an agent promises its user, in seconds; printed at its start, and kept in its events."""

from __future__ import annotations

ACTED_ON_S = 0.1


def bounds(
    shutdown_timeout: float, reaping: float | None = None, beating: float | None = None
) -> dict[str, float]:
    """What the agent promises, in seconds, on a host that is not starved of processor time.

    Args:
        shutdown_timeout: the grace that stopped workers get.
        reaping: from the deadline of a timer to the end of its worker; None without timers.
        beating: from the last beat of a worker to the end of all; None without heartbeats.
    """
    promised = {
        "a dead worker is acted on": ACTED_ON_S,
        "workers that are stopped are gone": shutdown_timeout + ACTED_ON_S,
    }
    more = {"a hung worker is killed": reaping, "a missing heartbeat ends all workers": beating}
    return promised | {text: seconds for text, seconds in more.items() if seconds is not None}
