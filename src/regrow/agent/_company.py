"""What an agent does because it is not alone: news of the other nodes, and news for them.

The rendezvous tells what happened elsewhere; each such thing becomes an event of the job, for the
story, and an event of `_decide`, for the decision. In the other direction go the failures of this
node's workers, before all of them are stopped, and that this node is about to end the round, before
its workers are: else those of the other nodes would fail in a collective that these have left, and
the job would be charged with a failure that is none.

A handler that is not regrow's may lack any of this; then the agent decides for itself, as torch's
does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent import _words as words
from regrow.agent._attempt import AttemptSteps
from regrow.agent._inbox import Inbox
from regrow.agent._types import RunResult, WorkerState
from regrow.utils import get_logger
from regrow.workers.errors._failure import first_of

if TYPE_CHECKING:
    from regrow.agent._standing import Standing
    from regrow.rendezvous._news import Judged, NodesWaiting, RoundClosed, RoundEnded
    from regrow.workers import ProcessFailure

logger = get_logger(__name__)

#: The rank of a failure that is no worker's, but its agent's.
NO_RANK = -1


class News:
    """Something that the rendezvous told, in the inbox."""

    __slots__ = ("what",)

    def __init__(self, what: object) -> None:
        self.what = what


class Company(AttemptSteps):
    """The part of an agent that talks with the others, through its rendezvous handler."""

    _inbox: Inbox
    _pushes = False  # whether the handler tells of changes by itself
    _told = ""  # what this node has reported of the running attempt's failure
    _failed_with = ""  # the report with which this node has closed the rendezvous
    _job_failure: tuple[int, ProcessFailure] | None = None  # why the job failed, on another node

    def _begin_records(self) -> None:
        super()._begin_records()
        self._told = ""
        self._last_result = RunResult(WorkerState.INIT)

    # --- what the others tell

    def _follow(self) -> Callable[[], None]:
        """Let the handler tell what happens; returns a function that ends it."""
        handler = self._worker_group.spec.rdzv_handler
        endings: list[Callable[[], None]] = []
        subscribe = getattr(handler, "subscribe", None)
        self._pushes = subscribe is not None
        if subscribe is not None:
            endings.append(subscribe(self._take))
        keep_lease = getattr(handler, "keep_lease", None)
        if keep_lease is not None:
            endings.append(keep_lease(self._renew_lease))

        def end() -> None:
            for ending in endings:
                ending()

        return end

    def _take(self, news: object) -> None:
        """Called by the handler, on a thread of its own."""
        from regrow.rendezvous._news import RoundEnded

        if isinstance(news, RoundEnded):
            self._over = max(self._over, news.round)
            self._lease.wake()
        self._inbox.put(News(news))

    def _renew_lease(self, until: float) -> None:
        """Called by the handler: the workers may run until then, in monotonic seconds."""
        self._lease.renew(until)

    def _hear(self, news: object) -> words.Event | None:
        """Record what the rendezvous told; returns what it means to the loop."""
        from regrow.rendezvous._news import Judged, NodesWaiting, RoundClosed, RoundEnded

        now = monotonic()
        match news:
            case RoundEnded():
                self._hear_end(news)
                return words.RoundOver(news.round, str(news), now)
            case Judged():
                self._hear_verdict(news)
                return None
            case NodesWaiting():
                return words.Waiting(news.round, news.waiting, self._would_be_full(news), now)
            case RoundClosed():
                return words.Closed(failed=self._hear_close(news))
        return words.MembershipChanged(str(news), now)

    def _hear_end(self, ended: RoundEnded) -> None:
        self._emit(
            "regrow.round.ended",
            attempt=ended.round - 1,
            ended_round=ended.round,
            node=ended.id,
            why=ended.why,
            failed=bool(ended.report),
        )
        if ended.report and ended.report != self._told:
            self._emit_failure_elsewhere(ended.report)

    def _was_caused_elsewhere(self) -> bool:
        return self._caused_elsewhere or (self._numbered and self._over >= self._round)

    def _hear_verdict(self, judged: Judged) -> None:
        self._emit(
            "regrow.round.judged",
            attempt=judged.round - 1,
            ended_round=judged.round,
            charged=judged.charged,
            failures=judged.failures,
            node=judged.cause.id,
            why=judged.cause.why,
        )
        if judged.round == self._round and judged.cause.report != self._told:
            self._caused_elsewhere = True

    def _hear_close(self, closed: RoundClosed) -> bool:
        self._emit(
            "regrow.rendezvous.closed", node=closed.id, why=closed.why, failed=bool(closed.report)
        )
        return self._learn_end(closed.report)

    def _learn_end(self, report: str) -> bool:
        """Note with what report the rendezvous was closed; returns whether the job has failed."""
        if report and report != self._failed_with and self._job_failure is None:
            self._job_failure = self._emit_failure_elsewhere(report)
        return bool(report) or self._job_failure is not None

    def _emit_failure_elsewhere(self, report: str) -> tuple[int, ProcessFailure]:
        from regrow.agent._report import decode

        rank, failure = decode(report)
        key = (failure.host, rank, failure.pid)
        if key not in self._failures_told:
            self._failures_told.add(key)
            self._emit(
                "regrow.worker.failed",
                host=failure.host,
                rank=rank,
                local_rank=failure.local_rank,
                pid=failure.pid or None,
                exit_code=failure.exitcode,
                signal=failure.signal_name() if failure.exitcode < 0 else None,
                message=failure.summary,
                traceback=failure.traceback,
                error_file=failure.error_file,
                told_monotonic=monotonic(),
                told_host=socket.gethostname(),
                root_cause=True,
            )
        return NO_RANK if rank is None else rank, failure

    def _would_be_full(self, news: NodesWaiting) -> bool:
        settings = getattr(self._worker_group.spec.rdzv_handler, "settings", None)
        most, here = getattr(settings, "max_nodes", None), self._worker_group.group_world_size
        return isinstance(most, int) and here is not None and here + news.waiting >= most

    # --- what the others are told

    def _first_failure(self) -> tuple[int, ProcessFailure] | None:
        """The failure that is known to be the first so far, with its global rank."""
        failures = self._last_result.failures
        if not failures:
            return None
        rank = first_of(failures)
        return rank, failures[rank]

    def _tell_failure(self) -> Judged | None:
        """Tell all nodes that this node's workers have failed; block until that is judged."""
        self._told = self._report_of(self._first_failure())
        handler: Any = self._worker_group.spec.rdzv_handler
        judged: Judged | None = handler.report_failure(self._told)
        return judged

    def _report_of(self, failed: tuple[int, ProcessFailure] | None) -> str:
        from regrow.agent._report import encode
        from regrow.workers import ProcessFailure

        rank, failure = failed or (NO_RANK, ProcessFailure(NO_RANK, 0, 1, ""))
        known = rank if rank != NO_RANK else None
        return encode(known, failure, socket.gethostname(), self._standing())

    def _standing(self) -> Standing | None:
        """Where this node's workers stood when one of the running attempt hung; None: not asked."""
        return None

    def _verdict(self, judged: Judged | None) -> words.Verdict:
        """What a judgement means to the loop; keeps the count of failures."""
        now = monotonic()
        if judged is None:
            self._caused_elsewhere = True
            return words.Verdict(False, False, False, "its round was over already", now)
        self._count_failures(judged.failures)
        mine = judged.charged and judged.cause.report == self._told
        if not mine:
            self._hear_verdict(judged)
            if judged.cause.report:
                self._emit_failure_elsewhere(judged.cause.report)
        final = judged.failures > self._worker_group.spec.max_restarts
        reason = "worker failure" if judged.charged else str(judged.cause)
        return words.Verdict(judged.charged, final, mine, reason, now)

    def _fail_for_all(self) -> None:
        """Close the rendezvous, as this node's workers have failed for good."""
        self._close_with(self._report_of(self._first_failure()), "its workers have failed for good")

    def _fail_by_error(self, error: BaseException) -> None:
        """Close the rendezvous, as this agent cannot go on; the error is on its way up."""
        from regrow.rendezvous import RendezvousError
        from regrow.workers import ProcessFailure

        if not self._shared or isinstance(error, RendezvousError):
            return
        failure = ProcessFailure(NO_RANK, 0, 1, "")
        failure.message = {"message": f"the agent failed: {type(error).__name__}: {error}"}
        self._close_with(self._report_of((NO_RANK, failure)), "its agent has failed")

    def _close_with(self, report: str, why: str) -> None:
        from regrow.rendezvous import RendezvousError

        handler: Any = self._worker_group.spec.rdzv_handler
        self._failed_with = report
        try:
            if not self._told:  # who has a seat in a round hears of nothing before that is over
                self._announce(why)
            handler.fail(report)
        except RendezvousError as error:
            logger.warning("the other nodes could not be told that this job has failed: %s", error)

    def _announce(self, why: str) -> None:
        """Tell all that this node is about to stop its workers."""
        leaving = getattr(self._worker_group.spec.rdzv_handler, "leaving", None)
        if leaving is not None:
            leaving(why)

    def _give_seat_back(self, why: str) -> None:
        leave = getattr(self._worker_group.spec.rdzv_handler, "leave", None)
        if leave is not None:
            leave(why)

    # --- the end

    def _stop_for_good(self, tell: bool) -> None:
        """Stop the workers of a job that has failed."""
        if tell:
            self._fail_for_all()
        self._call_stop_workers(self._worker_group)
        if not self._last_result.failures and (first := self._first_failure()) is not None:
            # They had begun to fail when it was learnt that the job is over.
            self._last_result = RunResult(WorkerState.FAILED, failures=dict([first]))

    def _conclude(self, final: WorkerState) -> RunResult:
        """The result of the run; where the job has failed on another node, with that failure."""
        self._worker_group.state = final
        self._last_result.state = final
        elsewhere = self._job_failure if final is WorkerState.FAILED else None
        if elsewhere is None:
            self._end_attempt(self._last_result)
            return self._last_result
        if not self._last_result.failures:
            self._last_result.state = WorkerState.STOPPED
        self._end_attempt(self._last_result)
        rank, failure = elsewhere
        self._last_result = RunResult(final, failures={rank: failure})
        return self._last_result
