"""How the agents of a round agree on the step at which all ranks stop, over the store of the round.

A request is one key, for which every agent waits. Each agent then reports, and group rank 0 decides
(`decisions.early_stop`): at once from the first reports, or from the second ones. All agents wait
for its decision, and each of them until a deadline of its own.

If the decision is that some nodes leave, another request may follow before the round ends. So the
requests of a round have numbers, from 0, and each has keys of its own. All nodes that stay know how
many requests came before, because each has received their decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Final

from regrow.agent.decisions import early_stop as rules
from regrow.agent.decisions.early_stop import EndNow, Leave, NodeReport, StopAt, Verdict
from regrow.utils import printable

if TYPE_CHECKING:
    from regrow.store import Store

_AGAIN: Final = b"again"
"""Value of the key `next`: group rank 0 needs the second reports."""


def asked_key(number: int) -> str:
    """Return the key of a request in the store of the round; `encode_request` writes its value."""
    return f"stop/{number}/asked"


def verdict_key(number: int) -> str:
    """Return the key of the decision of group rank 0 on a request."""
    return f"stop/{number}/verdict"


def agree(
    store: Store,
    number: int,
    rank: int,
    nodes: int,
    until: float,
    min_nodes: int | None,
    report: Callable[..., NodeReport],
) -> Verdict:
    """Exchange the reports of all nodes; return the decision of group rank 0.

    Args:
        store: the store of the round.
        number: number of the request in this round, from 0.
        rank: group rank of this node.
        nodes: number of nodes.
        until: monotonic seconds at which the decision is due.
        min_nodes: fewest nodes with which the job goes on; None: as many as it has.
        report: returns the report of this node. With a time, it waits up to this time for what is
            still missing.

    Raises:
        Exception: the store did not have the decision in time.
    """
    from regrow.store import StoreClosedError

    begun = monotonic()
    second_until = begun + (until - begun) * 0.6
    following = f"stop/{number}/next"

    def publish(turn: str, found: NodeReport) -> None:
        store.set(f"stop/{number}/{turn}/{rank}", rules.encode(found))

    def gathered(turn: str) -> list[NodeReport]:
        keys = [f"stop/{number}/{turn}/{each}" for each in range(nodes)]
        store.wait(keys, timedelta(seconds=max(0.01, until - monotonic())))
        return [rules.decode(text) for text in store.multi_get(keys)]

    def waited(key: str) -> bytes:
        # Group rank 0 publishes a decision at its own deadline at the latest.
        left = until + (until - begun) / 2 - monotonic()
        store.wait([key], timedelta(seconds=max(0.01, left)))
        return store.get(key)

    own = report()
    publish("first", own)
    if rank:
        if waited(following) == _AGAIN:
            publish("second", report(second_until))
        return rules.decode_verdict(waited(verdict_key(number)))
    verdict: Verdict | None = None
    try:
        verdict = rules.decide(gathered("first"), min_nodes, final=False)
        store.set(following, _AGAIN if verdict is None else b"")
        if verdict is None:
            publish("second", report(second_until))
            verdict = rules.decide(gathered("second"), min_nodes, final=True)
    finally:
        if verdict is None:  # a report is missing; only the node that leaves has to end
            is_leave = not own.whole and min_nodes is not None and nodes > min_nodes
            verdict = Leave() if is_leave else EndNow()
        # A node that leaves ends the round for all, also before the answer to this call.
        with suppress(StoreClosedError) if isinstance(verdict, Leave) else nullcontext():
            store.multi_set([following, verdict_key(number)], [b"", rules.encode_verdict(verdict)])
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
        StoreTimeout: the agents have not decided in that time, or the round is over.
        StoreError: the job is not reached any more.
        ValueError: the decision is not one of this release.
    """
    until, number = monotonic() + timeout, 0
    while True:
        store.set(asked_key(number), encode_request(why, None, leaves=False))
        store.wait([verdict_key(number)], timedelta(seconds=max(0.01, until - monotonic())))
        match rules.decode_verdict(store.get(verdict_key(number))):
            case StopAt(position):
                return position & 0xFFFFFFFF
            case EndNow():
                return None
        number += 1  # it was the request of a node that leaves; the others would go on


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
    return printable(why), seconds, leaves == "1"
