"""How `regrow` ends: its exit codes, and what it says with each.

| code  | meaning                                                                              |
|-------|--------------------------------------------------------------------------------------|
| 0     | every worker succeeded                                                               |
| 1     | the job failed: a worker failed for good, on this node or on another one, or a host  |
|       | denied what the job needs (files, processes, a program to run)                       |
| 2     | usage: nothing was started                                                           |
| 70    | internal error (EX_SOFTWARE): a traceback is printed; please report it               |
| 75    | infrastructure was lost (EX_TEMPFAIL): nodes did not come in time, or the host where |
|       | the nodes meet is gone or cannot be reached; the same command may succeed when run   |
|       | again                                                                                |
| 128+n | stopped by signal n: 130 by Ctrl-C, 143 by SIGTERM (preempted)                       |

A scheduler can requeue on 75 and 143, and should not on 1 and 2. torchrun ends with 1 for all of
them.

The exceptions are looked for by name among the modules that are loaded, and not imported: one
that was raised has been imported by whoever raised it, and Ctrl-C during an import should not
begin another.
"""

from __future__ import annotations

import errno
import sys

SUCCEEDED = 0
FAILED = 1
USAGE = 2
INTERNAL = 70
RETRY = 75
SIGNALED = 128
SIGINT = 2

#: What a host says that has not what the job needs, or does not allow it: no error of ours.
_DENIED = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.ENOEXEC, errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT),
        *(errno.E2BIG, errno.EEXIST),
    }
)


def outcome(error: BaseException) -> tuple[int, str]:
    """The exit code for an exception that ended the command, and the text for stderr."""
    if _is(error, "regrow.workers", "ChildFailedError"):
        return FAILED, _with_notes(str(error), error)
    if isinstance(error, KeyboardInterrupt):
        return SIGNALED + SIGINT, _with_notes("regrow: stopped by SIGINT", error)
    if _is(error, "regrow.workers", "SignalException"):
        signal = error.sigval  # type: ignore[attr-defined]
        return SIGNALED + signal, _with_notes(f"regrow: stopped by {signal.name}", error)
    if isinstance(error, SystemExit):
        return _of_system_exit(error)
    for name in ("RendezvousConnectionError", "RendezvousTimeoutError"):
        if _is(error, "regrow.rendezvous", name):
            line = f"regrow: {_described(error)} (running the command again may succeed)"
            return RETRY, _with_notes(line, error)
    if _is(error, "regrow.rendezvous", "RendezvousError"):
        return FAILED, _with_notes(f"regrow: {_described(error)}", error)
    if isinstance(error, OSError) and error.errno in _DENIED:
        place = f": {error.filename!r}" if error.filename else ""
        return FAILED, _with_notes(f"regrow: {error.strerror}{place}", error)
    import traceback

    text = "".join(traceback.format_exception(error))
    return INTERNAL, f"{text}regrow: internal error: please report it with the traceback above"


def _of_system_exit(error: SystemExit) -> tuple[int, str]:
    if error.code is None:
        return SUCCEEDED, ""
    if isinstance(error.code, int):
        return error.code, ""
    return FAILED, str(error.code)


def _is(error: BaseException, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(error, kind)


def _described(error: BaseException) -> str:
    """The error in one line, with what caused it."""
    text = " ".join(str(error).split()) or type(error).__name__
    cause = error.__cause__
    return f"{text}: {' '.join(str(cause).split())}" if cause and str(cause) not in text else text


def _with_notes(text: str, error: BaseException) -> str:
    """The text with what was added to the exception: the job's story."""
    return "\n".join([text, *getattr(error, "__notes__", ())])
