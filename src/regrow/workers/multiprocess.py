"""`MultiprocessContext`: workers that call a function, started as multiprocessing starts processes.

With `spawn` the guardian starts the workers like any program. multiprocessing only builds the
command line and the pickles: this needs five of its functions and none of its process handling.
With `fork` and `forkserver` multiprocessing itself forks, and the guardian adopts the worker. This
has two limits. The guardian does not see stops and continues of such a worker. It does not find a
process that the worker daemonized without exec, once the worker was killed from outside.
"""

from __future__ import annotations

import fcntl
import io
import multiprocessing
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import TYPE_CHECKING, Any

from regrow.utils import SignalInterrupt, headline, starting_helpers
from regrow.workers import function as _function
from regrow.workers.context import PContext
from regrow.workers.guardian import procfs
from regrow.workers.worker_set import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.process import BaseProcess

    from regrow.workers.guardian.client import Guardian, WorkerSetup
    from regrow.workers.logs.specs import LogsSpecs
    from regrow.workers.numa import NumaOptions

#: Seconds that a killed process has to end; after that, the agent no longer waits for it.
JOIN_TIMEOUT_S = 5.0
START_METHODS = ("spawn", "fork", "forkserver")


class MultiprocessContext(PContext):
    """Calls a function in a process per local rank; see `PContext`.

    Args:
        name: as in `PContext`.
        entrypoint: the function. For `spawn` and `forkserver` it and its arguments are pickled.
        args: its arguments by local rank.
        envs: as in `PContext`.
        start_method: spawn, fork or forkserver.
        logs_specs: as in `PContext`.
        log_line_prefixes: as in `PContext`.
        numa_options: how workers are bound to CPUs.
        more: further arguments of `PContext`.

    Raises:
        ValueError: unknown start method.
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
                f"unknown start method {start_method!r}: use {', '.join(START_METHODS)}"
            )
        self.start_method = start_method
        launcher = FunctionLauncher(name, entrypoint, args, start_method, numa_options)
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, launcher=launcher, **more
        )


@dataclass
class FunctionLauncher(Launcher):
    """Starts processes that call a function."""

    name: str
    function: Callable[..., Any]
    args: Mapping[int, tuple[Any, ...]]
    start_method: str
    numa_options: NumaOptions | None

    def __post_init__(self) -> None:
        self._processes: dict[int, BaseProcess] = {}
        self._results: dict[int, int] = {}  # memory files
        self._lifelines: list[int] = []  # pipes that end for a spawned child when this process dies
        self._troubles: dict[int, str] = {}  # return values that cannot be unpickled
        self._returned: set[int] = set()  # workers that ended with a return value
        self._gate: _function.Gate | None = None

    # --- the start of a worker

    def launch(
        self, rank: int, setup: WorkerSetup, guardian: Guardian, agent_fds: Sequence[int]
    ) -> int:
        """See `Launcher`."""
        if self._gate is None:
            self._gate = _function.Gate.new(len(self.args))
        if rank in self._results:  # this process replaces another one
            os.close(self._results.pop(rank))
            self._returned.discard(rank)
        result = self._results[rank] = os.memfd_create("regrow-result")
        call = _function.Call(self.function, self.args[rank])
        task = _function.WorkerTask(call, _function.Fd(result), None, self._cpus(rank), self._gate)
        start: Any = multiprocessing.get_context(self.start_method)
        process: BaseProcess = start.Process(
            target=_function.work, args=(task,), name=f"{self.name}:{rank}"
        )
        try:
            if self.start_method == "spawn":
                return self._spawn(process, setup, guardian)
            self._processes[rank] = process
            return self._fork(process, task, setup, guardian, agent_fds)
        finally:
            call.close()

    def _spawn(self, process: BaseProcess, setup: WorkerSetup, guardian: Guardian) -> int:
        handover, pickles = _Handover(), io.BytesIO()
        set_spawning_popen(handover)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), pickles)
            reduction.dump(process, pickles)
        finally:
            set_spawning_popen(None)
        with starting_helpers():
            tracker = resource_tracker.getfd()
        assert tracker is not None
        reader, writer = os.pipe()
        self._lifelines.append(writer)
        try:
            argv = spawn.get_command_line(tracker_fd=tracker, pipe_handle=reader)
            inherited = (tracker, reader, *handover.fds)
            fds = dict(zip(inherited, inherited, strict=True)) | dict(setup.fds)
            worker = guardian.spawn(argv, setup._replace(fds=fds))
        finally:
            os.close(reader)
        data = pickles.getvalue()
        # A larger pipe, so that the start of a worker does not wait until the previous worker
        # reads. Above the user's pipe limit it waits, as always in multiprocessing.
        with suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(data))
        with suppress(BrokenPipeError), open(writer, "wb", closefd=False) as pipe:
            pipe.write(data)
        return worker

    def _fork(
        self,
        process: BaseProcess,
        task: _function.WorkerTask,
        setup: WorkerSetup,
        guardian: Guardian,
        agent_fds: Sequence[int],
    ) -> int:
        forked = self.start_method == "fork"
        if not forked:
            _start_fork_server()
        mark = guardian.mark()
        adopted, adopter = os.pipe()
        try:
            # PDEATHSIG fires when the forking thread ends. The main thread lasts as long as this
            # process. The fork server has only one thread, and ends with this process.
            lasting = not forked or threading.current_thread() is threading.main_thread()
            task.setup = _function.ForkedSetup(
                env={**setup.env, procfs.MARK: mark},
                streams={number: _function.Fd(fd) for number, fd in setup.fds.items()},
                agent_fds=agent_fds if forked else (),
                dies_with_parent=lasting,
                parent=os.getpid() if forked else None,
                adopted=_function.Fd(adopted),
                adopter=adopter if forked else None,
            )
            process.start()
            assert process.pid is not None
            try:
                worker = guardian.adopt(process.pid, mark, setup)
            except BaseException:
                process.kill()
                raise
            os.write(adopter, b"\0")
            return worker
        finally:
            os.close(adopted)
            os.close(adopter)

    def _cpus(self, rank: int) -> list[int] | None:
        if self.numa_options is None:
            return None
        from regrow.workers.numa import bound_cpus

        return bound_cpus(rank, self.numa_options)

    # --- the end of a worker

    def end(self, rank: int, code: int | None) -> tuple[int, bool]:
        """See `Launcher`."""
        if code is None:
            self._processes[rank].join()
            code = self._processes[rank].exitcode
        stored = _function.is_stored(self._results[rank])
        if code is None:  # other code of this process waits for every child
            code = 0 if stored else 255
        # The result is noted here, because failures are read again after the group closed the file.
        if code == 0 and stored:
            self._returned.add(rank)
        return code, rank in self._returned

    def explain(self, rank: int, code: int) -> str | None:
        """See `Launcher`."""
        if code == 0 and rank not in self._returned:
            name = getattr(self.function, "__qualname__", None) or repr(self.function)
            return (
                f"the process ended with exit code 0 before {name} returned; look for a call of"
                " os._exit"
            )
        return self._troubles.get(rank)

    def return_values(self, ranks: Sequence[int]) -> dict[int, Any]:
        """See `Launcher`."""
        values = {}
        for rank in ranks:
            try:
                values[rank] = _function.load(self._results[rank])
            except SignalInterrupt:
                raise
            except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
                self._troubles[rank] = (
                    "the worker returned, but its agent cannot unpickle the return value:"
                    f" {headline(error)}"
                )
        return values

    def stopping(self) -> None:
        """See `Launcher`."""
        if self._gate is not None:
            self._gate.open()

    def lost(self) -> None:
        """See `Launcher`."""
        if self._gate is not None:
            self._gate.count()

    def kill(self, rank: int) -> None:
        """See `Launcher`."""
        process = self._processes.get(rank)
        if process is not None:
            process.kill()
            process.join(JOIN_TIMEOUT_S)

    def close(self) -> None:
        """See `Launcher`."""
        if self._gate is not None:
            self._gate.close()
        for fd in (*self._results.values(), *self._lifelines):
            os.close(fd)
        self._results.clear()
        self._lifelines.clear()
        for process in self._processes.values():
            with suppress(ValueError):  # given up: the process did not end after SIGKILL
                process.close()


def _start_fork_server() -> None:
    """Start the fork server of multiprocessing, unless it runs."""
    # One after the other, because the start of the tracker unblocks some signals again.
    with starting_helpers():
        resource_tracker.ensure_running()
    with starting_helpers():
        forkserver.ensure_running()


class _Handover(Popen):
    """Collects the descriptors that the pickles of a child contain; starts no process."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._fds = self.fds  # the name that `Popen` uses
