"""What a guardian tells of its workers, and in which words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's program runs."""

    worker: int
    pid: int
    monotonic: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The program could not be run; nothing but `Gone` follows."""

    worker: int
    error: OSError


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker's process ended."""

    worker: int
    code: int | None
    """Its exit code, negative for a signal; None for an adopted worker, whose parent knows."""
    stopping: bool
    """A stop had been asked for before it ended."""
    monotonic: float


@dataclass(frozen=True, slots=True)
class Suspended:
    """The worker was stopped by a signal such as SIGSTOP."""

    worker: int
    signal: int
    monotonic: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The worker runs again after a SIGCONT."""

    worker: int
    signal: int
    monotonic: float


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of the worker is left: it has ended, and so has all that it started."""

    worker: int
    left_behind: int
    """How many processes outlived it and had to be stopped."""
    stuck: int
    """How many processes, itself included, SIGKILL did not end in time; not gone, but given up."""
    monotonic: float


@dataclass(frozen=True, slots=True)
class Lapsed:
    """The lease is over, and the guardian kills all workers, or one that was to be started.

    Their ends are told as always, after this.
    """

    worker: int
    """0: all of them."""
    killed: int
    """How many workers these are."""
    monotonic: float


@dataclass(frozen=True, slots=True)
class GuardianLost:
    """The guardian is gone, and the worker with it; nothing follows."""

    worker: int
    monotonic: float


GuardianEvent = Started | Refused | Exited | Suspended | Resumed | Gone | Lapsed | GuardianLost
Listener = Callable[[GuardianEvent], None]


def decode(frame: list[bytes]) -> GuardianEvent:
    """The event that a message of the guardian's tells of.

    Raises:
        ValueError: it tells of none.
    """
    kind, worker, rest = frame[0], int(frame[1]), frame[2:]
    if kind == b"refused":  # stage, errno, path
        return Refused(worker, _refusal(rest[0].decode(), int(rest[1]), os.fsdecode(rest[2])))
    stamp = int(rest[-1]) / 1e9
    match kind:
        case b"started":
            return Started(worker, int(rest[0]), stamp)
        case b"exited":
            code = os.waitstatus_to_exitcode(int(rest[0])) if rest[0] else None
            return Exited(worker, code, rest[1] == b"1", stamp)
        case b"stopped":
            return Suspended(worker, int(rest[0]), stamp)
        case b"continued":
            return Resumed(worker, int(rest[0]), stamp)
        case b"gone":
            return Gone(worker, int(rest[0]), int(rest[1]), stamp)
        case b"lapsed":
            return Lapsed(worker, int(rest[0]), stamp)
    raise ValueError(f"the guardian sent an event {kind!r} that no agent knows")


def _refusal(stage: str, code: int, path: str) -> OSError:
    """Why a program did not run, as the exception class of its errno and in words that help."""
    text = os.strerror(code) if code else path
    if stage == "exec" and code == errno.ENOENT:
        interpreter = _interpreter(path)
        if interpreter is None:
            place = "" if "/" in path else " in PATH"
            text = f"cannot start a worker: there is no such program{place}"
        else:
            text = (
                f"cannot start a worker: the interpreter {interpreter!r} of its #! line is missing"
            )
    elif stage == "exec" and code == errno.EACCES:
        text = "cannot start a worker: not executable (chmod +x), or a folder"
    elif stage == "exec" and code == errno.ENOEXEC:
        text = (
            "cannot start a worker: neither a program of this machine nor a script with a #! line"
        )
    elif stage == "exec":
        text = f"cannot start a worker: {text}"
    elif stage == "fork":
        text = f"cannot start a worker: fork: {text} (limits of processes or memory: ulimit -u)"
    else:
        text = f"cannot start a worker: {stage}: {text}"
    return OSError(code, text, path or None) if code else OSError(text)


def _interpreter(path: str) -> str | None:
    """The interpreter that a script's first line names; None: no such file, or no such line."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return None
    words = line[2:].split() if line.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else None
