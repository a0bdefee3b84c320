"""`MultiprocessContext`: workers that call a function, started as multiprocessing starts processes.

With `spawn` the guardian starts them like any program: multiprocessing makes the command line and
the pickles, which needs five of its functions and none of its process handling. With `fork` and
`forkserver` multiprocessing itself forks and the guardian adopts; stops and continues of such a
worker are not seen, and a process that it daemonized without exec is not found once the worker
was killed from outside.
"""

from __future__ import annotations

import fcntl
import io
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regrow.workers import _function, _procfs
from regrow.workers._context import PContext
from regrow.workers._guardian_client import Command

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from regrow.workers import _group
    from regrow.workers import _guardian_events as guard
    from regrow.workers._logs import LogsSpecs
    from regrow.workers._numa import NumaOptions
    from regrow.workers._pump import LogPump
    from regrow.workers.errors import ProcessFailure

#: Seconds that a killed process has to end before nobody waits for it any more.
JOIN_TIMEOUT_S = 5.0
START_METHODS = ("spawn", "fork", "forkserver")


class MultiprocessContext(PContext):
    """Calls a function in a process per local rank; see `PContext`.

    Args:
        name: as in `PContext`.
        entrypoint: the function; for `spawn` and `forkserver` it and its arguments are pickled.
        args: its arguments by local rank.
        envs: as in `PContext`.
        start_method: spawn, fork or forkserver.
        logs_specs: as in `PContext`.
        log_line_prefixes: as in `PContext`.
        numa_options: which CPUs each worker is bound to.
        more: further arguments of `PContext`.

    Raises:
        ValueError: there is no such start method.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        **more: Any,
    ) -> None:
        if start_method not in START_METHODS:
            raise ValueError(
                f"there is no start method {start_method!r}: use {', '.join(START_METHODS)}"
            )
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, **more)
        self._function = entrypoint
        self.start_method = start_method
        self._numa_options = numa_options
        self._processes: dict[int, BaseProcess] = {}
        self._results: dict[int, int] = {}  # memory files
        self._lifelines: list[int] = []  # pipes that tell a spawned child of our death
        self._troubles: dict[int, str] = {}  # what is wrong with a worker that exited with 0

    # --- the start

    def _launch(self, local_rank: int, pump: LogPump) -> int:
        import multiprocessing

        result = self._results[local_rank] = os.memfd_create("regrow-result")
        env = os.environ | self.envs[local_rank]
        call = _function.Call(self._function, self.args[local_rank])
        job = _function.Job(call, _function.Fd(result), None, self._cpus(local_rank))
        start: Any = multiprocessing.get_context(self.start_method)
        process: BaseProcess = start.Process(
            target=_function.work, args=(job,), name=f"{self.name}:{local_rank}"
        )
        try:
            if self.start_method == "spawn":
                return self._spawn(local_rank, process, env, pump)
            adopted, adopter = os.pipe()
            try:
                job.setup = self._setup(local_rank, env, pump, adopted, adopter)
                worker = self._fork(local_rank, process, job.setup, pump)
                os.write(adopter, b"\0")
                return worker
            finally:
                os.close(adopted)
                os.close(adopter)
        finally:
            call.close()

    def _spawn(
        self, local_rank: int, process: BaseProcess, env: dict[str, str], pump: LogPump
    ) -> int:
        from multiprocessing import reduction, resource_tracker, spawn
        from multiprocessing.context import set_spawning_popen

        handover, pickles = _Handover(), io.BytesIO()
        set_spawning_popen(handover)  # type: ignore[arg-type]
        try:
            reduction.dump(spawn.get_preparation_data(process.name), pickles)
            reduction.dump(process, pickles)
        finally:
            set_spawning_popen(None)
        tracker = resource_tracker.getfd()
        assert tracker is not None
        reader, writer = os.pipe()
        self._lifelines.append(writer)
        try:
            argv = spawn.get_command_line(tracker_fd=tracker, pipe_handle=reader)
            inherited = (tracker, reader, *handover.fds)
            command = Command(
                argv,
                env,
                fds=dict(zip(inherited, inherited, strict=True)) | self._streams(local_rank, pump),
                drains=self._drains(local_rank, pump),
                grace=self._shutdown_timeout,
            )
            worker = self._guardian.spawn(command, self._listener(local_rank))
        finally:
            os.close(reader)
        data = pickles.getvalue()
        # So that no worker's start waits for the one before to read. Beyond what a user may have
        # it does wait, as it always does in multiprocessing.
        with suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(data))
        with suppress(BrokenPipeError), open(writer, "wb", closefd=False) as pipe:
            pipe.write(data)
        return worker

    def _setup(
        self, local_rank: int, env: dict[str, str], pump: LogPump, adopted: int, adopter: int
    ) -> _function.Setup:
        forked = self.start_method == "fork"
        streams = self._streams(local_rank, pump)
        strange: set[int] = set()
        if forked:
            strange.update(pump.own_fds())
            for rank in range(self.nprocs):
                strange.update(self._streams(rank, pump).values())
        # PDEATHSIG fires when the forking thread ends. Our main thread lasts, and the fork server
        # has one thread only, and ends with us.
        lasting = not forked or threading.current_thread() is threading.main_thread()
        return _function.Setup(
            env=env | {_procfs.MARK: self._guardian.mark()},
            streams={number: _function.Fd(fd) for number, fd in streams.items()},
            strange=sorted(strange),
            dies_with_parent=lasting,
            parent=os.getpid() if forked else None,
            adopted=_function.Fd(adopted),
            adopter=adopter if forked else None,
        )

    def _fork(
        self, local_rank: int, process: BaseProcess, setup: _function.Setup, pump: LogPump
    ) -> int:
        process.start()
        assert process.pid is not None
        with self._changed:
            self._processes[local_rank] = process
            self._crew.pids[local_rank] = process.pid
        try:
            return self._guardian.adopt(
                process.pid,
                setup.env[_procfs.MARK],
                self._listener(local_rank),
                drains=self._drains(local_rank, pump),
                grace=self._shutdown_timeout,
            )
        except BaseException:
            process.kill()
            raise

    def _cpus(self, local_rank: int) -> list[int] | None:
        if self._numa_options is None:
            return None
        from regrow.workers._numa import bound_cpus

        return bound_cpus(local_rank, self._numa_options)

    # --- the end

    def _exit_code(self, local_rank: int, event: guard.Exited) -> int:
        if event.code is not None:
            return event.code
        process = self._processes[local_rank]
        process.join()
        if process.exitcode is None:  # somebody in this process collects every child
            return 0 if _function.is_stored(self._results[local_rank]) else 255
        return process.exitcode

    def _abandon(self, local_rank: int) -> None:
        process = self._processes.get(local_rank)
        if process is not None:
            process.kill()
            process.join(JOIN_TIMEOUT_S)

    def _ended_well(self, local_rank: int, code: int) -> bool:
        return code == 0 and _function.is_stored(self._results[local_rank])

    def _return_values(self, local_ranks: list[int]) -> dict[int, Any]:
        values = {}
        for rank in local_ranks:
            try:
                values[rank] = _function.load(self._results[rank])
            except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
                self._troubles[rank] = (
                    "the worker returned, but its return value cannot be unpickled here:"
                    f" {type(error).__name__}: {error}"
                )
        return values

    def _failure(self, rank: int, member: _group.Member) -> ProcessFailure:
        if member.code == 0 and not _function.is_stored(self._results[rank]):
            self._troubles[rank] = (
                f"the process ended with exit code 0 before {_name(self._function)} returned; did"
                " something call os._exit?"
            )
        trouble, path = self._troubles.get(rank), self.error_files[rank]
        if trouble is not None and path != os.devnull and not os.path.exists(path):
            import json

            with suppress(OSError), open(path, "w") as file:
                json.dump({"message": trouble}, file)
        failure = super()._failure(rank, member)
        if trouble is not None and not failure.has_error_file:
            failure.message = trouble
        return failure

    def _release(self) -> None:
        for fd in (*self._results.values(), *self._lifelines):
            os.close(fd)
        self._results.clear()
        self._lifelines.clear()
        for process in self._processes.values():
            with suppress(ValueError):  # given up: SIGKILL did not end it
                process.close()


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


class _Handover:
    """What multiprocessing's pickles take for the child process that they are made for."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd

    def DupFd(self, fd: int) -> _Inherited:
        return _Inherited(fd)


class _Inherited:
    """A descriptor with the same number in the child."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd
