"""The server's log on stderr: limited in volume, and written by a thread that may block.

Some outputs block the thread that writes to them: a stopped terminal (Ctrl-S), a pipe without a
reader, a file system that hangs. A check before each write does not help. Other processes write to
the same output, and a non-blocking mode would apply to all these processes. So a `BackgroundWriter`
has a thread of its own, and drops items while too many wait.

A process with the wrong token may connect again and again, as fast as it can. `Refusals` reports
its first refusal at once. It counts the refusals of the next minute, and reports them in one line
at the end of the minute, with the latest reason. A peer is an address without its port, because
every connection has another port. Above `REFUSED_PEERS` addresses in a minute, the remaining
addresses share one line. So memory and log stay bounded for any number of connections. `Refusals`
contains the rules only: the caller ends the minutes, and writes the lines.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from regrow.store.limits import LOG_LINES, REFUSED_PEERS
from regrow.utils import start_thread

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """A queue with a writing thread; `add` never blocks, and the first item starts the thread.

    Args:
        write: called in the thread with the waiting items and the number of items lost after them;
            must not raise.
        name: name of the thread.
    """

    def __init__(self, write: Callable[[list[T], int], None], name: str) -> None:
        self._write = write
        self._name = name
        self._changed = threading.Condition()
        self._items: list[T] = []
        self._lost = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, item: T) -> None:
        """Queue an item for writing."""
        with self._changed:
            if len(self._items) == LOG_LINES:
                self._lost += 1
                return
            self._items.append(item)
            self._changed.notify()
            if self._thread is None:
                self._thread = start_thread(self._run, self._name)

    def close(self, seconds: float) -> None:
        """Write the remaining items, for at most `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                items, self._items = self._items, []
                lost, self._lost = self._lost, 0
            if not items:
                return
            self._write(items, lost)


def write_log(lines: list[str], lost: int, fd: int = 2) -> None:
    """Write the lines of the log, and the number of lines that are missing after them."""
    if lost:
        lines.append(f"{lost} lines are missing here: the log was not read fast enough")
    text = "".join(f"regrow.store: {line}\n" for line in lines)
    # A traceback may quote a file name that is no UTF-8.
    left = memoryview(text.encode(errors="backslashreplace"))
    with suppress(OSError):  # a lost reader of the log must not stop the server
        while left:
            left = left[os.write(fd, left) :]


class Refusals:
    """The addresses that were refused in the last minute."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[int, str]] = {}
        """Number of refusals since the last line, and the text of the latest one, by address."""

    def add(self, address: str, line: str) -> str | None:
        """Record a refusal.

        Args:
            address: the address, without a port.
            line: the log line for the refusal.

        Returns:
            The line, if it must be written at once; None if it was counted.
        """
        if address not in self._refused and len(self._refused) >= REFUSED_PEERS:
            address = "other addresses"
        count, _ = self._refused.get(address, (-1, ""))
        self._refused[address] = count + 1, line
        return line if count < 0 else None

    def end_minute(self) -> list[str]:
        """Return a line for each address with counted refusals; forget the other addresses."""
        counted = {address: known for address, known in self._refused.items() if known[0]}
        self._refused = dict.fromkeys(counted, (0, ""))
        return [
            f"{count} more connection{'s' if count > 1 else ''} from {address} within a minute; "
            f"the latest: {line}"
            for address, (count, line) in counted.items()
        ]
