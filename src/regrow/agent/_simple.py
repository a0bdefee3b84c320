"""`SimpleElasticAgent`: the loop that runs one worker group, over abstract ways to start workers.

The loop takes one message from the inbox, lets `_decide.decide` say what it means, and carries the
actions out; see there for the phases. The methods keep the names that subclasses written for
torch's agent override: four abstract ones, and `_rendezvous`, `_initialize_workers`,
`_restart_workers`, `_exit_barrier` with the meaning they have there. Hooks of both generations of
torch are called with the arguments they accept.

A subclass that does not push changes is looked at every `monitor_interval`; see `_poll_interval`.
"""

from __future__ import annotations

import abc
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent import _decide as core
from regrow.agent import _words as words
from regrow.agent._company import Company, News
from regrow.agent._inbox import Done, Inbox, Operations, Probe, signals_into
from regrow.agent._lease import Lease
from regrow.agent._types import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from regrow.metrics import prof, put_metric
from regrow.rendezvous import RendezvousClosedError, RendezvousGracefulExitError
from regrow.utils import get_logger
from regrow.workers import SignalException

if TYPE_CHECKING:
    from regrow.store import Store

SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

logger = get_logger(__name__)


class SimpleElasticAgent(Company, ElasticAgent):
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
        self._hopeless = False  # no restart can help
        self._failures_told = set()
        self._error: BaseException | None = None  # of the last operation
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
        """Start the group's workers; returns each local rank's worker id."""

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

    def _poll_interval(self) -> float | None:
        """Seconds between looks at the workers; None where every change is pushed."""
        return self._worker_group.spec.monitor_interval

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
                self._total_execution_time = int(monotonic() - start)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        state = core.State(remaining_restarts=self._remaining_restarts)
        event: words.Event | None = words.Begin()
        deadline: float | None = None  # of the running back-off
        in_flight: dict[object, Callable[[Any], words.Event | None]] = {}
        while True:
            if event is not None:
                state = replace(state, remaining_restarts=self._remaining_restarts)
                state, actions = core.decide(state, event)
                self._remaining_restarts = state.remaining_restarts
                for action in actions:
                    match action:
                        case words.Finish(final):
                            return self._conclude(final)
                        case words.Interrupt(signum):
                            sigval = signal.Signals(signum)
                            raise SignalException(f"the agent got {sigval.name}", sigval=sigval)
                        case words.GiveUp(message):
                            raise RuntimeError(f"[{self._worker_group.spec.role}] {message}")
                        case words.Raise():
                            assert self._error is not None
                            raise self._error
                        case words.Gather(waiting, until):
                            self._emit(
                                "regrow.job.gathering", waiting=waiting, delay_s=until - monotonic()
                            )
                        case words.Delay(seconds, reason):
                            self._emit_restarting(reason, seconds)
                            deadline = monotonic() + seconds
                            self._perform(action, in_flight, delayed=True)
                        case _:
                            self._perform(action, in_flight, delayed=deadline is not None)
                            deadline = None
            event = self._next_event(state, deadline, in_flight)

    def _perform(
        self,
        action: words.Action,
        in_flight: dict[object, Callable[[Any], words.Event | None]],
        *,
        delayed: bool,
    ) -> None:
        group = self._worker_group
        match action:
            case words.Form():
                call: Callable[[], Any] = lambda: self._initialize_workers(group)  # noqa: E731
                then: Callable[[Any], words.Event | None] = self._formed
            case words.Restart(reason, announce):
                if not delayed:
                    self._emit_restarting(reason, 0.0)
                call, then = lambda: self._restart(reason, announce), self._formed
            case words.Look():
                call, then = self._look, self._report
            case words.Tell():
                call, then = self._tell_failure, self._verdict
            case words.Delay(_, reason, announce):
                # What is left of a group does not run on while the agent waits.
                call = lambda: self._pause(reason, announce)  # noqa: E731
                then = lambda _: None  # noqa: E731
            case words.Stop(tell):
                call, then = lambda: self._stop_for_good(tell), lambda _: words.Stopped()
            case words.Barrier():
                call, then = self._exit_barrier, _barrier_ended
            case _:
                raise AssertionError(f"not an operation: {action}")
        assert self._operations is not None
        in_flight[self._operations.submit(call)] = then

    def _next_event(
        self,
        state: core.State,
        deadline: float | None,
        in_flight: dict[object, Callable[[Any], words.Event | None]],
    ) -> words.Event | None:
        timeout = None
        if deadline is not None:
            timeout = max(0.0, deadline - monotonic())
        elif state.phase is core.Phase.RUNNING:
            timeout = None if state.looking else self._poll_interval()
            if state.gather_until is not None:
                left = max(0.0, state.gather_until - monotonic())
                timeout = left if timeout is None else min(left, timeout)
        message = self._inbox.get(timeout)
        match message:
            case None if deadline is not None:
                return words.DelayOver()
            case None:
                now = monotonic()
                due = state.gather_until is not None and now >= state.gather_until
                if due:
                    waiting = self._worker_group.spec.rdzv_handler.num_nodes_waiting()
                    return words.GatherOver(now, waiting)
                return words.Changed()
            case Done(operation, result, error):
                then = in_flight.pop(operation, None)
                if error is not None and then is not None:
                    self._error = error
                    if not isinstance(error, RendezvousClosedError):
                        raise error
                    return words.Closed(self._learn_end(error.report), refused=True)
                return then(result) if then is not None else None
            case News():
                return self._hear(message.what)
            case Probe(answered):
                answered.set()
                return None
        return self._heed(message)

    def _heed(self, message: object) -> words.Event | None:
        """What a message means that is no operation's end; subclasses add their own kinds."""
        return message if isinstance(message, words.Event) else None

    def _look(self) -> tuple[RunResult, int]:
        result = self._monitor_workers(self._worker_group)
        waiting = 0
        told = self._pushes and self._numbered
        if result.state == WorkerState.HEALTHY and not told:
            waiting = self._worker_group.spec.rdzv_handler.num_nodes_waiting()
        return result, waiting

    def _report(self, found: tuple[RunResult, int]) -> words.Event:
        result, waiting = found
        role = self._worker_group.spec.role
        self._last_result = result
        self._worker_group.state = result.state
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.{result.state.name.lower()}", 1)
        if not WorkerState.is_running(result.state):
            self._end_attempt(result)
        return words.Report(result.state, waiting, monotonic(), self._hopeless)

    # --- operations

    def _formed(self, _: object) -> words.Event:
        number = self._round if self._numbered else None
        leads = self._worker_group.group_rank == 0
        return words.Formed(monotonic(), number, self._shared, leads)

    def _restart(self, reason: str, announce: bool) -> None:
        if announce:
            self._announce(reason)
        self._restart_workers(self._worker_group)

    def _pause(self, reason: str, announce: bool) -> None:
        if announce:
            self._announce(reason)
        self._stop_attempt(self._worker_group)

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


def _barrier_ended(passed: object) -> words.Event:
    # Hooks of torch's time return nothing.
    return words.BarrierBroken(monotonic()) if passed is False else words.BarrierPassed()
