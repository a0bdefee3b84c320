"""What a worker says of its beating while nothing is decided, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regrow.heartbeat._beats import Plan
    from regrow.heartbeat._failure import Ranks
    from regrow.heartbeat._merge import Standing

__all__ = ["bound", "not_begun", "speaks", "stands_still"]


def bound(plan: Plan) -> str:
    """Say within what time a worker that is missing is known."""
    return (
        f"heartbeat of {plan.size} workers every {plan.period:g} s: a worker that is missing is "
        f"known to all others within {plan.bound:g} s ({plan.failures} exchanges of "
        f"{plan.timeout:g} s at most), one whose process ends within 1 s where the exchange is the "
        f"store's"
    )


def stands_still(standing: Standing) -> str:
    """Say who does, and how far the others are."""
    who = standing.stalled
    what = f"{who} beat{'s' * (who.total == 1)}, but stand{'s' * (who.total == 1)} still"
    phase = f" in phase {standing.phase!r}" if standing.phase else ""
    return (
        f"{what} at step {standing.step}{phase} for {standing.still} beats; the others are at up "
        f"to step {standing.highest}"
    )


def not_begun(plan: Plan, missing: Ranks, seconds: float) -> str:
    """Say who has not come to the first exchange, and what to do about it.

    Args:
        plan: of the worker that waits, for as long as it takes.
        missing: of whom this is said.
        seconds: for how long it has waited.
    """
    return (
        f"heartbeat: {missing} of {plan.size} {'has' if missing.total == 1 else 'have'} not begun "
        f"to beat, {seconds:.3g} s after rank {plan.rank} has; until all have, nobody is missed. "
        f"A worker begins when it imports regrow: have all do that, or have one call "
        f"regrow.heartbeat.start with a start_timeout, to wait no longer than that"
    )


def speaks(plan: Plan, missing: Ranks) -> bool:
    """Whether it is for this worker to say loud who is missing, as all others know it, too."""
    first = next((rank for rank in range(plan.size) if rank not in missing.named), plan.rank)
    return plan.rank == first or missing.total > len(missing.named)
