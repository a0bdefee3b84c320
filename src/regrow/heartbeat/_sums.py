"""Sums of vectors in the store's server: an `Exchange` for whoever needs no more than that.

They are kept apart from the beats: another name, another set of workers that wait. A sum has the
rules of waiting of a beat (`_gathering`) and nothing else: it does not end when somebody leaves.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from regrow.heartbeat import _questions as questions
from regrow.heartbeat._gathering import Gathering, Waiting, check
from regrow.store import Answer

SUMS: Final = 1024
"""The most sums at once."""
INT64: Final = range(-(2**63), 2**63)


class _Sum:
    """The vectors of one name."""

    __slots__ = ("gathering", "last", "sessions", "vectors")

    def __init__(self, size: int) -> None:
        self.gathering = Gathering(size)
        self.vectors: dict[int, list[int]] = {}
        """By rank; the last of each."""
        self.last = b""
        """The last answer."""
        self.sessions: set[Hashable] = set()
        """Who has asked for it."""


class Sums:
    """All sums of a server."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    @property
    def gatherings(self) -> list[Gathering]:
        """Where workers may be waiting."""
        return [each.gathering for each in self._sums.values()]

    def asked(
        self, session: Hashable, id: int, question: questions.Reduce, now: float
    ) -> list[Answer]:
        """Take in a vector, and return what can be answered now, to anybody.

        Raises:
            ValueError: it cannot be summed up.
        """
        rank, size = question.rank, question.size
        check(rank, size)
        sum_ = self._sums.get(question.group)
        if sum_ is None or not (sum_.gathering.waiting or sum_.gathering.size == size):
            if len(self._sums) >= SUMS:
                raise ValueError(f"{SUMS} sums are made here already, and that is the most")
            sum_ = self._sums[question.group] = _Sum(size)
        gathering = sum_.gathering
        if size != gathering.size:
            raise ValueError(f"rank {rank} sums over {size}, and others over {gathering.size}")
        for other in gathering.waiting.keys() - {rank}:
            length = len(sum_.vectors[other])
            if length != len(question.vector):
                raise ValueError(
                    f"rank {rank} gives {len(question.vector)} numbers, and rank {other} {length}"
                )
        sum_.sessions.add(session)
        if gathering.missed(rank, question.incarnation, question.seen, now) is not None:
            return [Answer(session, id, sum_.last)]
        sum_.vectors[rank] = question.vector
        waiting = Waiting(session, id, question.incarnation, now, now + question.wait)
        if not gathering.come(rank, waiting):
            return []
        totals = [sum(numbers) for numbers in zip(*sum_.vectors.values(), strict=True)]
        if not all(total in INT64 for total in totals):
            gathering.leave(rank, now)
            raise ValueError("a sum does not fit into 64 bits")
        sum_.last = questions.encode(questions.Sums(gathering.number + 1, totals))
        return gathering.complete(sum_.last, now)

    def let_go(self, session: Hashable, id: int | None, now: float) -> None:
        """Forget what a session waits for; with an id, only that question."""
        for sum_ in self._sums.values():
            if session in sum_.sessions:
                for rank in list(sum_.gathering.waiting):
                    sum_.gathering.let_go(rank, session, id, now)

    def ended(self, session: Hashable) -> None:
        """Forget a session, and sums that nobody is there for."""
        for name, sum_ in list(self._sums.items()):
            sum_.sessions.discard(session)
            if not sum_.sessions:
                del self._sums[name]
