"""Fields of an event read from a log: there with the type that they should have, or unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Record", "integer", "real", "since", "text"]

Record: TypeAlias = Mapping[str, Any]
"""An event as the log has it: one JSON object."""


def since(later: float | None, earlier: float | None) -> float | None:
    """Seconds from `earlier` to `later`; None where that is unknown or makes no sense."""
    if later is None or earlier is None or later < earlier:
        return None
    return later - earlier


def text(event: Record, key: str) -> str | None:
    """The event's field `key` where it is a text that says something."""
    value = event.get(key)
    return value if isinstance(value, str) and value else None


def integer(event: Record, key: str) -> int | None:
    """The event's field `key` where it is an integer of sensible size."""
    value = event.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        return None
    return value


def real(event: Record, key: str) -> float | None:
    """The event's field `key` where it is a finite number."""
    value = event.get(key)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None if (whole := integer(event, key)) is None else float(whole)
