"""Events and metrics under the names of torch's agent; see `recorder` for regrow's events."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from regrow import events
from regrow.agent.api import RunResult, Worker
from regrow.events import Event, EventSource
from regrow.metrics import try_put_metric
from regrow.utils import to_json

if TYPE_CHECKING:
    from regrow.agent.job import Job
    from regrow.timer.fifo.request import FileTimerRequest


class TorchEvents:
    """Records events under torch's names, with the handler named in the worker spec.

    Args:
        job: what the parts of the agent share.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.total_execution_time = 0
        """Duration of the run in seconds, set at its end."""

    def record(self, event: Event) -> None:
        """Pass an event to the handler."""
        # Looked up on the module, because users replace the function there.
        events.record(event, self._job.group.spec.event_log_handler)

    def worker_event(self, state: str, worker: Worker, **more: Any) -> None:
        """Record the state of a worker; `more` as in `construct`."""
        self.record(self.construct(state, EventSource.WORKER, worker, **more))

    def results(self, result: RunResult, state_of: Callable[[Worker, RunResult], str]) -> None:
        """Record the final state of each worker.

        Args:
            result: result of the run.
            state_of: returns the name of a worker's state; see `_get_worker_state` of the agent.
        """
        for worker in self._job.group.workers:
            failure = result.failures.get(worker.global_rank)
            self.worker_event(
                state_of(worker, result),
                worker,
                raw_error=to_json(failure.error_file_data) if failure else None,
                exit_code=failure.exitcode if failure else None,
                worker_pid=failure.pid if failure else None,
            )

    def watchdog(self, name: str, request: FileTimerRequest | None) -> None:
        """Record an action of the timer server under torch's name (`kill worker process`)."""
        about = {"watchdog_event": name}
        if request is not None:
            about["worker_pid"] = str(request.worker_pid)
            about["scope_id"] = request.scope_id
            about["expiration_time"] = str(request.expiration_time)
            about["signal"] = str(request.signal)
        event = self.construct("RUNNING", EventSource.AGENT)
        event.name, event.metadata["metadata"] = name, json.dumps(about)
        self.record(event)

    @contextmanager
    def duration(self, state: str) -> Iterator[None]:
        """Record an event named `state` with the duration of the body, in milliseconds."""
        start = perf_counter()
        try:
            yield
        finally:
            duration_ms = (perf_counter() - start) * 1000
            self.record(self.construct(state, EventSource.AGENT, duration_ms=duration_ms))

    def construct(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        """Create an event of the agent, or of one of its workers."""
        group = self._job.group
        spec = group.spec
        inner: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:
            # Readers of torch's events expect one-element lists.
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
            "total_run_time": self.total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": json.dumps(inner),
            "agent_restarts": self._job.restart_count,
            "duration_ms": duration_ms,
        }
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)

    # --- metrics

    def metrics(self, result: RunResult) -> None:
        """Publish how the run ended; `flakiness` is separate."""
        failed = result.is_failed()
        restarted = self._job.restart_count != 0
        role = self._job.group.spec.role
        try_put_metric(f"workers.{role}.run_total", 1)
        outcomes = {
            "run_success_with_retries": not failed and restarted,
            "run_success_no_retries": not failed and not restarted,
            "run_failed_with_retries": failed and restarted,
            "run_failed_no_retries": failed and not restarted,
        }
        for name, holds in outcomes.items():
            try_put_metric(f"workers.{role}.{name}", int(holds))

    def flakiness(self, failed: bool) -> None:
        """Publish the share of the restart budget that was spent, in per cent."""
        spec = self._job.group.spec
        spent = 1 - (self._job.remaining_restarts + 1) / (spec.max_restarts + 1)
        try_put_metric(f"workers.{spec.role}.flakiness", 100 if failed else int(100 * spent))

    def check(self, result: RunResult) -> None:
        """Publish the result of a check of the workers."""
        role = self._job.group.spec.role
        try_put_metric(f"workers.{role}.remaining_restarts", self._job.remaining_restarts)
        try_put_metric(f"workers.{role}.{result.state.name.lower()}", 1)
