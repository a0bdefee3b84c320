"""`start_processes`: the one call that starts a group of workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from regrow.workers._context import PContext, validate_full_rank
from regrow.workers._logs import DefaultLogsSpecs, LogsSpecs
from regrow.workers._std import Std

if TYPE_CHECKING:
    from regrow.workers._guardian_client import Guardian
    from regrow.workers._numa import NumaOptions
    from regrow.workers._result import WorkerChange


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
    shutdown_timeout: float = 30.0,
    guardian: Guardian | None = None,
    on_change: Callable[[WorkerChange], None] | None = None,
    signals_to_handle: str | None = None,
    before_start: Callable[[PContext], None] | None = None,
    replaceable: Callable[[int], bool] = lambda local_rank: False,
) -> PContext:
    """Start one worker process per local rank.

    Args:
        name: of the workers; starts the prefix of their lines on the console.
        entrypoint: a program (`SubprocessContext`) or a function (`MultiprocessContext`).
        args: arguments by local rank, for ranks 0 to n-1; a program's are made strings.
        envs: environment by local rank, added to this process's own.
        logs_specs: where output goes; None makes a `DefaultLogsSpecs` of `log_dir`, `redirects`
            and `tee`, and a text is taken for `log_dir`: the form from before `LogsSpecs`.
        log_line_prefixes: start of each console line, by local rank.
        start_method: for functions: spawn, fork or forkserver.
        numa_options: which CPUs each worker is bound to.
        duplicate_stdout_filters: lines of tee'd stdouts that contain one of these are copied to
            one file.
        duplicate_stderr_filters: the same for stderr.
        log_dir: of the older form.
        redirects: of the older form.
        tee: of the older form.
        shutdown_timeout: seconds between SIGTERM and SIGKILL when a failure ends the group, and
            for processes that a worker leaves behind.
        guardian: starts the workers and watches them; None makes one for this group.
        on_change: called on another thread for each change; must not block.
        signals_to_handle: names of the signals that raise `SignalException` in the main thread;
            empty for none; None takes them from `TORCHELASTIC_SIGNALS_TO_HANDLE`.
        before_start: called with the workers before the first of them is started.
        replaceable: says of the local rank of a worker that ended whether the others can go on
            without it; must not block. Default: they cannot, so its failure ends them all.

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
        "shutdown_timeout": shutdown_timeout,
        "guardian": guardian,
        "on_change": on_change,
        "signals_to_handle": signals_to_handle,
        "replaceable": replaceable,
    }
    context: PContext
    if isinstance(entrypoint, str):
        from regrow.workers._subprocess import SubprocessContext

        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, **more)
    else:
        from regrow.workers._multiprocess import MultiprocessContext

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
