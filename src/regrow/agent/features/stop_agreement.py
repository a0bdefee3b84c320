"""How the agents of a round agree on the step at which all ranks stop, over the store of the round.

A request is one key, for which every agent waits. Each agent then reports, and group rank 0 decides
(`decisions.early_stop`): at once from the first reports, or from the second ones. All agents wait
for its decision, and each of them until a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Final

from regrow.agent.decisions import early_stop as rules
from regrow.agent.decisions.early_stop import EndNow, NodeReport, StopAt, Verdict

if TYPE_CHECKING:
    from regrow.store import Store

ASKED: Final = "stop/asked"
"""Key in the store of a round: the request to stop, as `encode_request` writes it."""
VERDICT: Final = "stop/verdict"
"""Key in the store of a round: the decision of group rank 0."""
_NEXT: Final = "stop/next"
"""Key: whether group rank 0 needs the second reports."""
_AGAIN: Final = b"again"


def agree(
    store: Store,
    rank: int,
    nodes: int,
    until: float,
    min_nodes: int | None,
    report: Callable[..., NodeReport],
) -> Verdict:
    """Exchange the reports of all nodes; return the decision of group rank 0.

    Args:
        store: the store of the round.
        rank: group rank of this node.
        nodes: number of nodes.
        until: monotonic seconds at which the decision is due.
        min_nodes: fewest nodes with which the job goes on; None: as many as it has.
        report: returns the report of this node. With a time, it waits up to this time for what is
            still missing.

    Raises:
        Exception: the store did not have the decision in time.
    """
    begun = monotonic()
    second_until = begun + (until - begun) * 0.6

    def gathered(key: str) -> list[NodeReport]:
        keys = [f"{key}/{each}" for each in range(nodes)]
        store.wait(keys, timedelta(seconds=max(0.01, until - monotonic())))
        return [rules.decode(text) for text in store.multi_get(keys)]

    def waited(key: str) -> bytes:
        # Group rank 0 publishes a decision at its own deadline at the latest.
        left = until + (until - begun) / 2 - monotonic()
        store.wait([key], timedelta(seconds=max(0.01, left)))
        return store.get(key)

    store.set(f"stop/first/{rank}", rules.encode(report()))
    if rank:
        if waited(_NEXT) == _AGAIN:
            store.set(f"stop/second/{rank}", rules.encode(report(second_until)))
        return rules.decode_verdict(waited(VERDICT))
    verdict: Verdict | None = None
    try:
        verdict = rules.decide(gathered("stop/first"), min_nodes, final=False)
        store.set(_NEXT, _AGAIN if verdict is None else b"")
        if verdict is None:
            store.set("stop/second/0", rules.encode(report(second_until)))
            verdict = rules.decide(gathered("stop/second"), min_nodes, final=True)
    finally:
        verdict = EndNow() if verdict is None else verdict
        store.multi_set([_NEXT, VERDICT], [b"", rules.encode_verdict(verdict)])
    return verdict


def ask(store: Store, why: str, timeout: float) -> int | None:
    """Ask the agents of a job to stop it; return the call at which all ranks stop.

    Args:
        store: the store of the running round.
        why: who asks, for people.
        timeout: seconds to wait for the decision.

    Returns:
        The number of the call of `should_stop`. None if the job ends as by SIGTERM.

    Raises:
        StoreTimeout: the agents have not decided in that time.
        StoreError: the job is not reached any more.
        ValueError: the decision is not one of this release.
    """
    store.set(ASKED, encode_request(why, None, leaves=False))
    store.wait([VERDICT], timedelta(seconds=timeout))
    verdict = rules.decode_verdict(store.get(VERDICT))
    return verdict.position & 0xFFFFFFFF if isinstance(verdict, StopAt) else None


def encode_request(why: str, left: float | None, leaves: bool) -> bytes:
    """Return a request to stop as text for the store of a round.

    Args:
        why: who asks, for people.
        left: seconds that the node which asks has left; None: each node has its whole grace.
        leaves: whether only that node has to end.
    """
    return f"{'-' if left is None else f'{left:.3f}'} {int(leaves)} {why}".encode()


def decode_request(text: bytes) -> tuple[str, float | None, bool]:
    """Return the reason, the seconds that are left, and whether only one node has to end.

    Raises:
        ValueError: the text is no request.
    """
    left, leaves, why = text[:500].decode(errors="replace").split(" ", 2)
    seconds = None if left == "-" else float(left)
    if seconds is not None and not 0 <= seconds < 1e7:
        raise ValueError(f"not a number of seconds: {left}")
    return " ".join(why.split()), seconds, leaves == "1"
