"""The agents: torch's constructors and hooks, and the shutdown after a signal or an error.

`SimpleElasticAgent` is the base class; `LocalElasticAgent` starts its workers on this host.

Both classes have torch's constructors and hook names, because subclasses written for torch's agent
override these hooks. The work is done by the parts of an agent: a `Loop` that takes messages from
one `Inbox`, an `Attempt` that runs operations, and a list of features; a `Job` is what they share.
The agent calls a hook with the arguments that it accepts, so hooks of both generations of torch
work. Few attributes hold the parts, and under unlikely names, because subclasses have their own.

The agent polls, at the spec's `monitor_interval`, in three cases only:

- a rendezvous plug-in has no `subscribe`;
- a subclass has its own `_monitor_workers` or starts its own workers;
- the check for workers in uninterruptible sleep is on (it is off by default).
"""

from __future__ import annotations

import abc
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent.api import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
)
from regrow.agent.api import WorkerState as State
from regrow.agent.attempt.attempt import Attempt
from regrow.agent.attempt.environment import (
    HEALTH_CHECK_PORT_ENV,
    SHARING_ENV,
    TORCHELASTIC_ENABLE_FILE_TIMER,
)
from regrow.agent.attempt.local import LocalWorkers
from regrow.agent.decisions.events import Signaled
from regrow.agent.features.early_stop import EarlyStop
from regrow.agent.features.heartbeats import Heartbeats
from regrow.agent.features.last_words import LastWords
from regrow.agent.features.live_reports import LiveReports
from regrow.agent.features.out_of_memory import OutOfMemory
from regrow.agent.features.state_d import UninterruptibleSleepers, timeout_from_environment
from regrow.agent.inbox import Inbox, Operations, signals_into
from regrow.agent.job import Job
from regrow.agent.loop import Loop
from regrow.events import Event, EventSource
from regrow.metrics import prof
from regrow.rendezvous import JOB_STOPS, RendezvousGracefulExitError, adapted
from regrow.utils import DEFAULT_SIGNALS, SIGNALS_ENV, get_logger, restart_grace, split_signals
from regrow.workers import DefaultLogsSpecs, PContext, SignalException, Std, raises_later
from regrow.workers.logs.follower import console

if TYPE_CHECKING:
    from types import FrameType

    from regrow.agent.features.health import AgentHealth, HealthCheckServer
    from regrow.agent.features.timers import TimerReports
    from regrow.store import Store
    from regrow.workers import LogsSpecs

ACTED_ON_S = 0.1
"""Seconds from the end of a worker to the agent's reaction."""

RAISED_S = 5.0
"""Seconds in which a signal raises in a subclass's own loop at most once."""

logger = get_logger(__name__)


