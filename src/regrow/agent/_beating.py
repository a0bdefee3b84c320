"""Workers that beat: what an agent adds to their heartbeats, and what it makes of their ends.

The beating is the workers' own affair (`regrow.heartbeat`). The agent's parts are that they begin
(an environment variable), that one which hangs is looked at and killed shortly before the others
notice (a countdown timer that each of its beats arms anew), that workers which are being stopped
are left their grace though others have gone (a byte that they share), and the account.

**Whose fault.** When one worker is missing, all others end, and say so in their error files with
the rank that is to blame. If that one has failed as well, it is the root cause, whoever ended first
(`first_of`). If it has not, and runs here, it was still there when the group was stopped, but did
not beat: then it is made a failure, so that it is named and not the one which noticed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from regrow.agent._comparing import ComparingAgent
from regrow.utils import get_logger
from regrow.workers.errors._failure import first_of

if TYPE_CHECKING:
    from regrow.agent import _words as words
    from regrow.agent._hang import Hang
    from regrow.agent._progress import ProgressBoard
    from regrow.workers import PContext, ProcessFailure, WorkerChange

logger = get_logger(__name__)


class _LookForSilent(NamedTuple):
    """The workers of an attempt have had the time to begin to beat."""

    context: PContext


class BeatingAgent(ComparingAgent):
    """An agent whose workers beat, if that is asked for."""

    _heartbeat: float | None
    _board: ProgressBoard | None
    _pcontext: PContext | None
    _look_out: threading.Timer | None = None  # for workers that do not begin to beat

    def _beating_bound(self) -> float | None:
        """Seconds from a worker's last beat to the end of all; None without heartbeats."""
        if self._heartbeat is None:
            return None
        from regrow.heartbeat._terms import KILL_S, bound

        return bound(self._heartbeat) + KILL_S

    def _watch(self, context: PContext) -> None:
        super()._watch(context)
        if self._heartbeat is None:
            return
        from regrow.agent._silent import LATEST_S
        from regrow.heartbeat._terms import bound

        self._stop_looking_out()
        after = min(bound(self._heartbeat), LATEST_S)
        look = _LookForSilent(context)
        self._look_out = threading.Timer(after, self._inbox.put, (look,))
        self._look_out.daemon = True
        self._look_out.start()

    def _stop_watchdog(self) -> None:
        self._stop_looking_out()
        super()._stop_watchdog()

    def _stop_looking_out(self) -> None:
        if self._look_out is not None:
            self._look_out.cancel()
            self._look_out = None

    def _heed(self, message: object) -> words.Event | None:
        if isinstance(message, _LookForSilent):
            self._name_silent(message.context)
            return None
        return super()._heed(message)

    def _name_silent(self, context: PContext) -> None:
        """Say which workers of the running attempt do not beat."""
        if context is not self._pcontext:
            return
        from regrow.agent._silent import silent
        from regrow.heartbeat._failure import Ranks

        running = [context.envs[each] for each in context.pids() if context.ended(each) is None]
        ranks = Ranks.of(silent(running))
        if ranks.total:
            logger.warning(
                "no heartbeat yet of %s, though --heartbeat asks for it, so nobody is missed: a "
                "worker begins to beat when it imports regrow, and all wait for the last one",
                ranks,
            )

    def _spare(self) -> None:
        """Tell the workers that they are being stopped."""
        board = self._board  # which another thread may be taking away
        if board is not None:
            board.stop()

    def _take_change(self, change: WorkerChange) -> None:
        """Called by the process context, on a thread of its own."""
        if change.status != 0 and change.kind in ("exited", "guardian_lost"):
            self._spare()  # the context stops the others
        self._inbox.put(change)

    def _heed_hang(self, hang: Hang) -> None:
        from regrow.heartbeat._terms import STALLED

        scope = hang.request.scope_id
        if not scope.startswith(STALLED):
            super()._heed_hang(hang)
            return
        from regrow.agent import _hang
        from regrow.timer._frames import where

        told = scope.removeprefix(STALLED)
        event = _hang.event(hang)
        kept = ("attempt", "rank", "local_rank", "pid", "stood", "stacks")
        self._emit("regrow.heartbeat.stalled", **{k: event[k] for k in kept}, message=told)
        stacks = f"; stacks in {hang.dump.path}" if hang.dump.path else ""
        logger.warning("%s; pid %s stands %s%s", told, hang.pid, where(hang.dump), stacks)

    def _with_blamed(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Failures by global rank, and that of a worker here which they say is to blame."""
        root = first_of(failures)
        blames, context = failures[root].blames - failures.keys(), self._pcontext
        for worker in self._worker_group.workers:
            if context is None or worker.global_rank not in blames:
                continue
            blamed = context.ended(worker.local_rank)
            if blamed is not None:
                blamed.message = f"rank {root} ended of it: {failures[root].summary}"
                blamed.failed_monotonic = failures[root].failed_monotonic
                failures = failures | {worker.global_rank: blamed}
        return failures

    def _emit_failure(self, rank: int, failure: ProcessFailure, *, root_cause: bool) -> None:
        told = failure.heartbeat
        if told is not None:
            self._emit(
                "regrow.heartbeat.failed",
                rank=rank,
                local_rank=failure.local_rank,
                pid=failure.pid,
                kind=told.get("kind"),
                ranks=sorted(failure.blames),
                count=told.get("count"),
                beat=told.get("beat"),
                seconds=told.get("seconds"),
                message=failure.summary,
                failed_monotonic=failure.failed_monotonic,
            )
        super()._emit_failure(rank, failure, root_cause=root_cause)
