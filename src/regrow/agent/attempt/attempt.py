"""`Attempt`: the blocking operations of an attempt, on another thread than the agent's loop.

An attempt forms a round with the other agents, which gives the workers their ranks, their store and
the address of worker rank 0. It then starts the workers, checks them and stops them.

An operation calls the methods that torch's agent has for it (`_rendezvous`, `_start_workers` and so
on: the *hooks*), because subclasses override them. The defaults of most hooks are here too. A hook
is called with the arguments that it accepts, so hooks of both generations of torch work: 2.6 passes
`is_restart`, 2.13 a `timeout`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent.api import FAILED_STATES, RunResult, Worker, WorkerGroup, WorkerState
from regrow.agent.attempt.environment import warn_if_unknown
from regrow.agent.attempt.lease import Lease
from regrow.agent.attempt.waiting import prepared
from regrow.agent.attempt.workers_store import WorkersStore, offer_key
from regrow.agent.decisions import ranks
from regrow.agent.decisions.decide import WORKER_FAILURE
from regrow.agent.peers import NO_RANK, Peers
from regrow.agent.records.incident import (
    what_failed,
    what_follows,
    what_joins,
    why_no_restart,
)
from regrow.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from regrow.utils import get_logger
from regrow.workers import SignalException
from regrow.workers.errors.failures import first_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.agent.agent import SimpleElasticAgent
    from regrow.agent.api import WorkerSpec
    from regrow.agent.attempt.local import LocalWorkers
    from regrow.agent.job import Job
    from regrow.rendezvous import Judged, RendezvousInfo
    from regrow.store import Store
    from regrow.workers import ProcessFailure

WORKERS_IDENTICAL_ENV = "TORCH_ELASTIC_WORKER_IDENTICAL"
_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"

_HOOKS = ("_restart_workers", "_initialize_workers", "_start_workers", "_stop_workers", "_shutdown")
"""Hooks of the agent that know only workers that are stopped, and then started."""
PARK_SHARE = 0.8
"""Share of `--restart-timeout` in which workers must leave their round to go on in the next one.

