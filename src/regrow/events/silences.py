"""How long a worker that hung, or a host that was lost, had been silent until regrow knew it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from regrow.events.story_types import Expiry

SILENT_HOST = "a silent host counts as lost"
"""Name of that time limit among those that a job records."""
_NO_HEARTBEAT = re.compile(r"\bno heartbeat arrived for (\d{1,9}(?:\.\d{1,9})?) s")


def without_heartbeat_s(what: str) -> float | None:
    """Return the seconds without a heartbeat in the words for a lost host; None for others."""
    found = _NO_HEARTBEAT.search(what)
    return None if found is None else float(found[1])


def of_host(what: str, at: float, steps: Iterable[float], bound: float | None) -> float:
    """Return the seconds before a host was known to be lost, in which no rank made a step.

    Args:
        what: the words for the lost host.
        at: when the loss was known.
        steps: the last step of each rank.
        bound: the time limit `SILENT_HOST`. After a takeover of the server it counts once more.
    """
    known = without_heartbeat_s(what) or 0.0
    longest = max(known, 2 * (bound or 0.0))
    return at - max((step for step in steps if at - longest <= step <= at), default=at - known)


def of_worker(timer: Expiry, at: float, signs: Iterable[float | None]) -> float:
    """Return the seconds before a timer or a heartbeat expired without a sign of life.

    Args:
        timer: the timer.
        at: when it expired.
        signs: times of the last step, and of the signal that suspended the worker.
    """
    begun = at - (timer.after_s or 0.0)
    return at - max([begun, *(sign for sign in signs if sign is not None and sign <= at)])
