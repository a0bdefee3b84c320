"""Waiting for processes and looking at them, for tests of what starts and stops them."""

from __future__ import annotations

import os
import queue
import select
import time
from collections.abc import Callable
from typing import TypeVar

from regrow.workers import _procfs
from regrow.workers._guardian_events import GuardianEvent

E = TypeVar("E")

#: Seconds after which a test gives up: far beyond what anything takes on a loaded machine.
PATIENCE = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition()` holds; fail with `what` if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def ends(pidfd: int, timeout: float = PATIENCE) -> bool:
    """Whether a process ends within so many seconds, whoever reaps it and when."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def alive(pid: int) -> bool:
    """Whether `pid` is a process that has not ended."""
    entry = _procfs.stat(pid)
    return entry is not None and entry.state not in "ZX"


def children_of(pid: int) -> list[int]:
    """All children of a process, zombies included."""
    everyone = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    found = ((other, _procfs.stat(other)) for other in everyone)
    return [other for other, entry in found if entry is not None and entry.parent == pid]


def marked(text: str) -> list[int]:
    """Living processes with `text` in their environment or command line."""
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


class Heard:
    """A listener that keeps what it hears until it is asked for."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[GuardianEvent] = queue.SimpleQueue()
        self.all: list[GuardianEvent] = []

    def __call__(self, event: GuardianEvent) -> None:
        self._events.put(event)

    def next(self, kind: type[E]) -> E:
        """The next event of this kind; those before it are passed over."""
        while True:
            event = self._events.get(timeout=PATIENCE)
            self.all.append(event)
            if isinstance(event, kind):
                return event
