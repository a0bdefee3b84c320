"""`start_processes`: starts a group of workers; `SubprocessContext`: workers that are programs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from regrow.workers.context import PContext, Supervision, validate_full_rank
from regrow.workers.logs.specs import DefaultLogsSpecs, LogsSpecs, Std
from regrow.workers.worker_set import Launcher

if TYPE_CHECKING:
    from regrow.workers.guardian.client import Guardian, WorkerSetup
    from regrow.workers.numa import NumaOptions


class SubprocessContext(PContext):
    """Runs a program per local rank; see `PContext`.

    Args:
        name: as in `PContext`.
        entrypoint: the program, looked up in PATH unless it has a slash.
        args: its arguments by local rank, converted with `str`.
        envs: as in `PContext`.
        logs_specs: as in `PContext`.
        log_line_prefixes: as in `PContext`.
        numa_options: how workers are bound to CPUs.
        more: further arguments of `PContext`.
    """

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        **more: Any,
    ) -> None:
        launcher = ProgramLauncher(entrypoint, args, numa_options)
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, launcher=launcher, **more
        )


@dataclass(frozen=True)
class ProgramLauncher(Launcher):
    """Starts programs."""

    program: str
    args: Mapping[int, tuple[Any, ...]]
    numa_options: NumaOptions | None

    def launch(
        self, rank: int, setup: WorkerSetup, guardian: Guardian, agent_fds: Sequence[int]
    ) -> int:
        """See `Launcher`."""
        argv = [self.program, *map(str, self.args[rank])]
        if self.numa_options is not None:
            from regrow.workers.numa import bound_command

            argv = bound_command(argv, rank, self.numa_options)
        return guardian.spawn(argv, setup)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs | str | None = None,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    log_dir: str | None = None,
    redirects: Std | dict[int, Std] = Std.NONE,
    tee: Std | dict[int, Std] = Std.NONE,
    before_start: Callable[[PContext], None] | None = None,
    **supervision: Unpack[Supervision],
) -> PContext:
    """Start one worker process per local rank.

    Args:
        name: name of the workers; starts the prefix of their lines on the console.
        entrypoint: a program (`SubprocessContext`) or a function (`MultiprocessContext`).
        args: arguments by local rank, for ranks 0 to n-1; those of a program are converted to
            strings.
        envs: environment by local rank, added to this process's own.
        logs_specs: destinations of the output. None creates a `DefaultLogsSpecs` from `log_dir`,
            `redirects` and `tee`. A string is used as `log_dir`: the form before `LogsSpecs`
            existed.
        log_line_prefixes: start of each console line, by local rank.
        start_method: for functions: spawn, fork or forkserver.
        numa_options: how workers are bound to CPUs.
        duplicate_stdout_filters: lines of tee'd stdouts that contain one of these are copied to one
            file.
        duplicate_stderr_filters: the same for stderr.
        log_dir: argument of the older form.
        redirects: argument of the older form.
        tee: argument of the older form.
        before_start: called with the workers before the first worker starts.
        supervision: the arguments of `PContext` from `shutdown_timeout` on.

    Returns:
        The running workers.

    Raises:
        RuntimeError: `args` or `envs` do not cover the ranks 0 to n-1.
        OSError: a program cannot be started.
    """
    validate_full_rank(args, len(args), "args")
    validate_full_rank(envs, len(args), "envs")
    if logs_specs is None or isinstance(logs_specs, str):
        logs_specs = DefaultLogsSpecs(logs_specs or log_dir, redirects, tee)
    more: dict[str, Any] = {
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
        **supervision,
    }
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, **more)
    else:
        from regrow.workers.multiprocess import MultiprocessContext

        context = MultiprocessContext(
            name, entrypoint, args, envs, start_method, logs_specs, **more
        )
    try:
        if before_start is not None:
            before_start(context)
        context.start()
    except BaseException:
        context.close(signal.SIGKILL, 0)
        raise
    return context
