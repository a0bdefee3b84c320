"""What an agent records: the job's own events, and the events and metrics torch's agent has.

The job's events (`regrow.*`) go to the event sinks; the story, the status line and the log of
events are made of nothing else. Torch-style events go to the handler named in the worker spec; they
are in `_status_records`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from regrow.agent._status_records import StatusRecords
from regrow.agent._types import RunResult, WorkerState
from regrow.events import Event, EventSource
from regrow.utils import get_logger
from regrow.workers.errors._failure import first_of

if TYPE_CHECKING:
    import signal

    from regrow.agent._progress import Steps
    from regrow.workers import ProcessFailure

logger = get_logger(__name__)


class AgentRecords(StatusRecords):
    """The recording half of an agent; `SimpleElasticAgent` is the other."""

    _attempt: int
    _round: int
    _event_sinks: tuple[Callable[[Event], None], ...] = ()
    _job: Mapping[str, Any] = MappingProxyType({})  # more about the job than the spec says
    _attempt_open = False
    _telling: threading.Lock  # an attempt's end may be told by either of two threads, but once
    _starts = 0  # how often workers were started, for whatever reason
    _noticed: float | None = None  # monotonic: when the loop first heard of a failed worker
    _numbered = False  # whether `_round` is the rendezvous's number, the same on all nodes
    _shared = False  # whether all nodes of the job count its failures together
    _caused_elsewhere = False  # what ended the attempt was not this node's doing
    _failures_told: set[tuple[str, int | None, int]]  # of other nodes: host, rank, pid

    # --- the job's events

    def _emit(self, name: str, **metadata: Any) -> None:
        if not self._event_sinks:
            return
        common = {
            "monotonic": monotonic(),
            "run_id": self._worker_group.spec.rdzv_handler.get_run_id(),
            "attempt": self._attempt,
            "round": self._round,
            "host": socket.gethostname(),
        }
        event = Event(name, EventSource.AGENT, metadata=common | metadata)
        for sink in self._event_sinks:
            try:
                sink(event)
            except Exception:  # whoever only looks on may not cost the training
                logger.exception("an event sink raised on %s: %r; the job goes on", name, sink)

    def _emit_job_started(self) -> None:
        spec = self._worker_group.spec
        self._emit(
            "regrow.job.started",
            command=[spec.get_entrypoint_name(), *map(str, spec.args)],
            nproc_per_node=spec.local_world_size,
            max_restarts=spec.max_restarts,
            **self._job,
        )

    def _emit_attempt_started(self) -> None:
        self._attempt_open = True
        self._starts += 1
        workers = self._worker_group.workers
        self._emit(
            "regrow.attempt.started",
            restart_count=self._restart_count(),
            world_size=workers[0].world_size,
            ranks=[worker.global_rank for worker in workers],
            pids={str(worker.global_rank): worker.id for worker in workers},
        )

    def _begin_records(self) -> None:
        """Forget what was known of an older attempt."""
        self._noticed = None
        self._caused_elsewhere = False
        self._failures_told = set()

    def _was_caused_elsewhere(self) -> bool:
        """Whether the running attempt ended by another node's doing."""
        return self._caused_elsewhere

    def _end_attempt(self, result: RunResult) -> None:
        """Tell how the running attempt ended, once; its workers are gone by now."""
        with self._telling:
            was_open, self._attempt_open = self._attempt_open, False
        if not was_open:
            return
        root = _root_cause(result)
        for rank, failure in sorted(result.failures.items()):
            first = failure is root and not self._was_caused_elsewhere()
            self._emit_failure(rank, failure, root_cause=first)
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        last_steps = {
            str(ranks[local_rank]): {
                "first_step": steps.first_step,
                "first_monotonic": steps.first_monotonic,
                "last_step": steps.last_step,
                "last_monotonic": steps.last_monotonic,
            }
            for local_rank, steps in self._steps().items()
        }
        state = WorkerState.FAILED if result.failures else result.state
        self._emit(
            "regrow.attempt.ended",
            state=state.value,
            reason=root.summary if root is not None else state.value.lower(),
            last_steps=last_steps,
        )
        self._noticed = None

    def _steps(self) -> dict[int, Steps]:
        """How far each local rank of the running attempt came; empty where nobody reports."""
        return {}

    def _emit_failure(self, rank: int, failure: ProcessFailure, *, root_cause: bool) -> None:
        self._emit(
            "regrow.worker.failed",
            rank=rank,
            local_rank=failure.local_rank,
            pid=failure.pid,
            exit_code=failure.exitcode,
            signal=failure.signal_name() if failure.exitcode < 0 else None,
            message=failure.summary,
            traceback=failure.traceback,
            error_file=failure.error_file,
            failed_monotonic=failure.failed_monotonic,
            exited_monotonic=failure.exited_monotonic,
            detected_monotonic=self._noticed if self._noticed is not None else monotonic(),
            root_cause=root_cause,
        )

    def _emit_restarting(self, reason: str, delay_s: float) -> None:
        self._emit(
            "regrow.job.restarting",
            restart_count=self._restart_count(),
            restarts_left=self._remaining_restarts,
            delay_s=delay_s,
            reason=reason,
        )

    def _emit_job_finished(self, result: RunResult, start: float) -> None:
        failed = result.is_failed()
        root = _root_cause(result)
        self._finish(
            WorkerState.FAILED.value if failed else WorkerState.SUCCEEDED.value,
            start,
            exit_code=1 if failed else 0,
            reason=root.summary if root is not None else result.state.value.lower(),
        )

    def _emit_job_signaled(self, sigval: signal.Signals, start: float) -> None:
        self._finish(
            "SIGNALED",
            start,
            exit_code=128 + sigval,
            signal=sigval.name,
            reason=f"the launcher got {sigval.name}",
        )

    def _emit_job_error(self, error: BaseException, start: float) -> None:
        from regrow.rendezvous import RendezvousConnectionError

        reason = f"{type(error).__name__}: {error}"
        lost = isinstance(error, RendezvousConnectionError)
        if lost:
            self._emit("regrow.rendezvous.lost", why=str(error))
        self._finish("ERROR", start, exit_code=75 if lost else None, reason=reason)

    def _finish(self, state: str, start: float, *, signal: str | None = None, **more: Any) -> None:
        self._emit(
            "regrow.job.finished",
            state=state,
            signal=signal,
            duration_s=monotonic() - start,
            restarts=max(0, self._starts - 1),
            **more,
        )

    def _count_failures(self, failures: int) -> None:
        """Take over how many failures the job has had, on all nodes together."""
        self._failures = failures
        self._remaining_restarts = max(0, self._worker_group.spec.max_restarts - failures)


def _root_cause(result: RunResult) -> ProcessFailure | None:
    return result.failures[first_of(result.failures)] if result.failures else None
