"""A small HTTP server for health checks and debugging, based on the standard library's parser.

Each connection carries one request and its response, in its own thread. These limits apply:
- A client has `CLIENT_TIME_S` to send the request, and the same time to receive the response.
- A request has at most `LONGEST_REQUEST` bytes.
- When `MOST_CLIENTS` connections are open, a new connection closes the oldest one.

So clients that send nothing, send garbage or do not read cost a bounded amount of memory, and never
delay a correct probe.

`http.server.ThreadingHTTPServer` itself has no such limits: it starts any number of threads, and
its time-out restarts with every byte. Its module takes 30 ms to import. So import this module only
where a server starts.
"""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple

from regrow.utils import start_thread
from regrow.utils.user_text import headline

CLIENT_TIME_S = 5.0
"""Seconds in which a client must send its request, and again to receive the response."""
MOST_CLIENTS = 32
"""Most connections that are open at the same time."""
LONGEST_REQUEST = 8192
"""Most bytes of a request, head and body together."""
_REST_S = 0.2  # seconds without accepting after an error, such as no free file descriptor


class HttpRequest(NamedTuple):
    """A client's request."""

    method: str
    """GET, POST, ..."""
    path: str
    """The request target without its query."""
    query: str = ""
    """The part of the request target after its question mark."""


class HttpResponse(NamedTuple):
    """The response to a request."""

    status: int
    """The HTTP status code."""
    body: bytes
    """The body of the response, in bytes."""
    content_type: str = "text/plain; charset=utf-8"
    """The content type of the body."""


class HttpServer:
    """Answers HTTP requests on the socket `listener`, which the server owns from now on.

    Args:
        listener: a bound stream socket that listens.
        answer: returns the response to a request. The server calls it for one request at a time,
            and it should return quickly. The text of an exception is sent with status 500.
        name: the name of the accepting thread.
    """

    def __init__(
        self, listener: socket.socket, answer: Callable[[HttpRequest], HttpResponse], name: str
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._answering = Lock()
        self._clients: dict[socket.socket, Thread] = {}  # oldest first
        self._changed = Condition()  # guards `_clients` and `_stopping`
        self._stopping = False
        listener.settimeout(None)
        self._thread = start_thread(self._accept, name)

    def stop(self) -> None:
        """Close the listener and every connection, and end the threads; may be called twice."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
            clients = list(self._clients.items())
        # The shutdown wakes `accept`. A forked child may hold the listener too; it cannot accept
        # after this.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection, thread in clients:
            _hang_up(connection)
            thread.join(CLIENT_TIME_S)  # takes longer if `answer` hangs

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
                self._start(connection)
            except (OSError, RuntimeError):  # the client left, or no descriptor or thread is free
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, _REST_S)

    def _start(self, connection: socket.socket) -> None:
        with self._changed:
            if len(self._clients) >= MOST_CLIENTS:
                _hang_up(next(iter(self._clients)))
                self._changed.wait_for(
                    lambda: self._stopping or len(self._clients) < MOST_CLIENTS, CLIENT_TIME_S
                )
            if self._stopping or len(self._clients) >= MOST_CLIENTS:  # `answer` hangs
                connection.close()
                return
            thread = Thread(target=self._serve, args=[connection], name="regrow-http", daemon=True)
            self._clients[connection] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._clients[connection]
                connection.close()
                raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):  # the client left, or its time is over
                _Handler(connection, self._respond).handle()
        finally:
            with self._changed:
                del self._clients[connection]
                connection.close()
                self._changed.notify_all()

    def _respond(self, request: HttpRequest) -> HttpResponse:
        with self._answering:
            try:
                return self._answer(request)
            except Exception as error:  # noqa: BLE001 - the client receives it
                return HttpResponse(500, f"{headline(error)}\n".encode())


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the connection is already closed
        connection.shutdown(socket.SHUT_RDWR)


class _TooLarge(Exception):
    """The request exceeds LONGEST_REQUEST."""


class _Incoming(io.RawIOBase):
    """Byte stream from a client, limited in size and time."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._connection = connection
        self._deadline = monotonic() + CLIENT_TIME_S
        self._left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise _TooLarge
        self._connection.settimeout(max(self._deadline - monotonic(), 0.001))
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    """Handles one request of a connection, and sends the response."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # for the response to a request without a version
    request_version = "HTTP/1.1"
    command = ""
    requestline = ""

    def __init__(
        self, connection: socket.socket, respond: Callable[[HttpRequest], HttpResponse]
    ) -> None:  # the base class would serve the whole connection
        self.connection = connection
        self.rfile = io.BufferedReader(_Incoming(connection, LONGEST_REQUEST))
        self.wfile = self._outgoing = io.BytesIO()
        self._respond = respond

    def handle(self) -> None:
        """Read the request, send the response, and close."""
        try:
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                self._send(self._response())
        except _TooLarge:
            self.send_error(413)
        self.connection.settimeout(CLIENT_TIME_S)
        self.connection.sendall(self._outgoing.getvalue())
        # An immediate close resets the connection if the client has sent more than was read. The
        # client would then lose the response.
        self.connection.shutdown(socket.SHUT_WR)
        rest = _Incoming(self.connection, sys.maxsize)
        while rest.read(LONGEST_REQUEST):
            pass

    def parse_request(self) -> bool:
        """Check the request line, and parse it with the headers; False: an error was sent."""
        words = self.raw_requestline.split()
        if len(words) == 3 and words[1].startswith(b"/") and words[2].startswith(b"HTTP/1."):
            return super().parse_request()
        self.send_error(400, "no HTTP request")
        return False

    def _response(self) -> HttpResponse:
        length = self.headers.get("Content-Length", "0").strip()
        if not (length.isascii() and length.isdecimal()):
            return HttpResponse(400, b"bad Content-Length\n")
        if len(length) > 9:
            raise _TooLarge
        self.rfile.read(int(length))
        path, _, query = self.path.partition("?")
        return self._respond(HttpRequest(self.command, path, query))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error as plain text; a long line or too many headers also get status 413."""
        code = 413 if code in (413, 414, 431) else code
        text = "request too large" if code == 413 else message or self.responses[code][0]
        self._send(HttpResponse(code, f"{text}\n".encode("utf-8", "backslashreplace")))

    def _send(self, response: HttpResponse) -> None:
        # Python 3.13 names status 413 like this; older versions use another name.
        self.send_response(response.status, "Content Too Large" if response.status == 413 else None)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log of requests."""
