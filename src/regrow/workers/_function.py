"""What runs in a worker process that was started to call a function.

Function, arguments and return value travel through memory files: they can be of any size, nobody
has to read while another writes, and what a worker wrote can be read after its death. The first
byte of the result's file says that the rest is complete.

Function and arguments are unpickled only when the worker is set up, inside `record`: the user's
modules are imported with the worker's environment in place, and an error in them leaves an error
file like any other.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import regrow

COMPLETE = b"\1"


@dataclass
class Fd:
    """A file descriptor that survives being pickled for a child by multiprocessing."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction

        return _detached, (reduction.DupFd(self.number),)


def _detached(duplicate: Any) -> Fd:
    return Fd(duplicate.detach())


class Call:
    """A function and its arguments, pickled apart from what carries them."""

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
        """Call it; in the worker."""
        if self._call is None:
            assert self._file is not None
            with open(self._file.number, "rb") as file:
                self._call = pickle.load(file)
        function, args = self._call
        return function(*args)

    def close(self) -> None:
        """Give back the memory, once a worker has its own hold of it; in the agent."""
        if self._file is not None:
            os.close(self._file.number)
            self._file = None


@dataclass
class Setup:
    """What a worker that multiprocessing forked has to do for itself; the guardian's do not."""

    env: Mapping[str, str]
    """Its whole environment."""
    streams: Mapping[int, Fd]
    """Its stdout and stderr, where they are redirected: number -> what it shall be."""
    strange: Sequence[int]
    """Descriptors of the agent that came along with the fork and must not be held."""
    dies_with_parent: bool
    """Whether the thread that forks it lasts as long as the job, so that its end is the job's."""
    parent: int | None
    """Who must be its parent; None if that is not known."""
    adopted: Fd
    """Has a byte to read once the guardian knows of it, and an end if the agent dies before."""
    adopter: int | None
    """The other end of that, if it came along with the fork."""


@dataclass
class Job:
    """All that a worker needs."""

    call: Call
    result: Fd
    """Takes the return value."""
    setup: Setup | None
    cpus: Sequence[int] | None
    """The CPUs that it may run on; None for all."""


def work(job: Job) -> None:
    """The main function of a worker."""
    if job.setup is not None:
        _settle(job.setup)
        regrow._begin_heartbeat()  # regrow was imported when this was no worker yet
    if job.cpus is not None:
        os.sched_setaffinity(0, job.cpus)
    from regrow.workers.errors import record

    stored = False

    def call() -> None:
        nonlocal stored
        store(job.result.number, job.call.run())
        stored = True

    record(call)()
    if not stored:  # sys.exit(0) is a success that returns nothing
        store(job.result.number, None)


def store(fd: int, value: Any) -> None:
    """Write a return value into its file.

    Raises:
        TypeError: it cannot be pickled.
    """
    with open(fd, "wb", closefd=False) as file:
        file.seek(len(COMPLETE))
        try:
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the worker's return value, of type {type(value).__qualname__}, cannot be"
                f" pickled: {error}"
            ) from error
    os.pwrite(fd, COMPLETE, 0)


def is_stored(fd: int) -> bool:
    """Whether a return value is there, whole."""
    return os.pread(fd, len(COMPLETE), 0) == COMPLETE


def load(fd: int) -> Any:
    """The return value in its file."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(len(COMPLETE))
        return pickle.load(file)


def _settle(setup: Setup) -> None:
    """Do what a program gets from exec and the guardian: session, signals, environment, streams."""
    from regrow.workers import _become

    os.setsid()
    if setup.adopter is not None:
        os.close(setup.adopter)
    if not os.read(setup.adopted.number, 1):
        os._exit(1)  # nobody would end it
    os.close(setup.adopted.number)
    # What it double-forks becomes its own child rather than init's, and so is found at its end.
    _become.prctl(_become.PR_SET_CHILD_SUBREAPER, 1)
    if setup.dies_with_parent:
        _become.prctl(_become.PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have died before the line above took effect.
        if setup.parent is not None and os.getppid() != setup.parent:
            os._exit(1)
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):  # the agent's handlers
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(setup.env)
    for number, fd in setup.streams.items():
        os.dup2(fd.number, number, inheritable=True)
    for strange in setup.strange:
        os.close(strange)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number in setup.streams and not _writes_to(getattr(sys, name), number):
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _writes_to(stream: IO[str] | None, number: int) -> bool:
    try:
        return stream is not None and stream.fileno() == number
    except (OSError, io.UnsupportedOperation):
        return False
