"""How a fixed set of nodes meets in a store, attempt after attempt.

Nodes are known by their rank, and each comes to a meeting whenever it is about to start its
workers. A meeting is complete when every rank is there; then all have the same attempt number,
under which they find one another's keys and nobody else's.

Nodes do not fail at the same time, and an agent may be killed and started again; so the number is
not counted by each node for itself but kept in the store. Who comes leaves a mark for its rank, new
each time, that lasts as long as its session. Who finds its rank marked already knows that this
attempt is over, whatever became of it, and opens the next; those who still wait in the old one go
on to it. So nobody has to remember anything, and an agent that was started again is like any other.

A mark may be that of an agent that has just died. So who sees all marks answers with what it sees,
and only when all have answered with the same have they met. The dead do not answer: the others
wait for the agent that takes its place, which leaves another mark or opens another attempt. Who
gives up ends the attempt for all, since nobody may count on it any more.

How an attempt ended is one key, set once: the marks of those who met, or `over`. Each takes part
only if its own mark is among them, so no one can be counted without knowing it, or the reverse.

Only who was sent on, and finds that its rank has come to the next attempt without it, knows that
it has been replaced, or that two nodes were given one rank.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from regrow.rendezvous._errors import RendezvousError, RendezvousTimeoutError
from regrow.store import StoreTimeout

if TYPE_CHECKING:
    from regrow.store import WatchStore

_OVER = "over"


def meet(store: WatchStore, rank: int, world_size: int, timeout: float) -> int:
    """Block until all ranks have come to the same attempt.

    Args:
        store: shared by the nodes of the job, for their meetings only.
        rank: this node's rank.
        world_size: how many nodes there are.
        timeout: seconds to wait.

    Returns:
        The number of the attempt, from 1.

    Raises:
        RendezvousTimeoutError: names the ranks that did not come.
        RendezvousError: another agent has come with this rank.
        StoreError: the store failed.
    """
    deadline = time.monotonic() + timeout
    mark = os.urandom(8).hex()
    waited = False
    while True:
        attempt = int(store.compare_set("attempt", "", "1"))
        own = f"{attempt}/{rank}"
        if store.compare_set(own, "", mark, ephemeral=True) == mark.encode():
            waiting = _Waiting(store, attempt, rank, mark, world_size)
            try:
                met = waiting.wait(deadline)
            except StoreTimeout as error:
                outcome = _end(store, attempt)
                if mark.encode() in outcome.split(b","):  # they have met this very moment
                    return attempt
                raise RendezvousTimeoutError(
                    f"node rank {rank} waited {timeout:g} s for all {world_size} nodes; missing: "
                    f"node rank {', '.join(map(str, waiting.missing()))}"
                ) from error
            if met:
                return attempt
            waited = True
        elif waited:
            raise RendezvousError(
                f"another agent came with node rank {rank} while this one waited: give every node "
                f"a --node-rank of its own, or end the agent that was replaced"
            )
        _end(store, attempt)


def _end(store: WatchStore, attempt: int) -> bytes:
    """End an attempt for all, if nobody has yet, and open the next; return how it ended."""
    outcome = store.compare_set(f"{attempt}/outcome", "", _OVER)
    store.compare_set("attempt", str(attempt), str(attempt + 1))
    return outcome


class _Waiting:
    """A node with its mark in an attempt, waiting for the outcome."""

    def __init__(
        self, store: WatchStore, attempt: int, rank: int, mark: str, world_size: int
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._rank = rank
        self._mark = mark
        self._world_size = world_size
        self._here: dict[str, bytes] = {}
        self._answer = b""

    def wait(self, deadline: float) -> bool:
        """Return whether this node has met all others; StoreTimeout: nothing came of it yet."""
        revision = 0
        while (outcome := self._here.get("outcome")) is None:
            left = max(deadline - time.monotonic(), 0.001)
            prefix = f"{self._attempt}/"
            seen = self._store.watch([prefix], revision, prefix=True, timeout=left)
            revision = seen.revision
            if seen.snapshot:
                self._here.clear()
            for key, _, value in seen.changes:
                if value is None:
                    self._here.pop(key.removeprefix(prefix), None)
                else:
                    self._here[key.removeprefix(prefix)] = value
            self._take_part()
        return self._mark.encode() in outcome.split(b",")

    def _take_part(self) -> None:
        marks = [self._here.get(str(rank)) for rank in range(self._world_size)]
        if "outcome" in self._here or None in marks:
            return
        all_marks = b",".join(filter(None, marks))
        if all_marks != self._answer:
            self._answer = all_marks
            self._store.set(f"{self._attempt}/answer/{self._rank}", all_marks, ephemeral=True)
        answers = {self._here.get(f"answer/{rank}") for rank in range(self._world_size)}
        if answers == {all_marks}:
            self._store.compare_set(f"{self._attempt}/outcome", "", all_marks)

    def missing(self) -> list[int]:
        """Return the ranks that did not come, or else those that do not answer."""
        ranks = range(self._world_size)
        away = [rank for rank in ranks if str(rank) not in self._here]
        return away or [r for r in ranks if self._here.get(f"answer/{r}") != self._answer]
