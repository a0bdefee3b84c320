"""Code that runs in a worker process that was started to call a function.

Function, arguments and return value travel through memory files. A memory file can have any size,
and no process has to read while another writes. The agent can read what a worker wrote after the
worker's death. The first byte of the result's file shows that the rest is complete.

The worker unpickles function and arguments only after its set-up, inside `record`. So the user's
modules are imported in the worker's environment, and an error in them leaves a normal error file.

A function worker that has stored its return value does not end before all workers of its node have
returned. There are two reasons:

- What the worker hosts stays available: the store of `torch.distributed` lives in the process of
  rank 0.
- The worker's native threads come to rest. A thread of gloo that drops a tensor needs the
  interpreter's lock. It aborts the process if it requests the lock while the interpreter shuts
  down. So a worker that shuts down right after its last collective would abort (SIGABRT).

The gate that the workers wait at is two event counters of the kernel, shared by the workers.
`tickets` counts the workers that may still arrive after the first. A worker that finds no ticket
left is the last one, and opens the gate for all. So no message to the agent is needed. If a worker
ends without having returned while the others continue, the agent takes a ticket for this worker.
When the agent stops the workers, it opens the gate.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import IO, Any

import regrow
from regrow.utils import ready, str_of
from regrow.workers.guardian import procfs

COMPLETE = b"\1"
#: Seconds that a worker gives its native threads to come to rest, and between two polls.
REST_S = 0.5
POLL_S = 0.001
#: Number of consecutive polls in which no other thread may be runnable.
QUIET_POLLS = 2


@dataclass
class Fd:
    """A file descriptor that multiprocessing can pickle for a child."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction

        return _detached, (reduction.DupFd(self.number),)


def _detached(duplicate: Any) -> Fd:
    return Fd(duplicate.detach())


class Call:
    """A function and its arguments, pickled separately from the worker's task."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call: tuple[Callable[..., Any], tuple[Any, ...]] | None = (function, args)
        self._file: Fd | None = None

    def __getstate__(self) -> dict[str, Any]:
        from multiprocessing import reduction

        self._file = Fd(os.memfd_create("regrow-call"))
        with open(self._file.number, "wb", closefd=False) as file:
            reduction.dump(self._call, file)
        os.lseek(self._file.number, 0, os.SEEK_SET)
        return {"_call": None, "_file": self._file}

    def run(self) -> Any:
        """Call the function, in the worker."""
        if self._call is None:
            assert self._file is not None
            with open(self._file.number, "rb") as file:
                self._call = pickle.load(file)
        function, args = self._call
        return function(*args)

    def close(self) -> None:
        """Free the memory in the agent, after a worker has its own descriptor."""
        if self._file is not None:
            os.close(self._file.number)
            self._file = None


@dataclass
class ForkedSetup:
    """Set-up of a worker that multiprocessing forked; the guardian does it for its workers."""

    env: Mapping[str, str]
    """The worker's complete environment."""
    streams: Mapping[int, Fd]
    """The worker's redirected stdout and stderr: number -> the descriptor to use."""
    agent_fds: Sequence[int]
    """Descriptors of the agent that the fork copied and the worker must not hold."""
    dies_with_parent: bool
    """Whether the forking thread lasts as long as the job, so that its end is the job's end."""
    parent: int | None
    """The expected parent process; None if it is not known."""
    adopted: Fd
    """Has a byte to read once the guardian watches the worker; ends if the agent dies."""
    adopter: int | None
    """The other end of `adopted`, if the fork copied it."""


@dataclass
class WorkerTask:
    """All parameters of a worker."""

    call: Call
    result: Fd
    """Memory file for the return value."""
    setup: ForkedSetup | None
    cpus: Sequence[int] | None
    """The CPUs on which the worker may run; None for all."""
    gate: Gate
    """The gate at which the worker waits for the others after its return."""


def work(task: WorkerTask) -> None:
    """Run a worker; its main function."""
    if task.setup is not None:
        _set_up(task.setup)
        regrow._begin_heartbeat()  # regrow was imported before this process became a worker
    if task.cpus is not None:
        os.sched_setaffinity(0, task.cpus)
    from regrow.workers.errors import record

    stored = False

    def call() -> None:
        nonlocal stored
        store(task.result.number, task.call.run())
        stored = True

    record(call)()
    if not stored:  # sys.exit(0) is a success without a return value
        store(task.result.number, None)
    regrow._end_heartbeat()  # the other nodes need not wait for the workers of this node
    task.gate.wait()


