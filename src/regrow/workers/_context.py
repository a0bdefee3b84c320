"""`PContext`: a group of worker processes as one thing that is started, waited for and closed.

What a subclass adds is how one worker is started and what its end means; the rest is here. The
guardian's events come in on its handle's thread, and `_crew` makes of them what happens to the
group. The group's end is worked up (logs to their end, error files, return values) on a thread of
its own, because it may take a while and other groups may share the guardian. `wait` and `close`
only wait for that.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.utils import get_logger
from regrow.workers._crew import Crew
from regrow.workers._guardian_client import Guardian
from regrow.workers._pump import LogPump
from regrow.workers._result import RunProcsResult, WorkerChange, work_up
from regrow.workers._signals import install_signal_handlers
from regrow.workers.errors import ProcessFailure

if TYPE_CHECKING:
    from regrow.workers import _group
    from regrow.workers import _guardian_events as guard
    from regrow.workers._logs import LogsSpecs

logger = get_logger(__name__)

#: Seconds after the grace until `close` returns in any case: more than the guardian's patience.
KILL_MARGIN = 10.0


class PContext(ABC):
    """Worker processes, one per local rank.

    Args:
        name: of the workers; starts the prefix of their lines on the console.
        entrypoint: a function or a program.
        args: arguments by local rank.
        envs: environment by local rank, added to this process's own.
        logs_specs: where output goes.
        log_line_prefixes: start of each console line, by local rank.
        duplicate_stdout_filters: lines of tee'd stdouts that contain one of these are copied to
            one file.
        duplicate_stderr_filters: the same for stderr.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when a failure ends the group.
        guardian: starts the workers and watches them; None makes one for this context.
        on_change: called on another thread for each change; must not block.
        signals_to_handle: names of the signals that raise `SignalException`; empty for none; None
            takes them from `TORCHELASTIC_SIGNALS_TO_HANDLE`.
        replaceable: says of the local rank of a worker that ended whether the others can go on
            without it; must not block. Default: they cannot.

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
        shutdown_timeout: float = 30.0,
        guardian: Guardian | None = None,
        on_change: Callable[[WorkerChange], None] | None = None,
        signals_to_handle: str | None = None,
        replaceable: Callable[[int], bool] = lambda local_rank: False,
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
        self._new_pump = partial(
            LogPump,
            name,
            dest,
            log_line_prefixes,
            stdout_filters=duplicate_stdout_filters,
            stderr_filters=duplicate_stderr_filters,
        )
        self._shutdown_timeout = shutdown_timeout
        self._own_guardian = guardian is None
        self._guardian = guardian if guardian is not None else Guardian()
        self._on_change = on_change or (lambda change: None)
        self._signals = signals_to_handle
        self._pump: LogPump | None = None
        #: Guards everything below; reentrant, because a signal's handler may close the context.
        self._changed = threading.Condition(threading.RLock())
        self._crew = Crew(
            name,
            self.nprocs,
            shutdown_timeout,
            self._guardian,
            self._exit_code,
            self._ended_well,
            self._abandon,
            replaceable,
        )
        self._result: RunProcsResult | None = None
        self._error: BaseException | None = None
        self._launched = False
        self._finishing = False
        self._done = False

    # --- what subclasses say

    @abstractmethod
    def _launch(self, local_rank: int, pump: LogPump) -> int:
        """Ask the guardian for one worker; returns its number there."""

    def _exit_code(self, local_rank: int, event: guard.Exited) -> int:
        """The exit code of a worker that ended."""
        assert event.code is not None
        return event.code

    def _ended_well(self, local_rank: int, code: int) -> bool:
        """Whether a worker that exited with `code` did what it was started for."""
        return code == 0

    def _return_values(self, local_ranks: list[int]) -> dict[int, Any]:
        """What the workers returned; where that cannot be had, it is left out."""
        return dict.fromkeys(local_ranks)

    def _abandon(self, local_rank: int) -> None:
        """Kill a worker that did not die with the guardian."""
        return

    def _release(self) -> None:
        """Give back what was needed for the workers, who are gone."""
        return

    # --- what users call

    def start(self) -> None:
        """Start the workers; returns once the program of each is running.

        Raises:
            OSError: a program cannot be started; those already running have been killed.
            ValueError: called twice.
        """
        if self._pump is not None:
            raise ValueError(
                "The process context already initialized."
                " Most likely the start method got called twice."
            )
        install_signal_handlers(self._signals)
        self._guardian.start()  # its interpreter starts while we go on
        self._pump = pump = self._new_pump()
        try:
            for rank in range(self.nprocs):
                worker = self._launch(rank, pump)
                with self._changed:
                    self._crew.employ(rank, worker)
        except BaseException:
            with self._changed:
                self._crew.dismiss()
            raise
        finally:
            pump.close_writers()
            pump.start()
            with self._changed:
                self._launched = True
                self._check_over()
        with self._changed:
            self._changed.wait_for(lambda: self._crew.settled or self._done)
            refusals = dict(self._crew.refusals)
        if refusals:
            self.close(signal.SIGKILL, 0)
            raise refusals[min(refusals)]

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all workers succeeded and are gone, or one failed and all are stopped.

        Args:
            timeout: seconds; negative for ever; 0 only looks.
            period: seconds after which the main thread hears at the latest of a signal that came as
                it fell asleep, or to another thread; Python wakes it for no such signal.

        Returns:
            How they ended; None if the time is over first.
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

    def first_failure(self) -> ProcessFailure | None:
        """What failed first, as far as is known while others are still being stopped."""
        with self._changed:
            group = self._crew.group
        failures = [self._failure(rank, group.members[rank]) for rank in group.failed]
        return min(failures, key=lambda failure: failure.failed_monotonic, default=None)

    def ended(self, local_rank: int) -> ProcessFailure | None:
        """How a worker ended, as if it had failed; None if it has not ended."""
        with self._changed:
            member = self._crew.group.members[local_rank]
        return None if member.code is None else self._failure(local_rank, member)

    def pids(self) -> dict[int, int]:
        """The process of each local rank, also after it ended."""
        with self._changed:
            return dict(sorted(self._crew.pids.items()))

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """Stop the workers with all that they started, and give back everything. May be repeated.

        Args:
            death_sig: sent to each worker's process group; None is SIGTERM.
            timeout: seconds until SIGKILL. A second call, from another thread, can shorten it.
        """
        signum = death_sig if death_sig is not None else signal.SIGTERM
        end = monotonic() + timeout + KILL_MARGIN
        with self._changed:
            self._crew.close(signum, timeout)
            self._changed.wait_for(
                lambda: self._done or not self._launched, max(0.0, end - monotonic())
            )
            left = [] if self._done else self._crew.left
        if left:
            logger.error(
                "workers of local ranks %s (pids %s) are not known to have ended within %s s of"
                " SIGKILL; is the guardian (pid %s) suspended?",
                left,
                [self._crew.pids.get(rank) for rank in left],
                KILL_MARGIN,
                self._guardian.pid,
            )
        if not self._done:
            if self._pump is not None:
                self._pump.stop(1.0)
            if self._own_guardian:
                self._guardian.close(1.0 if left else 10.0)

    # --- the guardian's events, on its thread

    def _listener(self, local_rank: int) -> guard.Listener:
        return partial(self._heed, local_rank)

    def _heed(self, rank: int, event: guard.GuardianEvent) -> None:
        with self._changed:
            change = self._crew.note(rank, event)
            self._changed.notify_all()
        if change is not None:
            self._on_change(change)
        with self._changed:
            self._check_over()

    def _check_over(self) -> None:
        if self._launched and self._crew.group.over and not self._finishing:
            self._finishing = True
            threading.Thread(target=self._finish, name="regrow-result", daemon=True).start()

    # --- the end, on a thread of its own

    def _finish(self) -> None:
        result, trouble = None, None
        try:
            if self._pump is not None:
                # An agent's next attempt does not wait for a slow console; the agent does, at
                # the job's end.
                self._pump.stop(flush=self._own_guardian)
            result = self._work_up()
            self._release()
            if self._own_guardian:
                self._guardian.close()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, which else would hang
            trouble = error
        with self._changed:
            self._result, self._error, self._done = result, trouble, True
            self._changed.notify_all()
        self._on_change(WorkerChange(-1, 0, "ended", 0, monotonic()))

    def _work_up(self) -> RunProcsResult:
        values, failures = work_up(self._crew.group, self._failure, self._return_values)
        result = RunProcsResult(values, failures, self.stdouts, self.stderrs)
        if failures:
            first = result.root_cause()
            logger.error(
                "failed (exitcode: %s) local_rank: %s (pid: %s) of %s: %s",
                first.exitcode,
                first.local_rank,
                first.pid,
                self.name,
                first.summary,
            )
        return result

    def _failure(self, rank: int, member: _group.Member) -> ProcessFailure:
        assert member.code is not None
        return ProcessFailure(
            local_rank=rank,
            pid=self._crew.pids.get(rank, 0),
            exitcode=member.code,
            error_file=self.error_files.get(rank, ""),
            exited_monotonic=member.exited,
        )

    # --- helpers of subclasses

    def _drains(self, local_rank: int, pump: LogPump) -> list[tuple[int, str]]:
        """This worker's share of the pipes that the guardian empties if we are killed."""
        own = (self.stdouts[local_rank], self.stderrs[local_rank])
        return [(fd, path) for fd, path in pump.drain_fds() if path in own]

    def _streams(self, local_rank: int, pump: LogPump) -> dict[int, int]:
        """The worker's stdout and stderr: number there -> number here."""
        fds = {1: pump.writer_fd(local_rank, "stdout"), 2: pump.writer_fd(local_rank, "stderr")}
        return {number: fd for number, fd in fds.items() if fd is not None}


def validate_full_rank(mapping: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Check that `mapping` has exactly the keys 0 to nprocs-1.

    Raises:
        RuntimeError: it has not.
    """
    expected = set(range(nprocs))
    if mapping.keys() != expected:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected}, actual: {set(mapping)}"
        )
