"""What `start` was given: whether it makes sense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils._limits import LONGEST_S

if TYPE_CHECKING:
    from regrow.heartbeat._beats import Plan


def of(exchange: object, rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """Return the rank and world size that were given, here or to the exchange."""
    rank = getattr(exchange, "rank", None) if rank is None else rank
    world_size = getattr(exchange, "world_size", None) if world_size is None else world_size
    return rank, world_size


def check(plan: Plan, on_stall: str) -> None:
    """Refuse what makes no sense.

    Raises:
        ValueError: it says what, and what to give.
    """
    for name, count in (("failures", plan.failures), ("stalled_after", plan.stalled_after)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name}={count!r}: give a whole number, at least 1")
    for name, value in (
        ("period", plan.period),
        ("timeout", plan.timeout),
        ("start_timeout", plan.start_timeout),
    ):
        if not 0.0 < value <= LONGEST_S:
            raise ValueError(
                f"{name}={value}: give a number of seconds greater than zero, and at most"
                f" {LONGEST_S}"
            )
    if on_stall not in ("report", "fatal"):
        raise ValueError(f"on_stall={on_stall!r}: give 'report' or 'fatal'")
