"""Start of a program: from the agent's `spawn` message over fork to exec.

Between fork and exec, all code runs in a process with one thread. A failure there is reported
through a pipe, as step, errno and file. The pipe closes by itself when the program starts.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports `enum`
import errno
import fcntl
import os

from . import procfs
from .protocol import groups_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

HOOK = os.fsencode(os.path.join(os.path.dirname(os.path.dirname(procfs.__file__)), "hook"))
"""Folder of the module that a worker's Python imports at its start, and removes from its path."""
_FLAGS = frozenset({b"-u", b"-B", b"-O", b"-OO", b"-q", b"-v"})
"""Flags of Python under which it imports that module."""


class Program:
    """A program to run, as a `spawn` message describes it.

    Args:
        frame: worker, mark, grace in ns, three counts (fd targets, arguments, variables), that many
            fields each, and the path of each drain.
        fds: descriptors that came with messages. This message takes its own: the working directory,
            one for each target, one for each drain.
    """

    def __init__(self, frame: list[bytes], fds: list[int]) -> None:
        targets, self.argv, variables, paths = groups_of(frame[4:], 3)
        self.env = dict(variable.split(b"=", 1) for variable in variables)
        self.directory = fds.pop(0)
        self.mapping = {int(target): fds.pop(0) for target in targets}
        self.drains = [(fds.pop(0), path) for path in paths]

    def start(self, guardian: int, *, is_helper: bool = False) -> tuple[int, int]:
        """Fork the process that runs the program.

        Args:
            guardian: the pid of this process.
            is_helper: whether it ignores the signals that this process ignores.

        Returns:
            The pid, and a pipe from which a failure can be read; without a failure it is at its
            end.

        Raises:
            OSError: the system cannot create another process.
        """
        failure, report = os.pipe()
        os.set_blocking(failure, False)
        try:
            pid = os.fork()
        except OSError:
            os.close(failure)
            raise
        else:
            if pid == 0:
                self._become(report, guardian, is_helper=is_helper)
            return pid, failure
        finally:
            os.close(report)

    def close(self) -> None:
        """Close the guardian's copies of the program's descriptors, except the drains."""
        for fd in (self.directory, *self.mapping.values()):
            os.close(fd)

    def _become(self, report: int, guardian: int, *, is_helper: bool) -> NoReturn:
        """Become the worker, in the forked child."""
        stage, path = b"prepare", b""
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            die_with(guardian)
            report, directory = move(self.mapping, report, self.directory)
            stage = b"chdir"
            os.fchdir(directory)
            stage = b"prepare"
            for signum in range(1, signal.NSIG):
                try:
                    signal.signal(signum, signal.SIG_DFL)
                # SIGKILL, SIGSTOP, and signals that the C library keeps
                except (OSError, ValueError):
                    continue
            if not is_helper:
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                self.env[procfs.WORKER_PID.encode()] = b"%d" % os.getpid()
                self.env[procfs.STARTED_FROM.encode()] = b"exec"
                if is_python(self.argv):
                    others = self.env.get(b"PYTHONPATH", b"")
                    self.env[b"PYTHONPATH"] = HOOK + b":" + others if others else HOOK
            stage = b"exec"
            code, path = _execute(self.argv, self.env)
        except OSError as error:
            code = error.errno or 0
        except BaseException as error:  # noqa: BLE001 - whatever it is, no second guardian may run
            code, path = 0, repr(error).encode()
        try:
            os.write(report, b"%s\0%d\0%s" % (stage, code, path))
        finally:
            os._exit(127)


def is_python(argv: list[bytes]) -> bool:
    """Return whether a command is a Python program that imports the modules of PYTHONPATH."""
    name = os.path.basename(argv[0])
    rest = [word for word in argv[1:] if word not in _FLAGS][:1]
    runs = not rest or not rest[0].startswith(b"-") or rest[0] in (b"-m", b"-c")
    return runs and (name == b"python" or name.startswith(b"python3"))


def _execute(argv: list[bytes], env: dict[bytes, bytes]) -> tuple[int, bytes]:
    """Run execvpe(3); if it fails, return the decisive errno and the file."""
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
            if not os.access(path, os.F_OK):  # otherwise ENOENT refers to the script's interpreter
                continue
            failure = (error.errno or 0, path)
            if error.errno != errno.EACCES:  # like a shell: a later file may be executable
                break
    return failure


def die_with(parent: int | None) -> None:
    """Make the kernel kill this process at the end of its parent.

    Args:
        parent: the pid of the parent, to end at once if the parent has ended before; None: unknown.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def move(mapping: Mapping[int, int], *others: int) -> list[int]:
    """Move descriptors to their targets, the keys of `mapping`.

    Returns:
        Copies of the other descriptors, which a target may have replaced.
    """
    # First above all targets, so that no target replaces a descriptor before its turn.
    above = max([2, *mapping]) + 1
    fds = (*mapping.values(), *others)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in mapping.values():
        os.close(fd)
    for target, copy in zip(mapping, copies, strict=False):
        os.dup2(copy, target, inheritable=True)
        os.close(copy)
    return copies[len(mapping) :]


def prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2), which Python offers only with heavier imports.

    Raises:
        OSError: the kernel refused the call.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
