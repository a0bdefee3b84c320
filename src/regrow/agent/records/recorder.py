"""`Recorder`: emits the events of the job.

The `regrow.*` events go to the event sinks. The story, the status line and the event log are made
from these events only. Events of torch go to the handler named in the worker spec; see
`torch_events`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from regrow.agent.api import RunResult, WorkerState
from regrow.events import Event, EventSource
from regrow.rendezvous import RendezvousConnectionError
from regrow.utils import (
    SignalInterrupt,
    get_logger,
    headline,
    signal_text,
    start_ticks,
    str_of,
)
from regrow.workers.errors.failures import first_of

if TYPE_CHECKING:
    import signal

    from regrow.agent.job import Job
    from regrow.rendezvous import Departed
    from regrow.workers import ProcessFailure

logger = get_logger(__name__)


class Recorder:
    """Emits the events of one agent's job; thread-safe.

    Args:
        job: what the parts of the agent share.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.sinks: tuple[Callable[[Event], None], ...] = ()
        """Functions that are called with each event, in the thread that emits it.

        Several threads may call one at the same time. A lock here would let a sink that blocks, on
        a terminal for example, delay the thread that handles signals.
        """
        self.launch_fields: Mapping[str, Any] = {}
        """Further fields of `regrow.job.started` that are not in the spec."""
        self.further_fields: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] | None = None
        """Returns further fields of an event, from its name and fields (`--chaos`)."""
        self.noticed: float | None = None
        """Monotonic seconds at which the loop first noticed a failed worker."""
        # Two threads may report the end of an attempt; only the first report counts.
        self._lock = threading.Lock()
        self._attempt_open = False
        self._starts = 0

    def emit(self, name: str, **metadata: Any) -> None:
        """Emit an event; an exception of a sink is logged and has no other effect."""
        if not self.sinks:
            return
        common = {
            "monotonic": monotonic(),
            "run_id": self._job.group.spec.rdzv_handler.get_run_id(),
            "attempt": self._job.attempt,
            "round": self._job.round,
            "host": socket.gethostname(),
        }
        if self.further_fields is not None:
            metadata |= self.further_fields(name, metadata)
        # All sinks show one time of day: the story on the terminal is that of the event log.
        event = Event(name, EventSource.AGENT, round(time() * 1000), common | metadata)
        for sink in self.sinks:
            try:
                sink(event)
            except SignalInterrupt:
                raise
            except Exception:  # a sink is an observer and must not stop the training
                logger.exception(
                    "the event sink %r raised an exception for %s; the job continues", sink, name
                )

    # --- the job

    def job_started(self) -> None:
        """Emit `regrow.job.started`."""
        spec = self._job.group.spec
        self.emit(
            "regrow.job.started",
            command=[spec.get_entrypoint_name(), *map(str, spec.args)],
            nproc_per_node=spec.local_world_size,
            max_restarts=spec.max_restarts,
            agent={"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
            **self.launch_fields,
        )

    def restarting(self, reason: str, delay_s: float) -> None:
        """Emit `regrow.job.restarting`."""
        self.emit(
            "regrow.job.restarting",
            restart_count=self._job.restart_count,
            restarts_left=self._job.remaining_restarts,
            delay_s=delay_s,
            reason=reason,
        )

    def job_finished(self, result: RunResult, start: float) -> None:
        """Emit the end of a job with a result; `start` is in monotonic seconds."""
        failed = result.is_failed()
        root = _root_cause(result)
        self._finish(
            WorkerState.FAILED.value if failed else WorkerState.SUCCEEDED.value,
            start,
            exit_code=1 if failed else 0,
            reason=root.summary if root is not None else result.state.value.lower(),
        )

    def job_stopped_early(self, why: str, start: float, *, stood_by: bool = False) -> None:
        """Emit the end of a job whose ranks have all stopped early at the same step.

        Args:
            why: who asked for it.
            start: monotonic seconds.
            stood_by: whether this node had no ranks.
        """
        stopped = f"all ranks stopped at the same step, by {why}"
        reason = f"the job was stopped by {why}, and this host stood by" if stood_by else stopped
        reason = f"{reason}; run it again to go on"
        self._finish("STOPPED", start, exit_code=85, reason=reason)

    def job_signaled(self, sigval: signal.Signals, start: float, asked_by: str) -> None:
        """Emit the end of a job that a signal ended.

        Args:
            sigval: the signal.
            start: monotonic seconds.
            asked_by: who asked the whole job to stop; "" if nobody did.
        """
        self._finish(
            "SIGNALED",
            start,
            exit_code=128 + sigval,
            signal=sigval.name,
            asked_by=asked_by or None,
            reason=f"asked by {asked_by}" if asked_by else f"the agent got {sigval.name}",
        )

    def job_error(self, error: BaseException, start: float) -> None:
        """Emit the end of a job that an agent's error ended; `start` is in monotonic seconds."""
        reason = headline(error)
        lost = isinstance(error, RendezvousConnectionError)
        if lost:
            self.emit("regrow.rendezvous.lost", why=str_of(error))
        self._finish("ERROR", start, exit_code=75 if lost else None, reason=reason)

    def _finish(self, state: str, start: float, *, signal: str | None = None, **more: Any) -> None:
        self.emit(
            "regrow.job.finished",
            state=state,
            signal=signal,
            duration_s=monotonic() - start,
            restarts=max(0, self._starts - 1),
            restarts_left=self._job.remaining_restarts,
            **more,
        )

    # --- an attempt

    def departed(self, round: int, nodes: Sequence[Departed]) -> None:
        """Emit which nodes of a round did not join the next round."""
        if nodes:
            self.emit(
                "regrow.round.departed",
                attempt=round - 1,
                ended_round=round,
                nodes=[{"node": node.id, "rank": node.rank, "why": node.why} for node in nodes],
            )

    def attempt_started(
        self,
        sources: Mapping[int, str],
        kept: Sequence[int] = (),
        page: Mapping[str, int | str] | None = None,
        logs: Mapping[int, str] | None = None,
    ) -> None:
        """Emit `regrow.attempt.started`; the workers are running.

        Args:
            sources: from what each rank has started: `exec`, `template` or `standby`.
            kept: ranks of the workers that went on in the processes of the attempt before.
            page: where a view finds the workers' page of steps (`WorkerReports.page`).
            logs: paths of the files that have the workers' output (`LocalWorkers.log_files`).
        """
        self._attempt_open = True
        self._starts += 1
        workers = self._job.group.workers
        self.emit(
            "regrow.attempt.started",
            restart_count=self._job.restart_count,
            world_size=workers[0].world_size,
            ranks=[worker.global_rank for worker in workers],
            pids={str(worker.global_rank): worker.id for worker in workers},
            forked=sorted(rank for rank, source in sources.items() if source == "template"),
            stood_by=sorted(rank for rank, source in sources.items() if source == "standby"),
            kept=list(kept),
            page=page,
            logs={str(rank): path for rank, path in (logs or {}).items()},
        )

    def attempt_ended(
        self,
        result: RunResult,
        last_steps: Mapping[str, Any],
        accounts: Mapping[str, Any],
        wrappers: Mapping[int, Mapping[str, Any]],
        ends: Mapping[str, Any],
    ) -> None:
        """Emit the failures and the end of the current attempt, once.

        Args:
            result: result of the attempt; its workers have ended.
            last_steps: the first and last steps of the workers, by global rank.
            accounts: the workers' accounts of their time, by global rank.
            wrappers: further fields of a failure, by global rank: why the worker's in-process
                wrapper could not handle it.
            ends: further fields of the event: how workers ended (`LocalWorkers.ends`).
        """
        with self._lock:
            was_open, self._attempt_open = self._attempt_open, False
        if not was_open:
            return
        root = _root_cause(result)
        elsewhere = self._job.caused_elsewhere or self._job.round_is_over
        for rank, failure in sorted(result.failures.items()):
            is_root = failure is root and not elsewhere
            self._failed(rank, failure, root_cause=is_root, **wrappers.get(rank, {}))
        state = WorkerState.FAILED if result.failures else result.state
        self.emit(
            "regrow.attempt.ended",
            state=state.value,
            reason=root.summary if root is not None else state.value.lower(),
            last_steps=last_steps,
            accounts=accounts,
            **ends,
        )
        self.noticed = None

    def _failed(self, rank: int, failure: ProcessFailure, **more: Any) -> None:
        missed = failure.heartbeat
        if missed is not None:
            self.emit(
                "regrow.heartbeat.failed",
                rank=rank,
                local_rank=failure.local_rank,
                pid=failure.pid,
                ranks=sorted(failure.blames),
                **{name: missed.get(name) for name in ("kind", "count", "beat", "seconds")},
                message=failure.summary,
                failed_monotonic=failure.failed_monotonic,
            )
        self.emit(
            "regrow.worker.failed",
            **failure_fields(rank, failure),
            failed_monotonic=failure.failed_monotonic,
            exited_monotonic=failure.exited_monotonic,
            noticed_late=failure.noticed_late,
            detected_monotonic=self.noticed if self.noticed is not None else monotonic(),
            **more,
        )


def _root_cause(result: RunResult) -> ProcessFailure | None:
    return result.failures[first_of(result.failures)] if result.failures else None


def failure_fields(rank: int | None, failure: ProcessFailure) -> dict[str, Any]:
    """Return the fields of `regrow.worker.failed` that do not depend on the worker's node."""
    return {
        "rank": rank,
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "exit_code": failure.exitcode,
        "signal": signal_text(-failure.exitcode) if failure.exitcode < 0 else None,
        "message": failure.summary,
        "traceback": failure.traceback,
        "error_file": failure.error_file,
        "killed_with": failure.killed_with or None,
        "stopped": failure.was_stopped,
    }
