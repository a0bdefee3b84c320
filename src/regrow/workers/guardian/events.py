"""Events that a guardian reports about its workers, and their texts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import NamedTuple


class Started(NamedTuple):
    """The worker's program runs."""

    worker: int
    pid: int
    monotonic: float
    source: str = "exec"
    """`exec`, or the `template` or `standby` from which it has started."""


class Refused(NamedTuple):
    """The program could not be run; only `Gone` follows."""

    worker: int
    error: OSError


class Exited(NamedTuple):
    """The worker's process ended."""

    worker: int
    code: int | None
    """Exit code, negative for a signal; None for an adopted worker, because its parent knows it."""
    stopping: bool
    """Whether a stop was requested before the end."""
    monotonic: float
    late: bool = False
    """The worker may have ended earlier, because the guardian was suspended and then resumed."""


class Suspended(NamedTuple):
    """A signal such as SIGSTOP suspended the worker."""

    worker: int
    signal: int
    monotonic: float


class Resumed(NamedTuple):
    """The worker was resumed by a SIGCONT."""

    worker: int
    signal: int
    monotonic: float


class Gone(NamedTuple):
    """No process of the worker is left: it and all its descendants have ended."""

    worker: int
    left_behind: int
    """Number of processes that outlived the worker and had to be stopped."""
    stuck: int
    """Number of processes, with the worker's, that SIGKILL did not end in time; given up."""
    monotonic: float


class Lapsed(NamedTuple):
    """The lease expired: the guardian kills all workers, or a worker that was about to start.

    The guardian reports their ends afterwards, as usual.
    """

    killed: int
    """Number of killed workers."""
    monotonic: float


class HelperChanged(NamedTuple):
    """A change of the template (`Guardian.preload`) or of a standby (`Guardian.stand_by`)."""

    helper: str
    """`template` or `standby`."""
    kind: str
    """`ready`: workers can start from it. `refused`: one could not. `gone`: it has ended. `unfit`:
    no such process can start these workers. `taken`: the standby has become a worker."""
    pid: int
    resident: int
    """`ready`: its resident memory in bytes."""
    why: str
    """`refused`, `gone`, `unfit`: the reason."""
    monotonic: float
    number: int = 0
    """What `Guardian.stand_by` has returned for a standby."""


class GuardianLost(NamedTuple):
    """The guardian is gone, and the worker with it; no event follows."""

    worker: int
    monotonic: float
    how: str = "the guardian is gone"
    """How the guardian ended, in words: "the guardian (pid 7) was killed by SIGKILL"."""


GuardianEvent = Started | Refused | Exited | Suspended | Resumed | Gone | GuardianLost
Listener = Callable[[GuardianEvent], None]


def decode(frame: list[bytes]) -> GuardianEvent | Lapsed | HelperChanged:
    """Parse an event from a message of the guardian.

    Raises:
        ValueError: the message is no event.
    """
    kind, worker, rest = frame[0], int(frame[1]), frame[2:]
    if kind == b"refused":  # stage, errno, path
        return Refused(worker, _refusal(rest[0].decode(), int(rest[1]), os.fsdecode(rest[2])))
    stamp = int(rest[-1]) / 1e9
    match kind:
        case b"started":
            return Started(worker, int(rest[0]), stamp, rest[1].decode())
        case b"exited":
            code = os.waitstatus_to_exitcode(int(rest[0])) if rest[0] else None
            return Exited(worker, code, rest[1] == b"1", stamp, rest[2] != b"0")
        case b"stopped":
            return Suspended(worker, int(rest[0]), stamp)
        case b"continued":
            return Resumed(worker, int(rest[0]), stamp)
        case b"gone":
            return Gone(worker, int(rest[0]), int(rest[1]), stamp)
        case b"lapsed":
            return Lapsed(int(rest[0]), stamp)
        case b"template" | b"standby":  # kind, pid, memory or reason
            helper, what, pid, more = kind.decode(), rest[0].decode(), int(rest[1]), rest[2]
            if what == "ready":
                return HelperChanged(helper, what, pid, int(more), "", stamp, worker)
            why = more.decode(errors="replace")
            return HelperChanged(helper, what, pid, 0, why, stamp, worker)
    raise ValueError(f"the guardian sent an unknown event {kind!r}")


def _refusal(stage: str, code: int, path: str) -> OSError:
    """Return the error for a program that could not be started; its text explains the cause."""
    reason = os.strerror(code) if code else path
    if stage == "exec":
        reason = _exec_failure(code, path) or reason
    elif stage == "fork":
        reason = f"fork: {reason} (limits of processes or memory: ulimit -u)"
    else:
        reason = f"{stage}: {reason}"
    text = f"cannot start a worker: {reason}"
    return OSError(code, text, path or None) if code else OSError(text)


def _exec_failure(code: int, path: str) -> str | None:
    match code:
        case errno.ENOENT if interpreter := _interpreter(path):
            return f"the interpreter {interpreter!r} of its #! line is missing"
        case errno.ENOENT:
            return "there is no such program" + ("" if "/" in path else " in PATH")
        case errno.EACCES:
            return "not executable (chmod +x), or a folder"
        case errno.ENOEXEC:
            return "neither a program of this machine nor a script with a #! line"
    return None


def _interpreter(path: str) -> str | None:
    """Return the interpreter in a script's first line; None: no such file, or no such line."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return None
    words = line[2:].split() if line.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else None
