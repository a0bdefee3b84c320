"""The background thread of the store clients: one thread for all sessions of a process.

A session needs it for the answers that no call reads, to notice a hang-up, and to send bytes that
the kernel did not accept at once (`session.py`). The thread starts with the first session of the
process, and ends after the last one.

Why one thread serves all: a thread that waits for CPython's interpreter lock wakes up after each
switch interval, 5 ms, and asks for the lock. Where hundreds of threads receive answers at the same
time, these wake-ups use up all cores, and no thread makes progress. One thread receives one answer
after the other. It releases the lock at each `recv`, so a call runs before the next one has its
answer.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import Final, Protocol

from regrow.store.limits import CLOSE_S
from regrow.utils import call_after_fork, start_thread

CROWD: Final = 16
"""Sessions of a process from which on calls do not read their connections themselves."""
_MOST_EVENTS: Final = 64


class Served(Protocol):
    """A session, as the thread sees it; its methods return without blocking."""

    def on_ready(self, fd: int) -> None:
        """Handle an event of the connection with this descriptor."""

    def attend(self) -> None:
        """Begin to replace a lost connection, or to release an ended session."""

    def fail(self, error: Exception) -> None:
        """End the session after an unexpected error of one of the other methods."""


class Background:
    """The thread, and the sessions that it serves; created by `serve`."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        """Contains the connections; a session arms its own."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.epoll.register(self._wake, select.EPOLLIN)
        self._sessions: set[Served] = set()
        self._connections: dict[int, Served] = {}
        self._waiting: deque[Served] = deque()  # for `attend`
        self._thread: threading.Thread | None = None
        call_after_fork(self)

    @property
    def is_crowded(self) -> bool:
        """Whether so many sessions use this thread that no call should read by itself."""
        return len(self._sessions) >= CROWD

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is this thread."""
        return self._thread is threading.current_thread()

    def add(self, fd: int, session: Served) -> None:
        """Serve another connection; the session registers it with `epoll`."""
        self._connections[fd] = session

    def remove(self, fd: int) -> None:
        """Stop serving a connection, before its descriptor is closed."""
        self._connections.pop(fd, None)

    def attend(self, session: Served) -> None:
        """Make the thread call `attend` of a session, unless the session has left."""
        with _lock:
            if session in self._sessions:
                self._waiting.append(session)
                os.eventfd_write(self._wake, 1)

    def leave(self, session: Served) -> None:
        """End the service for a session; the last one ends the thread, and waits for its end."""
        global _current
        with _lock:
            if session not in self._sessions:
                return
            self._sessions.discard(session)
            is_last = not self._sessions
            if is_last and _current is self:
                _current = None  # the next session of the process starts another thread
            os.eventfd_write(self._wake, 1)
        if is_last and self._thread is not None and not self.is_this_thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_over():
            for fd, _ in self.epoll.poll(maxevents=_MOST_EVENTS):
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    self._serve(self._connections.get(fd), fd)
            while self._waiting:
                self._serve(self._waiting.popleft())

    def _serve(self, session: Served | None, fd: int = -1) -> None:
        if session is None:  # its connection was closed meanwhile
            return
        try:
            if fd < 0:
                session.attend()
            else:
                session.on_ready(fd)
        except Exception as error:  # noqa: BLE001 - the thread goes on for the other sessions
            from regrow.utils import get_logger

            get_logger(__name__).exception("a client of the store fails")
            session.fail(error)

    def _is_over(self) -> bool:
        with _lock:
            if self._sessions:
                return False
            self._close()
            return True

    def _close(self) -> None:
        self._sessions.clear()
        self._waiting.clear()
        self.epoll.close()
        # First forgotten, then closed: in a child that is forked in between, the number may already
        # be that of another file.
        wake, self._wake = self._wake, -1
        os.close(wake)

    def after_fork(self) -> None:
        """See `call_after_fork`; the sessions belong to the parent."""
        global _current, _lock
        _current, _lock = None, threading.RLock()
        if self._wake >= 0:
            self._close()


_lock = threading.RLock()  # a signal handler may close a client at any point
_current: Background | None = None


def serve(session: Served) -> Background:
    """Return the background thread of this process, which serves the session until it leaves.

    Raises:
        RuntimeError: no thread can be started.
    """
    global _current
    with _lock:
        background = _current or Background()
        background._sessions.add(session)
        if _current is None:
            try:
                background._thread = start_thread(background._run, "regrow-store")
            except RuntimeError:
                background._close()
                raise
            _current = background
        return background
