"""`LocalWorkers`: the workers as processes of this host.

The guardian reports the changes of workers through the process context. Each change is a message in
the inbox, so an idle agent sleeps.

**Ends.** The end of a worker may be a failure; a check of the workers finds that out.

**Losses.** A wrapper (`regrow.inprocess`) continues without a rank that lost its process. The agent
must not stop the other workers then. The worker itself provides this information: its slot of the
progress page has a mark if the others continue without it. The worker sets the mark when all ranks
have met, and clears it when the call is about to end on all ranks. The mark is set again after the
worker has left the call for good. The agent reads the slot after the end of the process, so the
mark is valid up to the instant of a SIGKILL. An exit with 0 before the function has a result is a
failure. A lost worker is removed from the group, and no budget is charged unless another process
takes the place (`regrow.agent.features.replacements`). When the other workers have ended, the
attempt ends with their result (`regrow.workers.group`). If no worker of this node is left, its last
loss is a failure. The end of a worker outside a wrapper is always a failure.

**Leases.** The guardian kills the workers of a round when their lease expires, whether the agent
runs or not, and reports it.

**Workers that live on.** If a host is lost, joins or leaves, workers whose wrapper can go on in the
next round (`Wrapper(elastic=True)`) are ordered to leave the round (`park`), and to join the next
one in place of a start. They hold no lease of a round meanwhile: the guardian kills them when the
lease of the round that they have left expires, unless that of the next round has begun.

**Suspended workers** (SIGSTOP, a debugger) are alive and are not replaced, and the user may not
know why the job makes no progress. So the agent logs them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent.api import RunResult, Worker, WorkerState
from regrow.agent.attempt.environment import HEARTBEAT_ENV, worker_environment
from regrow.agent.decisions import events
from regrow.agent.decisions.keep import (
    ParkedWorkers,
    RunningWorkers,
    reason_not_to_move,
    reason_to_end,
)
from regrow.agent.features import Feature, StartedWorkers
from regrow.agent.features.progress import WorkerReports
from regrow.agent.features.replacements import Replacements
from regrow.rendezvous import RendezvousGracefulExitError
from regrow.utils import get_logger, macros, signal_text
from regrow.workers import Guardian, PContext, WorkerChange, start_processes
from regrow.workers.logs.relay import StderrRelay

if TYPE_CHECKING:
    from regrow.agent.features.state_d import UninterruptibleSleepers
    from regrow.agent.job import Job
    from regrow.utils import PortReservation
    from regrow.workers import LogsSpecs, ProcessFailure
    from regrow.workers.guardian.events import Lapsed

LEAVE_S = 5.0
"""Longest time in seconds from the end of a leaving node's grace until the others see it leave."""

logger = get_logger(__name__)


