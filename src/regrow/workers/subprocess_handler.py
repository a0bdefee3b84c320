"""`SubprocessHandler`: a program in a session of its own, its output in files.

regrow's own workers are not started by it: the guardian forks them, watches them, and leaves
nothing of them behind. It is here for programs that start processes by it as by torch's, or derive
from it to start them in another way.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from subprocess import Popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.workers._numa import NumaOptions

__all__ = ["SubprocessHandler", "get_subprocess_handler"]


class SubprocessHandler:
    """Starts a program.

    Args:
        entrypoint: the program, looked up in PATH unless it has a slash.
        args: its arguments, made strings with `str`.
        env: variables for it, beside those of this process.
        stdout: path of the file for its output; empty or None lets it have this process's own.
        stderr: the same for its errors.
        local_rank_id: which of this host's workers it is.
        numa_options: which CPUs it is bound to; None: those of this process.

    Raises:
        OSError: a file cannot be opened, or the program not be started.
        ValueError: it cannot be bound as `numa_options` says.
    """

    proc: Popen[bytes]
    """The process."""
    local_rank_id: int
    """Which of this host's workers it is."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: NumaOptions | None = None,
    ) -> None:
        argv: tuple[str, ...] = (entrypoint, *map(str, args))
        if numa_options is not None:
            from regrow.workers._numa import bound_command

            argv = tuple(bound_command(argv, local_rank_id, numa_options))
        self.local_rank_id = local_rank_id
        with ExitStack() as files:
            self._stdout = files.enter_context(open(stdout, "w")) if stdout else None
            self._stderr = files.enter_context(open(stderr, "w")) if stderr else None
            self.proc = self._popen(argv, os.environ | env)
            self._files = files.pop_all()

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        """Start it; for subclasses to replace."""
        return Popen(
            args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True
        )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send its process group a signal, by default SIGTERM, and close the files.

        It does not wait for the end. Of a group that is gone there is nothing to stop.
        """
        with self._files, suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def get_subprocess_handler(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """Start a program; see `SubprocessHandler`."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)
