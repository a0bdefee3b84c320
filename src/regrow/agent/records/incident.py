"""The line of the log at the time of a failure: what failed, and what happens next."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from regrow.agent.records.recorder import failure_fields
from regrow.utils import host_of, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.agent.api import Worker
    from regrow.rendezvous import Departed
    from regrow.workers import ProcessFailure

_MOST_GONE = 4


def what_failed(rank: int | None, failure: ProcessFailure) -> str:
    """Describe a failure in one line.

    Args:
        rank: global rank of the worker; None if the agent itself has failed.
        failure: the failure, on this host or on another.
    """
    from regrow.events import describe_failure  # loads the story's modules, which take a while

    who = "the agent" if rank is None else f"rank {rank}"
    pid = f" (pid {failure.pid})" if failure.pid else ""
    host = failure.host or socket.gethostname()
    return f"{who} on host {host}{pid} {describe_failure(failure_fields(rank, failure))}"


def what_follows(delay_s: float, workers: int, restarts_left: int | None) -> str:
    """Describe a restart in one line.

    Args:
        delay_s: seconds until the restart.
        workers: number of workers of the job, on all nodes; 0 if other nodes join or are gone.
        restarts_left: further restarts after this one; None if it costs none.
    """
    whom = "the workers" if not workers else f"all {workers} workers"
    if workers == 1:
        whom = "the worker"
    parts = [f"restarting {whom}"]
    if delay_s >= 0.05:
        parts = [f"waiting {round(delay_s, 2):g} s, then {parts[0]}"]
    if restarts_left is not None:
        number = restarts_left or "no"
        parts.append(f"{number} restart{'s' if restarts_left != 1 else ''} left")
    else:
        parts.append("which costs no restart")
    return ", ".join(parts)


def what_joins(workers: Sequence[Worker], gone: Sequence[Departed]) -> str:
    """Describe in one line that this node has a place in a job that has run without it.

    Args:
        workers: the workers of this node.
        gone: the nodes of the previous round that do not take part any more.
    """
    first, last = workers[0], workers[-1]
    ranks = f"rank {first.global_rank}"
    if len(workers) > 1:
        between = "and" if len(workers) == 2 else "to"
        ranks = f"ranks {first.global_rank} {between} {last.global_rank}"
    lost = [f"host {host_of(node.id)} is gone: {printable(node.why)}" for node in gone[:_MOST_GONE]]
    if len(gone) > _MOST_GONE:
        lost.append(f"{len(gone) - _MOST_GONE} more hosts are gone")
    return "; ".join([f"this node joins the job, with {ranks} of {first.world_size}", *lost])


def why_no_restart(max_restarts: int, restarts_left: int, *, is_hopeless: bool) -> str:
    """Describe why a job ends with a failure, in one line."""
    if is_hopeless:
        return "a restart cannot help, the job ends"
    if restarts_left > 0:
        return "the rendezvous is closed, the job ends"
    left = "no restarts left" if max_restarts else "no restarts allowed"
    return f"{left} (--max-restarts={max_restarts}), the job ends"
