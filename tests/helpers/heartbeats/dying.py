"""Processes that must end after a heartbeat failure; each has an obstacle to its end.

`dying` starts one, which runs this file.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from regrow.heartbeat.beats import HeartbeatPlan
from regrow.heartbeat.death import KernelTimer, die
from regrow.heartbeat.failure import HeartbeatFailure, Ranks
from regrow.heartbeat.failure_policy import FailurePolicy


@contextmanager
def dying(
    way: Callable[..., None], *args: str | Path, container: Sequence[str] = (), **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that ends now or soon; it is killed at the end.

    Args:
        way: a function below.
        args: for it.
        container: a command that runs another command in a container.
        env: added to the environment.
    """
    command = [*container, sys.executable, __file__, way.__name__, *map(str, args)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def died(
    way: Callable[..., None], *args: str | Path, container: Sequence[str] = (), **env: str
) -> tuple[int, str]:
    """Return such a process's exit code (negative for a signal) and its stderr."""
    with dying(way, *args, container=container, **env) as process:
        _, err = process.communicate(timeout=40)
        return process.returncode, err


def failure() -> HeartbeatFailure:
    """Return the failure that the heartbeat reports."""
    ranks = Ranks.of([2])
    return HeartbeatFailure("missing", ranks, "", rank=0, world_size=3, beat=7, seconds=9.0)


REASON = str(failure())


def armed() -> FailurePolicy:
    """Arm the timers that end this process in 0.1 s."""
    policy = FailurePolicy(HeartbeatPlan(0, 3, 0.05, 0.05, failures=1, start_timeout=1.0))
    policy.arm(0.1)
    return policy


# The ways to end. The first few end by kernel timers, because Python code can no longer run.


def hold_the_gil() -> None:
    reader, _writer = os.pipe()
    while True:  # a process with a signal handler loops here
        ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def native_code_with_the_gil() -> None:
    faulthandler.enable()
    armed()
    hold_the_gil()


def native_code_with_the_gil_and_a_handler() -> None:
    signal.signal(signal.SIGABRT, lambda *_: None)
    armed()
    hold_the_gil()


def native_code_with_the_gil_and_a_mask() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
    armed()
    hold_the_gil()


def stopped() -> None:
    armed()
    os.kill(os.getpid(), signal.SIGSTOP)


def putting_off() -> None:
    """Postpone one timer and close another one; wait for the signal of a third."""
    signums = signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    put_off, called_off, last = map(KernelTimer, signums)
    put_off.set(0.02)
    called_off.set(0.02)
    put_off.set(1000.0)
    called_off.close()
    last.set(0.05)
    signal.sigwait({signal.SIGALRM})
    put_off.close()
    print("pending:", *signal.sigpending(), flush=True)


def parent_of_a_child() -> None:
    """Fork a child without the parent's timers; it cannot delay or cancel the parent's end."""
    policy = armed()
    if os.fork() == 0:
        policy.alive()
        policy.arm(1000.0)
        policy.end()
        with open("/proc/self/timers", "rb") as file:
            print(f"{len(file.read())} bytes of timers", flush=True)
        os._exit(0)
    hold_the_gil()


# The others call `die` in a thread beside the main thread.


def _die_beside(main: Callable[[], object]) -> None:
    threading.Thread(target=lambda: die(failure())).start()
    while True:
        main()


def sleeping() -> None:
    _die_beside(lambda: time.sleep(1000))


def looping() -> None:
    _die_beside(lambda: None)


def native_code() -> None:
    reader, _writer = os.pipe()
    _die_beside(lambda: ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1))


def handling() -> None:
    signal.signal(signal.SIGABRT, lambda *_: print("handled", flush=True))
    sleeping()


def ignoring() -> None:
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    sleeping()


def blocking() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
    sleeping()


def printing() -> None:
    """Fill the pipes of both output streams, with threads that hold the streams' locks."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    for emit in (print, logging.info):
        threading.Thread(target=lambda emit=emit: [emit("x" * 10000) for _ in range(100)]).start()
    _die_beside(lambda: sys.stdout.write("x" * 10000))


def blocked_error_file(path: str) -> None:
    """Replace the error file by a pipe, so that opening it for writing blocks."""
    os.mkfifo(f"{path}.{os.getpid()}.tmp")
    sleeping()


def without_timers() -> None:
    """Run without kernel timers: the user's limit is 0."""
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))
    armed()
    sleeping()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