class SimpleElasticAgent(ElasticAgent):
    """Manages the workers of one spec; a subclass defines how to start them.

    The agent polls a subclass that does not push changes; see `_poll_interval`.

    Args:
        spec: what to run.
        exit_barrier_timeout: seconds to wait for the other agents at the end of the job.
        shutdown_timeout: seconds between the stop signal and SIGKILL.
        restart_timeout: the same, for workers stopped by a restart after a failure. At most
            `shutdown_timeout`; None means the smaller of `shutdown_timeout` and 5 s.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: float = 30,
        *,
        restart_timeout: float | None = None,
    ) -> None:
        self.stopped_early = ""
        """Who asked the job to stop, if all workers of this node did (`regrow.should_stop`)."""
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        inbox, handler = Inbox(), adapted(spec.rdzv_handler)
        grace = restart_grace(restart_timeout, shutdown_timeout)
        job = Job(self._worker_group, handler, inbox.put, shutdown_timeout, grace)
        # A lambda, because it looks up the method when it is called.
        self._regrow = Loop(job, inbox, Attempt(self, job), lambda: self._poll_interval())

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the worker group; an agent has one group, so `role` is ignored."""
        return self._worker_group

    def add_event_sinks(self, *sinks: Callable[[Event], None]) -> None:
        """Add functions that are called with each event of the job."""
        self._regrow.job.recorder.sinks += sinks

    def interrupt(self, signum: signal.Signals) -> None:
        """End the job as if this process had received `signum`; safe from any thread.

        An agent that runs outside the main thread handles no signals, and can be ended by this.
        """
        self._regrow.inbox.put(Signaled(signum))

    def _why_stopped_early(self) -> str:
        return ""

    def _asked_to_stop_by(self) -> str:
        return ""

    # --- attributes of torch's agent that subclasses use

    @property
    def _remaining_restarts(self) -> int:
        return self._regrow.job.remaining_restarts

    @_remaining_restarts.setter
    def _remaining_restarts(self, value: int) -> None:
        self._regrow.job.remaining_restarts = value

    @property
    def _total_execution_time(self) -> int:
        return self._regrow.job.torch_events.total_execution_time

    @property
    def _store(self) -> Store | None:
        store: Store | None = self._worker_group.store
        return store

    # --- methods that a subclass must implement

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the group's workers; return the worker id of each local rank.

        Args:
            worker_group: the group, after its rendezvous. Its workers share a store
                (`regrow.store.worker_store`) if they get the group's `store_environment`.
        """

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the group's workers, in any state."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers and return their state."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Send `death_sig` to the workers, and SIGKILL after `timeout` seconds.

        The default is torch's; the agent passes the grace in force (`--shutdown-timeout`).
        """

    def _kill_now(self) -> None:
        """Send SIGKILL at once to the workers that `_shutdown` is stopping.

        Another thread calls this while `_shutdown` runs. The default does nothing.
        """

    def _poll_interval(self) -> float | None:
        """Return the seconds between two checks of the workers; None if all changes are pushed."""
        return self._worker_group.spec.monitor_interval

    # --- hooks that a subclass may replace or extend

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next round with the other agents; store its ranks, store and address."""
        self._regrow.attempt.form_round(worker_group)

    @prof
    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return this agent's workers with their ranks; see `decisions.ranks`."""
        return self._regrow.attempt.assign_ranks(store, group_rank, group_world_size, spec)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Form a round and start new workers in it."""
        self._regrow.attempt.initialize(worker_group)

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, form the next round and start new workers in it."""
        self._regrow.attempt.stop(worker_group)
        self._initialize_workers(worker_group)

    def _exit_barrier(self) -> bool | None:
        """Wait until all agents of the round are done; see `Attempt.wait_for_all`."""
        return self._regrow.attempt.wait_for_all(self._exit_barrier_timeout)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the agent's loop until the job ends."""
        job = self._regrow.job
        own_loop, job.own_loop = job.own_loop, False
        try:
            return self._regrow.run()
        finally:
            job.own_loop = own_loop

    # --- the run

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job until its workers end for good; see `ElasticAgent.run`.

        Returns:
            The result of the last attempt. Its state is STOPPED if the rendezvous ended this node's
            part in the job gracefully.

        Raises:
            SignalException: a signal ended the job; the agent has stopped the workers with it.
        """
        names = os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS)
        features = self._regrow.job.features
        try:
            for feature in features:
                feature.open()
            with signals_into(self._regrow.inbox, names, self._interrupt_own_loop):
                return self._run(role, monotonic())
        finally:
            for feature in reversed(features):
                feature.close()

    def _run(self, role: str, start: float) -> RunResult:
        """Run the job; stop the workers when a signal or an error ends it."""
        loop, job, attempt = self._regrow, self._regrow.job, self._regrow.attempt
        recorder, peers, handler = job.recorder, attempt.peers, job.handler
        job.leaving = job.hopeless = False
        peers.begin_run()
        loop.operations = operations = Operations(loop.inbox)
        death_sig = signal.SIGTERM
        unfollow: Callable[[], None] = lambda: None  # noqa: E731
        try:
            unfollow = peers.follow(attempt.lease.wake, self._renew_lease)
            recorder.job_started()
            job.raised_at = -inf
            job.own_loop = True  # until `_invoke_run` of this class begins
            try:
                result = self._invoke_run(role)
            finally:
                job.own_loop = False
            job.torch_events.total_execution_time = int(monotonic() - start)
            self._record_metrics(result)
            self._record_worker_events(result)
            self.stopped_early = why = self._why_stopped_early()
            if why:
                recorder.job_stopped_early(why, start)
                handler.leave(f"{JOB_STOPS}{why}")
                return result
            recorder.job_finished(result, start)
            return result
        except RendezvousGracefulExitError as error:
            logger.info("Rendezvous gracefully exited: %s", error)
            result = RunResult(State.STOPPED)
            if error.stopped_by:
                self.stopped_early = error.stopped_by
                recorder.job_stopped_early(error.stopped_by, start, stood_by=True)
                handler.leave("it stood by, and the job is stopped")
            else:
                recorder.job_finished(result, start)
            return result
        except (SignalException, KeyboardInterrupt) as error:
            # Ctrl-C is a KeyboardInterrupt if the signals to handle are without SIGINT.
            death_sig = error.sigval if isinstance(error, SignalException) else signal.SIGINT
            # First, because this event decides whether this agent still prints for the job.
            recorder.emit("regrow.job.stopping", signal=death_sig.name, grace_s=job.final_grace)
            logger.warning("received %s; the workers are being stopped", death_sig.name)
            asked_by = self._asked_to_stop_by()
            why = f"{JOB_STOPS}{asked_by}" if asked_by else f"its agent got {death_sig.name}"
            # If only this node leaves, workers of others that can go on need not be ended for it.
            # A handler of a user may not know that argument.
            only_this = not asked_by and attempt.others_would_go_on()
            until_left = {"until_left": True} if only_this else {}
            handler.leaving(why, full_grace=True, **until_left)
            handler.interrupt()
            self._shut_down(death_sig, signals=1)
            handler.leave(why)
            recorder.job_signaled(death_sig, start, asked_by)
            raise
        except BaseException as error:
            peers.fail_by_error(error)
            handler.interrupt()
            self._shut_down(death_sig)
            recorder.job_error(error, start)
            raise
        finally:
            self._shut_down(death_sig)
            unfollow()
            operations.close()
            attempt.close()
            job.torch_events.total_execution_time = int(monotonic() - start)

    def _interrupt_own_loop(self, signum: int, frame: FrameType | None) -> bool:
        """Raise SignalException while a subclass's own loop runs; return False otherwise.

        Where the exception would be lost, this method returns True, and the signal comes again
        (`raises_later`). The signals of the next `RAISED_S` seconds go to the inbox, so that the
        loop can clean up. A later one raises again, because the loop may have hidden the first.
        """
        job = self._regrow.job
        if not job.own_loop or monotonic() - job.raised_at < RAISED_S:
            return False
        if not raises_later(signum, frame):
            job.raised_at = monotonic()
            sigval = signal.Signals(signum)
            raise SignalException(f"the agent got {sigval.name}", sigval=sigval)
        return True

    def _renew_lease(self, until: float) -> None:
        """Let the workers run until `until` (monotonic seconds); called by the rendezvous."""
        attempt = self._regrow.attempt
        if attempt.workers is not None:
            attempt.workers.guardian.renew(until)
        attempt.lease.renew(until)

    def _shut_down(self, death_sig: signal.Signals, signals: int = 0) -> None:
        """Run `_shutdown` once, on another thread, so that a second signal can end its grace.

        Args:
            death_sig: the signal for the workers.
            signals: number of signals that the job has received so far.
        """
        received = count(signals + 1)

        def on_signal() -> None:
            if next(received) > 1:  # the first one asks for the end that is under way
                self._kill_now()

        attempt, job = self._regrow.attempt, self._regrow.job
        if job.leaving:
            return
        job.leaving = True
        attempt.lease.wake()
        self._regrow.wait_for(lambda: attempt.leave(death_sig), on_signal)
        attempt.end_by(death_sig)

    # --- torch's events and metrics

    def get_event_failed(self) -> Event:
        """Return the event of an agent that ended with the exception in progress."""
        import traceback

        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """Return the event of an agent that finished its loop, with any result of its workers."""
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """Record an event named `state` with the duration of the body, in milliseconds."""
        return self._regrow.job.torch_events.duration(state)

    def _construct_event(self, state: str, source: EventSource, *more: Any, **named: Any) -> Event:
        return self._regrow.job.torch_events.construct(state, source, *more, **named)

    def _record_worker_events(self, result: RunResult) -> None:
        self._regrow.job.torch_events.results(result, self._get_worker_state)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """Return the name of a worker's state at the end of a run.

        A worker that has succeeded may be missing in the result: a later round, in which no worker
        started, may have changed its rank.
        """
        if result.state in {State.UNHEALTHY, State.FAILED}:
            known = result.failures.keys() | result.return_values.keys()
            return result.state.value if worker.global_rank in known else "TERMINATED"
        return result.state.value

    def _record_metrics(self, group_results: RunResult) -> None:
        self._record_flakiness_metric(group_results.is_failed())
        self._regrow.job.torch_events.metrics(group_results)

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        self._regrow.job.torch_events.flakiness(is_failed)


class LocalElasticAgent(SimpleElasticAgent):
    """Runs `spec.local_world_size` workers on this host.

    Args:
        spec: what to run.
        logs_specs: where the output of the workers goes. A start method or None selects the older
            form of reference 002: `LocalElasticAgent(spec, start_method, exit_barrier_timeout,
            log_dir)`.
        start_method: how function entry points are started.
        exit_barrier_timeout: seconds to wait for the other agents at the end of the job.
        log_line_prefix_template: prefix of lines that are copied to the console.
        shutdown_timeout: seconds between the stop signal and SIGKILL, if the job ends or nothing
            has failed.
        health_check_server: the server to use instead of a new one on
            `TORCHELASTIC_HEALTH_CHECK_PORT`. The agent starts and stops it.
        uninterruptible_state_timeout: seconds after which a worker in uninterruptible sleep
            (state D) makes the group UNHEALTHY and ends the job. None reads
            `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`; 0, or None without it, is off.
        log_dir: log directory of the older form.
        event_sinks: functions that are called with each event of the job.
        job: further fields of `regrow.job.started` that the launcher knows and the spec does not.
        timers: whether to serve the workers' countdown timers. `TORCHELASTIC_ENABLE_FILE_TIMER=1`
            and `heartbeat` turn them on as well. The server's pipe is at `TORCHELASTIC_TIMER_FILE`,
            or at a path that the agent chooses.
        native_stacks: whether py-spy reads the native frames of workers with expired timers.
        heartbeat: seconds between two heartbeats of each worker; None: workers do not start their
            heartbeats by themselves. A period also turns `timers` on.
        restart_timeout: seconds between the stop signal and SIGKILL for a restart after a failure.
            At most `shutdown_timeout`; None means the smaller of `shutdown_timeout` and 5 s.
        preload: modules that a process imports from which later workers are forked.
        standby: number of processes that wait at their wrapped call for the place of a lost worker.
        chaos: faults to inject (`--chaos`); empty for none.
        time_limit: seconds after which the job ends, as by SIGTERM `shutdown_timeout` before that.
        min_nodes: fewest nodes with which the job goes on; None: as many as it has.
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
        restart_timeout: float | None = None,
        preload: Sequence[str] = (),
        standby: int = 0,
        chaos: str = "",
        time_limit: float | None = None,
        min_nodes: int | None = None,
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
        super().__init__(
            spec, exit_barrier_timeout, shutdown_timeout, restart_timeout=restart_timeout
        )
        self._start_method = str(start_method)
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._health_check_server = health_check_server
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = timeout_from_environment(os.environ)
        common = self._regrow.job
        sleepers = UninterruptibleSleepers(uninterruptible_state_timeout)
        log_dir = (job or {}).get("log_dir")
        workers = LocalWorkers(
            common,
            sleepers,
            heartbeats=heartbeat is not None,
            report_not_replaced=self._regrow.attempt.report_not_replaced,
            log_dir=log_dir,
        )
        self._regrow.attempt.workers = self._regrow_workers = workers
        self._regrow_stop = EarlyStop(common, min_nodes=min_nodes, time_limit=time_limit)
        self._regrow.on_signal = self._regrow_stop.on_signal
        common.features += [workers, workers.replacements, OutOfMemory(), LastWords()]
        common.features += [self._regrow_stop, LiveReports(common, lambda: workers.reports)]
        cores = len(os.sched_getaffinity(0))
        if preload:
            from regrow.agent.features.templates import DelayedStart, Templates

            delay = DelayedStart(cores, spec.local_world_size)
            common.features.append(Templates(common, workers.guardian, preload, delay))
        if standby:
            from regrow.agent.features.standbys import Standbys
            from regrow.agent.features.templates import DelayedStart

            delay = DelayedStart(cores, spec.local_world_size)
            common.features.append(Standbys(common, workers.guardian, standby, log_dir, delay))
        if chaos:
            from regrow.agent.features.chaos import Chaos
            from regrow.chaos import parse

            common.features.append(Chaos(common, parse(chaos)))
        if os.environ.get(SHARING_ENV) == "0" and not spec.rdzv_handler.use_agent_store:
            from regrow.agent.features.torch_store import TorchStores
            from regrow.store import start_torch_server

            common.features.append(TorchStores(common, start_torch_server))
        in_environment = os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) == "1"
        self._regrow_timers: TimerReports | None = None
        if timers or in_environment or heartbeat is not None:
            from regrow.agent.features.timers import TimerReports

            self._regrow_timers = TimerReports(
                common,
                log_dir,
                native_stacks=native_stacks,
                others_continue=lambda rank: (
                    workers.reports is not None and workers.reports.others_continue(rank)
                ),
            )
            common.features.append(self._regrow_timers)
        heartbeats = Heartbeats(heartbeat)
        common.features.append(heartbeats)
        own_bounds = bounds(
            common.shutdown_timeout,
            common.restart_timeout,
            self._regrow_timers.reaped_s if self._regrow_timers is not None else None,
            heartbeats.ended_s,
        )
        recorder = common.recorder
        recorder.sinks = event_sinks
        all_bounds = own_bounds | dict(common.handler.bounds)
        recorder.launch_fields = {"bounds": all_bounds} | dict(job or {})

    @property
    def _pcontext(self) -> PContext | None:
        return self._regrow_workers.context

    @_pcontext.setter
    def _pcontext(self, context: PContext | None) -> None:
        self._regrow_workers.context = context

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job until its workers end for good; see `SimpleElasticAgent.run`."""
        health = self._setup_healthcheck()
        handled, _ = split_signals(os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS))
        try:
            with self._regrow_stop.notices(handled):
                return super().run(role)
        finally:
            if health is not None:
                self._regrow.job.features.remove(health)
            console().flush()

    def _why_stopped_early(self) -> str:
        return self._regrow_stop.stopped()

    def _asked_to_stop_by(self) -> str:
        return self._regrow_stop.asked_by()

    def _setup_healthcheck(self) -> AgentHealth | None:
        """Add the health check if there is a server, or a port for one."""
        if self._health_check_server is None and HEALTH_CHECK_PORT_ENV not in os.environ:
            return None
        from regrow.agent.features.health import AgentHealth

        job, timers = self._regrow.job, self._regrow_timers
        age = timers.age if timers is not None else lambda: 0.0
        health = AgentHealth(job, self._health_check_server, age)
        # First in the list: it opens before all other features and closes after them.
        job.features.insert(0, health)
        return health

    def _poll_interval(self) -> float | None:
        replaced = type(self)._monitor_workers is not LocalElasticAgent._monitor_workers
        pushes = self._regrow.job.handler.pushes
        if replaced or not pushes or not self._regrow_workers.pushes_changes:
            return self._worker_group.spec.monitor_interval
        return None

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self._regrow_workers.start(
            self._logs_specs, self._start_method, self._log_line_prefix_template
        )

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        grace = self._regrow.attempt.restart_grace if is_restart else self._shutdown_timeout
        self._regrow_workers.stop(signal.SIGTERM, grace)

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: float = 30,
        is_restart: bool = False,
    ) -> None:
        self._regrow_workers.stop(death_sig, timeout)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._regrow.job.own_loop:
            self._regrow.handle_waiting()
        return self._regrow_workers.check()

    def _kill_now(self) -> None:
        self._regrow_workers.guardian.stop(None, signal.SIGKILL, 0)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        rank = worker.global_rank
        if rank in self._regrow_workers.lost and rank not in result.failures:
            return "TERMINATED"
        return super()._get_worker_state(worker, result)


def bounds(
    shutdown_timeout: float,
    restart_timeout: float,
    reaped_s: float | None = None,
    ended_s: float | None = None,
) -> dict[str, float]:
    """Return the time limits that an agent keeps, in seconds, by description.

    They hold on a host with enough processor time. The agent prints them when it starts and
    records them in its events.

    Args:
        shutdown_timeout: grace of workers that are stopped.
        restart_timeout: grace of workers that are stopped for a restart after a failure.
        reaped_s: from the deadline of a timer to the end of its worker; None without timers.
        ended_s: from the last heartbeat of a worker to the end of all; None without heartbeats.
    """
    promised = {"a dead worker is acted on": ACTED_ON_S}
    if restart_timeout < shutdown_timeout:
        promised["after a failure the other workers are gone"] = restart_timeout + ACTED_ON_S
    promised["workers that are stopped are gone"] = shutdown_timeout + ACTED_ON_S
    more = {"a hung worker is killed": reaped_s, "a missing heartbeat ends all workers": ended_s}
    return promised | {text: seconds for text, seconds in more.items() if seconds is not None}
