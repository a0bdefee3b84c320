"""`Peers`: reports to and from the other nodes; compares charged failures with --max-restarts.

The rendezvous reports changes on other nodes. Each change becomes an event of the job, for the
story, and an event of `decide`, for the decision.

This node reports two things. It reports a failure of its workers while it still stops the rest. It
announces that it is about to end the round before it stops its workers. Without the announcement,
the workers of the other nodes would fail in a collective that this node's workers have left. The
job would then be charged for a planned restart.

A rendezvous handler of a plug-in may offer none of this. The agent then decides alone, as torch's
agent does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from regrow.agent.decisions import events
from regrow.agent.decisions.decide import WORKER_FAILURE
from regrow.agent.records.recorder import failure_fields
from regrow.agent.records.shared_failure import decode, encode
from regrow.rendezvous import RendezvousError
from regrow.utils import get_logger, headline, host_of
from regrow.workers import ProcessFailure

if TYPE_CHECKING:
    from regrow.agent.job import Job
    from regrow.rendezvous import Judged, NodesWaiting, RendezvousClosedError, RoundClosed

logger = get_logger(__name__)

#: Rank of a failure of the agent itself, and not of a worker.
NO_RANK = -1


class Peers:
    """The other nodes of the job, reached through the rendezvous.

    The features add to this node's report, and receive the reports of other nodes.

    Args:
        job: what the parts of the agent share.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reported = ""  # this node's report of a failure in the current attempt
        self._closed_with = ""  # the report with which this node closed the rendezvous
        self._closed_as: tuple[str, str, bool] | None = None  # the latest recorded closing
        # Recorded failures of other nodes: host, rank, pid.
        self._recorded: set[tuple[str, int | None, int]] = set()
        self._judged = 0  # the latest round with a recorded verdict
        self.job_failure: tuple[int, ProcessFailure] | None = None
        """Failure of another node that made the job fail, with its rank."""
        self.failure_elsewhere: tuple[int, ProcessFailure] | None = None
        """The latest failure of another node in the current attempt, with its rank."""

    def begin_run(self) -> None:
        """Clear the data of the last run."""
        self._closed_with, self._closed_as, self.job_failure = "", None, None
        self._judged = 0

    def begin_attempt(self) -> None:
        """Clear the data of the last attempt."""
        self._reported, self._recorded, self.failure_elsewhere = "", set(), None

    # --- reports of other nodes

    def follow(
        self, round_ended: Callable[[], None], renewed: Callable[[float], None]
    ) -> Callable[[], None]:
        """Subscribe to the rendezvous: its reports arrive in the inbox.

        Args:
            round_ended: called at once at the end of a round, on a thread of the rendezvous.
            renewed: called on such a thread with the end of the lease, in monotonic seconds: until
                then the workers may run.

        Returns:
            A function that ends the reports.
        """

        def receive(report: object) -> None:
            from regrow.rendezvous import RoundEnded

            if isinstance(report, RoundEnded):
                self._job.over = max(self._job.over, report.round)
                round_ended()
            self._job.post(partial(self.on_report, report))

        unsubscribe = self._job.handler.subscribe(receive)
        release_lease = self._job.handler.keep_lease(renewed)

        def end() -> None:
            unsubscribe()
            release_lease()

        return end

    def on_report(self, report: object) -> events.Event | None:
        """Record a report from the rendezvous; return the event for the loop, if any."""
        from regrow.rendezvous import (
            Judged,
            LeavingAnnounced,
            NodesWaiting,
            RestartSpent,
            RoundClosed,
            RoundEnded,
            ServerRestarted,
            ServersChanged,
        )

        if self._job.leaving:
            return None
        now, emit = monotonic(), self._job.recorder.emit
        match report:
            case ServerRestarted(how, pid, after, why):
                emit(
                    "regrow.rendezvous.server_ended",
                    pid=pid,
                    how=how,
                    restarted_after_s=None if why else after,
                    reason=why or None,
                )
                return None
            case ServersChanged(epoch, server, successors, may_lose):
                emit(
                    "regrow.rendezvous.servers",
                    epoch=epoch,
                    server=server,
                    successors=list(successors),
                    may_lose=may_lose,
                )
                return None
            case LeavingAnnounced(round, node, why):
                emit("regrow.round.leaving", attempt=round - 1, node=node, why=why)
                logger.warning("%s; the round goes on until its workers have ended", report)
                for feature in self._job.features:
                    feature.on_leaving()
                return None
            case RoundEnded():
                failed = bool(report.report)
                # A node that leaves after an early stop has finished its work.
                if failed or not self._job.stopping or report.lost:
                    emit(
                        "regrow.round.ended",
                        attempt=report.round - 1,
                        ended_round=report.round,
                        node=report.id,
                        why=report.why,
                        failed=failed,
                        lost=report.lost,
                    )
                if failed and report.report != self._reported:
                    self._record_failure(report.report)
                return events.RoundOver(
                    report.round,
                    str(report),
                    now,
                    full_grace=report.full_grace,
                    failed=failed,
                    lost=report.lost,
                    keep=report.keep,
                )
            case Judged():
                self._record_verdict(report)
                ends = self._is_final(report)
                return (events.JobEnds if ends else events.JobContinues)(report.round)
            case RestartSpent(failures=failures):
                if self._job.shared and failures > (self._job.failures or 0):
                    self._job.count_failures(failures)
                return None
            case NodesWaiting():
                full = self._would_be_full(report)
                hosts = tuple(str(host_of(id)) for id in report.first)
                return events.JoinRequested(report.round, report.waiting, full, now, hosts)
            case RoundClosed():
                return events.Closed(failed=self.on_close(report))
        return events.MembershipChanged(str(report), now)

    def _record_verdict(self, judged: Judged) -> None:
        if judged.round > self._judged:
            self._judged = judged.round
            self._job.recorder.emit(
                "regrow.round.judged",
                attempt=judged.round - 1,
                ended_round=judged.round,
                charged=judged.charged,
                failures=judged.failures,
                node=judged.cause.id,
                why=judged.cause.why,
                lost=judged.cause.lost,
            )
        if judged.round == self._job.round and judged.cause.report != self._reported:
            self._job.caused_elsewhere = True

    def on_close(self, closed: RoundClosed | RendezvousClosedError) -> bool:
        """Record that no further round forms; return whether the job has failed.

        Args:
            closed: the report, or the error of a refused call.
        """
        from regrow.rendezvous import RoundClosed

        node = closed.id if isinstance(closed, RoundClosed) else closed.node
        report, known = closed.report, (node, closed.why, bool(closed.report))
        if node and known != self._closed_as:
            self._closed_as = known
            self._job.recorder.emit(
                "regrow.rendezvous.closed",
                node=node,
                why=closed.why,
                failed=bool(report),
                lost=isinstance(closed, RoundClosed) and closed.lost,
            )
        mine = report in (self._closed_with, self._reported)
        if report and not mine and self.job_failure is None:
            self.job_failure = self._record_failure(report)
        return bool(report) or self.job_failure is not None

    def _record_failure(self, report: str) -> tuple[int, ProcessFailure]:
        for feature in self._job.features:
            feature.on_report(report)
        rank, failure = decode(report)
        key = (failure.host, rank, failure.pid)
        if key not in self._recorded:
            self._recorded.add(key)
            known = failure_fields(rank, failure) | {
                "host": failure.host,
                "pid": failure.pid or None,
                "told_monotonic": monotonic(),
                "told_host": socket.gethostname(),
            }
            self._job.recorder.emit("regrow.worker.failed", **known, root_cause=True)
        self.failure_elsewhere = NO_RANK if rank is None else rank, failure
        return self.failure_elsewhere

    def _would_be_full(self, report: NodesWaiting) -> bool:
        most, here = self._job.handler.max_nodes, self._job.group.group_world_size
        return most is not None and here is not None and here + report.waiting >= most

    # --- reports of this node

    def report_failure(self, failed: tuple[int, ProcessFailure] | None) -> Judged | None:
        """Report the failure of this node's workers; block until all nodes have a verdict.

        Args:
            failed: the first failure, with its global rank.
        """
        self._reported = self._report_of(failed)
        return self._job.handler.report_failure(self._reported)

    def verdict(self, judged: Judged | None) -> events.Verdict:
        """Compare the failures of the job with --max-restarts; return the event for the loop."""
        now = monotonic()
        if judged is None:
            self._job.caused_elsewhere = True
            return events.Verdict(False, False, False, "the round had already ended", now)
        self._job.count_failures(judged.failures)
        mine = judged.charged and judged.cause.report == self._reported
        if not mine:
            self._record_verdict(judged)
            if judged.cause.report:
                self._record_failure(judged.cause.report)
        reason = WORKER_FAILURE if judged.charged else str(judged.cause)
        return events.Verdict(judged.charged, self._is_final(judged), mine, reason, now)

    def _is_final(self, judged: Judged) -> bool:
        """Return whether the judged failure ends the job."""
        return judged.charged and judged.failures > self._job.group.spec.max_restarts

    def _report_of(self, failed: tuple[int, ProcessFailure] | None) -> str:
        rank, failure = failed or (NO_RANK, ProcessFailure(NO_RANK, 0, 1, ""))
        found = {name: v for each in self._job.features for name, v in each.evidence().items()}
        return encode(rank if rank != NO_RANK else None, failure, socket.gethostname(), found)

    def fail(self, failed: tuple[int, ProcessFailure] | None, why: str) -> None:
        """Close the rendezvous for all nodes, because the job has failed here for good.

        Args:
            failed: the first failure, with its global rank.
            why: reason of this node for leaving the round.
        """
        handler, self._closed_with = self._job.handler, self._report_of(failed)
        try:
            if not self._reported:  # nodes in the round get the failure only after its end
                handler.leaving(why, full_grace=True)
            handler.fail(self._closed_with)
        except RendezvousError as error:
            logger.warning(
                "the agent cannot notify the other nodes that the job has failed: %s", error
            )

    def fail_by_error(self, error: BaseException) -> None:
        """Close the rendezvous because this agent failed; the caller raises the error."""
        if not self._job.shared or isinstance(error, RendezvousError):
            return
        failure = ProcessFailure(NO_RANK, 0, 1, "")
        failure.message = {"message": f"the agent failed: {headline(error)}"}
        self.fail((NO_RANK, failure), "its agent has failed")
