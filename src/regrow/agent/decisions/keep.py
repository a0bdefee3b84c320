"""Decides whether the workers of a node go on in the next round, in their processes; pure.

The agent asks twice: at the end of a round, before it orders the workers to leave the round; and
when the next round is formed, before it orders them to join it. The answer is for all workers of
the node together. If it is no, they are ended, and the next round starts new ones. No other node
depends on the answer: ranks in old and in new processes meet in a new group.

An agent that leaves with notice asks as well: if its workers could go on, those of the others can.
"""

from __future__ import annotations

from typing import NamedTuple


class RunningWorkers(NamedTuple):
    """What the agent knows about the workers of its node at the end of their round."""

    numbered: bool
    """Whether the rendezvous numbers its rounds, so that an old order is recognized."""
    own_hooks: bool
    """Whether a subclass of the agent starts, stops or restarts workers in a way of its own."""
    heartbeats: bool
    """Whether the workers beat (`--heartbeat`), which new processes do together."""
    all_run: bool
    """Whether all workers run."""
    may_stay: bool
    """Whether each worker is in its first call of a function with `Wrapper(elastic=True)`."""


def reason_to_end(workers: RunningWorkers) -> str:
    """Return why the workers have to be ended; empty if they may leave the round and live on."""
    if not workers.may_stay:
        return "not every worker is in its first call of a function with Wrapper(elastic=True)"
    if not workers.all_run:
        return "a worker has ended"
    if not workers.numbered:
        return "the rendezvous does not number its rounds"
    if workers.own_hooks:
        return "the agent's class restarts its workers in a way of its own"
    if workers.heartbeats:
        return "--heartbeat: the heartbeats of all workers begin together"
    return ""


class ParkedWorkers(NamedTuple):
    """What the agent knows about workers that have left their round, when the next one begins."""

    all_run: bool
    """Whether all workers still run: the lease may have expired meanwhile."""
    before: frozenset[int]
    """Their local ranks."""
    after: frozenset[int]
    """The local ranks that the next round needs."""


def reason_not_to_move(workers: ParkedWorkers) -> str:
    """Return why parked workers cannot join a round; empty if they can."""
    if not workers.all_run:
        return "a worker ended while the round formed, or its lease expired"
    if workers.before != workers.after:
        return "the round needs another number of workers here"
    return ""
