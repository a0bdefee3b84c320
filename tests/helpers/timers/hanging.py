"""Processes that hang, each in a way that makes the capture of its stacks hard.

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

from regrow.timer.stacks import answering
from regrow.timer.stacks.answering import CANDIDATES, arm
from regrow.timer.stacks.capture import Target, capture
from regrow.timer.stacks.report import Dump


class Hanging(NamedTuple):
    """A process that hangs."""

    process: subprocess.Popen[str]
    target: Target
    output: str
    """Its last line of output."""


@contextmanager
def hanging(way: Callable[..., None], *args: str, threads: int = 0) -> Iterator[Hanging]:
    """Start a process that hangs now or soon; it is killed at the end.

    Args:
        way: a function below.
        args: for it.
        threads: number of other threads, all idle.
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
    """Capture the stacks of a process; the default budget (s) is enough for a loaded machine."""
    return capture([target], budget)[target.pid]


# The ways to hang. Each prints a line when it begins.


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
    """Hang in a busy loop of native code that holds the GIL."""
    import re

    _here()
    re.match("(a+)+$", "a" * 60 + "b")


def woken() -> None:
    """Hang in native code that any signal ends."""
    _here()
    ctypes.PyDLL(None).pause()
    sleeping()


def blocking() -> None:
    """Block signals in the only thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    sleeping()


def spawning(fifo: str) -> None:
    """Wait uninterruptibly in posix_spawn until the test opens a pipe.

    The child waits too, and shares all memory of its parent.
    """
    _here()
    opening = (os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opening])
    sleeping()


def executing() -> None:
    """Replace the armed program by another one; the printed line comes too early."""
    _here()
    os.execv("/bin/sleep", ["sleep", "1000"])


def exiting() -> None:
    _here()
    sys.exit()


def child() -> None:
    """Fork a child with the handlers and the memory of its parent; print its pid."""
    if (pid := os.fork()) > 0:
        _here(pid)
    time.sleep(1000)


def armed_child() -> None:
    """Fork a child that arms itself; print its pid."""
    if (pid := os.fork()) > 0:
        os.waitpid(pid, 0)
    arm()
    _here(os.getpid())
    time.sleep(1000)


def otherwise(way: str) -> None:
    """Replace the armed signal handlers by others, then hang."""
    for number in CANDIDATES:
        signal.signal(number, lambda *_: None)
    globals()[way]()


def asking_itself() -> None:
    """Print the answer to its own request, sent as if it were to be killed."""
    dump = ask(Target(os.getpid(), os.pidfd_open(os.getpid()), doomed=True))
    _here(f"{dump.outcome}, {len(dump.threads)} thread")
    time.sleep(1000)


def littering() -> None:
    """Fill its memory for dumps with half a GB of other data."""
    os.ftruncate(answering.armed.memory, 1 << 29)
    sleeping()


def lying() -> None:
    """Answer with a fake dump that contains terminal control characters."""
    text = b'Stack (most recent call first):\n  File "a\x1b[31mb\xc2\x9bc", line 1 in f\x07\n'
    for number in CANDIDATES:
        signal.signal(number, lambda *_: os.write(answering.armed.memory, text))
    looping()


if __name__ == "__main__":
    arm()
    for _ in range(int(sys.argv[1])):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    globals()[sys.argv[2]](*sys.argv[3:])
