"""The server of the page: uvicorn, with limits for clients that are slow, idle or too many."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from regrow.views.runs import Library
from regrow.views.web.app import make_app

MOST_CONNECTIONS = 200
"""Most open connections; for a further one, the oldest without a request is closed."""
REQUEST_S = 10.0
"""Seconds until a connection must have sent its request."""
UNREAD_S = 30.0
"""Seconds until a client must read on when the buffers are full."""
LONGEST_REQUEST = 16 << 10
"""Longest head of a request, in bytes."""


class Connection(H11Protocol):
    """A connection with limits; it serves one request."""

    open: ClassVar[dict[Connection, None]] = {}
    """All open connections, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and limit the time for its request."""
        Connection.open[self] = None
        self._unread: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(Connection.open) > MOST_CONNECTIONS:
            # One that has sent no request gives way, in the extreme case this one itself.
            idle = next(each for each in Connection.open if each.is_idle)
            del Connection.open[idle]
            idle.transport.abort()
        self.loop.call_later(REQUEST_S, self._check_request)

    @property
    def is_idle(self) -> bool:
        """Whether no request has arrived yet."""
        cycle: object = self.cycle  # None until there is a request, whatever its type says
        return cycle is None

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place."""
        Connection.open.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The buffers are full: limit the time until the client reads on."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads on."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_request(self) -> None:
        if self.is_idle and not self.transport.is_closing():
            self.transport.abort()


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections of pages, which have no end of their own."""
        for connection in list(Connection.open):
            connection.transport.abort()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(MOST_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def serve(library: Library, token: str, listener: socket.socket) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        library: the jobs to show.
        token: the secret that requests for data must contain.
        listener: the listening socket.
    """
    with suppress(ValueError, OSError):  # each connection needs a descriptor, and each sample some
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    options: dict[str, Any] = {
        "http": Connection,
        "ws": "none",
        "lifespan": "off",
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "h11_max_incomplete_event_size": LONGEST_REQUEST,
        "timeout_graceful_shutdown": 1,
    }
    server = _Server(uvicorn.Config(make_app(library, token), **options))
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again that has ended it
        server.run(sockets=[listener])
