"""Workers that restart in place: what their agent makes of the end of one of them.

A wrapper (`regrow.inprocess`) goes on without a rank whose process has ended. The agent must not
stop the others for it then, and learns so from the worker itself: while its wrapper is live, and
after it has left it for good, the worker's slot of the progress board says that it is replaceable.
That is read when the process has ended, so it holds up to the instant of a SIGKILL.

Such an end is a *loss*: counted out here, told as `regrow.inprocess.lost`, charged to nobody. The
place stays empty until something fills it; that nothing does yet is no part of the rules. When the
others have ended, the attempt ends as they did (`regrow.workers._group`). Where no worker of this
node is left, its last loss is a failure, as is every end of a worker in no wrapper.

What the ranks make of it they tell themselves: each restart is one event, of the rank that is 0 in
the new world.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.agent._beating import BeatingAgent
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.agent import _words as words
    from regrow.agent._types import RunResult, Worker
    from regrow.workers import WorkerChange

RESTARTED = "regrow.inprocess.restarted"
LOST = "regrow.inprocess.lost"

logger = get_logger(__name__)


class Told(NamedTuple):
    """A worker has told something that is worth an event."""

    attempt: int
    line: bytes
    """A JSON object: the name of the event, and its fields."""


class RestartingAgent(BeatingAgent):
    """An agent whose workers may restart in place."""

    _lost: set[int]  # global ranks of the attempt's workers that were counted out

    def _heed(self, message: object) -> words.Event | None:
        if not isinstance(message, Told):
            return super()._heed(message)
        if message.attempt == self._attempt:
            self._heed_told(message.line)
        return None

    def _heed_told(self, line: bytes) -> None:
        try:
            told: dict[str, Any] = json.loads(line)
            name, fields = told["name"], dict(told["fields"])
        except (ValueError, KeyError, TypeError):
            logger.warning("a worker has told what is no event: %.200r", line)
            return
        if name == RESTARTED:
            self._emit(RESTARTED, **fields)

    def _heed_loss(self, change: WorkerChange) -> None:
        worker = self._worker_group.workers[change.local_rank]
        self._lost.add(worker.global_rank)
        code = change.status
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        logger.warning(
            "rank %s (pid %s) ended %s; the others go on without it, restarting in place",
            worker.global_rank,
            change.pid,
            how,
        )
        self._emit(
            LOST,
            rank=worker.global_rank,
            local_rank=change.local_rank,
            pid=change.pid,
            exitcode=code,
            lost_monotonic=change.monotonic,
        )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        if worker.global_rank in self._lost and worker.global_rank not in result.failures:
            return "TERMINATED"
        return super()._get_worker_state(worker, result)
