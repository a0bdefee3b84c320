"""Features of an agent: everything beyond starting, watching and stopping workers.

A feature overrides the methods of `Feature` that it needs. It gets what it uses as constructor
arguments, so it is understood and tested without an agent. The agent calls its features in the
order of its list. A feature's own threads post functions to the agent's inbox, and the agent's loop
calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regrow.store import Store
    from regrow.workers import Guardian, PContext, ProcessFailure

__all__ = ["Feature", "StartedWorkers"]


class StartedWorkers(NamedTuple):
    """The workers of one attempt."""

    attempt: int
    ranks: Sequence[int]
    """Global ranks, by local rank."""
    context: PContext
    """The workers' processes."""
    guardian: Guardian
    """The process that watches the workers."""
    world_size: int = 0
    """Number of ranks of the job on all nodes; 0 means the number of `ranks`."""

    def pids(self) -> dict[int, int]:
        """Return the process id of each worker, by global rank."""
        return {self.ranks[local_rank]: pid for local_rank, pid in self.context.pids().items()}


class Feature:
    """Base class of features; each method has no effect unless a feature overrides it."""

    def open(self) -> None:
        """Start the feature, before any other part of the job starts.

        Raises:
            OSError: the feature cannot work; this ends the job.
        """

    def close(self) -> None:
        """End the feature, after the last attempt's workers; may be called more than once."""

    def on_wait(self, environment: Mapping[str, str]) -> None:
        """Prepare while this node waits for a place in a round; may be called more than once.

        No other method of the feature runs meanwhile, except in the agent's loop.

        Args:
            environment: the variables of a worker, without those that depend on the round.
        """

    # --- one attempt, on the thread that runs operations

    def before_ranks(self, store: Store) -> None:
        """Write data for the other nodes, before the ranks of a new round are assigned.

        Args:
            store: store of the round.
        """

    def after_ranks(self, store: Store) -> None:
        """Read the data that the other nodes wrote in `before_ranks`.

        If ranks were exchanged, every node has finished `before_ranks`. With
        TORCH_ELASTIC_WORKER_IDENTICAL=1 they are not exchanged, so a key may be missing.
        """

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """Prepare the start of the workers.

        Args:
            environments: environment of each local rank; the feature adds its variables.
        """

    def on_start(self, workers: StartedWorkers) -> None:
        """Receive the workers, right before the first one runs."""

    def before_stop(self) -> None:
        """Do the work that needs the workers, right before they are stopped; once in an attempt."""

    def on_stop(self, signum: int) -> None:
        """Act on the signal that stops the workers; on any thread, perhaps several times.

        The workers have got the signal, or get it right after this call.

        Args:
            signum: the signal.
        """

    def on_wake(self) -> None:
        """Read what a worker has written into memory, in the agent's loop."""

    def on_leaving(self) -> None:
        """Handle the announcement of another node that it leaves, in the agent's loop.

        The round goes on until that node has left.
        """

    # --- failures

    def explain(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Add the feature's knowledge to failures.

        Args:
            failures: failures of this node's workers, by global rank; may be modified.

        Returns:
            These failures, and further failures that they imply.
        """
        return failures

    def evidence(self) -> dict[str, Any]:
        """Return fields to add to the report about a failure that this node sends to the others."""
        return {}

    def on_report(self, report: str) -> None:
        """Handle another node's report of a failure."""
