"""`SubprocessHandler` as in torch: starts one process in its own session.

regrow itself does not use it: the guardian starts the workers, and leaves no process behind. The
class exists for programs that call or subclass torch's class.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from subprocess import Popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.workers.numa import NumaOptions

__all__ = ["SubprocessHandler", "get_subprocess_handler"]


class SubprocessHandler:
    """Starts a program.

    Args:
        entrypoint: the program, looked up in PATH unless it has a slash.
        args: its arguments, converted with `str`.
        env: its variables, added to those of this process.
        stdout: path of the file for its output; empty or None: it inherits the stdout of this
            process.
        stderr: the same for its errors.
        local_rank_id: local rank of the worker on this host.
        numa_options: how it is bound to CPUs; None: the CPUs of this process.

    Raises:
        OSError: a file cannot be opened, or the program cannot be started.
        ValueError: the program cannot be bound as `numa_options` requires.
    """

    proc: Popen[bytes]
    """The process of the program."""
    local_rank_id: int
    """Local rank of the worker on this host."""

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
            from regrow.workers.numa import bound_command

            argv = tuple(bound_command(argv, local_rank_id, numa_options))
        self.local_rank_id = local_rank_id
        with ExitStack() as files:
            self._stdout = files.enter_context(open(stdout, "w")) if stdout else None
            self._stderr = files.enter_context(open(stderr, "w")) if stderr else None
            self.proc = self._popen(argv, os.environ | env)
            self._files = files.pop_all()

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        """Start the program; subclasses may replace this method."""
        return Popen(
            args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True
        )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the process group, by default SIGTERM, and close the files.

        The method does not wait for the end. If the group is gone, no signal is sent.
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
