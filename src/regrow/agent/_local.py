"""`LocalElasticAgent`: workers as processes of this host, every change of which is pushed.

Ends of workers come from the guardian by way of the process context, changes of membership from
the rendezvous handler, first steps through the progress board: all are messages in the inbox, so
an idle agent sleeps. What cannot be pushed is polled at the spec's `monitor_interval`, and only
then: a rendezvous of a plug-in that offers no `subscribe`, a `_monitor_workers` that a subclass
replaced, and the watch for workers in uninterruptible sleep where it is asked for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent import _words as words
from regrow.agent._bounds import bounds
from regrow.agent._environment import TORCHELASTIC_ENABLE_FILE_TIMER, worker_environment
from regrow.agent._sleepers import UninterruptibleSleepers, timeout_from_environment
from regrow.agent._stepping import SteppingAgent
from regrow.agent._types import RunResult, WorkerGroup, WorkerSpec, WorkerState
from regrow.metrics import prof
from regrow.utils import get_logger, macros
from regrow.workers import (
    DefaultLogsSpecs,
    Guardian,
    PContext,
    ProcessFailure,
    Std,
    WorkerChange,
    start_processes,
)
from regrow.workers._console import console

if TYPE_CHECKING:
    from regrow.agent._health import HealthCheckServer
    from regrow.events import Event
    from regrow.utils import PortReservation
    from regrow.workers import LogsSpecs

logger = get_logger(__name__)


class LocalElasticAgent(SteppingAgent):
    """Runs `spec.local_world_size` workers on this host.

    Args:
        spec: what to run.
        logs_specs: where the workers' output goes. A start method or None here is reference
            002's older form, `LocalElasticAgent(spec, start_method, exit_barrier_timeout,
            log_dir)`.
        start_method: how function entry points are started.
        exit_barrier_timeout: seconds to wait at the end for the other agents.
        log_line_prefix_template: prefix of tee'd lines.
        shutdown_timeout: seconds between the stop signal and SIGKILL, on every path.
        health_check_server: a server to use instead of one made for
            `TORCHELASTIC_HEALTH_CHECK_PORT`; it is started and stopped with the agent.
        uninterruptible_state_timeout: seconds after which a worker in uninterruptible sleep
            (state D) makes the group UNHEALTHY and ends the job; 0 or None with no
            `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT` is off.
        log_dir: of the older form.
        event_sinks: called with each of the job's events.
        job: what the launcher knows of the job beyond the spec, for `regrow.job.started`.
        timers: whether to serve the workers' countdown timers; `TORCHELASTIC_ENABLE_FILE_TIMER=1`
            turns them on as well. The server's pipe is at `TORCHELASTIC_TIMER_FILE`, or at a path
            of its own.
        native_stacks: whether py-spy is asked for native frames of workers whose timers ran out.
        heartbeat: seconds between two heartbeats of the workers; None: they do not beat by
            themselves. It turns `timers` on.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | str | None = None,
        start_method: str | float = "spawn",
        exit_barrier_timeout: float | str | None = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        log_dir: str | None = None,
        event_sinks: tuple[Callable[[Event], None], ...] = (),
        job: Mapping[str, Any] | None = None,
        timers: bool = False,
        native_stacks: bool = False,
        heartbeat: float | None = None,
    ) -> None:
        if logs_specs is None or isinstance(logs_specs, str):
            method = logs_specs if logs_specs is not None else start_method
            if isinstance(start_method, (int, float)):  # (spec, method, barrier timeout, log_dir)
                log_dir = log_dir or (
                    exit_barrier_timeout if isinstance(exit_barrier_timeout, str) else None
                )
                exit_barrier_timeout = start_method
            start_method = method
            logs_specs = DefaultLogsSpecs(
                log_dir=log_dir, redirects=spec.redirects or Std.NONE, tee=spec.tee or Std.NONE
            )
        if not isinstance(exit_barrier_timeout, (int, float)):
            exit_barrier_timeout = 300
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = str(start_method)
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._health_check_server = health_check_server
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = timeout_from_environment(os.environ)
        self._sleepers = UninterruptibleSleepers(uninterruptible_state_timeout)
        self._event_sinks = event_sinks
        asked = os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) == "1"
        self._timers = timers or asked or heartbeat is not None
        self._heartbeat = heartbeat
        self._native_stacks = native_stacks
        self._hung = {}
        self._lost = set()
        ours = bounds(self._shutdown_timeout, self._reaping_bound(), self._beating_bound())
        more = getattr(spec.rdzv_handler, "bounds", {})
        self._job = {"bounds": ours | dict(more)} | dict(job or {})
        self._pcontext: PContext | None = None
        self._guardian: Guardian | None = None
        self._port: PortReservation | None = None
        self._last_turn = monotonic()

    # --- the run

    def run(self, role: str = "default") -> RunResult:
        """Run the workers to their end; see `SimpleElasticAgent.run`."""
        self._guardian = Guardian(on_lapse=self._take_lapse)
        try:
            # Started first: its interpreter starts while the round forms.
            self._guardian.start()
            self._start_watchdog()
            self._setup_healthcheck()
            return super().run(role)
        finally:
            self._release_attempt()
            self._release()
            console().flush()

    def _poll_interval(self) -> float | None:
        replaced = type(self)._monitor_workers is not LocalElasticAgent._monitor_workers
        if replaced or not self._pushes or self._sleepers.timeout > 0:
            return self._worker_group.spec.monitor_interval
        return None

    def _heed(self, message: object) -> words.Event | None:
        if isinstance(message, WorkerChange):
            return self._heed_worker(message)
        return super()._heed(message)

    def _heed_worker(self, change: WorkerChange) -> words.Event | None:
        if change.kind in ("suspended", "resumed"):
            self._heed_suspension(change)
            return None
        if change.kind == "lost":
            self._heed_loss(change)
            return None
        if self._noticed is None and change.status != 0:
            self._noticed = monotonic()
            return words.Failing()
        return words.Changed()

    def _first_failure(self) -> tuple[int, ProcessFailure] | None:
        context = self._pcontext
        failure = context.first_failure() if context is not None else None
        if failure is None or self._last_result.failures:
            return super()._first_failure()
        return self._worker_group.workers[failure.local_rank].global_rank, self._explained(failure)

    # --- the hooks

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        self._release_attempt()
        self._lost = set()
        if not worker_group.master_port:
            from regrow.utils import PortReservation

            # Held until the attempt is over, or another process could take it before rank 0 does.
            self._port = PortReservation()
            worker_group.master_port = self._port.port
        board = self._open_board()
        envs: dict[int, dict[str, str]] = {}
        args: dict[int, tuple[Any, ...]] = {}
        prefixes: dict[int, str] | None = {} if self._log_line_prefix_template else None
        for worker in worker_group.workers:
            rank = worker.local_rank
            envs[rank] = worker_environment(
                worker_group,
                worker,
                run_id=spec.rdzv_handler.get_run_id(),
                restart_count=self._restart_count(),
                attempt=self._attempt,
                fencing_token=self._round if self._numbered else None,
                use_agent_store=spec.rdzv_handler.use_agent_store,
                outer=os.environ,
                timer_file=self._timer_file(),
                heartbeat=self._heartbeat,
            ) | board.environment(rank)
            args[rank] = tuple(macros.substitute(list(spec.args), str(rank)))
            if prefixes is not None and self._log_line_prefix_template:
                prefixes[rank] = _prefix(self._log_line_prefix_template, spec.role, worker)
        assert spec.entrypoint is not None
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            shutdown_timeout=self._shutdown_timeout,
            guardian=self._guardian,
            on_change=self._take_change,
            signals_to_handle="",
            before_start=self._watch,
            replaceable=board.replaceable,
        )
        return dict(self._pcontext.pids())

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._spare()
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: float = 30,
        is_restart: bool = False,
    ) -> None:
        self._spare()
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)
        if not is_restart:
            self._release()

    def _release(self) -> None:
        self._stop_watchdog()
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None
        if self._health_check_server is not None:
            self._health_check_server.stop()
            self._health_check_server = None

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        assert context is not None, "there are no workers to look at before they are started"
        # No id: the guardian was killed before it could start that worker, which thus failed.
        started = {worker.id for worker in worker_group.workers if worker.id is not None}
        running = set(context.pids().values())
        if started != running:
            logger.error("worker pids %s do not match the context's %s", started, running)
            return RunResult(state=WorkerState.UNKNOWN)
        result = context.wait(0)
        if result is None:
            return self._watch_sleepers(context.pids())
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if result.is_failed():
            failures = {ranks[r]: self._explained(failed) for r, failed in result.failures.items()}
            return RunResult(state=WorkerState.FAILED, failures=self._with_blamed(failures))
        values = {ranks[local]: value for local, value in result.return_values.items()}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _watch_sleepers(self, pids: Mapping[int, int]) -> RunResult:
        stuck = self._sleepers.stuck(set(pids.values()), monotonic())
        if not stuck:
            return RunResult(state=WorkerState.HEALTHY)
        self._remaining_restarts = 0
        self._hopeless = True
        workers = self._worker_group.workers
        failures = {
            workers[local_rank].global_rank: self._sleepers.failure(local_rank, pid)
            for local_rank, pid in pids.items()
            if pid in stuck
        }
        for failure in failures.values():
            logger.error("worker with pid %s is %s", failure.pid, failure.message)
        return RunResult(state=WorkerState.UNHEALTHY, failures=failures)

    # --- an attempt's belongings

    def _release_attempt(self) -> None:
        self._close_board()
        if self._port is not None:
            self._port.close()
            # The next attempt picks anew: the old port may still be bound by a dying connection.
            self._port = None


def _prefix(template: str, role: str, worker: Any) -> str:
    from string import Template

    return Template(template).safe_substitute(
        role_name=role, rank=worker.global_rank, local_rank=worker.local_rank
    )
