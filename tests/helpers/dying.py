"""Processes whose heartbeat says that they are to end, each with something in the way of it.

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

from regrow.heartbeat._death import Deadline, die
from regrow.heartbeat._failure import HeartbeatFailure, Ranks
from regrow.heartbeat._kernel_timer import KernelTimer

REASON = "rank 2 is missing"


@contextmanager
def dying(
    way: Callable[..., None], *args: str | Path, container: Sequence[str] = (), **env: str
) -> Iterator[subprocess.Popen[str]]:
    """A process that is about to end, or does already; killed at the end.

    Args:
        way: a function below.
        args: for it.
        container: a command that starts another in a container.
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
    """How such a process ended, negative for a signal, and what it said on stderr."""
    with dying(way, *args, container=container, **env) as process:
        _, err = process.communicate(timeout=40)
        return process.returncode, err


def failure() -> HeartbeatFailure:
    """What is found wrong."""
    ranks = Ranks.of([2])
    return HeartbeatFailure("missing", ranks, REASON, rank=0, world_size=3, beat=7, seconds=9.0)


# The ways to end. The first few do it by the timers, since no Python can run any more.


def hold_the_gil() -> None:
    reader, _writer = os.pipe()
    while True:  # one with a handler comes by here
        ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def native_code_with_the_gil() -> None:
    faulthandler.enable()
    Deadline(0.1, 0.1).arm()
    hold_the_gil()


def native_code_with_the_gil_and_a_handler() -> None:
    signal.signal(signal.SIGABRT, lambda *_: None)
    Deadline(0.1, 0.1).arm()
    hold_the_gil()


def native_code_with_the_gil_and_a_mask() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
    Deadline(0.1, 0.1).arm()
    hold_the_gil()


def stopped() -> None:
    Deadline(0.1, 0.1).arm()
    os.kill(os.getpid(), signal.SIGSTOP)


def putting_off() -> None:
    """One timer is put off, another one called off; what a third sends is waited for."""
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
    """Its child has none of its timers, and cannot put off or call off its end."""
    deadline = Deadline(0.1, 0.1)
    deadline.arm()
    if os.fork() == 0:
        deadline.alive()
        deadline.arm(1000.0)
        deadline.disarm()
        with open("/proc/self/timers", "rb") as file:
            print(f"{len(file.read())} bytes of timers", flush=True)
        os._exit(0)
    hold_the_gil()


# The others call `die` in a thread, whatever the main thread is doing.


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
    """Both of its streams are pipes that nobody reads, and threads hold their locks."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    for say in (print, logging.info):
        threading.Thread(target=lambda say=say: [say("x" * 10000) for _ in range(100)]).start()
    _die_beside(lambda: sys.stdout.write("x" * 10000))


def in_vain(path: str) -> None:
    """Whoever opens its error file to write waits for somebody to read it."""
    os.mkfifo(f"{path}.{os.getpid()}.tmp")
    sleeping()


def without_timers() -> None:
    """The kernel has no timers left for this user."""
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))
    Deadline(0.1, 0.1).arm()
    sleeping()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
