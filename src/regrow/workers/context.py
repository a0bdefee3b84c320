"""`PContext`: a group of worker processes, with `start`, `wait` and `close`.

The thread of the guardian's handle receives the guardian's events, and `WorkerSet` converts them to
changes of the group. A separate thread processes the end of the group: the rest of the logs, error
files, return values. The reason: this may take a while, and other groups may share the guardian.
`wait` and `close` only wait for that thread.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, TypedDict

from regrow.utils import get_logger, start_thread
from regrow.workers.errors import ProcessFailure
from regrow.workers.errors.error_handler import ERROR_FILE_ENV
from regrow.workers.errors.failures import earliest
from regrow.workers.guardian import events as guard
from regrow.workers.guardian.client import Guardian, WorkerSetup
from regrow.workers.logs.pump import LogPump
from regrow.workers.logs.specs import of_rank
from regrow.workers.signals import install_signal_handlers
from regrow.workers.worker_set import (
    Launcher,
    Overdue,
    RunProcsResult,
    WorkerChange,
    WorkerSet,
    collect_results,
)

if TYPE_CHECKING:
    from regrow.workers.logs.relay import StderrRelay
    from regrow.workers.logs.specs import LogsSpecs

logger = get_logger(__name__)

#: Most seconds after the grace until `close` returns: longer than the guardian's kill time-out.
KILL_MARGIN = 10.0
WORDS_S = 0.2
"""Seconds to wait until the last output of a worker that has failed is stored. It takes that long
only if another process holds the worker's streams open."""
STORE_S = 2.0
"""Seconds to wait until the output of a worker that is replaced is stored."""


class Supervision(TypedDict, total=False):
    """Arguments of `PContext` that torch's context does not have; see there."""

    shutdown_timeout: float
    failure_timeout: Callable[[], float] | None
    guardian: Guardian | None
    on_change: Callable[[WorkerChange], None] | None
    signals_to_handle: str | None
    others_continue: Callable[[int], bool]
    owes_result: Callable[[int], bool]
    vacates: Callable[[int], bool]
    relay: StderrRelay | None


