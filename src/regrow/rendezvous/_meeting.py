"""How a fixed set of nodes meets in a store, attempt after attempt.

Nodes are known by their rank, and each comes to a meeting whenever it is about to start its
workers. A meeting is complete when every rank is there; then all have the same attempt number,
under which they find one another's keys and nobody else's.

Nodes do not fail at the same time, and an agent may be killed and started again; so the number is
not counted by each node for itself but kept in the store. Who comes leaves a mark for its rank, new
each time, that lasts as long as its session: an agent that dies while it waits is not counted.
Who finds its rank marked already knows that this attempt is over, whatever became of it, and opens
the next; those who still wait in the old one go on to it. So nobody has to remember anything, and
an agent that was started again is like any other.

Who gives up ends the attempt for all: a mark that nobody stands behind must not be counted. The
mark of an agent that was killed stays until its session ends, at most the store's grace; nodes
that meet in this time with the dead one hear of it from their workers only.

How an attempt ended is one key, set once: the marks of those who met, or nothing. Each takes part
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
            here: dict[str, bytes] = {}
            try:
                met = _wait(store, attempt, mark, world_size, deadline, here)
            except StoreTimeout as error:
                # Nobody may count on a node that has given up: the attempt is over for all, unless
                # they have met this very moment.
                outcome = store.compare_set(f"{attempt}/outcome", "", _OVER)
                if mark.encode() in outcome.split(b","):
                    return attempt
                store.compare_set("attempt", str(attempt), str(attempt + 1))
                missing = [str(r) for r in range(world_size) if f"{attempt}/{r}" not in here]
                raise RendezvousTimeoutError(
                    f"node rank {rank} waited {timeout:g} s for all {world_size} nodes; missing: "
                    f"node rank {', '.join(missing)}"
                ) from error
            if met:
                return attempt
            waited = True
        elif waited:
            raise RendezvousError(
                f"another agent came with node rank {rank} while this one waited: give every node "
                f"a --node-rank of its own, or end the agent that was replaced"
            )
        # Whoever comes first does both for all; the others' calls find it done.
        store.compare_set(f"{attempt}/outcome", "", _OVER)
        store.compare_set("attempt", str(attempt), str(attempt + 1))


def _wait(
    store: WatchStore,
    attempt: int,
    mark: str,
    world_size: int,
    deadline: float,
    here: dict[str, bytes],
) -> bool:
    """Wait for the outcome of an attempt, keeping `here` up to date; was this node in it?"""
    outcome, revision = f"{attempt}/outcome", 0
    while outcome not in here:
        left = max(deadline - time.monotonic(), 0.001)
        seen = store.watch([f"{attempt}/"], revision, prefix=True, timeout=left)
        if seen.snapshot:
            here.clear()
        revision = seen.revision
        for change in seen.changes:
            if change.value is None:
                here.pop(change.key, None)
            else:
                here[change.key] = change.value
        if outcome not in here and len(here) == world_size:
            marks = b",".join(here.values())
            here[outcome] = store.compare_set(outcome, "", marks)
    return mark.encode() in here[outcome].split(b",")
