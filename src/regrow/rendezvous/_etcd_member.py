"""One member of an etcd cluster, and the connections to it.

Each call has a connection to itself, kept for the next one. So a call that is given up is simply
cut, and `cut` ends all that is under way when the member turns out to be silent.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection

from regrow.rendezvous._etcd_answers import EtcdClosed, EtcdUnreachable, Message, read, results
from regrow.store._sockets import endpoint_of, keep_alive

_CONNECT = 1.0
"""Seconds for a connection to come about; without an answer, the kernel asks once more then."""
_AVOID = 1.0
"""Seconds for which a member with which there is no connection is asked after all others."""


class Stream:
    """Answers as they come. One thread iterates, and calls `end` when it is through."""

    def __init__(
        self,
        member: Member,
        connection: HTTPConnection,
        sock: socket.socket,
        answer: HTTPResponse,
    ) -> None:
        self._member = member
        self._connection = connection
        self._sock = sock
        self._answer = answer

    def __iter__(self) -> Iterator[Message]:
        """Return what comes; ends only as `wait_at_most` says.

        Raises:
            EtcdUnreachable: the stream has broken, or `close` was called.
            EtcdError: etcd has ended it with an error.
        """
        name = self._member.name
        try:
            while line := self._answer.readline():
                yield from results(line, name)
        except TimeoutError:
            return
        except (OSError, HTTPException, ValueError) as error:
            raise EtcdUnreachable(f"{name}: {error}") from error
        raise EtcdUnreachable(f"{name} has ended the stream")

    def check(self) -> None:
        """Raise what the member has answered instead of a stream."""
        if self._answer.status != 200:
            read((self._answer.status, self._answer.read()), self._member)

    def wait_at_most(self, seconds: float | None) -> None:
        """Let the iteration end when nothing has come for so long; None: for ever."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Wake whoever iterates; from any thread."""
        shut(self._sock)

    def end(self) -> None:
        """Give the connection back."""
        self._member.drop(self._connection)
        self._answer.close()


class Member:
    """One member, and the connections to it.

    Attributes:
        name: its host and port.
        avoid_until: before this time (monotonic) there is hardly a use in asking it.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self.name = endpoint_of(host, port)
        self.avoid_until = 0.0
        self._host, self._port, self._tls = host, port, tls
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        # The socket is not always the connection's: where the answer is to be the last one, it is
        # the answer's alone.
        self._busy: dict[HTTPConnection, socket.socket] = {}
        self._round_trip = 0.0
        self._closed = False

    def ask(
        self, path: str, body: bytes, token: str, patience: float, left: float
    ) -> tuple[int, bytes]:
        """Return status and content of the answer.

        Args:
            patience: seconds that the member is given, besides the way there and back.
            left: seconds that there are at all.
        """
        connection, used = self._take(left)
        try:
            try:
                found = self._exchange(connection, path, body, token, patience, left)
            except (ConnectionError, HTTPException):
                if not (self.drop(connection) and used):
                    raise
                # It was closed at the other end while nobody used it.
                connection = self._connect(left)
                found = self._exchange(connection, path, body, token, patience, left)
        except BaseException:
            self.drop(connection)
            raise
        self._give_back(connection)
        return found

    def listen(self, path: str, body: bytes, token: str, patience: float, left: float) -> Stream:
        """Return the stream of answers to a request, as soon as it has begun."""
        connection = self._connect(left)
        sock = connection.sock
        try:
            self._send(connection, path, body, token, patience, left)
            stream = Stream(self, connection, sock, connection.getresponse())
            stream.check()
        except BaseException:
            self.drop(connection)
            raise
        return stream

    def near(self) -> str:
        """Return the address of this end."""
        connection, _ = self._take(_CONNECT)
        address: str = connection.sock.getsockname()[0]
        self._give_back(connection)
        return address

    def get(self, path: str) -> bytes:
        """Return the first part of a page."""
        connection = self._connect(_CONNECT)
        try:
            connection.request("GET", path)
            return connection.getresponse().read(1000)
        finally:
            self.drop(connection)

    def _exchange(
        self,
        connection: HTTPConnection,
        path: str,
        body: bytes,
        token: str,
        patience: float,
        left: float,
    ) -> tuple[int, bytes]:
        self._send(connection, path, body, token, patience, left)
        answer = connection.getresponse()
        if answer.version == 11 and answer.length is None and not answer.chunked:
            raise ConnectionError("its answer was cut short")  # in the headers: nobody notices
        return answer.status, answer.read()

    def _send(
        self,
        connection: HTTPConnection,
        path: str,
        body: bytes,
        token: str,
        patience: float,
        left: float,
    ) -> None:
        connection.sock.settimeout(min(patience + 2 * self._round_trip, left))
        headers: Mapping[str, str] = {"Authorization": token} if token else {}
        connection.request("POST", f"/v3/{path}", body, headers)

    def _take(self, left: float) -> tuple[HTTPConnection, bool]:
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
                self._busy[connection] = connection.sock
                return connection, True
        return self._connect(left), False

    def _connect(self, left: float) -> HTTPConnection:
        timeout = min(_CONNECT, left)
        connection = (
            HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
            if self._tls
            else HTTPConnection(self._host, self._port, timeout=timeout)
        )
        began = time.monotonic()
        try:
            connection.connect()
            keep_alive(connection.sock)  # a watch may have nothing to say for days
        except OSError:
            self.avoid_until = time.monotonic() + _AVOID
            connection.close()
            raise
        self._round_trip = time.monotonic() - began
        self.avoid_until = 0.0
        with self._lock:
            if self._closed:
                connection.close()
                raise EtcdClosed("this connection to etcd was closed")
            self._busy[connection] = connection.sock
        return connection

    def _give_back(self, connection: HTTPConnection) -> None:
        with self._lock:
            whole = self._busy.pop(connection, None) is not None
            if whole and not self._closed and connection.sock is not None:
                self._idle.append(connection)
            else:
                connection.close()

    def drop(self, connection: HTTPConnection) -> bool:
        """Close a connection, by whoever uses it; return whether it was whole until now."""
        with self._lock:
            whole = self._busy.pop(connection, None) is not None
        connection.close()
        return whole

    def cut(self) -> None:
        """End all connections: the member is silent, or gone. Whoever uses one closes it."""
        with self._lock:
            for sock in self._busy.values():
                shut(sock)
            self._busy.clear()
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def close(self) -> None:
        """End all connections, and have no more."""
        with self._lock:
            self._closed = True
        self.cut()


def shut(sock: socket.socket) -> None:
    """Wake whoever reads from a connection; from any thread."""
    with suppress(OSError):  # the other end was first
        # Not SSLSocket.shutdown: that pulls TLS from under whoever reads.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
