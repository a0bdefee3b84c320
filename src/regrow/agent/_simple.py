"""`SimpleElasticAgent`: an agent that runs one worker group, over abstract ways to start workers.

It runs the loop (`_loop`) and sees to it that nothing is left when that ends. The methods keep the
names that subclasses written for torch's agent override: four abstract ones, and `_rendezvous`,
`_initialize_workers`, `_restart_workers`, `_exit_barrier` with the meaning they have there. Hooks
of both generations of torch are called with the arguments they accept.

A subclass that does not push changes is looked at every `monitor_interval`; see `_poll_interval`.
"""

from __future__ import annotations

import abc
import os
import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent import _words as words
from regrow.agent._inbox import Done, Inbox, Operations, Probe, signals_into
from regrow.agent._lease import Lease
from regrow.agent._loop import Loop
from regrow.agent._types import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from regrow.agent._workers_store import WorkersStore
from regrow.metrics import prof
from regrow.rendezvous import RendezvousGracefulExitError
from regrow.utils import get_logger
from regrow.utils._signals import DEFAULT_SIGNALS, SIGNALS_ENV
from regrow.workers import SignalException

if TYPE_CHECKING:
    from regrow.store import Store

logger = get_logger(__name__)


class SimpleElasticAgent(Loop, ElasticAgent):
    """Manages the workers of a single spec.

    Args:
        spec: what to run.
        exit_barrier_timeout: seconds to wait at the end for the other agents.
        shutdown_timeout: seconds between the stop signal and SIGKILL.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: float = 30,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Store | None = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        self._attempt = -1  # counts every start of workers
        self._round = -1
        self._over = 0
        self._lease = Lease()
        self._workers_store = WorkersStore(spec.rdzv_handler)
        self._hopeless = False
        self._failures_told = set()
        self._inbox = Inbox()
        self._operations: Operations | None = None
        # Held while workers are being started, so that nobody leaves half-started ones behind.
        self._starting = threading.Lock()
        self._leaving = False
        self._telling = threading.Lock()
        self._last_result = RunResult(WorkerState.INIT)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group; the agent has only one, whatever the role."""
        return self._worker_group

    # --- what a subclass provides

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the group's workers; returns each local rank's worker id.

        Args:
            worker_group: after its rendezvous; with its `store_environment` in their environment
                the workers share a store (`regrow.store.worker_store`).
        """

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the group's workers, in whatever state they are."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers and say how they are."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Stop the workers by `death_sig`, give back everything; after `timeout` s SIGKILL."""

    def _kill_now(self) -> None:
        """End whatever grace a running stop still gives; called beside `_shutdown`."""

    # --- the run

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; see `ElasticAgent.run`.

        Returns:
            The last attempt's result; state STOPPED when the rendezvous ended this node's part
            in the job gracefully.

        Raises:
            SignalException: a signal ended the job; the workers have been stopped with it.
        """
        start = monotonic()
        self._leaving = self._hopeless = False
        self._workers_store = WorkersStore(self._worker_group.spec.rdzv_handler)
        self._failed_with, self._job_failure = "", None
        names = os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS)
        with signals_into(self._inbox, names):
            self._operations = Operations(self._inbox)
            death_sig = signal.SIGTERM
            unfollow: Callable[[], None] = lambda: None  # noqa: E731
            try:
                unfollow = self._follow()
                self._emit_job_started()
                result = self._invoke_run(role)
                self._total_execution_time = int(monotonic() - start)
                self._record_metrics(result)
                self._record_worker_events(result)
                self._emit_job_finished(result, start)
                return result
            except RendezvousGracefulExitError as error:
                logger.info("Rendezvous gracefully exited: %s", error)
                result = RunResult(WorkerState.STOPPED)
                self._emit_job_finished(result, start)
                return result
            except SignalException as error:
                logger.warning("Received %s death signal, shutting down workers", error.sigval)
                death_sig = error.sigval
                why = f"its agent got {death_sig.name}"
                self._announce(why)
                self._interrupt_rendezvous()
                self._shut_down(death_sig)
                self._give_seat_back(why)
                self._emit_job_signaled(death_sig, start)
                raise
            except BaseException as error:
                self._fail_by_error(error)
                self._interrupt_rendezvous()
                self._shut_down(death_sig)
                self._emit_job_error(error, start)
                raise
            finally:
                self._shut_down(death_sig)
                unfollow()
                self._operations.close()
                self._workers_store.close()
                self._total_execution_time = int(monotonic() - start)

    # --- the end

    def _interrupt_rendezvous(self) -> None:
        interrupt = getattr(self._worker_group.spec.rdzv_handler, "interrupt", None)
        if interrupt is not None:
            interrupt()

    def _shut_down(self, death_sig: signal.Signals) -> None:
        """`_shutdown` once, off this thread, so that a further signal can cut its grace short."""
        if self._leaving:
            return
        self._leaving = True
        self._lease.wake()
        stop = Operations(self._inbox)
        operation = stop.submit(lambda: self._leave(death_sig))
        stop.close()
        while True:
            match self._inbox.get():
                case Done(ended, _, error) if ended is operation:
                    if error is not None:
                        raise error
                    break
                case words.Signaled():
                    self._kill_now()
                case Probe(answered):
                    answered.set()
                case message:
                    self._heed(message)
        self._end_attempt(RunResult(WorkerState.STOPPED))

    def _leave(self, death_sig: signal.Signals) -> None:
        with self._starting:  # those being started are stopped once they all exist
            self._call_shutdown(death_sig)
