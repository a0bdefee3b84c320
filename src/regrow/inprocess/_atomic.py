"""Sections of the wrapped function that a restart does not begin in.

A section and the termination procedure (abort, then the interrupt) exclude each other. The lock is
re-entrant, so sections nest, and an abort plug-in may use one. Two things it does not do by itself.
A thread that leaves a section and enters the next one at once has taken the lock again before
whoever waits for it is awake; so a procedure that is about to begin closes the door first, and
sections are entered only while it is open. And a thread that comes late sleeps at the door, in a
call that a signal ends, so that the interrupt reaches it there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Atomic:
    """Keeps the termination procedure and sections of the function apart."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0  # the thread that has it
        self._door = threading.Lock()
        self._closed = False

    @contextmanager
    def section(self) -> Iterator[None]:
        """Code that the termination procedure does not begin in; waits while it runs."""
        while self._closed and self._owner != threading.get_ident():
            with self._door:
                pass
        with self._held():
            yield

    @contextmanager
    def termination(self) -> Iterator[None]:
        """The termination procedure: begins when no thread is in a section, and keeps all out."""
        with self._door:
            self._closed = True
            try:
                with self._held():
                    yield
            finally:
                self._closed = False

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            before, self._owner = self._owner, threading.get_ident()
            try:
                yield
            finally:
                self._owner = before
