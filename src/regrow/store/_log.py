"""The lines that a server writes to stderr, by a thread of their own.

A terminal that was stopped (Ctrl-S) and a pipe that nobody reads block whoever writes to them, and
that must not be the server's loop. To see first whether they can be written would not do: others
write there as well, and to have their writes fail instead of block is not this process's to decide.
So a thread is blocked, and keeps as many lines as are of use to anybody.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Final

_LINES: Final = 256
"""How many wait to be written; those that come then are lost, and counted."""
_LAST_SECONDS: Final = 0.5


class Log:
    """Takes lines and never blocks; the thread is started with the first one.

    Args:
        fd: where to write them.
    """

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._news = threading.Condition()
        self._lines: deque[str] = deque()
        self._lost = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def __call__(self, line: str) -> None:
        """Have a line written."""
        with self._news:
            if len(self._lines) == _LINES:
                self._lost += 1
                return
            self._lines.append(line)
            self._news.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="regrow-log", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write what is left, if that can be done soon."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while lines := self._take():
            text = memoryview("".join(f"regrow.store: {line}\n" for line in lines).encode())
            with suppress(OSError):  # whoever read it is gone, which is no reason to serve nobody
                while text:
                    text = text[os.write(self._fd, text) :]

    def _take(self) -> list[str]:
        with self._news:
            self._news.wait_for(lambda: self._lines or self._closed)
            lines = list(self._lines)
            self._lines.clear()
            if self._lost:
                lines.append(f"{self._lost} lines are missing here: nobody read what was written")
                self._lost = 0
            return lines
