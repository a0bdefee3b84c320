"""An agent's guardian: the lease under which workers live, and what befalls them without an end.

The guardian kills the workers of a round whose lease is over, whether the agent runs or not, and
tells of it. It tells of workers that somebody has stopped (SIGSTOP, a debugger), too: they are
neither dead nor replaced, and their user may not know why the job stands still.
"""

from __future__ import annotations

import signal
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from regrow.agent import _words as words
from regrow.agent._restarting import RestartingAgent
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.workers import WorkerChange
    from regrow.workers._guardian_events import Lapsed

logger = get_logger(__name__)


class _LeaseOver(NamedTuple):
    """The guardian has killed the workers of a round."""

    round: int
    lapsed: Lapsed


class GuardedAgent(RestartingAgent):
    """An agent whose workers a guardian watches."""

    def _heed(self, message: object) -> words.Event | None:
        if isinstance(message, _LeaseOver):
            return self._heed_lapse(message.round, message.lapsed)
        return super()._heed(message)

    def _leave(self, death_sig: signal.Signals) -> None:
        guardian = self._guardian
        if guardian is not None:
            guardian.wake()  # a start that is under way waits for it, and this for that
        super()._leave(death_sig)

    def _renew_lease(self, until: float) -> None:
        guardian = self._guardian  # which another thread may be taking away
        if guardian is not None:
            guardian.renew(until)
        super()._renew_lease(until)

    def _take_lapse(self, lapsed: Lapsed) -> None:
        """Called by the guardian's handle, on a thread of its own."""
        # Those who were to be started are of the attempt that is being started.
        self._inbox.put(_LeaseOver(self._attempt + 1, lapsed))

    def _heed_lapse(self, round: int, lapsed: Lapsed) -> words.Event:
        killed = lapsed.killed
        self._emit(
            "regrow.lease.over",
            attempt=round - 1,
            workers=killed,
            lapsed_monotonic=lapsed.monotonic,
        )
        number = f"{killed} workers were" if killed != 1 else "worker was"
        why = f"its lease was over, and its {number} killed"
        return words.LeaseOver(round, why, monotonic())

    def _heed_suspension(self, change: WorkerChange) -> None:
        """A worker was suspended, or goes on."""
        worker = self._worker_group.workers[change.local_rank]
        self._emit(
            f"regrow.worker.{change.kind}",
            rank=worker.global_rank,
            local_rank=change.local_rank,
            pid=change.pid,
            signal=signal.Signals(change.status).name if change.status else None,
        )
        if change.kind == "suspended":
            waits = "the job waits for it" if self._heartbeat is None else "it does not beat"
            logger.warning(
                "rank %s (pid %s) was stopped by %s; %s: kill -CONT %s",
                worker.global_rank,
                change.pid,
                signal.Signals(change.status).name,
                waits,
                change.pid,
            )

    def _kill_now(self) -> None:
        # Not by way of the context: there is none yet while workers are being started.
        guardian = self._guardian  # which another thread may be taking away
        if guardian is not None:
            guardian.stop(None, signal.SIGKILL, 0)
