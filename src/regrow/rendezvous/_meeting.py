"""How a fixed set of nodes meets in a store, attempt after attempt.

Nodes are known by their rank, and each comes to a meeting whenever it starts its workers. A
meeting is complete when every rank has come; then all have the same attempt number, under which
they find one another's keys and nobody else's.

Nodes do not fail at the same time, and an agent may be killed and started again; so the number is
not counted by each node for itself but kept in the store. Who comes to a meeting where its rank
has been before, complete or not, knows that this attempt is over and opens the next; those who
still wait in the old one are sent on. Nobody has to remember anything, so an agent that was
started again is like any other.

Each attempt has one key that says how it ended, `met` or `over`; it is set once, by compare-and-
set, so all agree, and it is the only thing that anybody waits for.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from regrow.rendezvous._errors import RendezvousTimeoutError
from regrow.store import StoreTimeout

if TYPE_CHECKING:
    from regrow.store import Store


def meet(store: Store, rank: int, world_size: int, timeout: float) -> int:
    """Block until all ranks have come to the same attempt.

    Args:
        store: shared by the nodes of the job, and by nobody else.
        rank: this node's rank.
        world_size: how many nodes there are.
        timeout: seconds to wait.

    Returns:
        The number of the attempt, from 1.

    Raises:
        RendezvousTimeoutError: names the ranks that did not come.
        StoreError: the store failed.
    """
    deadline = time.monotonic() + timeout
    while True:
        attempt = int(store.compare_set("attempt", "", "1"))
        outcome = f"{attempt}/outcome"
        if store.add(_arrived(attempt, rank), 1) > 1:
            store.compare_set(outcome, "", "over")
            store.compare_set("attempt", str(attempt), str(attempt + 1))
            continue
        if store.add(f"{attempt}/count", 1) == world_size:
            store.compare_set(outcome, "", "met")
        try:
            store.wait([outcome], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except StoreTimeout as error:
            missing = [r for r in range(world_size) if not store.check([_arrived(attempt, r)])]
            raise RendezvousTimeoutError(
                f"node rank {rank} waited {timeout:g} s for all {world_size} nodes; missing: node "
                f"rank {', '.join(map(str, missing)) or 'none any more (they came too late)'}"
            ) from error
        if store.get(outcome) == b"met":
            return attempt


def _arrived(attempt: int, rank: int) -> str:
    return f"{attempt}/arrived/{rank}"
