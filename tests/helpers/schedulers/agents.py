"""Agents that schedulers derive from torch's agent; only the imports are changed.

As a program it runs one agent:

    agents.py AGENT MAX_RESTARTS LOG_DIR NODES ENDPOINT COMMAND...
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from regrow.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent.server.local_elastic_agent import LocalElasticAgent
from regrow.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes
from regrow.rendezvous.registry import get_rendezvous_handler

from regrow.metrics.api import prof
from regrow.rendezvous import RendezvousParameters
from regrow.utils import macros


class OwnLoop(LocalElasticAgent):
    """Polls its workers in a loop of its own."""

    def _invoke_run(self, role: str = "default") -> RunResult:
        spec = self._worker_group.spec
        self._initialize_workers(self._worker_group)
        while True:
            time.sleep(spec.monitor_interval)
            result = self._monitor_workers(self._worker_group)
            self._worker_group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                self._exit_barrier()
                return result
            if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
                if self._remaining_restarts <= 0:
                    self._stop_workers(self._worker_group)
                    self._worker_group.state = WorkerState.FAILED
                    return result
                self._remaining_restarts -= 1
                self._restart_workers(self._worker_group)
            elif spec.rdzv_handler.num_nodes_waiting() > 0:
                self._restart_workers(self._worker_group)


class RestartsHealthy(OwnLoop):
    """Restarts its healthy workers once, when there is one file per worker."""

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        if self._remaining_restarts == worker_group.spec.max_restarts:
            self._remaining_restarts -= 1
            ready = Path(worker_group.spec.args[-1])
            while len(list(ready.iterdir())) < worker_group.spec.local_world_size:
                time.sleep(0.01)
            self._restart_workers(worker_group)


class OwnStart(LocalElasticAgent):
    """Starts its workers by `start_processes`, as torch's agent does."""

    _pcontext: PContext | None

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        args: dict[int, tuple[Any, ...]] = {}
        envs: dict[int, dict[str, str]] = {}
        for worker in worker_group.workers:
            local_rank = worker.local_rank
            envs[local_rank] = {
                "LOCAL_RANK": str(local_rank),
                "RANK": str(worker.global_rank),
                "WORLD_SIZE": str(worker.world_size),
                "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            }
            args[local_rank] = tuple(macros.substitute(list(spec.args), str(local_rank)))
        assert spec.entrypoint is not None
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            start_method=self._start_method,
        )
        return dict(self._pcontext.pids())


class Monitored(OwnStart):
    """Monitors its workers itself, too."""

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        if {each.id for each in worker_group.workers} != set(self._pcontext.pids().values()):
            return RunResult(state=WorkerState.UNKNOWN)
        result = self._pcontext.wait(0)
        if not result:
            return RunResult(state=WorkerState.HEALTHY)
        ranks = {each.local_rank: each.global_rank for each in worker_group.workers}
        if result.is_failed():
            failures = {ranks[each]: failure for each, failure in result.failures.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        values = {ranks[each]: value for each, value in result.return_values.items()}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)


class Torch26(OwnLoop, Monitored):
    """All of these changes, with the hooks of torch 2.6."""

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._shutdown(is_restart=is_restart)

    def _shutdown(  # type: ignore[override]
        self, death_sig: signal.Signals = signal.SIGTERM, is_restart: bool = False
    ) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig)


class Torch213(OwnLoop, Monitored):
    """All of these changes, with the hooks of torch 2.13."""

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
        self._shutdown()

    def _shutdown(  # type: ignore[override]
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30
    ) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, timeout)


def run(
    agent: str,
    max_restarts: int,
    log_dir: str,
    command: list[str],
    nodes: int = 1,
    endpoint: str = "localhost:0",
    **more: Any,
) -> RunResult:
    """Run two workers under an agent of this module; `more` is for its constructor."""
    parameters = RendezvousParameters("c10d", endpoint, "job", nodes, nodes, local_addr="127.0.0.1")
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=max_restarts,
        monitor_interval=0.01,
    )
    made = globals()[agent](spec, DefaultLogsSpecs(log_dir), start_method="spawn", **more)
    try:
        result = made.run()
        assert isinstance(result, RunResult)
        return result
    finally:
        handler.shutdown()


if __name__ == "__main__":
    try:
        _, name, restarts, logs, number, place, *program = sys.argv
        print(run(name, int(restarts), logs, program, int(number), place).state.value)
    except SignalException as error:
        print("SignalException", error.sigval.name)
        sys.exit(128 + error.sigval)
