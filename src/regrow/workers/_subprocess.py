"""`SubprocessContext`: workers that are programs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from regrow.workers._context import PContext
from regrow.workers._guardian_client import Command

if TYPE_CHECKING:
    from regrow.workers._logs import LogsSpecs
    from regrow.workers._numa import NumaOptions
    from regrow.workers._pump import LogPump


class SubprocessContext(PContext):
    """Runs a program per local rank; see `PContext`.

    Args:
        name: as in `PContext`.
        entrypoint: the program, looked up in PATH unless it has a slash.
        args: its arguments by local rank, made strings with `str`.
        envs: as in `PContext`.
        logs_specs: as in `PContext`.
        log_line_prefixes: as in `PContext`.
        numa_options: which CPUs each worker is bound to.
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
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, **more)
        self._program = entrypoint
        self._numa_options = numa_options

    def _launch(self, local_rank: int, pump: LogPump) -> int:
        argv = [self._program, *map(str, self.args[local_rank])]
        if self._numa_options is not None:
            from regrow.workers._numa import bound_command

            argv = bound_command(argv, local_rank, self._numa_options)
        command = Command(
            argv,
            os.environ | self.envs[local_rank],
            fds=self._streams(local_rank, pump),
            drains=self._drains(local_rank, pump),
            grace=self._shutdown_timeout,
        )
        return self._guardian.spawn(command, self._listener(local_rank))