The rest is the time between SIGTERM and SIGKILL for workers that have not left it.
"""
START_S = 1.0
"""Seconds that `leave` waits for a start of workers before it stops those that run already."""

logger = get_logger(__name__)


class Attempt:
    """Forms rounds, and starts, watches and stops the workers, one attempt at a time.

    Args:
        hooks: the agent.
        job: what the parts of the agent share.
    """

    def __init__(self, hooks: SimpleElasticAgent, job: Job) -> None:
        self._hooks = hooks
        self._job = job
        self.peers = Peers(job)
        self.lease = Lease()
        self.workers: LocalWorkers | None = None
        """The workers of this host; None if a subclass of the agent starts the workers itself."""
        self.restart_grace = job.restart_timeout
        """Seconds between the stop signal and SIGKILL in the current restart."""
        self._workers_store = WorkersStore(job)
        self._waited_for_ranks = False  # whether group rank 0 has sent this agent its ranks
        self._known_addr = "127.0.0.1"  # the latest MASTER_ADDR that was resolved
        # Held during a start of workers: a stop must not leave a half-started worker behind.
        self._starting = threading.Lock()
        self._unstopped = threading.Lock()  # taken by the first stop of an attempt

    # --- operations of the loop

    def form(self) -> None:
        """Form a round and start workers in it."""
        self._hooks._initialize_workers(self._job.group)

    def restart(self, reason: str, announce: bool, full_grace: bool, keep: bool = False) -> None:
        """Stop the workers, form the next round and start workers in it.

        Args:
            reason: reason of the restart, for the other nodes.
            announce: whether to notify the other nodes before the workers are stopped.
            full_grace: whether the workers get the same grace as at the end of a job.
            keep: whether workers that can go on in the next round live on.
        """
        self._prepare_restart(reason, announce, full_grace, keep)
        if keep and self._park():
            self._hooks._initialize_workers(self._job.group)
        else:
            self._hooks._restart_workers(self._job.group)

    def _park(self) -> bool:
        """Let the workers leave their round, without their end; return whether all have left it.

        The time that this takes is a part of the grace, so a failure lets workers live no longer.
        """
        job, workers, begun = self._job, self.workers, monotonic()
        if workers is None:
            return False
        self._before_stop()
        within = PARK_SHARE * job.restart_timeout
        if not workers.park(within, own_hooks=self._has_own_hooks()):
            self.restart_grace = max(0.0, self.restart_grace - (monotonic() - begun))
            return False
        job.group.state = WorkerState.STOPPED
        self.end(RunResult(WorkerState.STOPPED))
        return True

    def others_would_go_on(self) -> bool:
        """Return whether the workers of the other nodes can go on when this node leaves.

        All nodes run the same script, so the workers of this node show it.
        """
        workers = self.workers
        return workers is not None and workers.would_go_on(own_hooks=self._has_own_hooks())

    def _has_own_hooks(self) -> bool:
        from regrow.agent.agent import LocalElasticAgent

        ours, own = LocalElasticAgent, type(self._hooks)
        return self._job.own_loop or any(
            getattr(own, name) is not getattr(ours, name) for name in _HOOKS
        )

    def pause(self, reason: str, announce: bool, full_grace: bool) -> None:
        """Stop the workers; arguments as in `restart`, which follows later."""
        self._prepare_restart(reason, announce, full_grace)
        self.stop(self._job.group)

    def _prepare_restart(
        self, reason: str, announce: bool, full_grace: bool, keep: bool = False
    ) -> None:
        job = self._job
        self.restart_grace = job.shutdown_timeout if full_grace else job.restart_timeout
        if announce:
            job.handler.leaving(reason, full_grace=full_grace, keep=keep)

    def check(self) -> tuple[RunResult, int]:
        """Check the workers; return their state and the number of waiting nodes.

        The number is 0 if the workers are not healthy, or if the rendezvous reports waiting nodes
        by itself.
        """
        result, handler = self._hooks._monitor_workers(self._job.group), self._job.handler
        waiting = 0
        if result.state == WorkerState.HEALTHY and not (handler.pushes and self._job.numbered):
            waiting = handler.num_nodes_waiting()
        return result, waiting

    def store_result(self, result: RunResult) -> None:
        """Store the result of `check`; called by the loop."""
        self._job.result = result
        self._job.group.state = result.state
        self._job.torch_events.check(result)
        if not WorkerState.is_running(result.state):
            self.end(result)

    def report_failure(self) -> Judged | None:
        """Report the first failure to the other nodes; block until all nodes have a verdict."""
        return self.peers.report_failure(self.first_failure())

    def stop_for_good(self, report: bool) -> None:
        """Stop the workers of a job that has failed.

        Args:
            report: whether to close the rendezvous for all nodes, with this node's failure as the
                reason.
        """
        if report:
            self.peers.fail(self.first_failure(), "its workers have failed for good")
        self._log_end()
        self._call_stop_workers(is_restart=False)
        if not self._job.result.failures and (first := self.first_failure()) is not None:
            # The workers had started to fail when the agent learned that the job is over.
            self._job.result = RunResult(WorkerState.FAILED, failures=dict([first]))

    def log_restart(self, reason: str, delay_s: float) -> None:
        """Log in one line what failed or changed, and that the workers start again.

        Args:
            reason: reason of the restart.
            delay_s: seconds until the restart.
        """
        job, elsewhere = self._job, self.peers.failure_elsewhere
        here = self.first_failure() if reason == WORKER_FAILURE and elsewhere is None else None
        failed = elsewhere or here
        if failed is None:
            logger.warning("%s; %s", reason, what_follows(delay_s, 0, None))
            return
        left = job.remaining_restarts
        if reason != WORKER_FAILURE:  # the other node's verdict is not counted here yet
            left -= 1
        if left < 0:
            then = why_no_restart(job.group.spec.max_restarts, 0, is_hopeless=False)
        else:
            then = what_follows(delay_s, job.group.workers[0].world_size, left)
        self._log_failure(failed, then, here=here is not None)

    def _log_end(self) -> None:
        """Log in one line what failed, and why the job ends."""
        elsewhere = self.peers.job_failure or self.peers.failure_elsewhere
        failed = elsewhere or self.first_failure()
        if failed is not None:
            spec, left = self._job.group.spec, self._job.remaining_restarts
            left = 0 if elsewhere else left
            then = why_no_restart(spec.max_restarts, left, is_hopeless=self._job.hopeless)
            self._log_failure(failed, then, here=elsewhere is None)

    def _log_failure(self, failed: tuple[int, ProcessFailure], then: str, *, here: bool) -> None:
        rank, failure = failed
        what = what_failed(rank if rank != NO_RANK else None, failure)
        # An agent that shares its output with others shows failures of its own host only.
        logger.log(logging.ERROR if here else logging.WARNING, "%s; %s", what, then)

    def exit_barrier(self) -> bool | None:
        """Wait for the other agents; see `wait_for_all`."""
        return self._hooks._exit_barrier()

    def conclude(self, final: WorkerState) -> RunResult:
        """Return the result of the run.

        If the job failed on another node, the result has the failure of that node.
        """
        result = self._job.result
        self._job.group.state = result.state = final
        elsewhere = self.peers.job_failure if final is WorkerState.FAILED else None
        if elsewhere is not None and not result.failures:
            result.state = WorkerState.STOPPED
        self.end(result)
        if elsewhere is not None:
            rank, failure = elsewhere
            result = self._job.result = RunResult(final, failures={rank: failure})
        return result

    def shorten_grace(self) -> None:
        """Shorten the grace of workers that are being stopped; do not block."""
        if self.workers is not None:
            self.workers.shorten_grace(self._job.restart_timeout)

    def lengthen_grace(self) -> None:
        """Give workers that are stopped the grace of the job's end; do not block."""
        if self.workers is not None:
            self.workers.lengthen_grace(self._job.shutdown_timeout)

    def report_not_replaced(self, rank: int) -> None:
        """Report to the ranks of this attempt that no other process takes the place of a rank.

        Raises:
            StoreError: the workers' store does not receive the report.
        """
        self._workers_store.report_not_replaced(rank, self._job.group.store_environment)

    # --- defaults of hooks

    def initialize(self, group: WorkerGroup) -> None:
        """Form a round and start workers in it; the default of `_initialize_workers`."""
        job = self._job
        self._check_staying()
        self._hooks._rendezvous(group)
        while not self.lease.wait(lambda: job.leaving or job.round_is_over):
            self._check_staying()
            self._hooks._rendezvous(group)
        # The lock covers the last event, so it precedes all events of the attempt's end.
        with self._starting:
            self._check_staying()
            self._unstopped = threading.Lock()
            job.begin_attempt()
            self.peers.begin_attempt()
            job.recorder.noticed = None
            worker_ids = self._hooks._start_workers(group)
            for local_rank, worker_id in worker_ids.items():
                worker = group.workers[local_rank]
                worker.id = worker_id
                job.torch_events.worker_event("START", worker)
            group.state = WorkerState.HEALTHY
            kept = self.workers.kept if self.workers else []
            sources = self.workers.sources() if self.workers and not kept else {}
            reports = self.workers.reports if self.workers else None
            page = reports.page() if reports else None
            logs = self.workers.log_files() if self.workers else {}
            job.recorder.attempt_started(sources, kept, page, logs)
        for feature in job.features:  # a worker may have written before its attempt had started
            job.post(feature.on_wake)
        job.leftovers.clear(group.store)

    def stop(self, group: WorkerGroup) -> None:
        """Stop the workers for a restart, and record how their attempt ended."""
        if self._job.own_loop:  # a subclass's own loop has not chosen a grace
            failed = group.state in FAILED_STATES or self.failed()
            job = self._job
            self.restart_grace = job.restart_timeout if failed else job.shutdown_timeout
        self._call_stop_workers(is_restart=True)
        group.state = WorkerState.STOPPED
        if self._job.result.state is WorkerState.UNHEALTHY:
            self.end(self._job.result)
        else:
            self.end(RunResult(WorkerState.STOPPED, failures=self.failed()))

    def wait_for_all(self, timeout: float) -> bool | None:
        """Wait until all agents of the round are done; the default of `_exit_barrier`.

        An agent that takes too long only causes a log line. An agent that has lost the round's
        store cannot know the state of the other agents. They may still work and expect another
        round, so this agent joins the next round too. If the others are done, it learns there
        that the job is over.

        Args:
            timeout: seconds to wait.

        Returns:
            False if the round ended during the wait, or its store was lost. The work of the round
            may then be incomplete.
        """
        world_size, store = self._job.group.group_world_size, self._job.group.store
        if world_size is None or world_size == 1 or store is None:
            return True
        from regrow.utils import store as store_util

        self._job.leftovers.add(store, store_util.barrier_keys(_TERMINAL_STATE_SYNC_ID))
        try:
            store_util.barrier(
                store=store,
                world_size=world_size,
                key_prefix=_TERMINAL_STATE_SYNC_ID,
                barrier_timeout=timeout,
            )
        except SignalException:
            raise
        except Exception as error:
            if self._job.numbered and is_cut_off(error):
                if not round_is_over(error):
                    logger.warning(
                        "lost the store of round %s while waiting for the other agents; joining "
                        "the next round: %s",
                        self._job.round,
                        error,
                    )
                return False
            logger.exception("Error waiting on the exit barrier for %s agents", world_size)
        return True

    def _call_stop_workers(self, *, is_restart: bool) -> None:
        self._before_stop()
        call_hook(self._hooks._stop_workers, self._job.group, is_restart=is_restart)

    def _before_stop(self) -> None:
        """Call `before_stop` of the features, once in an attempt."""
        if self._unstopped.acquire(blocking=False):
            for feature in self._job.features:
                feature.before_stop()

    # --- rounds

    def form_round(self, group: WorkerGroup) -> None:
        """Form a round; the default of `_rendezvous`.

        Args:
            group: gets the workers' ranks, the store and the address of the round.

        Raises:
            RendezvousGracefulExitError: the agent is leaving the job.
            RendezvousError: no round could be formed.
        """
        while not self._form_round(group):  # the round ended before it could start
            self._check_staying()

    def _check_staying(self) -> None:
        """Raise RendezvousGracefulExitError if the agent is leaving the job."""
        if self._job.leaving:
            raise RendezvousGracefulExitError("the agent is leaving the job")

    def _form_round(self, group: WorkerGroup) -> bool:
        spec, job = group.spec, self._job
        start = monotonic()
        with self._job.torch_events.duration("RENDEZVOUS"):
            try:
                with prepared(job, lambda: self._workers_store.without_token(os.environ)):
                    info = job.handler.next_rendezvous()
            except RendezvousTimeoutError as error:
                job.recorder.departed(job.round, error.departed)
                raise
        number, failures, nodes = info.round, info.failures, info.world_size
        is_new = job.round < 0
        if number is not None and not (is_new and info.all_joined):
            job.recorder.departed(number - 1, info.departed)
        try:
            assigned, place = self._agree(info, spec)
        except Exception as error:
            if number is None or not is_cut_off(error):
                raise
            if not round_is_over(error):  # a short loss of connection must not fail the job
                logger.warning("round %s cannot begin; joining the next round: %s", number, error)
            return False
        job.numbered = number is not None
        job.round = job.round + 1 if number is None else number
        # A subclass's own loop counts the failures of its own node, as in torch.
        job.shared = failures is not None and not job.own_loop
        if failures is not None and job.shared:
            job.count_failures(failures)
        group.workers, group.store = assigned, info.store
        group.group_rank, group.group_world_size = info.rank, nodes
        addr = spec.master_addr or (place.master_addr if place else None) or "127.0.0.1"
        group.master_addr = addr
        group.master_port = spec.master_port or (place.master_port if place else None)
        if addr != self._known_addr:
            self._known_addr = addr
            warn_if_unknown(addr)
        group.store_environment = self._workers_store.environment(nodes, addr, os.environ)
        job.recorder.emit(
            "regrow.rendezvous.completed",
            attempt=job.next_attempt,
            group_rank=info.rank,
            group_world_size=nodes,
            world_size=assigned[0].world_size,
            leader=addr,
            leader_serves=job.handler.is_served_by(addr),
            successors=list(info.successors),
            joined=list(info.joined),
            first_ranks=list(info.first_ranks) if nodes > 1 else [],
            duration_s=monotonic() - start,
        )
        if is_new and info.joined and not info.all_joined:
            logger.warning("%s", what_joins(assigned, info.departed))
        return True

    def _agree(
        self, info: RendezvousInfo, spec: WorkerSpec
    ) -> tuple[list[Worker], RendezvousStoreInfo | None]:
        """Exchange the data that the agents of a round need from each other, over its store.

        Returns:
            This node's workers, and the address of worker rank 0 if it is not fixed.
        """
        store, rank, nodes = info
        place = info.bootstrap_store_info
        known = spec.master_addr or (place.master_addr if place else None) or spec.local_addr
        self._workers_store.open(store, rank, nodes, known)
        for feature in self._job.features:
            feature.before_ranks(store)
        self._waited_for_ranks = False
        with self._job.torch_events.duration("ASSIGN_WORKER_RANKS"):
            assigned = self._hooks._assign_worker_ranks(store, rank, nodes, spec)
        for feature in self._job.features:
            feature.after_ranks(store)
        if place is None and not spec.master_addr and nodes > 1:
            place = RendezvousStoreInfo.build(rank, store, spec.local_addr, spec.master_port)
        if rank:
            self._job.leftovers.add(store, [offer_key(rank)])
            self._workers_store.look_up(store, rank, surely=self._waited_for_ranks)
        return assigned, place

    def assign_ranks(self, store: Store, rank: int, nodes: int, spec: WorkerSpec) -> list[Worker]:
        """Assign this node's ranks; the default of `_assign_worker_ranks`; see `ranks`."""
        size = spec.local_world_size
        if os.environ.get(WORKERS_IDENTICAL_ENV, "0") == "1":
            base, world_size = rank * size, nodes * size
            return ranks.workers(ranks.Assignment(base, world_size, base, world_size), size)
        self._waited_for_ranks = True
        if nodes > 1:
            self._job.leftovers.add(store, ranks.keys_of(rank))
        return ranks.workers(
            ranks.exchange(store, ranks.RoleInfo(spec.role, rank, size), nodes), size
        )

    # --- the end

    def leave(self, death_sig: signal.Signals) -> None:
        """Stop the workers for good with a signal.

        A running start of workers is awaited first, because it must not leave a half-started worker
        behind. If it takes longer than `START_S`, the workers that run already get the signal, and
        their grace begins. If the start hangs (a log directory that does not answer), they are
        killed after the grace.
        """
        grace = self._job.final_grace
        if self.workers is not None:
            self.workers.guardian.wake()  # a running start may wait for it
        started = self._starting.acquire(timeout=START_S)
        self._before_stop()
        if not started and self.workers is not None:
            self.workers.send_signal(death_sig, grace)
        if not started and not (started := self._starting.acquire(timeout=grace)):
            logger.error("the start of the workers does not end; leaving the job without it")
            if self.workers is not None:
                self.workers.send_signal(signal.SIGKILL, 0)
        try:
            call_hook(self._hooks._shutdown, death_sig, timeout=grace, is_restart=False)
        finally:
            if started:
                self._starting.release()

    def close(self) -> None:
        """End a run: close the workers' store."""
        self._workers_store.close()

    def end(self, result: RunResult) -> None:
        """Record the end of the current attempt, unless it is recorded already."""
        reports = self.workers.reports if self.workers is not None else None
        last_steps = reports.last_steps() if reports is not None else {}
        accounts = reports.accounts_by_rank() if reports is not None else {}
        wrappers = self.workers.wrappers() if self.workers is not None else {}
        ends = self.workers.ends() if self.workers is not None else {}
        self._job.recorder.attempt_ended(result, last_steps, accounts, wrappers, ends)

    def end_by(self, death_sig: signal.Signals) -> None:
        """Record the end of an attempt that was stopped because the agent left the job."""
        failures = not_due_to(death_sig, self.failed())
        self.end(RunResult(WorkerState.STOPPED, failures=failures))

    # --- failures

    def first_failure(self) -> tuple[int, ProcessFailure] | None:
        """Return the first failure known so far, with its global rank."""
        failures = self._job.result.failures
        if failures:
            rank = first_of(failures)
            return rank, failures[rank]
        return self.workers.first_failure() if self.workers is not None else None

    def failed(self) -> dict[int, ProcessFailure]:
        """Return the workers that failed by themselves in an attempt that ended for another reason.

        The keys are global ranks.
        """
        try:
            found = self.workers.failures() if self.workers is not None else None
        except SignalException:
            raise
        except Exception:  # an error here must not hide the reason for the attempt's end
            logger.exception("cannot find out which workers failed before they were stopped")
            return {}
        return self._job.result.failures if found is None else found


