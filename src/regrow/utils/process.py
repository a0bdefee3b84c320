"""Processes and signals: start helper processes; end a process, wait for it, describe its end.

A process is identified by a pidfd, which never refers to another process later.

**Helper processes** run beside the user's programs.
A terminal sends a signal to every process of a job: agents, workers and helpers. So does a
scheduler before a preemption or a time limit. The signal asks the workers to save. A helper that
ended at the signal would take away what the workers need for the save, such as the store in which
agents renew their leases. So each helper ignores every signal that is sent to a group. It ends with
its owner, which it watches by a pipe, a socket or a pidfd.

The thread that starts a helper blocks the signals, or `posix_spawn` does. A program inherits the
blocked signals. So a helper is safe from its first instruction, and needs no code for this.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from regrow.utils.descriptors import ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from subprocess import CompletedProcess
    from typing import Any


class SignalInterrupt(Exception):
    """Base of `SignalException`, which a signal handler may raise in any line of the main thread.

    Code that hides the exceptions of foreign code lets it pass. Otherwise the signal would be lost.
    """


SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
KILL_S = 5.0
"""Longest wait after SIGKILL, in seconds; a process that runs longer is stuck in the kernel."""
GROUP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGTSTP,
)
"""Blockable signals that a terminal or a scheduler sends to all processes of a job."""


def split_signals(names: str) -> tuple[list[signal.Signals], list[str]]:
    """Split a comma-separated list such as `SIGTERM,SIGINT`.

    Returns:
        The signals that a process can handle; and all other names.
    """
    known: list[signal.Signals] = []
    others: list[str] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        signum = signal.Signals.__members__.get(name.upper())
        if signum is None or signum in (signal.SIGKILL, signal.SIGSTOP):
            others.append(name)
        else:
            known.append(signum)
    return known, others


def signal_name(number: int) -> str | None:
    """Return the name of a signal, such as SIGKILL or SIGRTMIN+3; None if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        after_first = number - signal.SIGRTMIN
        return f"SIGRTMIN+{after_first}" if 0 < after_first < 30 else None


def signal_text(number: int) -> str:
    """Return a text for a signal, also for a signal without a name."""
    return signal_name(number) or f"signal {number}"


_SOURCES = {
    "exec": "by a cold start",
    "template": "from the template",
    "standby": "as a standby at the wrapped call",
}


def source_text(source: str) -> str:
    """Return the words for the source of a worker: `exec`, `template` or `standby`."""
    return _SOURCES.get(source, source)


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since the boot; None if it is gone.

    A process id and this number together name one process of a boot.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])  # a zombie has ended


def ends_within(pidfd: int, seconds: float | None) -> bool:
    """Return whether a process ends within `seconds`; None waits without a limit."""
    return bool(ready([pidfd], seconds))


def end_process(
    pidfd: int, grace: float | None = None, before_kill: Callable[[], object] | None = None
) -> bool:
    """End a process: SIGTERM, and SIGKILL after the grace.

    Args:
        pidfd: the process.
        grace: seconds between the two signals; None sends SIGKILL only.
        before_kill: called if the process did not end within the grace.

    Returns:
        Whether the process has ended. A process that is stuck in the kernel has not ended `KILL_S`
        after SIGKILL.
    """
    if grace is not None:
        _send(pidfd, signal.SIGTERM)
        _send(pidfd, signal.SIGCONT)  # a stopped process handles no signal
        if ends_within(pidfd, grace):
            return True
        if before_kill is not None:
            before_kill()
    _send(pidfd, signal.SIGKILL)
    return ends_within(pidfd, KILL_S)


def run_within(command: Sequence[str], seconds: float) -> CompletedProcess[str]:
    """Run a command to its end, with its output; kill it when `seconds` are over.

    Unlike `subprocess.run`, this waits only `KILL_S` for a command that was killed. A command that
    is stuck in the kernel, for example in the driver of a GPU, is left behind.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: the command did not end in time.
    """
    import subprocess

    from regrow.utils.threads import start_thread

    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
    )
    try:
        out, err = child.communicate(timeout=seconds)
    except BaseException:
        child.kill()
        try:
            child.wait(KILL_S)
        except subprocess.TimeoutExpired:
            start_thread(child.wait, "regrow-left-behind")  # collects the child if it ends
        for stream in (child.stdout, child.stderr):
            assert stream is not None
            stream.close()
        raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _send(pidfd: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signum)


def reap(pidfd: int) -> int | None:
    """Collect a child that has ended.

    Returns:
        The exit code, negative for a signal. None if the code is not known, because other code of
        this process waits for every child and collected this one first.
    """
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except OSError:  # ECHILD; EINVAL on Linux 5.3, which has no P_PIDFD
        return None
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def end_text(code: int | None) -> str:
    """Describe how a process ended: `was killed by SIGKILL`, `exited with code 3`, `has ended`."""
    if code is None:
        return "has ended"
    return f"was killed by {signal_text(-code)}" if code < 0 else f"exited with code {code}"


def spawn_helper(
    arguments: Sequence[str],
    env: Mapping[str, str],
    file_actions: Sequence[tuple[Any, ...]],
) -> int:
    """Start a Python program as a helper in its own session; return its pid.

    Args:
        arguments: arguments for the Python interpreter that runs this process.
        env: the helper's complete environment.
        file_actions: as in `os.posix_spawn`.

    Raises:
        OSError: the helper cannot be started.
    """
    if not sys.executable:
        raise OSError("cannot start a helper: sys.executable does not name a Python interpreter")
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *arguments],
        env,
        file_actions=file_actions,
        setsid=True,
        setsigmask=GROUP_SIGNALS,
    )


@contextmanager
def starting_helpers() -> Iterator[None]:
    """Context manager: processes that this thread starts inherit a mask of the group signals.

    For helpers that `spawn_helper` cannot start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
