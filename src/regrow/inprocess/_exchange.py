"""What the living ranks tell each other while their ranks are assigned.

A host's name, say, is known on that host only. Whatever the number of ranks, each sends the same
few messages: `Exchange.count` costs four and two barriers, `Exchange.gather` two and one barrier.

What is needed of the store is in `SharedStore`, and any c10d store with `StoreMixin` has it. All
living ranks make the same exchanges in the same order, so numbering them has every key used once.
They are counted on the store object, which a rank has for one iteration: a process that takes over
a lost rank has made none of the earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

from ._assignment import RankAssignmentCtx

__all__ = ["Exchange", "SharedStore"]


class SharedStore(Protocol):
    """What a rank assignment needs of `ctx.store`, on which an attribute can be set."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number at `key`, at first 0; return the sum."""
        ...

    def append(self, key: str, value: str, /) -> None:
        """Append to the text at `key`, at first empty; at once, as others see it."""

    def get(self, key: str, /) -> bytes:
        """The text at `key`."""
        ...

    def barrier(
        self,
        rank: int,
        /,
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        *,
        expected: Iterable[int],
    ) -> None:
        """Come to a barrier as `rank`, and wait until `rendezvous_count` ranks are there."""


class Exchange:
    """One exchange between the living ranks.

    Args:
        ctx: the assignment that it is made for.
        name: what is exchanged, for the store's keys and its errors.
        timeout: how long a rank waits for the others at each barrier.
    """

    def __init__(self, ctx: RankAssignmentCtx, name: str, timeout: timedelta) -> None:
        assert ctx.state.rank is not None  # a rank that is out takes no part
        ctx.store.exchanges = getattr(ctx.store, "exchanges", 0) + 1
        self._name = f"{name}_{ctx.store.exchanges}"
        self._store: SharedStore = ctx.store
        self._rank = ctx.state.rank
        self._living = set(range(ctx.state.world_size)) - ctx.terminated_ranks
        self._timeout = timeout

    def count(self, key: str, fits: Callable[[int], object]) -> set[int]:
        """Find the ranks of groups whose size does not fit.

        Args:
            key: of this rank's group.
            fits: whether a group of so many ranks does; asked on each rank about its own group.

        Returns:
            The ranks that it said no to, the same set everywhere.
        """
        group, misfits = f"{self._name}:group:{key}", f"{self._name}:misfits"
        self._store.add(group, 1)
        self._meet("counted")
        fit = fits(self._store.add(group, 0))
        self._store.append(misfits, "" if fit else f"{self._rank},")
        self._meet("judged")
        return {int(rank) for rank in self._store.get(misfits).decode().split(",") if rank}

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all living ranks, in no certain order.

        Args:
            value: this rank's; anything that JSON can express.
        """
        values = f"{self._name}:values"
        self._store.append(values, json.dumps(value) + "\n")
        self._meet("told")
        return [json.loads(line) for line in self._store.get(values).decode().splitlines()]

    def _meet(self, what: str) -> None:
        self._store.barrier(
            self._rank,
            group_name=f"{self._name}:{what}",
            rendezvous_count=len(self._living),
            timeout=self._timeout,
            expected=self._living,
        )