def not_due_to(
    death_sig: signal.Signals, failures: Mapping[int, ProcessFailure]
) -> dict[int, ProcessFailure]:
    """Return the failures that the signal at the end of the job did not cause.

    A scheduler sends the signal to the workers too, and the signal may end them before the agent
    does. Failures after such a first failure are its consequences.

    Args:
        death_sig: the signal that ended the job.
        failures: failures of the last attempt, by global rank.
    """
    if not failures:
        return {}
    first = failures[first_of(failures)]
    return {} if first.exitcode in (-death_sig, 128 + death_sig) else dict(failures)


def call_hook(hook: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """Call `hook` with `args`, and with those `offered` keywords that its signature names.

    A hook with `**kwargs` gets none: it may pass them on to a hook that does not know them.
    """
    function = hook
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    return hook(*args, **{name: value for name, value in offered.items() if name in names})


def round_is_over(error: Exception) -> bool:
    """Return whether a call of the round's store failed because the round has ended."""
    from regrow.store import StoreClosedError

    return isinstance(error, StoreClosedError)


def is_cut_off(error: Exception) -> bool:
    """Return whether a call failed because the connection to the round's store is lost."""
    from regrow.store import StoreConnectionError

    # torch's error is recognized by its name, because torch is not imported here.
    return isinstance(error, StoreConnectionError) or type(error).__name__ == "DistNetworkError"
