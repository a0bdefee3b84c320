"""A connection to the store server that is made when it is needed, and that anybody may end.

To connect can take as long as the network likes. So it is done by whoever needs the connection
first, without a lock that the one who ends it would have to wait for: ending makes a descriptor
readable that the connecting thread watches together with its socket. Nor does it wait for the
server, which may be out of reach: the session is over when the server hears of it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.store import StoreClosedError, StoreTimeout, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous._threads import Threads
    from regrow.store import StoreClient, Tls

GRACE = 0.5
"""Seconds in which a client whose connection broke may come back to its session."""
SPARE_ROUND_TRIPS = 6.0
"""How many round trips it has on top of that: to connect anew takes three, if none is lost."""


class Where(NamedTuple):
    """How to reach the server."""

    endpoint: str
    """"host:port", as the user may know it."""
    token: bytes
    tls: Tls | None = None
    addr: str | None = None
    """This host's address as the others reach it; None: that of the connection."""


class Line:
    """A connection to a server, made anew by whoever needs it after it was dropped.

    Args:
        where: the server.
        threads: whose locks to use.
        connect: makes a session; `regrow.store.connect`.
    """

    def __init__(
        self,
        where: Where,
        threads: Threads = threading,
        connect: Callable[..., StoreClient] = connect,
    ) -> None:
        self._where = where
        self._make = connect
        self._lock = threads.Lock()
        self._dialing = threads.Lock()
        self._client: StoreClient | None = None
        self._stop = -1
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it was ended."""
        return self._ended

    def client(self, timeout: float, *, wait_for_server: bool = False) -> StoreClient:
        """Return the session, beginning one if there is none.

        Args:
            timeout: seconds within which the server must be reached.
            wait_for_server: try again while nobody listens there, or what does hangs up.

        Raises:
            StoreClosedError: the line was ended.
            StoreError: as `regrow.store.connect`.
        """
        client = self._client
        if client is not None:
            return client
        if not self._dialing.acquire(timeout=timeout):
            raise StoreTimeout(f"another thread has been connecting for more than {timeout:g} s")
        try:
            if self._client is None:
                self._connect(timeout, wait_for_server)
            client = self._client
        finally:
            self._dialing.release()
        if client is None:
            raise StoreClosedError("the connection was ended while it was made")
        return client

    def drop(self, client: StoreClient) -> None:
        """Have the next call begin another session than this one, which is lost."""
        with self._lock:
            if self._client is client:
                self._client = None
        client.close(0)

    def end(self) -> None:
        """End the session; calls that are blocked and later ones raise StoreClosedError."""
        with self._lock:
            self._ended = True
            client = self._client
            if self._stop >= 0:
                os.eventfd_write(self._stop, 1)
        if client is not None:
            client.close(0)

    def _connect(self, timeout: float, wait_for_server: bool) -> None:
        with self._lock:
            if self._ended:
                raise StoreClosedError("the connection was ended")
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        client: StoreClient | None = None
        try:
            client = self._make(
                self._where.endpoint,
                token=self._where.token,
                tls=self._where.tls,
                timeout=timeout,
                session_grace=GRACE,
                spare_round_trips=SPARE_ROUND_TRIPS,
                refusal_is_final=not wait_for_server,
                stop=self._stop,
            )
        finally:
            with self._lock:
                os.close(self._stop)
                self._stop = -1
                if not self.ended:
                    self._client, client = client, None
            if client is not None:  # the line was ended meanwhile
                client.close(0)


class OnFirstUse:
    """Stands for the session of a line, and connects when it is first asked for anything."""

    def __init__(self, line: Line, timeout: float) -> None:
        self._line = line
        self._seconds = timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line.client(self._seconds), name)