def store(fd: int, value: Any) -> None:
    """Write a return value to its file.

    Raises:
        TypeError: the value cannot be pickled.
    """
    with open(fd, "wb", closefd=False) as file:
        file.seek(len(COMPLETE))
        try:
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"cannot pickle the worker's return value, of type {type(value).__qualname__}:"
                f" {str_of(error)}; return a value that pickle accepts"
            ) from error
    os.pwrite(fd, COMPLETE, 0)


def is_stored(fd: int) -> bool:
    """Return whether the file contains a complete return value."""
    return os.pread(fd, len(COMPLETE), 0) == COMPLETE


def load(fd: int) -> Any:
    """Read the return value from its file."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(len(COMPLETE))
        return pickle.load(file)


def _set_up(setup: ForkedSetup) -> None:
    """Set up session, signals, environment and streams, like exec and the guardian."""
    from regrow.workers.guardian import procfs, spawn

    os.setsid()
    if setup.adopter is not None:
        os.close(setup.adopter)
    if not os.read(setup.adopted.number, 1):
        os._exit(1)  # no guardian would end this process
    os.close(setup.adopted.number)
    # A double-forked descendant becomes this process's child instead of init's. So it is found when
    # this worker ends.
    spawn.prctl(spawn.PR_SET_CHILD_SUBREAPER, 1)
    if setup.dies_with_parent:
        spawn.die_with(setup.parent)
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):  # a handler of the agent
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # undo the mask of the fork server
    os.environ.clear()
    os.environ.update(setup.env)
    os.environ[procfs.WORKER_PID] = str(os.getpid())
    for number, fd in setup.streams.items():
        os.dup2(fd.number, number, inheritable=True)
    for agent_fds in setup.agent_fds:
        os.close(agent_fds)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number in setup.streams and not _writes_to(getattr(sys, name), number):
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _writes_to(stream: IO[str] | None, number: int) -> bool:
    try:
        return stream is not None and stream.fileno() == number
    except (OSError, io.UnsupportedOperation):
        return False


# --- the gate


@dataclass
class Gate:
    """The gate, both for the agent and for its workers: two event counters."""

    tickets: Fd
    opened: Fd

    @classmethod
    def new(cls, workers: int) -> Gate:
        """Create a closed gate for this number of workers."""
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        tickets = os.eventfd(workers - 1, flags | os.EFD_SEMAPHORE)
        return cls(Fd(tickets), Fd(os.eventfd(0, flags)))

    def count(self) -> None:
        """Count a worker that has returned, or that will not return; the last opens the gate."""
        try:
            os.eventfd_read(self.tickets.number)
        except BlockingIOError:
            self.open()

    def open(self) -> None:
        """Release the workers that wait, and the workers that arrive later."""
        with suppress(BlockingIOError):  # the counter is at its limit
            os.eventfd_write(self.opened.number, 1)

    def wait(self) -> None:
        """Wait until all workers of the node have returned; let native threads come to rest."""
        self.count()
        ready([self.opened.number])
        let_threads_rest()

    def close(self) -> None:
        """Close the agent's counters; the workers have copies, or are gone."""
        os.close(self.tickets.number)
        os.close(self.opened.number)


def let_threads_rest(limit: float = REST_S) -> None:
    """Release the interpreter's lock and wait until no other thread of this process is runnable.

    A thread that waits for the lock gets it meanwhile. The kernel has no event for "all threads of
    a process rest", so this function polls.

    Args:
        limit: seconds; after that, threads that never rest are no longer waited for.
    """
    deadline, quiet = monotonic() + limit, 0
    while len(os.listdir("/proc/self/task")) > 1 and quiet < QUIET_POLLS:
        sleep(POLL_S)
        quiet = 0 if _others_run() else quiet + 1
        if monotonic() >= deadline:
            return


def _others_run() -> bool:
    own = str(threading.get_native_id())
    tasks = (task for task in os.listdir("/proc/self/task") if task != own)
    found = (procfs.stat(f"self/task/{task}") for task in tasks)
    return any(entry is not None and entry.state == "R" for entry in found)
