"""When each fault of a plan is due, and on which rank: the same on every node.

Every node computes the schedule for itself, from the plan alone. Nothing in it depends on what has
happened in the job, except for the number of ranks, which all nodes of a round share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from regrow.chaos.plan import DEFAULT_FOR_S, Plan, RandomFaults, Rule


@dataclass(frozen=True, slots=True, order=True)
class DueFault:
    """One fault at one time."""

    at_s: float
    """Seconds from the first start of the job's workers."""
    index: int
    """Number of the rule in the plan."""
    rule: Rule = field(compare=False)
    """The fault and its settings."""
    draw: float = field(compare=False)
    """Random number from 0 to 1, which chooses the rank if the rule names none."""
    waits: bool = field(compare=False)
    """Whether the fault waits for its rank if this is not ready, instead of being left out."""

    def rank(self, world_size: int) -> int:
        """Return the global rank that the fault concerns."""
        if self.rule.rank is not None:
            return self.rule.rank
        return min(int(self.draw * world_size), world_size - 1)


class Schedule:
    """All faults of a plan, in the order of their times."""

    def __init__(self, plan: Plan) -> None:
        sources = [
            _repeated(index, rule, _numbers(plan, index))
            if isinstance(rule, Rule)
            else _random(index, rule, _numbers(plan, index))
            for index, rule in enumerate(plan.rules)
        ]
        self._faults = heapq.merge(*sources)
        self._next = next(self._faults, None)

    @property
    def next_s(self) -> float | None:
        """Time of the next fault; None if none is left."""
        return None if self._next is None else self._next.at_s

    def due(self, elapsed_s: float) -> list[DueFault]:
        """Remove and return the faults that are due.

        Args:
            elapsed_s: seconds from the first start of the job's workers.
        """
        found = []
        while self._next is not None and self._next.at_s <= elapsed_s:
            found.append(self._next)
            self._next = next(self._faults, None)
        return found


def _numbers(plan: Plan, index: int) -> Random:
    """Return the random numbers of a rule; another rule in the plan does not change them."""
    return Random(f"{plan.seed}/{index}")


def _repeated(index: int, rule: Rule, numbers: Random) -> Iterator[DueFault]:
    first = rule.at_s if rule.at_s is not None else rule.every_s
    assert first is not None
    if rule.every_s is None:
        yield DueFault(first, index, rule, numbers.random(), waits=True)
        return
    turn = 0
    while rule.times is None or turn < rule.times:
        yield DueFault(first + turn * rule.every_s, index, rule, numbers.random(), waits=False)
        turn += 1


def _random(index: int, rule: RandomFaults, numbers: Random) -> Iterator[DueFault]:
    at = 0.0
    while True:
        at += numbers.expovariate(1.0 / rule.mtbf_s)
        fault = rule.faults[numbers.randrange(len(rule.faults))]
        lasts = rule.for_s if rule.for_s is not None else DEFAULT_FOR_S.get(fault)
        chosen = Rule(fault, rank=rule.rank, at_s=at, for_s=lasts)
        yield DueFault(at, index, chosen, numbers.random(), waits=False)
