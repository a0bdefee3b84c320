"""Client of one service of a store server; it starts a new session after a loss.

The first thread that needs a session starts it. A connection may take as long as the network needs,
so the connecting thread holds no lock that `close` waits for. Instead, `close` makes a descriptor
readable, and the connecting thread waits for this descriptor together with its socket.

A session repeats unanswered questions by itself after a reconnect. If the session is lost, the
client sends the question to the server again over a new session. So a service must handle a
repeated question.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from regrow.store.client.session import ConnectionState
from regrow.store.errors import StoreClosedError, StoreSessionLost, StoreTimeout
from regrow.store.limits import CLOSE_S

if TYPE_CHECKING:
    from regrow.store.client.client import StoreClient


Connect = Callable[[float, int], "StoreClient"]
"""Starts a session.

The first argument is the seconds within which the connection must succeed. The second is a
descriptor that stops the attempt when it becomes readable (`stop` of `regrow.store.connect`).
"""


class ServiceClient:
    """Asks one service of a store server; any thread may use it.

    Args:
        service: the name of the service.
        connect: starts a session; `ask` and `connect` call it while there is no session.
        session: a session to use instead; this object neither replaces nor closes it.
        connect_within: seconds within which `ask` must connect a new session, if its own time-out
            leaves more.
        clock: monotonic clock in seconds.
        new_lock: creates a lock; a simulation passes its own function.
    """

    def __init__(
        self,
        service: str,
        connect: Connect,
        *,
        session: StoreClient | None = None,
        connect_within: float = threading.TIMEOUT_MAX,
        clock: Callable[[], float] = time.monotonic,
        new_lock: Callable[[], threading.Lock] = threading.Lock,
    ) -> None:
        self._service = service
        self._begin = connect
        self._given = session
        self.session = session
        """The session, which may be lost since its last use; None: there is no session."""
        self.closed = False
        """Whether `close` was called."""
        self._connect_within = connect_within
        self._clock = clock
        self._lock = new_lock()
        self._connecting = new_lock()
        self._stop = -1

    @property
    def state(self) -> ConnectionState:
        """The state of the session; LOST while there is no session."""
        session = self.session
        return ConnectionState.LOST if session is None else session.state

    def ask(
        self,
        question: bytes | Callable[[float], bytes],
        timeout: float,
        *,
        nudge: float | None = None,
    ) -> bytes:
        """Send a question and return the answer, over a new session if the old session is lost.

        Args:
            question: the body, or a function that creates the body from the remaining seconds.
            timeout: seconds within which the answer must arrive.
            nudge: see `StoreClient.ask`.

        Raises:
            StoreSessionLost: the session that the caller gave is lost.
            StoreError: as for `connect` and `StoreClient.ask`.
        """
        deadline = self._clock() + timeout
        while True:
            session = self.connect(min(self._left(deadline), self._connect_within))
            left = self._left(deadline)
            body = question if isinstance(question, bytes) else question(left)
            try:
                return session.ask(self._service, body, left, nudge=nudge)
            except StoreSessionLost:
                if session is self._given:
                    raise
                self.drop(session)

    def connect(self, timeout: float) -> StoreClient:
        """Return the session; start one within `timeout` seconds if there is none.

        Raises:
            StoreClosedError: `close` was called.
            StoreTimeout: another thread has been connecting for that time.
            StoreError: the server is not reachable.
        """
        session = self._usable()
        if session is not None:
            return session
        began = self._clock()
        if not self._connecting.acquire(timeout=timeout):
            raise StoreTimeout(
                f"another thread has been connecting for more than {round(timeout, 2):g} s"
            )
        try:
            session = self._usable()
            if session is None:
                waited = self._clock() - began
                if self.session is not None:
                    self.drop(self.session)
                session = self._connect(max(timeout - waited, 0.0))
        finally:
            self._connecting.release()
        return session

    def drop(self, session: StoreClient) -> None:
        """Close a lost session, so that the next call starts a new session."""
        with self._lock:
            if self.session is session:
                self.session = None
        session.close(0.0)

    def close(self, timeout: float = CLOSE_S) -> None:
        """End the session; blocked and later calls raise StoreClosedError.

        Args:
            timeout: seconds to wait for the server; with 0, the session ends when the server
                detects the closed connection.
        """
        with self._lock:
            self.closed = True
            session = self.session
            if self._stop >= 0:
                os.eventfd_write(self._stop, 1)
        if session is not None and session is not self._given:
            session.close(timeout)

    def _left(self, deadline: float) -> float:
        return max(deadline - self._clock(), 0.0)

    def _usable(self) -> StoreClient | None:
        with self._lock:
            self._check_open()
            session = self.session
        if session is None or session is self._given:
            return session
        return None if session.state is ConnectionState.LOST else session

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosedError(
                "this client has closed its connection to the store, so it can send no more "
                "questions"
            )

    def _connect(self, timeout: float) -> StoreClient:
        with self._lock:
            self._check_open()
            stop = self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        session: StoreClient | None = None
        try:
            session = self._begin(timeout, stop)
        finally:
            with self._lock:
                os.close(stop)
                self._stop = -1
                closed = self.closed
                if not closed:
                    self.session = session
        if closed:
            session.close(0.0)
            raise StoreClosedError(
                "close() was called while this client was connecting to the store"
            )
        return session
