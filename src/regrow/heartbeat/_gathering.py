"""Everyone comes, or it is said who is missing: the place in the server where workers wait.

A worker is there as long as its question is parked, and not longer: one that gave up, or lost its
connection, is not counted as there for those who come later. So a set is full only at a moment at
which all wait, which is what "within the bound" rests on.

Who is missing is another question. The workers' waits end one after the other, and who gave up a
moment ago is not to be named to the next one as missing. Missing is whoever did not wait at any
time in which the one who asks did.

The last full set is remembered for those who could not be told of it, since their connection broke:
they ask again, saying what they have seen, and get the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from regrow.heartbeat._failure import Ranks
from regrow.store import Answer

TOGETHER: Final = 0.05
"""Seconds within which waits end together, so that who is missing is looked up once for all."""


class Waiting(NamedTuple):
    """A worker's question that has no answer yet."""

    session: Hashable
    id: int
    who: int
    """The worker's incarnation."""
    asked: float
    until: float
    """When it is to be told who is missing."""


class Gathering:
    """One set after the other of the same workers.

    Args:
        size: how many they are.
    """

    __slots__ = ("_at", "_gone", "_took", "number", "size", "waiting")

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = 0
        """How many sets were full."""
        self.waiting: dict[int, Waiting] = {}
        """By rank."""
        self._gone: dict[int, float] = {}
        """Until when each rank waited for the last time."""
        self._took: dict[int, int] = {}
        """Who took part in the last full set, by rank."""
        self._at = 0.0

    def missed(self, rank: int, who: int, seen: int, now: float) -> float | None:
        """How long ago the set was full that this worker took part in and has not seen, if any."""
        took_part = self._took.get(rank) == who
        return now - self._at if took_part and seen == self.number - 1 else None

    def come(self, rank: int, waiting: Waiting) -> bool:
        """Let a worker wait, in place of an older question of its own; whether the set is full."""
        self.waiting[rank] = waiting
        return len(self.waiting) == self.size

    def leave(self, rank: int, now: float) -> Waiting | None:
        """Let a worker wait no longer."""
        waiting = self.waiting.pop(rank, None)
        if waiting is not None:
            self._gone[rank] = now
        return waiting

    def let_go(self, rank: int, session: Hashable, id: int | None, now: float) -> None:
        """Let a worker wait no longer if it does by this session, and by this question if given."""
        waiting = self.waiting.get(rank)
        if waiting is not None and waiting.session == session and id in (None, waiting.id):
            self.leave(rank, now)

    def complete(self, body: bytes, now: float) -> list[Answer]:
        """Tell all who wait, that is everyone, what the full set means."""
        self.number += 1
        self._took = {rank: waiting.who for rank, waiting in self.waiting.items()}
        self._at = now
        return self.dismiss(body)

    def dismiss(self, body: bytes) -> list[Answer]:
        """Tell all who wait the same, and let them go."""
        answers = [Answer(each.session, each.id, body) for each in self.waiting.values()]
        self.waiting.clear()
        self._gone.clear()
        return answers

    def due(self) -> float:
        """When the first of them is to be told who is missing."""
        return min((each.until for each in self.waiting.values()), default=math.inf)

    def overdue(self, now: float) -> tuple[list[int], Ranks]:
        """Return the ranks that have waited long enough, and who was missing."""
        ranks = [rank for rank, each in self.waiting.items() if each.until <= now + TOGETHER]
        since = min((self.waiting[rank].asked for rank in ranks), default=now)
        missing = (
            rank
            for rank in range(self.size)
            if rank not in self.waiting and self._gone.get(rank, -math.inf) < since
        )
        return ranks, Ranks.of(missing)

    def send_off(self, ranks: Iterable[int], body: bytes, now: float) -> list[Answer]:
        """Tell some who wait the same, and let them go."""
        left = [self.leave(rank, now) for rank in ranks]
        return [Answer(each.session, each.id, body) for each in left if each is not None]


def check(rank: int, size: int) -> None:
    """Refuse a rank that cannot be.

    Raises:
        ValueError: it says why.
    """
    if rank >= size:
        raise ValueError(f"there is no rank {rank} in a world of {size}: they are 0 to {size - 1}")
