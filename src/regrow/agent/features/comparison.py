"""Stack positions of workers, compared between nodes: their form in reports and stores.

Places travel in reports (`shared_failure`) and through stores, so their size is bounded. The
reading agent may run another release, so it skips what it cannot read. All functions are pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from regrow.agent.records import shared_failure
from regrow.timer.stacks.report import readable

#: Maximum size in bytes of one node's places as JSON: 16 places with the longest names.
MAX_BYTES = 16 << 10
_PLACE = 400  # characters
_RANKS = 1 << 31
_EVIDENCE = "places"  # name of the report's field
KEY = "regrow/places/{}"
"""Key of all places in the round's store, with the number of the attempt that the hang ended."""


class WorkerPlaces(NamedTuple):
    """The places of ranks in their programs."""

    attempt: int
    """The attempt that the hang ended; all nodes use the same number."""
    places: Mapping[int, str]
    """Places by global rank, in the form of `timer.stacks.report.where`."""


def as_evidence(found: WorkerPlaces) -> dict[str, Any]:
    """Return the field with the places of workers for a report of a failure."""
    return {_EVIDENCE: encode(found)}


def from_report(report: str) -> WorkerPlaces | None:
    """Return the places of workers in a report of a failure; None if it has none."""
    return decode(shared_failure.evidence(report, _EVIDENCE))


def encode(found: WorkerPlaces) -> dict[str, Any]:
    """Encode as plain values: each place with its ranks; drop places beyond `MAX_BYTES`."""
    groups: dict[str, list[int]] = {}
    for rank, place in sorted(found.places.items()):
        groups.setdefault(place[:_PLACE], []).append(rank)
    shown = list(groups.items())
    while True:
        fields = {"attempt": found.attempt, "places": shown}
        if not shown or len(json.dumps(fields)) <= MAX_BYTES:
            return fields
        shown = shown[: len(shown) // 2]


def decode(fields: object) -> WorkerPlaces | None:
    """Decode the value of `encode`; return None for any other value."""
    if not isinstance(fields, dict):
        return None
    attempt, groups = fields.get("attempt"), fields.get("places")
    if type(attempt) is not int or not isinstance(groups, list):
        return None
    places: dict[int, str] = {}
    for group in groups:
        match group:
            case [str(place), [*ranks]]:
                shown = readable(place, _PLACE)
                known = (rank for rank in ranks if type(rank) is int and 0 <= rank < _RANKS)
                places |= dict.fromkeys(known, shown)
    return WorkerPlaces(attempt, places) if places else None


def gather(attempt: int, lines: bytes) -> dict[int, str]:
    """Return the places of ranks from the reports of several nodes.

    Args:
        attempt: the attempt; other attempts' reports are skipped.
        lines: the reports, as lines of JSON.
    """
    places: dict[int, str] = {}
    for line in lines.splitlines():
        with suppress(ValueError, RecursionError):
            found = decode(json.loads(line))
            if found is not None and found.attempt == attempt:
                places |= found.places
    return places
