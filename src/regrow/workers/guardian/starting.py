"""Start of the guardian's process: by its handle, or early, while the agent still loads its code.

The guardian's interpreter starts in a tenth of the time in which an agent gets to its first worker.
`regrow run` starts it first, on another processor, so that no worker waits for it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final, NamedTuple

from regrow.utils import spawn_helper

#: Runs `process.main` as a module, so that its byte code is cached, but without `regrow` and its
#: imports: a bare package that contains only the path of the files.
BOOTSTRAP = (
    "import sys;p=type(sys)('regrow_guardian');p.__path__=[sys.argv.pop()];"
    "sys.modules[p.__name__]=p;from regrow_guardian.process import main;main()"
)
KILL_TIMEOUT_S: Final = 5.0
"""Default `kill_timeout` of a `Guardian`, which an early one has."""


class GuardianProcess(NamedTuple):
    """A guardian that runs: its process, and the agent's end of the socket to it."""

    pid: int
    socket: socket.socket


_early: GuardianProcess | None = None


def start_early() -> None:
    """Start a guardian for the first handle that needs one; do nothing if that fails."""
    global _early
    with suppress(OSError):  # the handle tries again, and reports it
        _early = start_process(KILL_TIMEOUT_S)


def take_early() -> GuardianProcess | None:
    """Return the guardian of `start_early`, once."""
    global _early
    process, _early = _early, None
    return process


def end_early() -> None:
    """End the guardian of `start_early` if no handle took it: it ends with its socket."""
    process = take_early()
    if process is not None:
        process.socket.close()


def start_process(kill_timeout: float) -> GuardianProcess:
    """Start a guardian; do not wait until it runs.

    Args:
        kill_timeout: as for `Guardian`.

    Raises:
        OSError: the process cannot be started.
    """
    ours, theirs = socket.socketpair()
    number = 3 if theirs.fileno() != 3 else 4  # a copy, because only the copy is inherited
    try:
        pid = spawn_helper(
            [
                *("-I", "-S", "-c", BOOTSTRAP),
                *(str(os.getpid()), str(number), str(round(kill_timeout * 1e9))),
                os.path.dirname(os.path.abspath(__file__)),
            ],
            os.environ,
            [
                # First, because the socket itself is 0 or 1 if these descriptors were closed.
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), number),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                *([] if is_standard(2) else [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]),
            ],
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return GuardianProcess(pid, ours)


def is_standard(fd: int) -> bool:
    """Return whether 0, 1 or 2 is a standard stream; if it was closed, it may be a file of ours."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
