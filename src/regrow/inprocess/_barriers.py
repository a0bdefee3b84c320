"""Barriers over any c10d store, of torch or of regrow.

A barrier is a counter: every rank adds one, whoever completes it sets a key, and all wait for that
key. So what a rank sends and receives does not grow with the number of ranks; only who waits in
vain asks who came. A barrier knows how many are to come, and who only if it is told: ranks are
numbered by whoever calls, and need not be those from 0 on. Where it is not told, a list is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from regrow.store import StoreTimeout

from ._link import BarrierOverflow, BarrierTimeout

if TYPE_CHECKING:
    from regrow.store import Store

__all__ = ["Ranks", "Time", "append", "is_there", "meet", "read"]

Ranks = int | Iterable[int]
"""One, or several that one process comes for."""
Time = timedelta | float
"""A float is seconds."""

SHOWN: Final = 8
"""How many ranks an error names."""
LONGEST: Final = 3600.0
"""Seconds of one question to the store; `timedelta.max` is too much for some."""


def meet(
    store: Store,
    name: str,
    ranks: Ranks,
    count: int,
    timeout: Time,
    *,
    expected: Iterable[int] | None = None,
    again: bool = False,
) -> None:
    """Come to a barrier, and wait until as many have come as are to.

    Args:
        store: has the barrier.
        name: the barrier's, the same on all ranks.
        ranks: who comes.
        count: how many ranks have to come.
        timeout: how long to wait for the last one; 0: come, and do not wait.
        expected: who has to come, for the error to name the missing; else it names who came.
        again: whether a rank may come more than once; it is counted once.

    Raises:
        BarrierTimeout: not all came; says who.
        BarrierOverflow: more came, or one of these ranks came before and may not.
    """
    key = _key(name)
    numbers = [ranks] if isinstance(ranks, int) else list(dict.fromkeys(ranks))
    new = [rank for rank in numbers if store.add(f"{key}/rank/{rank}", 1) == 1]
    if not again and len(new) < len(numbers):
        twice = next(rank for rank in numbers if rank not in new)
        raise BarrierOverflow(f"rank {twice} comes to the barrier {name!r} a second time")
    if new and expected is None:
        append(store, f"{key}/ranks", "".join(f"{rank} " for rank in new))
    came = store.add(f"{key}/came", len(new))
    if came > count:
        raise BarrierOverflow(f"{came} ranks came to the barrier {name!r} of {count}")
    if new and came == count:
        store.set(f"{key}/over", b"1")
    allowed = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if allowed and not _comes(store, f"{key}/over", allowed):
        late = f"did not come to the barrier {name!r} within {allowed:g} s"
        if expected is None:
            there = sorted(map(int, read(store, f"{key}/ranks").split()))
            missing = max(count - len(there), 0)
            raise BarrierTimeout(f"{missing} of {count} ranks {late}; there came {_listed(there)}")
        absent = [rank for rank in sorted(expected) if not is_there(store, name, rank)]
        raise BarrierTimeout(f"{len(absent)} of {count} ranks ({_listed(absent)}) {late}")


def is_there(store: Store, name: str, rank: int) -> bool:
    """Say whether somebody has come to a barrier in the name of a rank."""
    return store.check([f"{_key(name)}/rank/{rank}"])


def append(store: Store, key: str, text: str) -> None:
    """Append to a key; c10d's FileStore cannot, where nothing else is lost by a loop."""
    try:
        store.append(key, text)
    except RuntimeError:
        seen = b""
        while (now := store.compare_set(key, seen, seen + text.encode())) != seen + text.encode():
            seen = now


def read(store: Store, key: str) -> str:
    """The text of a key, empty if it is not there."""
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _key(name: str) -> str:
    return f"barrier/{name}"


def _comes(store: Store, key: str, allowed: float) -> bool:
    """Wait for a key; whether it comes in that time."""
    deadline = time.monotonic() + allowed
    while True:
        begun = time.monotonic()
        left = max(min(LONGEST, deadline - begun), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except (StoreTimeout, RuntimeError):  # torch's DistStoreError is the latter
            now = time.monotonic()
            if now - begun < 0.9 * left:  # it was not the time that was over
                raise
            if now >= deadline:
                return False
        else:
            return True


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(map(str, ranks[:SHOWN])) + more
