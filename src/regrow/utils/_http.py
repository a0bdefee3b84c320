"""A tiny HTTP server for health checks and debugging, in one thread.

It answers short requests from memory, closes each connection after its answer
and holds on to nobody: a client has a few seconds for its request and for
taking the answer, and when all places are taken the one who has been there
longest has to go. So clients that send nothing, send garbage or do not read
cost a bounded amount of memory and never keep an honest probe out.

Why not the standard library's: it takes a thread for each connection, without
a limit and without a deadline, and 30 ms to import.
"""

from __future__ import annotations

import errno
import os
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["HttpServer", "Request", "Response"]

CLIENT_TIME_S = 5.0
"""Seconds that a client has for its request, and again for taking the answer."""
MOST_CLIENTS = 32
"""Connections that are open at the same time; one more takes the oldest one's place."""
LONGEST_REQUEST = 8192
"""Bytes of a request's head and body together."""
_REST_S = 0.2  # Seconds without accepting after the process ran out of file descriptors.
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Request(NamedTuple):
    """What a client asks for."""

    method: str
    """GET, POST, ..."""
    path: str
    """The target without its query."""
    query: str = ""
    """What follows the target's question mark."""


class Response(NamedTuple):
    """What it is told."""

    status: int
    """The HTTP status code."""
    body: bytes
    """The content."""
    content_type: str = "text/plain; charset=utf-8"
    """Its type."""


class _Client:
    """A connection: its request is read, then its answer is written, then its end is awaited."""

    __slots__ = ("answered", "deadline", "incoming", "outgoing", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.deadline = monotonic() + CLIENT_TIME_S
        self.incoming = b""
        self.outgoing = b""
        self.answered = False


class HttpServer:
    """Answers requests that come in on `listener`, which it owns from now on.

    Args:
        listener: a bound stream socket that listens.
        answer: gives the response to a request. It is called in the server's thread, one
            request at a time, and should not take long. An exception is answered with its
            text and status 500.
        name: the thread's name.
    """

    def __init__(
        self, listener: socket.socket, answer: Callable[[Request], Response], name: str
    ) -> None:
        import selectors

        self._listener = listener
        self._answer = answer
        self._clients: dict[int, _Client] = {}  # by file descriptor, oldest first
        self._rest_until: float | None = None
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and every connection, and end the thread; may be called twice."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _serve(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._next_deadline()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Client) and key.fd in self._clients:
                        self._serve_client(key.data, events)
                self._expire(monotonic())
        finally:
            self._close_all()

    def _next_deadline(self) -> float | None:
        deadlines = [client.deadline for client in self._clients.values()]
        if self._rest_until is not None:
            deadlines.append(self._rest_until)
        return max(min(deadlines) - monotonic(), 0.0) if deadlines else None

    def _expire(self, now: float) -> None:
        import selectors

        for client in [c for c in self._clients.values() if c.deadline <= now]:
            self._drop(client)
        if self._rest_until is not None and self._rest_until <= now:
            self._rest_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        import selectors

        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # The client is gone again, or there is no descriptor left: the second would be
            # reported again and again, so the listener rests.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._selector.unregister(self._listener)
                self._rest_until = monotonic() + _REST_S
            return
        connection.setblocking(False)
        if len(self._clients) >= MOST_CLIENTS:
            self._drop(next(iter(self._clients.values())))
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve_client(self, client: _Client, events: int) -> None:
        import selectors

        try:
            if events & selectors.EVENT_WRITE:
                self._write(client)
            elif events & selectors.EVENT_READ:
                self._read(client)
        except BlockingIOError:
            return
        except OSError:  # it is gone: nobody is left to be told
            self._drop(client)

    def _read(self, client: _Client) -> None:
        import selectors

        data = client.socket.recv(LONGEST_REQUEST)
        if not data:
            self._drop(client)
        elif not client.answered:
            client.incoming += data
            request = _parse(client.incoming)
            if request is None:
                return
            response = self._respond(request) if isinstance(request, Request) else request
            head_only = isinstance(request, Request) and request.method == "HEAD"
            client.outgoing = _encode(response, head_only)
            client.answered = True
            client.deadline = monotonic() + CLIENT_TIME_S
            self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def _respond(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except Exception as error:  # noqa: BLE001 - it is told to the client
            return Response(500, f"{type(error).__name__}: {error}\n".encode())

    def _write(self, client: _Client) -> None:
        import selectors
        import socket

        sent = client.socket.send(client.outgoing)
        client.outgoing = client.outgoing[sent:]
        if not client.outgoing:
            # To close at once would reset the connection where the client has sent more than
            # was read, and its answer would be lost.
            client.socket.shutdown(socket.SHUT_WR)
            self._selector.modify(client.socket, selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.socket)
        del self._clients[client.socket.fileno()]
        client.socket.close()

    def _close_all(self) -> None:
        import socket

        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        try:
            # A forked child may hold the listener too; nobody listens on it from now on.
            self._listener.shutdown(socket.SHUT_RDWR)
        finally:
            self._listener.close()


def _parse(incoming: bytes) -> Request | Response | None:
    """The request, once it is complete; a response where it never will be."""
    head, separator, body = incoming.partition(b"\r\n\r\n")
    if not separator:
        if len(incoming) > LONGEST_REQUEST:
            return Response(413, b"request too large\n")
        # What cannot become a request is not waited for.
        line, ended, _ = incoming.partition(b"\r\n")
        return None if not ended or len(line.split()) == 3 else Response(400, b"no HTTP request\n")
    lines = head.split(b"\r\n")
    words = lines[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not words[1].startswith(b"/"):
        return Response(400, b"no HTTP request\n")
    length = 0
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            if not value.strip().isdigit():
                return Response(400, b"bad Content-Length\n")
            length = int(value) if len(value) < 16 else LONGEST_REQUEST
    if length + len(head) > LONGEST_REQUEST:
        return Response(413, b"request too large\n")
    if len(body) < length:
        return None
    path, _, query = words[1].decode("latin-1").partition("?")
    return Request(words[0].decode("latin-1"), path, query)


def _encode(response: Response, head_only: bool) -> bytes:
    head = (
        f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else response.body)
