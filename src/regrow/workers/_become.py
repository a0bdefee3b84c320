"""The step from a forked child of the guardian to a worker's program.

All of it happens between fork and exec, in a process with one thread. What fails is told through a
pipe that closes by itself when the program starts: the step, the errno and the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def become(
    argv: list[bytes],
    env: dict[bytes, bytes],
    directory: int,
    mapping: dict[int, int],
    report: int,
    guardian: int,
) -> NoReturn:
    """In the forked child: become the worker. Failures go through the pipe `report`."""
    stage, path = b"prepare", b""
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the line above took effect
            os._exit(1)
        # First out of the way of each other's targets, then to their places.
        above = max([2, *mapping]) + 1
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, above)
        directory = fcntl.fcntl(directory, fcntl.F_DUPFD_CLOEXEC, above)
        moved = {
            target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for target, fd in mapping.items()
        }
        for target, fd in moved.items():
            os.dup2(fd, target, inheritable=True)
        stage = b"chdir"
        os.fchdir(directory)
        stage = b"prepare"
        for signum in range(1, signal.NSIG):
            try:
                signal.signal(signum, signal.SIG_DFL)
            except (OSError, ValueError):  # SIGKILL, SIGSTOP, and those the C library keeps
                continue
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        stage = b"exec"
        code, path = _execute(argv, env)
    except OSError as error:
        code = error.errno or 0
    except BaseException as error:  # noqa: BLE001 - of whatever kind, it may not become a guardian
        code, path = 0, repr(error).encode()
    try:
        os.write(report, b"%s\0%d\0%s" % (stage, code, path))
    finally:
        os._exit(127)


def _execute(argv: list[bytes], env: dict[bytes, bytes]) -> tuple[int, bytes]:
    """execvpe(3); returns, where it fails, the errno that matters and the file it is about."""
    if b"/" in argv[0]:
        places = [argv[0]]
    else:
        search = env.get(b"PATH", os.fsencode(os.defpath))
        places = [os.path.join(place, argv[0]) for place in search.split(b":")]
    failure = (errno.ENOENT, argv[0])
    for path in places:
        try:
            os.execve(path, argv, env)
        except OSError as error:
            if not os.access(path, os.F_OK):  # else ENOENT is about the script's interpreter
                continue
            failure = (error.errno or 0, path)
            if error.errno != errno.EACCES:  # as a shell: a later one may be executable
                break
    return failure


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2), which Python offers in no lighter way.

    Raises:
        OSError: the kernel refused.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
