"""Exit codes of `regrow`, and the text that it prints with each.

| code  | meaning                                                                              |
|-------|--------------------------------------------------------------------------------------|
| 0     | every worker succeeded                                                               |
| 1     | the job failed: a worker of any node failed and no restart was left, or a host       |
|       | denied a resource that the job needs (files, processes, a program to run, a port),   |
|       | or the rendezvous refused this node or was closed                                    |
| 2     | usage: nothing was started                                                           |
| 70    | internal error (EX_SOFTWARE): a traceback is printed; please report it               |
| 75    | infrastructure was lost (EX_TEMPFAIL): nodes did not join in time, or the host of    |
|       | the rendezvous is lost or unreachable; the same command may succeed in another run   |
| 85    | stopped early: all ranks got True from `regrow.should_stop` at the same step and     |
|       | succeeded. The number is that of HTCondor's self-checkpointing jobs                  |
| 128+n | stopped by signal n: 130 by Ctrl-C, 143 by SIGTERM (preempted)                       |

A scheduler can requeue a job on 75, 85 and 143, and should not on 1 and 2. torchrun exits with 1
where regrow exits with 70, 75, 85 or 128+n.

This file does not import the exception classes. It searches for them by name in the loaded modules.
The module that raised an exception has also loaded its class, and a Ctrl-C during an import should
not start another import.
"""

from __future__ import annotations

import errno
import sys

from regrow.utils import str_of

SUCCEEDED = 0
FAILED = 1
USAGE = 2
INTERNAL = 70
RETRY = 75
STOPPED_EARLY = 85
SIGNALED = 128
SIGINT = 2

BRIEF = "regrow_brief"
"""Attribute of an exception if another agent prints the job's story: the end of its one line."""

#: Errors of a host that lacks or denies a resource of the job; these are no errors of regrow.
_DENIED = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.ENOEXEC, errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT),
        *(errno.E2BIG, errno.EEXIST, errno.EADDRINUSE, errno.EADDRNOTAVAIL),
    }
)


def outcome(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the text for stderr for an exception that ended the command."""
    if _is(error, "regrow.workers", "ChildFailedError"):
        return FAILED, _with_notes(_child_failed(error), error)
    if isinstance(error, KeyboardInterrupt):
        return SIGNALED + SIGINT, _story_or("regrow: stopped by SIGINT", error)
    if _is(error, "regrow.workers", "StoppedEarly"):
        why = error.why  # type: ignore[attr-defined]
        stopped = f"all ranks stopped at the same step, by {why}"
        if not error.return_values:  # type: ignore[attr-defined]
            stopped = f"the job was stopped by {why}, and this host stood by"
        line = f"regrow: {stopped}; run the job again to go on"
        return STOPPED_EARLY, _story_or(line, error)
    if _is(error, "regrow.workers", "SignalException"):
        signal = error.sigval  # type: ignore[attr-defined]
        return SIGNALED + signal, _story_or(f"regrow: stopped by {signal.name}", error)
    if isinstance(error, SystemExit):
        return _of_system_exit(error)
    for name in ("RendezvousConnectionError", "RendezvousTimeoutError"):
        if _is(error, "regrow.rendezvous", name):
            line = f"regrow: {_described(error)} (running the command again may succeed)"
            return RETRY, _with_notes(line, error)
    if _is(error, "regrow.rendezvous.errors", "RendezvousUsageError"):
        return USAGE, _with_notes(f"regrow: {_described(error)}", error)
    if _is(error, "regrow.rendezvous", "RendezvousError"):
        return FAILED, _with_notes(f"regrow: {_described(error)}", error)
    if isinstance(error, OSError) and error.errno in _DENIED:
        place = f": {error.filename!r}" if error.filename else ""
        return FAILED, _with_notes(f"regrow: {error.strerror}{place}", error)
    import traceback

    text = "".join(traceback.format_exception(error))
    return INTERNAL, f"{text}regrow: internal error: please report it with the traceback above"


def _child_failed(error: BaseException) -> str:
    """Return the report of a failed job; with `BRIEF`, its first failure in one line."""
    if getattr(error, BRIEF, None) is None:
        return str_of(error)
    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
    where = f" on host {failure.host}" if failure.host else ""
    return f"regrow: the job has failed: rank {rank}{where}: {' '.join(failure.summary.split())}"


def _of_system_exit(error: SystemExit) -> tuple[int, str]:
    if error.code is None:
        return SUCCEEDED, ""
    if isinstance(error.code, int):
        return error.code, ""
    return FAILED, str_of(error.code)


def _is(error: BaseException, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(error, kind)


def _described(error: BaseException) -> str:
    """Return the error and its cause in one line."""
    text = " ".join(str_of(error).split()) or type(error).__name__
    cause = "" if error.__cause__ is None else str_of(error.__cause__)
    return text if cause in text else f"{text}: {' '.join(cause.split())}"


def _story_or(text: str, error: BaseException) -> str:
    """Return the job's story, whose first line has the facts of `text`; `text` without a story."""
    notes = getattr(error, "__notes__", ())
    is_told = notes and getattr(error, BRIEF, None) is None
    return "\n".join(notes) if is_told else _with_notes(text, error)


def _with_notes(text: str, error: BaseException) -> str:
    """Append the notes of the exception: the job's story, or the directory of its logs."""
    brief = getattr(error, BRIEF, None)
    if brief is not None:
        return f"{text}; {brief}" if brief else text
    return "\n".join([text, *getattr(error, "__notes__", ())])
