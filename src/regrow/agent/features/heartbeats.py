"""`Heartbeats`: the agent's part in the workers' heartbeats.

The workers send the heartbeats themselves (`regrow.heartbeat`). The agent adds this:

- An environment variable starts the heartbeats.
- A countdown timer (`timers`), armed by each heartbeat, expires shortly before the other workers
  notice a hung worker. The agent then reads the stacks of the hung worker and kills it.
- A byte that agent and workers share (`progress`) lets workers that are being stopped use their
  whole grace, even if other workers have already ended.
- The agent reports the root cause.

**Root cause.** If one worker is missing, all others end, and name the missing rank in their error
files. If that rank has failed as well, it is the root cause, whichever rank ended first
(`first_of`). If it has not failed and runs on this node, it was alive when the agent stopped the
workers, but it sent no heartbeats. The agent then adds a failure for it. So the report names this
rank, and not the rank that noticed it.

**Workers without a heartbeat** most likely do not import regrow. If some workers send heartbeats
and others do not, the waiting workers report the missing ranks. If no worker sends heartbeats,
there is no report, and the user wrongly believes that the workers are watched. Only the agent can
warn. The process that runs a rank's heartbeat binds an abstract unix socket
(`heartbeat/automatic.py`). The agent tests whether a datagram could be sent to it. The test does
not occupy the name, so the rank can still bind it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from regrow.agent.attempt.environment import HEARTBEAT_ENV
from regrow.agent.features import Feature, StartedWorkers
from regrow.heartbeat.terms import KILL_S, bound
from regrow.utils import get_logger
from regrow.workers.errors.failures import first_of

if TYPE_CHECKING:
    from regrow.workers import ProcessFailure

LATEST_S = 60.0
"""Seconds after which silent workers are logged, even if the heartbeat period is longer."""

logger = get_logger(__name__)


class Heartbeats(Feature):
    """Starts the heartbeats, and explains failures with them.

    Args:
        period: seconds between two heartbeats (`--heartbeat`); None: a worker sends heartbeats only
            if its script starts them.
    """

    def __init__(self, period: float | None) -> None:
        self._period = period
        self._workers: StartedWorkers | None = None
        self._silence_check: threading.Timer | None = None  # for workers without a heartbeat

    @property
    def ended_s(self) -> float | None:
        """Seconds from a last heartbeat to the end of all workers; None without a period."""
        return None if self._period is None else bound(self._period) + KILL_S

    def close(self) -> None:
        """See base class."""
        if self._silence_check is not None:
            self._silence_check.cancel()
            self._silence_check = None

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        if self._period is not None:
            for environment in environments.values():
                environment[HEARTBEAT_ENV] = repr(self._period)

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class."""
        self.close()
        self._workers = workers
        if self._period is None:
            return
        after = min(bound(self._period), LATEST_S)
        self._silence_check = threading.Timer(after, self.warn_of_silence, (workers,))
        self._silence_check.daemon = True
        self._silence_check.start()

    def warn_of_silence(self, workers: StartedWorkers) -> None:
        """Log the workers of the current attempt that send no heartbeats."""
        if workers is not self._workers:
            return
        from regrow.heartbeat.failure import Ranks

        context = workers.context
        running = [context.envs[each] for each in context.pids() if context.ended(each) is None]
        ranks = Ranks.of(silent(running))
        if ranks.total:
            logger.warning(
                "no heartbeat yet from %s, although --heartbeat is set: a worker starts its "
                "heartbeat when it imports regrow, and missing heartbeats are detected only when "
                "all workers have started theirs",
                ranks,
            )

    def explain(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """See base class: add the failure of a worker that the others name as the cause."""
        if self._workers is None or not failures:
            return failures
        root = first_of(failures)
        blames = failures[root].blames - failures.keys()
        for local_rank, rank in enumerate(self._workers.ranks):
            blamed = self._workers.context.ended(local_rank) if rank in blames else None
            if blamed is not None:
                blamed.message = f"rank {root} ended because of this rank: {failures[root].summary}"
                blamed.failed_monotonic = failures[root].failed_monotonic
                failures = failures | {rank: blamed}
        return failures


def silent(environments: Iterable[Mapping[str, str]]) -> list[int]:
    """Return the ranks that send no heartbeats.

    Args:
        environments: variables of each worker on top of this process's own environment.
    """
    from regrow.heartbeat.automatic import claim, is_held

    whole = [{**os.environ, **each} for each in environments]
    return sorted(int(each["RANK"]) for each in whole if not is_held(claim(each)))