class LocalWorkers(Feature):
    """Starts, watches and stops the workers of this host.

    Args:
        job: what the parts of the agent share. Its features add to the environment of the workers
            and explain failures.
        sleepers: detects workers in uninterruptible sleep.
        heartbeats: whether the job runs with `--heartbeat`; this changes the warning about a
            suspended worker.
        report_not_replaced: reports to the ranks of the latest attempt that a rank is not replaced.
        log_dir: folder for the logs of the workers; None: not known.
    """

    def __init__(
        self,
        job: Job,
        sleepers: UninterruptibleSleepers,
        *,
        heartbeats: bool,
        report_not_replaced: Callable[[int], None] = lambda rank: None,
        log_dir: str | None = None,
    ) -> None:
        self._job, self._log_dir = job, log_dir
        self.replacements = Replacements(job, lambda: self.reports, report_not_replaced)
        self.reports: WorkerReports | None = None
        """The page of steps of the latest attempt, which may be closed."""
        self._sleepers = sleepers
        self._heartbeats = heartbeats
        self.context: PContext | None = None
        """The workers' processes; a subclass of the agent that starts its own workers sets it."""
        self.lost: set[int] = set()
        """Global ranks of the workers that were lost in the latest attempt."""
        self.finished: dict[int, float] = {}
        """When workers of the latest attempt ended with exit code 0, by global rank."""
        self.kept: list[int] = []
        """Global ranks of the workers of the latest attempt, if they went on in their processes."""
        self._started: StartedWorkers | None = None  # with the context that posts its changes
        self.guardian = Guardian(on_lapse=self._on_lapse)
        self._relay = StderrRelay()
        self._port: PortReservation | None = None
        self._parked = False  # whether the workers have left their round, and wait for the next

    def open(self) -> None:
        """See base class: start the guardian; its interpreter starts while the round forms."""
        self.guardian.renew(None)
        self.guardian.start()
        self._relay.open()

    def close(self) -> None:
        """See base class: close the guardian and the relay, the port and the page of steps."""
        if self.reports is not None:
            self.reports.close()
        self.guardian.close()
        self._release_port()
        self._relay.close()

    def on_wait(self, environment: Mapping[str, str]) -> None:
        """See base class: log what would keep the workers from starting."""
        from regrow.agent.attempt.waiting import problems

        for problem in problems(self._job.group.spec, self._log_dir, os.environ):
            logger.warning("this host waits for a place, and could not take it now: %s", problem)

    def _release_port(self) -> None:
        # Each attempt has a new port: a closing connection may still hold the old one.
        if self._port is not None:
            self._port.close()
            self._port = None

    # --- start and stop

    def start(
        self, logs_specs: LogsSpecs, start_method: str, line_prefix: str | None = None
    ) -> dict[int, int]:
        """Start the workers of an attempt; return the process id of each local rank.

        Args:
            logs_specs: where the output of the workers goes.
            start_method: how function entry points are started.
            line_prefix: template for the prefix of each console line; None for the default.
        """
        job, group, spec = self._job, self._job.group, self._job.group.spec
        moves, self.kept = self._may_move(), []
        self._release_port()
        if not group.master_port:
            from regrow.utils import PortReservation

            # Held until the attempt ends; otherwise a process could take it before rank 0.
            self._port = PortReservation()
            group.master_port = self._port.port
        envs = {
            worker.local_rank: worker_environment(job, worker, os.environ)
            for worker in group.workers
        }
        reports = self.reports
        if reports is None or not moves:
            if reports is not None:
                reports.close()
            self.reports = reports = WorkerReports(job)
        for local_rank, environment in envs.items():
            environment |= reports.environment(local_rank)
        for feature in job.features:
            feature.before_start(envs)
        if moves:
            return self._move(reports, envs)
        assert spec.entrypoint is not None
        self.context = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=_prefixes(line_prefix, spec.role, group.workers),
            start_method=start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            shutdown_timeout=job.shutdown_timeout,
            # Read at the failure: a replacement may have spent the last restart by then.
            failure_timeout=lambda: (
                job.restart_timeout if job.remaining_restarts > 0 else job.shutdown_timeout
            ),
            guardian=self.guardian,
            on_change=partial(self._on_change, job.attempt),
            signals_to_handle="",
            before_start=self._before_first,
            others_continue=self._others_continue,
            owes_result=reports.owes_result,
            vacates=self.replacements.vacates,
            # A function gets the agent's stderr itself, as from torch.
            relay=self._relay if isinstance(spec.entrypoint, str) else None,
        )
        return dict(self.context.pids())

    # --- workers that go on in the next round

    def park(self, timeout: float, *, own_hooks: bool) -> bool:
        """Order the workers to leave their round; return whether all have left it.

        Args:
            timeout: seconds to wait for them.
            own_hooks: whether a subclass of the agent restarts workers in a way of its own.
        """
        context, reports = self.context, self.reports
        if not isinstance(context, PContext) or reports is None:
            return False
        why = reason_to_end(self._running(context, reports, own_hooks))
        if not why and not self._leave_round(context, reports, timeout):
            why = f"a worker did not leave its round within {timeout:g} s"
        if why and any(map(reports.may_stay, range(len(self._job.group.workers)))):
            self._record_not_kept(why)
        self._parked = not why
        return self._parked

    def would_go_on(self, *, own_hooks: bool) -> bool:
        """Return whether workers like these go on in the next round, on the other hosts.

        Those of this host may have ended: a scheduler sends its signal to them too.

        Args:
            own_hooks: as for `park`.
        """
        context, reports = self.context, self.reports
        if not isinstance(context, PContext) or reports is None:
            return False
        running = self._running(context, reports, own_hooks)
        return not reason_to_end(running._replace(all_run=True))

    def _running(
        self, context: PContext, reports: WorkerReports, own_hooks: bool
    ) -> RunningWorkers:
        return RunningWorkers(
            numbered=self._job.numbered,
            own_hooks=own_hooks,
            heartbeats=any(env.get(HEARTBEAT_ENV) for env in context.envs.values()),
            all_run=context.all_run,
            may_stay=all(map(reports.may_stay, range(len(self._job.group.workers)))),
        )

    def on_leaving(self) -> None:
        """See base class: send the order to wait to each rank that can go on in the next round.

        The leaving host may serve the store. A rank that loses the store then waits until the agent
        orders it to leave the round.
        """
        reports, job = self.reports, self._job
        for local_rank in range(len(job.group.workers)):
            if reports is not None and reports.may_stay(local_rank):
                reports.order(
                    local_rank,
                    kind="wait",
                    attempt=job.attempt,
                    seconds=LEAVE_S + job.shutdown_timeout,
                )

    def _leave_round(self, context: PContext, reports: WorkerReports, timeout: float) -> bool:
        attempt, local_ranks = self._job.attempt, range(len(self._job.group.workers))
        sent = [reports.order(each, kind="leave", attempt=attempt) for each in local_ranks]
        if not all(sent):
            return False

        def pointless() -> bool:
            stay = all(reports.may_stay(each) for each in local_ranks)
            return self._job.leaving or not context.all_run or not stay

        return reports.all_parked(timeout, pointless)

    def _may_move(self) -> bool:
        """Return whether parked workers go on in the round that was formed; end them if not."""
        if not self._parked:
            return False
        self._parked = False
        assert self.context is not None
        context, group = self.context, self._job.group
        before, after = (
            frozenset(context.envs),
            frozenset(each.local_rank for each in group.workers),
        )
        why = reason_not_to_move(ParkedWorkers(context.all_run, before, after))
        if why:
            self._record_not_kept(why)
            self.stop(signal.SIGKILL, 0)
        return not why

    def _move(self, reports: WorkerReports, envs: Mapping[int, dict[str, str]]) -> dict[int, int]:
        """Let the workers join the round that was formed; return their process ids."""
        context, job = self.context, self._job
        assert context is not None
        ranks = [worker.global_rank for worker in job.group.workers]
        before = context.envs
        context.move(envs, partial(self._on_change, job.attempt))
        self._before_first(context)
        reports.move(job.attempt, ranks)
        for local_rank, env in context.envs.items():
            changed = changed_variables(before[local_rank], env)
            if not reports.order(local_rank, kind="join", env=changed):
                logger.error("local rank %s does not receive the order to go on", local_rank)
                self.guardian.stop(None, signal.SIGKILL, 0)
        if not context.all_run:  # one has ended since this was checked, and its peers wait for it
            self.guardian.stop(None, signal.SIGKILL, 0)
        self.kept = ranks
        logger.warning(
            "the workers of this node go on in round %s, in their processes, as ranks %s",
            job.round,
            ", ".join(map(str, ranks)),
        )
        return dict(context.pids())

    def _record_not_kept(self, why: str) -> None:
        self._job.recorder.emit("regrow.attempt.not_kept", reason=why)
        logger.warning("the workers of this node do not go on in the next round: %s", why)

    def _others_continue(self, local_rank: int) -> bool:
        assert self.reports is not None
        goes_on = self.reports.others_continue(local_rank)
        return goes_on and not self.replacements.ends_attempt(local_rank)

    def _before_first(self, context: PContext) -> None:
        if self._job.leaving:  # the agent did not wait for this start
            raise RendezvousGracefulExitError("the agent is leaving the job")
        workers = self._job.group.workers
        ranks = [worker.global_rank for worker in workers]
        started = StartedWorkers(
            self._job.attempt, ranks, context, self.guardian, workers[0].world_size
        )
        for feature in self._job.features:
            feature.on_start(started)

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class."""
        self._started, self.lost, self.finished = workers, set(), {}

    def stop(self, death_sig: signal.Signals, grace: float) -> None:
        """Send a signal to the workers, and SIGKILL after `grace` seconds."""
        self._announce_stop(death_sig)
        if self.context is not None:
            self.context.close(death_sig, grace)

    def send_signal(self, signum: signal.Signals, grace: float) -> None:
        """Send a signal to the workers that run, and SIGKILL after `grace` seconds; do not wait."""
        self._announce_stop(signum)
        self.guardian.stop(None, signum, grace)

    def _announce_stop(self, signum: signal.Signals) -> None:
        if self.reports is not None:
            self.reports.stop()
        for feature in self._job.features:
            feature.on_stop(signum)

    def shorten_grace(self, grace: float) -> None:
        """Shorten the grace of workers that are being stopped to `grace` seconds from now."""
        context = self.context  # another thread may replace the attribute
        if isinstance(context, PContext):  # torch's context has one grace
            context.hurry(grace)

    def lengthen_grace(self, grace: float) -> None:
        """Give the workers at least `grace` seconds from their stop, past or future."""
        context = self.context
        if isinstance(context, PContext):
            context.lengthen(grace)

    def sources(self) -> dict[int, str]:
        """Return from what each global rank has started: exec, a template or a standby."""
        sources = getattr(self.context, "sources", dict)  # torch's context has no templates
        return {self._ranks()[rank]: source for rank, source in sources().items()}

    def log_files(self) -> dict[int, str]:
        """Return the file with the stderr of each global rank, else with its stdout, if any."""
        found: dict[int, str] = {}
        if self.context is None:
            return found
        for local_rank, rank in self._ranks().items():
            for paths in (self.context.stderrs, self.context.stdouts):
                if (path := paths.get(local_rank)) and path != os.devnull:
                    found.setdefault(rank, path)
        return found

    def ends(self) -> dict[str, Any]:
        """Return how workers ended: fields of the event of the end of an attempt.

        `finished`: when a worker ended with exit code 0, by global rank. `killed`: the global ranks
        of workers that were killed because they had not ended within the grace.
        `killed_descendants`: those of workers that had started processes that were killed.
        """
        finished = {str(rank): at for rank, at in self.finished.items()}
        context = self.context
        if not isinstance(context, PContext):  # torch's context does not know
            return {"finished": finished}
        ranks = self._ranks()
        killed = {
            name: sorted(ranks[local] for local in found if local in ranks)
            for name, found in context.overdue()._asdict().items()
        }
        return {"finished": finished, **killed}

    # --- watch

    def _on_change(self, attempt: int, change: WorkerChange) -> None:
        """Handle a change of a worker; called by the process context on its own thread."""
        if change.status != 0 and change.kind in ("exited", "guardian_lost"):
            self._announce_stop(signal.SIGTERM)  # the context stops the other workers
        if self.reports is not None:
            self.reports.wake()
        self.replacements.on_change(change)
        self._job.post(partial(self.on_change, attempt, change))

    def on_change(self, attempt: int, change: WorkerChange) -> events.Event | None:
        """Record a change of a worker of an attempt; return the event for the loop."""
        if attempt != self._job.attempt:
            return None  # the next attempt has begun
        if change.kind in ("lost", "suspended", "resumed"):
            self._record(change)
            return None
        if change.kind in ("vacant", "cleared", "replaced"):
            return None  # `Replacements` handles it
        if change.kind == "exited" and change.status == 0 and self._started is not None:
            self.finished[self._started.ranks[change.local_rank]] = change.monotonic
        if self._job.recorder.noticed is None and change.status != 0:
            self._job.recorder.noticed = monotonic()
            return events.Failing()
        return events.Changed()

    def _record(self, change: WorkerChange) -> None:
        assert self._started is not None
        rank, pid, status = self._started.ranks[change.local_rank], change.pid, change.status
        worker = {"rank": rank, "local_rank": change.local_rank, "pid": pid}
        emit = self._job.recorder.emit
        if change.kind == "lost":
            self.lost.add(rank)
            emit(
                "regrow.inprocess.lost", **worker, exitcode=status, lost_monotonic=change.monotonic
            )
            how, then = (
                f"with exit code {status}",
                "the wrapper of the other ranks decides what follows",
            )
            if status < 0:
                how = f"by {signal_text(-status)}"
                then = "the other ranks continue without it, by an in-process restart"
            logger.warning("rank %s (pid %s) ended %s; %s", rank, pid, how, then)
            return
        signame = signal_text(status) if status else None
        emit(f"regrow.worker.{change.kind}", **worker, signal=signame)
        if change.kind == "suspended":
            effect = "it sends no heartbeat" if self._heartbeats else "the job waits for it"
            logger.warning(
                "rank %s (pid %s) was paused by %s; %s: kill -CONT %s",
                rank,
                pid,
                signame,
                effect,
                pid,
            )

    def _on_lapse(self, lapsed: Lapsed) -> None:
        """Handle an expired lease; called by the guardian's handle on its own thread."""
        context = self.context
        if context is not None:
            context.note_lapse()
        # The number of the round, also for workers that were killed during their start.
        self._job.post(partial(self.on_lapse, self._job.attempt + 1, lapsed))

    def on_lapse(self, round: int, lapsed: Lapsed) -> events.LeaseOver:
        """Record an expired lease of a round's workers; return the event for the loop."""
        killed = lapsed.killed
        self._job.recorder.emit(
            "regrow.lease.over",
            attempt=round - 1,
            workers=killed,
            lapsed_monotonic=lapsed.monotonic,
        )
        workers = f"{killed} workers" if killed != 1 else "worker"
        why = f"its lease expired, and the guardian killed its {workers}"
        return events.LeaseOver(round, why, monotonic())

    @property
    def pushes_changes(self) -> bool:
        """Whether the inbox gets every change of the workers, so that no polling is needed."""
        # A subclass of the agent may start its own workers.
        own = self._started.context if self._started is not None else None
        return self.context is own and self._sleepers.timeout <= 0

    def check(self) -> RunResult:
        """Return the state of the workers."""
        context, group = self.context, self._job.group
        assert context is not None, "the workers are not started yet"
        # A worker without an id has failed: the guardian was killed before it could start it.
        pids = context.pids()
        for worker in group.workers:
            if self.replacements.incarnation(worker.local_rank):
                worker.id = pids.get(worker.local_rank)
        started = {worker.id for worker in group.workers if worker.id is not None}
        running = set(pids.values())
        if started != running:
            logger.error("worker pids %s do not match the context's %s", started, running)
            return RunResult(state=WorkerState.UNKNOWN)
        result = context.wait(0)
        if result is None:
            return self._check_sleepers(context.pids())
        if result.is_failed():
            failures = self._explained(result.failures)
            return RunResult(state=WorkerState.FAILED, failures=failures)
        ranks = self._ranks()
        values = {ranks[local]: value for local, value in result.return_values.items()}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _check_sleepers(self, pids: Mapping[int, int]) -> RunResult:
        stuck = self._sleepers.stuck(set(pids.values()), monotonic())
        if not stuck:
            return RunResult(state=WorkerState.HEALTHY)
        self._job.remaining_restarts = 0
        self._job.hopeless = True
        failures = {
            rank: self._sleepers.failure(local, pids[local])
            for local, rank in self._ranks().items()
            if pids.get(local) in stuck
        }
        for failure in failures.values():
            logger.error("worker with pid %s is %s", failure.pid, failure.message)
        return RunResult(state=WorkerState.UNHEALTHY, failures=failures)

    # --- failures

    def _explained(self, failures: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        """Return failures by global rank, with the explanations of the features."""
        ranks = self._ranks()
        found = {ranks[local]: failure for local, failure in failures.items()}
        for feature in self._job.features:
            found = feature.explain(found)
        return found

    def first_failure(self) -> tuple[int, ProcessFailure] | None:
        """Return the first failure of an attempt that still runs, with its global rank."""
        first_failure = getattr(self.context, "first_failure", None)  # torch's context has none
        failure: ProcessFailure | None = first_failure() if first_failure is not None else None
        if failure is None:
            return None
        rank = self._ranks()[failure.local_rank]
        return rank, self._explained({failure.local_rank: failure})[rank]

    def failures(self) -> dict[int, ProcessFailure] | None:
        """Return the failures of an attempt that has ended, by global rank; None without any."""
        result = self.context.wait(0) if self.context is not None else None
        if result is None or not result.is_failed():
            return None
        return self._explained(result.failures)

    def wrappers(self) -> dict[int, dict[str, Any]]:
        """Return what the in-process wrapper of each worker could do at its end, by global rank.

        `wrapped`: the worker was in a wrapped function. `replaceable`: another process could take
        its place. `incarnation`: number of processes that had its place before.
        """
        reports = self.reports
        if reports is None:
            return {}
        return {
            rank: {
                "wrapped": reports.in_wrapper(local),
                "replaceable": reports.may_be_replaced(local),
                "incarnation": self.replacements.incarnation(local),
            }
            for local, rank in self._ranks().items()
        }

    def _ranks(self) -> dict[int, int]:
        return {worker.local_rank: worker.global_rank for worker in self._job.group.workers}


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that a worker has to change for another attempt; None: to remove.

    A wrapper has changed RANK and WORLD_SIZE in the worker, so they are always among them.
    """
    changed: dict[str, str | None] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        if before.get(name) != value or name in ("RANK", "WORLD_SIZE"):
            changed[name] = value
    return changed


def _prefixes(template: str | None, role: str, workers: Sequence[Worker]) -> dict[int, str] | None:
    if not template:
        return None
    from string import Template

    return {
        worker.local_rank: Template(template).safe_substitute(
            role_name=role, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for worker in workers
    }
