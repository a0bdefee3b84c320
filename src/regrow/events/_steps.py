"""Training steps: how far an attempt came, and what had to be done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ._fields import Record, integer, real, since, text

__all__ = ["Steps", "last_steps", "seconds_of", "work_lost"]


@dataclass(frozen=True, slots=True)
class Steps:
    """How far a worker came in an attempt."""

    rank: int | None
    """The worker's rank."""
    host: str | None
    """The host on whose clock the times are."""
    first_step: int
    """The first step that it reported, by the script's numbers."""
    first_monotonic: float | None
    """When."""
    last_step: int | None = None
    """The last one; unknown while the attempt runs."""
    last_monotonic: float | None = None
    """When."""


def last_steps(ended: Record) -> list[Steps]:
    """The steps that an ended attempt's event tells of, by rank."""
    by_rank = ended.get("last_steps")
    if not isinstance(by_rank, Mapping):
        return []
    found = []
    for rank, steps in by_rank.items():
        if not isinstance(steps, Mapping):
            continue
        first, last = integer(steps, "first_step"), integer(steps, "last_step")
        if first is None or last is None:
            continue
        found.append(
            Steps(
                rank=int(rank) if isinstance(rank, str) and _is_number(rank) else None,
                host=text(ended, "host"),
                first_step=first,
                first_monotonic=real(steps, "first_monotonic"),
                last_step=last,
                last_monotonic=real(steps, "last_monotonic"),
            )
        )
    return found


def _is_number(rank: str) -> bool:
    return rank.isascii() and rank.isdecimal() and len(rank) < 10


def work_lost(last: int | None, resumed_from: int | None) -> int | None:
    if last is None or resumed_from is None:
        return None
    # A script that reports every tenth step seems to resume past what it had reached.
    return max(last - resumed_from, 0)


def seconds_of(lost: int | None, steps: list[Steps]) -> float | None:
    """How long an attempt took for `lost` of its steps, by the pace of its furthest worker."""
    if not lost:
        return 0.0 if lost == 0 else None
    furthest = max(steps, key=lambda s: -1 if s.last_step is None else s.last_step, default=None)
    if furthest is None or furthest.last_step is None or furthest.last_step <= furthest.first_step:
        return None
    took = since(furthest.last_monotonic, furthest.first_monotonic)
    if took is None:
        return None
    return lost * took / (furthest.last_step - furthest.first_step)