class PContext:
    """Worker processes, one per local rank.

    Args:
        name: name of the workers; starts the prefix of their lines on the console.
        entrypoint: a function or a program.
        args: arguments by local rank.
        envs: environment by local rank, added to this process's own.
        logs_specs: destinations of the output.
        log_line_prefixes: start of each console line, by local rank.
        duplicate_stdout_filters: lines of tee'd stdouts that contain one of these are copied to one
            file.
        duplicate_stderr_filters: the same for stderr.
        shutdown_timeout: seconds between SIGTERM and SIGKILL for processes that a worker leaves
            behind.
        failure_timeout: returns the same for the other workers when a failure ends the group; must
            not block. None is `shutdown_timeout`.
        launcher: starts single workers.
        guardian: watches the workers; None creates one for this context.
        on_change: called on another thread for each change; must not block.
        signals_to_handle: names of the signals that raise `SignalException`; empty for none; None
            reads them from `TORCHELASTIC_SIGNALS_TO_HANDLE`.
        others_continue: returns, for the local rank of a worker that ended, whether the others can
            continue without it; must not block. Default: they cannot.
        owes_result: returns, for the local rank of a worker that ended, whether it was in a wrapped
            function (`regrow.inprocess`) that has no result; must not block. In that case an exit
            with 0 is a failure. Default: it was not.
        vacates: returns, for the local rank of a worker without which the others can continue,
            whether another process may take its place (`replace` or `give_up`); must not block.
            Default: none may.
        relay: keeps the end of each stderr that is not redirected, if `logs_specs` asks for it.

    Raises:
        RuntimeError: the log destinations do not cover the local ranks.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        launcher: Launcher,
        shutdown_timeout: float = 30.0,
        failure_timeout: Callable[[], float] | None = None,
        guardian: Guardian | None = None,
        on_change: Callable[[WorkerChange], None] | None = None,
        signals_to_handle: str | None = None,
        others_continue: Callable[[int], bool] = lambda local_rank: False,
        owes_result: Callable[[int], bool] = lambda local_rank: False,
        vacates: Callable[[int], bool] = lambda local_rank: False,
        relay: StderrRelay | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        dest = logs_specs.reify(envs)
        validate_full_rank(dest.stdouts, self.nprocs, "stdouts")
        validate_full_rank(dest.stderrs, self.nprocs, "stderrs")
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.error_files = dest.error_files
        self._dest = dest
        self._new_pump = partial(
            LogPump,
            name,
            prefixes=log_line_prefixes,
            stdout_filters=duplicate_stdout_filters,
            stderr_filters=duplicate_stderr_filters,
            relay=relay,
        )
        self._shutdown_timeout = shutdown_timeout
        self._own_guardian = guardian is None
        self._guardian = guardian if guardian is not None else Guardian()
        self._on_change = on_change or (lambda change: None)
        self._signals = signals_to_handle
        self._pump: LogPump | None = None
        self._pumps: dict[int, LogPump] = {}  # of processes that replaced a worker, by its rank
        #: Guards all attributes below; reentrant, because a signal handler may close the context.
        self._changed = threading.Condition(threading.RLock())
        self._launcher = launcher
        self._workers = WorkerSet(
            name,
            self.nprocs,
            failure_timeout or (lambda: shutdown_timeout),
            self._guardian,
            launcher,
            others_continue,
            owes_result,
            vacates,
        )
        self._result: RunProcsResult | None = None
        self._error: BaseException | None = None
        self._launched = False
        self._lapsed = False
        self._finishing = False
        self._done = False

    # --- public methods

    def start(self) -> None:
        """Start the workers; return once the program of each is running.

        Raises:
            OSError: a program cannot be started; the workers that already ran have been killed.
            ValueError: called twice.
        """
        if self._pump is not None:
            raise ValueError(
                "The process context already initialized."
                " Most likely the start method got called twice."
            )
        install_signal_handlers(self._signals)
        self._guardian.start()  # the guardian's interpreter starts in parallel
        self._pump = pump = self._new_pump(self._dest)
        try:
            for rank in range(self.nprocs):
                self._launch(rank, pump)
        except BaseException:
            with self._changed:
                self._workers.add_no_more()
            raise
        finally:
            pump.close_writers()
            pump.start()
            with self._changed:
                self._launched = True
                self._check_over()
        with self._changed:
            self._changed.wait_for(lambda: self._workers.settled or self._done)
            refusals = dict(self._workers.refusals)
        if refusals:
            self.close(signal.SIGKILL, 0)
            raise refusals[min(refusals)]

    def replace(self, local_rank: int, env: Mapping[str, str]) -> bool:
        """Start another process in the place of a worker of which no process is left.

        Its output follows that of the worker, in the same files. If it cannot be started, the
        worker has failed.

        Args:
            local_rank: rank of the worker, which is vacant (`vacates`).
            env: variables that differ from those of the worker.

        Returns:
            False if the workers are being stopped, so no process starts.
        """
        with self._changed:
            if not self._launched or not self._workers.replace(local_rank):
                return False
        self.envs[local_rank] |= env
        before = self._pumps.pop(local_rank, None)
        if before is not None:
            before.stop(flush=False)
        elif self._pump is not None:
            self._pump.await_end(local_rank, STORE_S)
        try:
            pump = self._pumps[local_rank] = self._new_pump(of_rank(self._dest, local_rank))
            try:
                self._launch(local_rank, pump)
            finally:
                pump.close_writers()
                pump.start()
        except (OSError, ValueError) as error:
            logger.error("another process of local rank %s cannot start: %s", local_rank, error)
            with self._changed:
                self._workers.refuse(local_rank)
            self._on_change(WorkerChange(local_rank, 0, "exited", 127, monotonic()))
            with self._changed:
                self._check_over()
        return True

    @property
    def all_run(self) -> bool:
        """Whether every worker runs, and none is being stopped."""
        with self._changed:
            group = self._workers.group
            begun = self._launched and len(self._workers.pids) == self.nprocs
            return begun and not group.ends and group.stopped_at is None

    def move(
        self, envs: Mapping[int, Mapping[str, str]], on_change: Callable[[WorkerChange], None]
    ) -> None:
        """Take the running workers into another attempt.

        Args:
            envs: the new environment by local rank, for processes that replace a worker later.
            on_change: called from now on for each change, as the argument of the constructor.
        """
        with self._changed:
            # The error file belongs to the process, and not to the attempt.
            kept = {
                rank: {ERROR_FILE_ENV: self.envs[rank].get(ERROR_FILE_ENV, "")} for rank in envs
            }
            self.envs = {rank: {**env, **kept[rank]} for rank, env in envs.items()}
            self._on_change = on_change

    def give_up(self, local_rank: int) -> bool:
        """Note that no process takes the place of a worker; return whether the place was vacant."""
        with self._changed:
            change = self._workers.give_up(local_rank)
        if change is not None:
            self._on_change(change)
        with self._changed:
            self._check_over()
        return change is not None

    def _launch(self, rank: int, pump: LogPump) -> None:
        setup = self._setup(rank, pump)
        worker = self._launcher.launch(rank, setup, self._guardian, sorted(pump.own_fds()))
        with self._changed:
            self._workers.add(rank, worker)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all workers succeeded and are gone, or one failed and all are stopped.

        Args:
            timeout: seconds; negative: without a limit; 0: do not wait.
            period: seconds within which the main thread detects a signal that arrived as it fell
                asleep, or on another thread. Python does not wake it for such a signal.

        Returns:
            The result of the workers; None if the time expires first.
        """
        end = monotonic() + timeout if timeout >= 0 else inf
        main = threading.current_thread() is threading.main_thread()
        longest = max(period, 0.001) if main else threading.TIMEOUT_MAX
        with self._changed:
            while not self._done and (left := end - monotonic()) > 0:
                self._changed.wait(min(left, longest))
            if self._error is not None:
                raise self._error
            return self._result

    def note_lapse(self) -> None:
        """Note that the lease expired: the ends of the killed workers are not logged as errors."""
        self._lapsed = True

    def first_failure(self) -> ProcessFailure | None:
        """Return the first failure known so far, also while other workers are being stopped."""
        with self._changed:
            failed = self._workers.group.failed
        return earliest(map(self._failure, failed))

    def last_stderr(self, local_rank: int) -> str:
        """Return the end of the stderr of a worker that has ended; empty if it is not kept.

        Args:
            local_rank: the worker.
        """
        pump = self._pumps.get(local_rank, self._pump)
        return pump.last_stderr(local_rank, WORDS_S) if pump is not None else ""

    def ended(self, local_rank: int) -> ProcessFailure | None:
        """Return the end of a worker as if it had failed; None if it has not ended."""
        return self._failure(local_rank) if local_rank in self._workers.group.ends else None

    def pids(self) -> dict[int, int]:
        """Process id of each local rank, also after its end."""
        with self._changed:
            return dict(sorted(self._workers.pids.items()))

    def sources(self) -> dict[int, str]:
        """Return from what each local rank has started: exec, a template or a standby."""
        with self._changed:
            return dict(self._workers.sources)

    def overdue(self) -> Overdue:
        """Return the local ranks with processes that outlived the grace of a stop."""
        with self._changed:
            return self._workers.overdue

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """Stop the workers and all their descendants, and release all resources. May be repeated.

        Args:
            death_sig: sent to each worker's process group; None is SIGTERM.
            timeout: seconds until SIGKILL. A second call, from another thread, can shorten or
                lengthen this time, counted from the first call.
        """
        signum = death_sig if death_sig is not None else signal.SIGTERM
        end = monotonic() + timeout + KILL_MARGIN
        with self._changed:
            self._workers.close(signum, timeout)
            while not self._done and self._launched and (left_s := end - monotonic()) > 0:
                self._changed.wait(left_s)
                end = max(end, self._workers.deadline + KILL_MARGIN)  # another thread's change
            left = [] if self._done else self._workers.left
        if left:
            logger.error(
                "the guardian has not reported the end of the workers of local ranks %s (pids %s)"
                " within %s s of SIGKILL; check whether the guardian (pid %s) is suspended",
                left,
                [self._workers.pids.get(rank) for rank in left],
                KILL_MARGIN,
                self._guardian.pid,
            )
        if not self._done:
            for pump in self._all_pumps():
                pump.stop(1.0)
            if self._own_guardian:
                self._guardian.close(1.0 if left else 10.0)

    def hurry(self, timeout: float) -> None:
        """Shorten the grace of workers that are being stopped; does not wait.

        Args:
            timeout: seconds from now until SIGKILL.
        """
        with self._changed:
            self._workers.hurry(timeout)

    def lengthen(self, timeout: float) -> None:
        """Give the workers at least this grace, also if they are stopped later; does not wait.

        Args:
            timeout: seconds from the first stop until SIGKILL.
        """
        with self._changed:
            self._workers.lengthen(timeout)
            self._changed.notify_all()

    # --- the guardian's events, on the thread of its handle

    def _on_event(self, rank: int, event: guard.GuardianEvent) -> None:
        with self._changed:
            change = self._workers.handle(rank, event)
            self._changed.notify_all()
        if change is not None:
            self._on_change(change)
        with self._changed:
            self._check_over()

    def _check_over(self) -> None:
        if self._launched and self._workers.group.over and not self._finishing:
            self._finishing = True
            start_thread(self._finish, "regrow-result")

    # --- the end of the group, on a separate thread

    def _finish(self) -> None:
        result, trouble = None, None
        try:
            for pump in self._all_pumps():
                # The next attempt of an agent does not wait for a slow console. At the end of the
                # job, the agent does.
                pump.stop(flush=self._own_guardian)
            result = self._collect_results()
            self._launcher.close()
            if self._own_guardian:
                self._guardian.close()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, which else would hang
            trouble = error
        with self._changed:
            self._result, self._error, self._done = result, trouble, True
            self._changed.notify_all()
        self._on_change(WorkerChange(-1, 0, "ended", 0, monotonic()))

    def _collect_results(self) -> RunProcsResult:
        values, failures = collect_results(
            self._workers.group, self._failure, self._launcher.return_values
        )
        first = earliest(failures.values())
        if first is not None:
            logger.log(
                # The agent that has passed its guardian logs the failure, with what follows.
                logging.ERROR if self._own_guardian and not self._lapsed else logging.INFO,
                "failed (exitcode: %s) local_rank: %s (pid: %s) of %s: %s",
                first.exitcode,
                first.local_rank,
                first.pid,
                self.name,
                first.summary,
            )
        return RunProcsResult(values, failures, self.stdouts, self.stderrs)

    def _all_pumps(self) -> list[LogPump]:
        first = [] if self._pump is None else [self._pump]
        return [*first, *self._pumps.values()]

    def _failure(self, rank: int) -> ProcessFailure:
        return self._workers.failure(rank, self.error_files.get(rank, ""))

    def _setup(self, rank: int, pump: LogPump) -> WorkerSetup:
        return WorkerSetup(
            os.environ | self.envs[rank],
            partial(self._on_event, rank),
            fds=pump.writer_fds(rank),
            drains=pump.drain_fds(rank),
            grace=self._shutdown_timeout,
        )


def validate_full_rank(mapping: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Check that `mapping` has exactly the keys 0 to nprocs-1.

    Raises:
        RuntimeError: the keys differ.
    """
    expected = set(range(nprocs))
    if mapping.keys() != expected:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected}, actual: {set(mapping)}"
        )
