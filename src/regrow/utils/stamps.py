"""Times for display: at the start of a line, and with the day and the time zone."""

from __future__ import annotations

import time

_start: float | None = None


def begin_time_stamps(start: float | None) -> None:
    """Set the start of the job, in seconds of the monotonic clock, for `stamped`; None: no job."""
    global _start
    _start = start


def stamped(text: str) -> str:
    """Return a line for stderr with the present time at its start, once a job has started."""
    if _start is None:
        return text
    since = time.monotonic() - _start
    return f"{time_stamp(since, time.time() - since)} {text}"


def time_stamp(since_s: float, started_at: float | None) -> str:
    """Return a time for display, such as `15:20:54 +0.3s`.

    The time of day is cut off after its seconds, as on a clock.

    Args:
        since_s: seconds since the start of the job.
        started_at: time of day of that start, in seconds since the epoch; None: unknown. The time
            is shown in the reader's time zone.
    """
    since = f"+{max(since_s, 0.0):.1f}s"
    if started_at is None:
        return since
    try:
        at = time.localtime(started_at + since_s)
        return f"{time.strftime('%H:%M:%S', at)} {since}"
    except (ValueError, OverflowError, OSError):  # a time outside the platform's calendar
        return since


def date_stamp(epoch_s: float | None) -> str:
    """Return a time with its day for display, such as `2026-11-29 15:20:54 UTC`.

    Args:
        epoch_s: seconds since the epoch; None: unknown, shown as `-`. The time is shown in the
            time zone of this process.
    """
    if epoch_s is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(epoch_s))
    except (ValueError, OverflowError, OSError):  # a time outside the platform's calendar
        return "-"
