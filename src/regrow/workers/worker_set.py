"""The workers of a group: applies the guardian's events to the group, up to its end.

The guardian knows single workers, by its own numbers. `WorkerSet` converts its events to events of
the group (`group`), and makes the guardian stop the workers that the group stops. It returns a
`WorkerChange` to its owner. A `Launcher` handles the differences between programs and functions.

A worker may start while the group is already being stopped, because another worker failed right
after its start. Such a worker is stopped with the rest of the same grace. If the guardian dies, the
kernel kills its workers. They have failed, unless they had been stopped before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, NamedTuple

from regrow.utils import DEFAULT_SIGNALS, get_logger, split_signals, to_json
from regrow.workers.errors import ProcessFailure
from regrow.workers.group import EndKind, GroupState, WorkerEnd, ended, given_up, replaced
from regrow.workers.guardian import events as guard
from regrow.workers.guardian.client import Guardian, WorkerSetup

logger = get_logger(__name__)

#: Signals with which an agent stops workers: those that it handles, and SIGKILL.
_STOPS = {signal.SIGKILL, *split_signals(DEFAULT_SIGNALS)[0]}
#: Exit code of a process that could not be started, as of a shell's command that is not found.
_NOT_STARTED = 127
#: Message for a worker that failed although it exited with 0.
NO_RESULT = (
    "exit code 0, but the function that it runs in regrow.inprocess.Wrapper has no result: return"
    " from the function instead of ending the process, or end it with another exit code"
)


class WorkerChange(NamedTuple):
    """A change of a worker, or of its group."""

    local_rank: int
    """The worker's local rank; -1 for the group."""
    pid: int
    """The worker's process id; 0 if there is none."""
    kind: Literal[
        "exited",
        "lost",
        "vacant",
        "cleared",
        "replaced",
        "suspended",
        "resumed",
        "guardian_lost",
        "ended",
    ]
    """Kind of the change.

    `lost`: the worker ended, and the others continue without it. `vacant`: the same, but another
    process may take its place. `cleared`: no process of that worker is left. `replaced`: another
    process has taken its place. `guardian_lost`: the guardian is gone, with all workers. `ended`:
    no process of the group is left, and `wait` has its result.
    """
    status: int
    """`exited`, `lost`, `vacant`: the exit code, negative for a signal.

    `suspended`, `resumed`: the signal. `guardian_lost`: -9. The others: 0.
    """
    monotonic: float
    """Time of the change, in seconds of the monotonic clock."""


class Overdue(NamedTuple):
    """The local ranks whose processes were killed because they had not ended within their grace."""

    killed: frozenset[int] = frozenset()
    """Ranks whose worker was killed."""
    killed_descendants: frozenset[int] = frozenset()
    """Ranks whose worker had ended; processes that it had started were killed."""


@dataclass
class RunProcsResult:
    """Result of a group of workers; all fields are by local rank."""

    return_values: dict[int, Any] = field(default_factory=dict)
    """Return values of the functions; None for programs. Empty if any worker failed."""
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    """The workers that failed by themselves, without those stopped because of them."""
    stdouts: dict[int, str] = field(default_factory=dict)
    """Path of each stdout.log; empty if not redirected."""
    stderrs: dict[int, str] = field(default_factory=dict)
    """Path of each stderr.log; empty if not redirected."""

    def is_failed(self) -> bool:
        """Whether any worker failed."""
        return len(self.failures) > 0


