"""Where the workers of one node stood when one of them hung, for the other nodes of the job.

A host can ask its own workers only, and often all of them agree: they wait in a collective for a
rank of another host. So the report of a hang says where each worker stood that was asked, and who
learns of it asks its own before they are stopped, and compares all of them.

It travels in reports (`_report`) and through stores, so it is bounded. Whoever reads it may be of
another release: what cannot be read is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from regrow.timer._frames import printable

#: Most bytes of it as JSON: 16 places of the longest names.
MAX_BYTES = 16 << 10
_PLACE = 400  # characters
_RANKS = 1 << 31


class Standing(NamedTuple):
    """Where ranks stood."""

    attempt: int
    """The attempt that the hang ended; the same number on all nodes."""
    places: Mapping[int, str]
    """By global rank, as `timer._frames.where` tells it."""


def encode(standing: Standing) -> dict[str, Any]:
    """As plain values: each place with its ranks. What is beyond `MAX_BYTES` is left out."""
    groups: dict[str, list[int]] = {}
    for rank, place in sorted(standing.places.items()):
        groups.setdefault(place[:_PLACE], []).append(rank)
    told = list(groups.items())
    while True:
        fields = {"attempt": standing.attempt, "places": told}
        if not told or len(json.dumps(fields)) <= MAX_BYTES:
            return fields
        told = told[: len(told) // 2]


def decode(fields: object) -> Standing | None:
    """What `encode` made; None where it is nothing of the kind."""
    if not isinstance(fields, dict):
        return None
    attempt, told = fields.get("attempt"), fields.get("places")
    if type(attempt) is not int or not isinstance(told, list):
        return None
    places: dict[int, str] = {}
    for group in told:
        match group:
            case [str(place), [*ranks]]:
                shown = printable(place, _PLACE)
                known = (rank for rank in ranks if type(rank) is int and 0 <= rank < _RANKS)
                places |= dict.fromkeys(known, shown)
    return Standing(attempt, places) if places else None


def gather(attempt: int, told: bytes) -> dict[int, str]:
    """Where ranks stood, by what several nodes have told of one attempt.

    Args:
        attempt: what is told of any other is passed over.
        told: a line of JSON of each.
    """
    places: dict[int, str] = {}
    for line in told.splitlines():
        with suppress(ValueError, RecursionError):
            standing = decode(json.loads(line))
            if standing is not None and standing.attempt == attempt:
                places |= standing.places
    return places
