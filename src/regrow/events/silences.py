"""How long a worker that hung, or a host that was lost, had been silent until regrow knew it."""

from __future__ import annotations

import re
from collections.abc import Iterable

SILENT_HOST = "a silent host counts as lost"
LEASE = "workers of a host that is cut off are killed"
"""Names of these time limits among those that a job records."""
_NO_HEARTBEAT = re.compile(
    r"\bno heartbeat (?:arrived )?for (\d{1,9}(?:\.\d{1,9})?) s"
    r"|\btimer .{1,130} of (\d{1,9}(?:\.\d{1,9})?) s was exceeded"
)


def without_heartbeat_s(what: str) -> float | None:
    """Return the seconds of silence in the words for a lost host, or a worker that hung."""
    found = _NO_HEARTBEAT.search(what)
    return None if found is None else float(found[1] or found[2])


def of_words(what: str, at: float, steps: Iterable[float], bound: float | None = None) -> float:
    """Return the seconds before a lost host or a hang elsewhere was known, without a step here.

    Args:
        what: the words for the lost host, or for the worker that hung on another host.
        at: when that was known here.
        steps: the last step of each rank.
        bound: the time limit `SILENT_HOST`. After a takeover of the server it counts once more.
    """
    known = without_heartbeat_s(what) or 0.0
    longest = max(known, 2 * (bound or 0.0))
    return at - max((step for step in steps if at - longest <= step <= at), default=at - known)


def of_worker(limit_s: float | None, at: float, signs: Iterable[float | None]) -> float:
    """Return the seconds before a timer, a heartbeat or a lease expired without a sign of life.

    Args:
        limit_s: seconds after which it expires.
        at: when it expired.
        signs: times of the last steps, and of the signal that suspended the worker.
    """
    begun = at - (limit_s or 0.0)
    return at - max([begun, *(sign for sign in signs if sign is not None and sign <= at)])
