"""Events of one or several hosts on one clock, which is 0 at the start of the job.

Each host measures with a monotonic clock of its own. Before a story is built, the times of all
hosts are moved to the clock of one of them: the one with the most events that others recorded as
well. The difference of two clocks is the median over events that both hosts recorded at nearly the
same time: a round that completed or ended reaches all nodes within the time of a message. Hosts
without such an event in common are compared by the time of day, so the order is then as good as the
hosts' time synchronization.

A failure that its own host and other hosts recorded counts once: the record of its own host is
kept, because it has the exact times.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from regrow.events.evidence import Record, integer, real, text

_SHARED = frozenset({"regrow.rendezvous.completed", "regrow.round.ended", "regrow.round.judged"})
"""Events that all nodes of a round record at nearly the same time."""

_BY_RANK = frozenset({"last_steps", "accounts"})
"""Fields that have an object with times for each rank."""

_STARTED = "regrow.job.started"

_Anchor = tuple[str, int]


def on_one_clock(events: Iterable[Record]) -> tuple[list[Record], float | None]:
    """Move the events of a job to one clock.

    Returns:
        The events, each failure once. All monotonic times are seconds since the start of the job.
        Then the time of day of the start, in seconds since the epoch.
    """
    known = _without_reports(list(events))
    by_host: dict[str, list[Record]] = defaultdict(list)
    for event in known:
        by_host[_writer(event)].append(event)
    if not by_host:
        return known, None
    anchors = {host: _anchors(found) for host, found in by_host.items()}
    seen = Counter(anchor for found in anchors.values() for anchor in found)
    # The host with the most common events, so that no delay rests on a single one by chance.
    reference = min(
        by_host,
        key=lambda host: (
            -sum(seen[anchor] > 1 for anchor in anchors[host]),
            _start(by_host[host]),
            host,
        ),
    )
    delays = {host: _delay(reference, host, anchors, by_host) for host in by_host}
    first = [e for e in known if e.get("name") == _STARTED] or known
    starts = [
        (at + delays[_writer(event)], math.inf if time is None else time)
        for event in first
        if (at := real(event, "monotonic")) is not None
        for time in (real(event, "time"),)
    ]
    zero, day = min(starts, default=(0.0, math.inf))
    moved = [_moved(event, delays[_writer(event)] - zero) for event in known]
    return moved, day if math.isfinite(day) else None


def _writer(event: Record) -> str:
    """Return the host of the agent that recorded an event."""
    return text(event, "told_host") or text(event, "host") or ""


def _start(events: list[Record]) -> float:
    """Return the time of day at which a host's agent started; infinity if unknown."""
    times = (real(event, "time") for event in events if event.get("name") == _STARTED)
    return min((time for time in times if time is not None), default=math.inf)


def _delay(
    reference: str,
    other: str,
    anchors: Mapping[str, Mapping[_Anchor, float]],
    by_host: Mapping[str, list[Record]],
) -> float:
    """Return the seconds to add to the other host's clock to get that of the reference."""
    if other == reference:
        return 0.0
    first, second = anchors[reference], anchors[other]
    common = [first[anchor] - second[anchor] for anchor in first.keys() & second.keys()]
    if common:
        return median(common)
    days = [
        [time - at for e in events if (time := real(e, "time")) and (at := real(e, "monotonic"))]
        for events in (by_host[other], by_host[reference])
    ]
    return median(days[0]) - median(days[1]) if all(days) else 0.0


def _anchors(events: list[Record]) -> dict[_Anchor, float]:
    """Return the first time of each event that other hosts record as well."""
    found: dict[_Anchor, float] = {}
    for event in events:
        name, at = text(event, "name") or "", real(event, "monotonic")
        number = integer(event, "attempt")
        if name in _SHARED and at is not None and number is not None:
            found[name, number] = min(at, found.get((name, number), math.inf))
    return found


def _moved(event: Record, delay: float) -> Record:
    if not delay:
        return event
    moved: dict[str, Any] = {}
    for key, value in event.items():
        if key in _BY_RANK and isinstance(value, dict):
            moved[key] = {
                rank: _moved(each, delay) if isinstance(each, dict) else each
                for rank, each in value.items()
            }
        elif key == "account" and isinstance(value, dict):
            moved[key] = _moved(value, delay)
        elif str(key).endswith("monotonic") and (at := real(event, key)) is not None:
            moved[key] = at + delay
        else:
            moved[key] = value
    return moved


def _without_reports(events: list[Record]) -> list[Record]:
    """Return the events without other hosts' reports of failures that are recorded themselves."""
    failed = [e for e in events if e.get("name") == "regrow.worker.failed"]
    recorded = {_failure(event) for event in failed if text(event, "told_host") is None}
    reported = {_failure(event) for event in failed if text(event, "told_host") is not None}
    both = recorded & reported
    kept: list[Record] = []
    for event in events:
        if event.get("name") != "regrow.worker.failed" or _failure(event) not in both:
            kept.append(event)
        elif text(event, "told_host") is None:
            kept.append({**event, "root_cause": True})
    return kept


def _failure(event: Record) -> tuple[str | None, int | None, int | None, int | None]:
    keys = ("attempt", "rank", "pid")
    attempt, rank, pid = (integer(event, key) for key in keys)
    return text(event, "host"), attempt, rank, pid
