"""The events and metrics of torch's agent, for those who read them; see `_records` for our own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from regrow import events
from regrow.agent._types import RunResult, Worker, WorkerGroup, WorkerState
from regrow.events import Event, EventSource
from regrow.metrics import put_metric
from regrow.utils import to_json

if TYPE_CHECKING:
    from regrow.timer._file_request import FileTimerRequest


class StatusRecords:
    """An agent's events and metrics as torch names them."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _total_execution_time: int
    _failures: int | None = None  # of the job so far, where all nodes count them together

    def _restart_count(self) -> int:
        """How many failures were restarted from."""
        if self._failures is not None:
            return self._failures
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    # --- torch's events

    def _record(self, event: Event) -> None:
        # Looked up on the module, where users replace it.
        events.record(event, self._worker_group.spec.event_log_handler)

    def get_event_failed(self) -> Event:
        """The event for an agent that ended by the exception being handled."""
        import traceback

        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """The event for an agent whose loop returned, whatever became of its workers."""
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            self._record(
                self._construct_event(
                    self._get_worker_state(worker, result),
                    EventSource.WORKER,
                    worker,
                    raw_error=to_json(failure.error_file_data) if failure else None,
                    exit_code=failure.exitcode if failure else None,
                    worker_pid=failure.pid if failure else None,
                )
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        rank = worker.global_rank
        if rank in result.failures or rank in result.return_values:
            return result.state.value
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
            return "TERMINATED"
        raise ValueError(f"rank {rank} is in neither the failures nor the return values")

    def _record_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """Record what the timer server did, by torch's names ("kill worker process")."""
        about = {"watchdog_event": name}
        if request is not None:
            about["worker_pid"] = str(request.worker_pid)
            about["scope_id"] = request.scope_id
            about["expiration_time"] = str(request.expiration_time)
            about["signal"] = str(request.signal)
        event = self._construct_event("RUNNING", EventSource.AGENT)
        event.name, event.metadata["metadata"] = name, json.dumps(about)
        self._record(event)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event `state` with the milliseconds its body took."""
        start = perf_counter()
        try:
            yield
        finally:
            duration_ms = (perf_counter() - start) * 1000
            self._record(self._construct_event(state, EventSource.AGENT, duration_ms=duration_ms))

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group = self._worker_group
        spec = group.spec
        inner: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:
            # One-element lists, as readers of torch's events expect them.
            inner["local_rank"] = (worker.local_rank,)
            inner["role_rank"] = (worker.role_rank,)
            inner["role_world_size"] = (worker.role_world_size,)
            inner["exit_code"] = (exit_code,)
            inner["worker_pid"] = (worker_pid,)
        metadata = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": worker.global_rank if worker is not None else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker is not None else None,
            "role": spec.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": self._total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": json.dumps(inner),
            "agent_restarts": self._restart_count(),
            "duration_ms": duration_ms,
        }
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)

    # --- torch's metrics

    def _record_metrics(self, group_results: RunResult) -> None:
        failed = group_results.is_failed()
        restarted = self._restart_count() != 0
        role = self._worker_group.spec.role
        self._record_flakiness_metric(failed)
        put_metric(f"workers.{role}.run_total", 1)
        outcomes = {
            "run_success_with_retries": not failed and restarted,
            "run_success_no_retries": not failed and not restarted,
            "run_failed_with_retries": failed and restarted,
            "run_failed_no_retries": failed and not restarted,
        }
        for name, holds in outcomes.items():
            put_metric(f"workers.{role}.{name}", int(holds))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        spec = self._worker_group.spec
        spent = 1 - (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        put_metric(f"workers.{spec.role}.flakiness", 100 if is_failed else int(100 * spent))
