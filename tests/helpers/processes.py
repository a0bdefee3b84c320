"""Wait for processes and inspect them, for tests of code that starts and stops processes."""

from __future__ import annotations

import os
import queue
import select
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from regrow.workers.guardian import procfs
from regrow.workers.guardian.events import GuardianEvent, HelperChanged

E = TypeVar("E")
T = TypeVar("T")

#: Seconds after which a test fails; far more than any step takes on a loaded machine.
PATIENCE = 30.0

#: Signals that a terminal or a scheduler sends to all processes of a job.
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


def wait_until(
    condition: Callable[[], T | None],
    what: str | Callable[[], str],
    timeout: float = PATIENCE,
    pause: float = 0.005,
) -> T:
    """Poll a condition, and return its first true result.

    Args:
        condition: called after each pause.
        what: the text of the failure after a time-out, or a function that returns it.
        timeout: seconds until the test fails.
        pause: seconds between two calls.
    """
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never: {what if isinstance(what, str) else what()}")
        time.sleep(pause)
    return result


def ends(pidfd: int, timeout: float = PATIENCE) -> bool:
    """Return whether a process ends within `timeout` seconds, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def alive(pid: int) -> bool:
    """Return whether `pid` is a process that has not ended."""
    entry = procfs.stat(pid)
    return entry is not None and entry.state not in "ZX"


def state_of(pid: int) -> str:
    """Return the state letter of a process, such as T for stopped; empty if there is none."""
    entry = procfs.stat(pid)
    return entry.state if entry is not None else ""


def children_of(pid: int) -> list[int]:
    """Return all children of a process, zombies included."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    found = ((other, procfs.stat(other)) for other in pids)
    return [other for other, entry in found if entry is not None and entry.parent == pid]


def marked(text: str) -> list[int]:
    """Return the ids of living processes with `text` in their environment or command line."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid() or not alive(int(name)):
            continue
        for file in ("environ", "cmdline"):
            try:
                with open(f"/proc/{name}/{file}", "rb") as content:
                    if text.encode() in content.read():
                        found.append(int(name))
            except OSError:
                continue
    return sorted(set(found))


class EventQueue:
    """A listener that queues its events until the test reads them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[GuardianEvent | HelperChanged] = queue.SimpleQueue()
        self.all: list[GuardianEvent | HelperChanged] = []

    def __call__(self, event: GuardianEvent | HelperChanged) -> None:
        self._events.put(event)

    def next(self, kind: type[E]) -> E:
        """Return the next event of this kind; earlier events are dropped."""
        while True:
            event = self._events.get(timeout=PATIENCE)
            self.all.append(event)
            if isinstance(event, kind):
                return event