class Launcher:
    """Start of one kind of workers, and the meaning of their ends. Ranks are local."""

    def launch(
        self, rank: int, setup: WorkerSetup, guardian: Guardian, agent_fds: Sequence[int]
    ) -> int:
        """Start one worker.

        Args:
            rank: the worker.
            setup: its environment, streams and grace.
            guardian: starts or adopts the worker.
            agent_fds: the agent's descriptors that no forked worker may keep.

        Returns:
            The guardian's number for the worker.
        """
        raise NotImplementedError

    def end(self, rank: int, code: int | None) -> tuple[int, bool]:
        """Return a worker's exit code, and whether the worker completed its task.

        Args:
            rank: the worker.
            code: its exit code; None for an adopted worker, because its parent knows it.
        """
        assert code is not None
        return code, code == 0

    def explain(self, rank: int, code: int) -> str | None:
        """Return why a worker failed, if its exit code does not show the reason."""
        return None

    def return_values(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the workers' return values; omit values that cannot be read."""
        return dict.fromkeys(ranks)

    def stopping(self) -> None:
        """Note that the workers are being stopped; workers that have returned may end."""

    def lost(self) -> None:
        """Note that a worker is lost, and the others continue."""

    def kill(self, rank: int) -> None:
        """Kill a worker that did not die with the guardian."""

    def close(self) -> None:
        """Release the workers' resources, now that the workers are gone."""


@dataclass
class WorkerSet:
    """The workers of one group; the owner calls all methods under one lock.

    Args:
        name: name of the workers.
        size: number of workers.
        grace: returns the seconds between SIGTERM and SIGKILL when a failure ends the group.
        guardian: runs the workers.
        launcher: interprets the ends of the workers.
        others_continue: returns whether the others can continue without a worker that ended.
        owes_result: returns whether a worker that ended has not completed its function; see
            `PContext`.
        vacates: returns whether another process may take the place of a worker that ended.
    """

    name: str
    size: int
    grace: Callable[[], float]
    guardian: Guardian
    launcher: Launcher
    others_continue: Callable[[int], bool]
    owes_result: Callable[[int], bool]
    vacates: Callable[[int], bool] = lambda local_rank: False

    def __post_init__(self) -> None:
        self.group = GroupState(self.size)
        self.pids: dict[int, int] = {}
        """Process id of each local rank, also after its end."""
        self.sources: dict[int, str] = {}
        """From what each local rank has started; see `Started`."""
        self.refusals: dict[int, OSError] = {}
        """Errors of programs that could not be started."""
        self._replaced: set[int] = set()  # ranks whose worker was replaced
        self._workers: dict[int, int] = {}  # the guardian's numbers of the workers
        self._last_stop: tuple[int, float] | None = None  # signal and deadline
        self._least_grace = 0.0  # of all stops, except by SIGKILL
        self.overdue = Overdue()
        """The ranks with processes that outlived the grace of a stop."""
        self._killed_with: dict[int, str] = {}  # how the guardian's end killed these workers
        self._loss_outcome: EndKind | None = None  # of the workers of a guardian that is lost

    @property
    def settled(self) -> bool:
        """Whether each worker is known to run, or to have failed to start."""
        return bool(self.refusals) or len(self.pids.keys() | self.group.ends.keys()) == self.size

    @property
    def deadline(self) -> float:
        """End of the latest grace, in seconds of the monotonic clock; 0 without a stop."""
        return 0.0 if self._last_stop is None else self._last_stop[1]

    @property
    def left(self) -> list[int]:
        """Ranks of workers that have not ended, or that left processes behind."""
        return [rank for rank in self._workers if rank not in self.group.gone]

    def add(self, rank: int, worker: int) -> None:
        """Add the guardian's number of the worker with this rank."""
        if rank not in self._workers:
            self._workers[rank] = worker
            if self._last_stop is not None:
                signum, deadline = self._last_stop
                self.guardian.stop([worker], signum, deadline - monotonic())

    def replace(self, rank: int) -> bool:
        """Make room for another process in the place of a worker; return False if none may start.

        The worker is vacant and gone.
        """
        if not self._is_vacant(rank) or rank not in self.group.gone:
            return False
        self.group = replaced(self.group, rank)
        del self._workers[rank]
        self._replaced.add(rank)
        return True

    def give_up(self, rank: int) -> WorkerChange | None:
        """Note that no process takes the place of a worker.

        Returns:
            The change of the worker for the owner; None if it was not vacant.
        """
        if not self._is_vacant(rank):
            return None
        self.group = given_up(self.group, rank)
        if self.group.failed and self.group.stopped_at is None:
            self._stop(signal.SIGTERM, self.grace())
        return self._change_of_end(rank)

    def _is_vacant(self, rank: int) -> bool:
        end = self.group.ends.get(rank)
        return end is not None and end.outcome == "vacant"

    def refuse(self, rank: int) -> None:
        """Note that a process in the place of a worker could not be started: it has failed."""
        self._note_end(rank, WorkerEnd(_NOT_STARTED, monotonic(), "failed"))
        self._note_gone(rank)

    def add_no_more(self) -> None:
        """Note that the other workers will not start; `close` stops those that did."""
        self._note_gone(*(set(range(self.size)) - self._workers.keys()))

    def close(self, signum: int, grace: float) -> None:
        """Stop the workers."""
        if self._workers and not self.group.over:
            self._stop(signum, grace)

    def hurry(self, grace: float) -> None:
        """Shorten the grace of workers that are being stopped; no effect on other workers."""
        if self.group.stopped_at is not None and self._last_stop is not None:
            self.guardian.stop([self._workers[rank] for rank in self.left], 0, grace)
            signum, deadline = self._last_stop
            self._last_stop = signum, min(deadline, self.group.stopped_at + grace)

    def lengthen(self, grace: float) -> None:
        """Give the workers at least this grace, counted from their first stop, past or future."""
        self._least_grace = grace
        if self.group.stopped_at is not None and self._last_stop is not None:
            self.guardian.stop([self._workers[rank] for rank in self.left], 0, grace)
            signum, deadline = self._last_stop
            self._last_stop = signum, max(deadline, self.group.stopped_at + grace)

    def handle(self, rank: int, event: guard.GuardianEvent) -> WorkerChange | None:
        """Handle an event of the guardian; return the changes for the owner."""
        self.add(rank, event.worker)
        pid = self.pids.get(rank, 0)
        match event:
            case guard.Started(pid=pid, source=source, monotonic=at):
                self.pids[rank], self.sources[rank] = pid, source
                if rank in self._replaced:
                    return WorkerChange(rank, pid, "replaced", 0, at)
            case guard.Refused(error=error):
                if rank not in self.pids:
                    self.refusals[rank] = error
                    return None
                logger.error("another process of local rank %s cannot start: %s", rank, error)
                self._note_end(rank, WorkerEnd(_NOT_STARTED, monotonic(), "failed"))
                return WorkerChange(rank, 0, "exited", _NOT_STARTED, monotonic())
            case guard.Exited():
                return self._handle_exit(rank, event)
            case guard.Suspended(signal=signum, monotonic=at):
                return WorkerChange(rank, pid, "suspended", signum, at)
            case guard.Resumed(signal=signum, monotonic=at):
                return WorkerChange(rank, pid, "resumed", signum, at)
            case guard.Gone(left_behind=left, stuck=stuck, monotonic=at):
                if left and self._grace_was_over(at) and rank not in self.overdue.killed:
                    descendants = self.overdue.killed_descendants | {rank}
                    self.overdue = self.overdue._replace(killed_descendants=descendants)
                self._note_gone(rank)
                self._log_leftovers(rank, left, stuck)
                if self._is_vacant(rank):
                    return WorkerChange(rank, pid, "cleared", 0, monotonic())
            case guard.GuardianLost(monotonic=at, how=how):
                return self._handle_loss(rank, at, how)
        return None

    def _handle_exit(self, rank: int, event: guard.Exited) -> WorkerChange:
        code, well = self.launcher.end(rank, event.code)
        well = well and not self.owes_result(rank)
        # An exit with 0 reports a success, which the other workers cannot achieve in its place.
        others_continue = (well or code != 0) and self.others_continue(rank)
        outcome: EndKind = "completed" if well else "stopped" if event.stopping else "failed"
        end = WorkerEnd(code, event.monotonic, outcome, event.late)
        if code == -signal.SIGKILL and self._grace_was_over(end.at):
            self.overdue = self.overdue._replace(killed=self.overdue.killed | {rank})
        self._note_end(rank, end, others_continue, others_continue and self.vacates(rank))
        return self._change_of_end(rank)

    def _grace_was_over(self, at: float) -> bool:
        """Return whether the workers had been asked to end, and the time for it was over."""
        if self._last_stop is None:
            return False
        signum, deadline = self._last_stop
        return signum != signal.SIGKILL and at >= deadline

    def _change_of_end(self, rank: int) -> WorkerChange:
        end, pid = self.group.ends[rank], self.pids.get(rank, 0)
        match end.outcome:
            case "lost":
                self.launcher.lost()
                return WorkerChange(rank, pid, "lost", end.code, end.at)
            case "vacant":
                return WorkerChange(rank, pid, "vacant", end.code, end.at)
        return WorkerChange(rank, pid, "exited", end.code, end.at)

    def _note_end(
        self, rank: int, end: WorkerEnd, others_continue: bool = False, vacates: bool = False
    ) -> None:
        self.group = ended(self.group, rank, end, others_continue, vacates)
        if self.group.failed and self.group.stopped_at is None:
            self._stop(signal.SIGTERM, self.grace())

    def _note_gone(self, *ranks: int) -> None:
        self.group = self.group._replace(gone=self.group.gone.union(ranks))

    def _stop(self, signum: int, grace: float) -> None:
        now = monotonic()
        if signum != signal.SIGKILL:
            grace = max(grace, self._least_grace)
        if self.group.stopped_at is None:
            self.group = self.group._replace(stopped_at=now)
        self.group = given_up(self.group, *self.group.ends)
        self.launcher.stopping()
        self.guardian.stop([self._workers[rank] for rank in self.left], signum, grace)
        self._last_stop = signum, now + grace

    def failure(self, rank: int, error_file: str) -> ProcessFailure:
        """Return the end of a worker as if it had failed.

        Args:
            rank: the worker's local rank; the worker has ended.
            error_file: path of its error file, which need not exist.
        """
        end = self.group.ends[rank]
        text = self.launcher.explain(rank, end.code)
        if text is not None and error_file != os.devnull and not os.path.exists(error_file):
            with suppress(OSError), open(error_file, "w") as file:
                file.write(to_json({"message": text}))
        failure = ProcessFailure(
            local_rank=rank,
            pid=self.pids.get(rank, 0),
            exitcode=end.code,
            error_file=error_file,
            exited_monotonic=end.at,
            noticed_late=end.late,
            killed_with=self._killed_with.get(rank, ""),
        )
        if end.code == 0 and not end.well:
            text = text or NO_RESULT
        if text is not None and not failure.has_error_file:
            failure.message = {"message": text, "extraInfo": {}}
        return failure

    def _log_leftovers(self, rank: int, left: int, stuck: int) -> None:
        pid = self.pids.get(rank, 0)
        if stuck:
            logger.error(
                "SIGKILL did not end %s processes of local rank %s (pid %s), and the job continues"
                " without waiting for them: they are probably in uninterruptible sleep (state D:"
                " a device hangs); this host may need a restart",
                stuck,
                rank,
                pid,
            )
        if left and self.group.stopped_at is None:
            logger.info(
                "the worker of local rank %s (pid %s) ended, but %s processes that it started"
                " still ran; the guardian has stopped them",
                rank,
                pid,
                left,
            )

    def _handle_loss(self, rank: int, at: float, how: str) -> WorkerChange | None:
        first = self._loss_outcome is None
        stopped = self.group.stopped_at is not None
        self._loss_outcome = self._loss_outcome or ("stopped" if stopped else "failed")
        self.launcher.kill(rank)
        if rank not in self.group.ends:
            self._killed_with[rank] = how
            self._note_end(rank, WorkerEnd(-signal.SIGKILL, at, self._loss_outcome))
        self._note_gone(rank)
        if not first:
            return None
        logger.error(
            "%s, and its end killed the workers of %s; look for a kill -9 or a memory limit",
            how,
            self.name,
        )
        return WorkerChange(-1, 0, "guardian_lost", -signal.SIGKILL, at)


def collect_results(
    group: GroupState,
    failure: Callable[[int], ProcessFailure],
    return_values: Callable[[list[int]], dict[int, Any]],
) -> tuple[dict[int, Any], dict[int, ProcessFailure]]:
    """Find the workers that failed, and if none did, the return values; both by local rank.

    A worker that ended after the stop has failed if its error file is older than the stop: it
    caught its exception before the others failed, and its clean-up took longer.

    Args:
        group: the group; it has ended.
        failure: returns the end of a worker as if it had failed; reads its error file.
        return_values: returns the values of workers that completed their tasks; a worker without a
            value has failed.
    """
    failures = {}
    for rank, end in sorted(group.ends.items()):
        found = failure(rank)
        lingered = (
            found.has_error_file
            and end.outcome == "stopped"
            and group.stopped_at is not None
            and found.failed_monotonic < group.stopped_at
        )
        if end.outcome == "failed" or lingered:
            found.was_stopped = lingered and _raised_and_was_stopped(found)
            failures[rank] = found
    if failures:
        return {}, failures
    completed = [rank for rank, end in sorted(group.ends.items()) if end.well]
    values = return_values(completed)
    failures = {rank: failure(rank) for rank in completed if rank not in values}
    return {} if failures else values, failures


def _raised_and_was_stopped(failure: ProcessFailure) -> bool:
    """Return whether the stop ended the process, and its error file holds an exception.

    A hang and a missing heartbeat leave a file with a stack. A process may also crash as it ends.
    """
    is_exception = "Traceback (most recent call last):" in (failure.traceback or "")
    return is_exception and -failure.exitcode in _STOPS
