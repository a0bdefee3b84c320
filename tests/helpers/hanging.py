"""Processes that hang, each in a way that asking where they stand has to cope with.

`hanging` starts one, which runs this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from regrow.timer._capture import Target, capture
from regrow.timer._frames import Dump
from regrow.timer._stacks import CANDIDATES, _armed, arm


class Hanging(NamedTuple):
    """A process that hangs."""

    process: subprocess.Popen[str]
    target: Target
    said: str
    """What it said at last."""


@contextmanager
def hanging(way: Callable[..., None], *args: str, threads: int = 0) -> Iterator[Hanging]:
    """A process that is about to hang, or does already; killed at the end.

    Args:
        way: a function below.
        args: for it.
        threads: how many others it has, all idle.
    """
    command = [sys.executable, __file__, str(threads), way.__name__, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pidfd = os.pidfd_open(process.pid)
        try:
            yield Hanging(process, Target(process.pid, pidfd), process.stdout.readline().strip())
        finally:
            os.close(pidfd)
            process.kill()


def ask(target: Target, budget: float = 20.0) -> Dump:
    """Where a process stands, with as much patience as a loaded machine may need."""
    return capture([target], budget)[target.pid]


# The ways to hang. Each says in a line that it begins.


def _here(word: object = "here") -> None:
    print(word, flush=True)


def sleeping() -> None:
    _here()
    time.sleep(1000)


def looping() -> None:
    _here()
    while True:
        pass


def holding_the_gil() -> None:
    reader, _writer = os.pipe()
    _here()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def matching() -> None:
    """A busy loop of native code that holds the GIL."""
    import re

    _here()
    re.match("(a+)+$", "a" * 60 + "b")


def woken() -> None:
    """Native code that any signal ends."""
    _here()
    ctypes.PyDLL(None).pause()
    sleeping()


def deaf() -> None:
    """Its main thread takes no signal; one that does is native, and knows nothing of Python."""
    libc = ctypes.CDLL(None)
    thread, semaphore = ctypes.c_ulong(), ctypes.create_string_buffer(64)
    assert libc.pthread_create(ctypes.byref(thread), None, libc.sem_wait, semaphore) == 0
    stone_deaf()


def stone_deaf() -> None:
    """No thread takes a signal, if there is only this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    sleeping()


def spawning(fifo: str) -> None:
    """Uninterruptible until somebody opens a pipe, as its child is, which has all its memory."""
    _here()
    opening = (os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opening])
    sleeping()


def executing() -> None:
    """Another program, which no longer has what was armed, after a line that comes too early."""
    _here()
    os.execv("/bin/sleep", ["sleep", "1000"])


def exiting() -> None:
    _here()
    sys.exit()


def child() -> None:
    """A child with the handlers and the memory of its parent; says its pid."""
    if (pid := os.fork()) > 0:
        _here(pid)
    time.sleep(1000)


def armed_child() -> None:
    """A child that has armed itself; says its pid."""
    if (pid := os.fork()) > 0:
        os.waitpid(pid, 0)
    arm()
    _here(os.getpid())
    time.sleep(1000)


def otherwise(way: str) -> None:
    """It has other handlers by now than those that it armed."""
    for number in CANDIDATES:
        signal.signal(number, lambda *_: None)
    globals()[way]()


def asking_itself() -> None:
    """Says how it answers when it asks itself as if it were to be killed."""
    dump = ask(Target(os.getpid(), os.pidfd_open(os.getpid()), doomed=True))
    _here(f"{dump.outcome}, {len(dump.threads)} thread")
    time.sleep(1000)


def littering() -> None:
    """Its memory for dumps holds half a GB of something else."""
    os.ftruncate(_armed.memory, 1 << 29)
    sleeping()


def lying() -> None:
    """Its answer is its own, and made for a terminal."""
    text = b'Stack (most recent call first):\n  File "a\x1b[31mb\xc2\x9bc", line 1 in f\x07\n'
    for number in CANDIDATES:
        signal.signal(number, lambda *_: os.write(_armed.memory, text))
    looping()


if __name__ == "__main__":
    arm()
    for _ in range(int(sys.argv[1])):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    globals()[sys.argv[2]](*sys.argv[3:])
