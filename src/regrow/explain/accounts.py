"""What the accounts of an attempt's workers say of its steps."""

from __future__ import annotations

from regrow._accounts import REPEATED_STEPS, STEPS
from regrow.events.evidence import Record, integer, real
from regrow.explain.scene import Scene


def accounts_of(scene: Scene, attempt: int) -> list[Record]:
    """Return the last account of each worker of an attempt."""
    found: dict[str, Record] = {}
    for name in ("worker.accounts", "attempt.ended"):
        for event in scene.named(name, attempt):
            by_rank = event.get("accounts")
            if isinstance(by_rank, dict):
                found |= {rank: a for rank, a in by_rank.items() if isinstance(a, dict)}
    return list(found.values())


def row_seconds(account: Record, row: str) -> float:
    """Return the seconds of a row; 0.0 if there are none."""
    spent = account.get("seconds")
    return (real(spent, row) or 0.0) if isinstance(spent, dict) else 0.0


def row_count(account: Record, row: str) -> int:
    """Return the number of steps of a row."""
    counts = account.get("counts")
    return (integer(counts, row) or 0) if isinstance(counts, dict) else 0


def step_s(scene: Scene, attempt: int) -> float | None:
    """Return the mean seconds of a step in an attempt; None if that is not recorded."""
    paces = []
    for account in accounts_of(scene, attempt):
        if steps := sum(row_count(account, row) for row in _ROWS):
            paces.append(sum(row_seconds(account, row) for row in _ROWS) / steps)
    return sum(paces) / len(paces) if paces else None


_ROWS = (STEPS, REPEATED_STEPS)
