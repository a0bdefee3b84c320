"""Reaching a store server: the address, the connection, the handshake, the first greeting.

Everything here blocks the thread that calls it, until a deadline or until one of `wakes`, file
descriptors, becomes readable, so that closing a client does not wait for an unreachable host.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from regrow.store import _handshake as handshake
from regrow.store import _wire as wire
from regrow.store._channel import Channel
from regrow.store._errors import (
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreHungUp,
    StoreProtocolError,
    StoreTimeout,
)
from regrow.store._sockets import endpoint_of, keep_alive, round_trip

if TYPE_CHECKING:
    import ssl

_NOT_OURS: Final = (
    "either it is not a regrow store (a PyTorch TCPStore behaves like this), or it is {instead}"
)

_HANDSHAKE_SECONDS: Final = 10.0
"""How long a server that accepted the connection may take to answer."""
_TRY_SECONDS: Final = 2.0
"""How long one address is tried before another, or the same anew: the kernel waits twice as long
after every try of its own, and would be far behind a link that is up again."""

Address = tuple[socket.AddressFamily, str | tuple[str, int]]


class Greeted(NamedTuple):
    """A connection over which a session was begun or resumed."""

    channel: Channel
    welcome: wire.Welcome
    """What the server granted."""
    rest: bytes
    """What came after it."""


def parse_endpoint(endpoint: str) -> tuple[str, int] | str:
    """Return "host:port" as (host, port) and "unix:path" as the path."""
    if endpoint.startswith("unix:"):
        return endpoint[len("unix:") :]
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f'{endpoint!r} is no store endpoint; it looks like "host:port", "[::1]:port" or '
            f'"unix:/path"'
        )
    return host.strip("[]"), int(port)


class Dialer:
    """Opens connections to one server.

    Args:
        endpoint: "host:port" or "unix:path".
        token: the secret that both sides prove.
        tls: the TLS context, if the server has certificates.
        server_hostname: the name expected in the server's certificate.
        client: how to name this client to the server.
        spare: round trips to the server that are added to the grace of a session.
        may_start: the server may be started by the first connection, so that how soon it answers
            says nothing of the way to it.
    """

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        tls: ssl.SSLContext | None,
        server_hostname: str | None,
        client: str,
        spare: float,
        may_start: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._where = parse_endpoint(endpoint)
        self._token = token
        self._tls = tls
        self._server_hostname = server_hostname
        self._client = client
        self._spare = spare
        self._may_start = may_start
        self._reached: Address | None = None
        self.server = endpoint
        """The endpoint, with the address that was reached in place of a name."""
        self.local_host = ""
        """This host's address on the last connection; "" over a unix socket."""
        self.wakes: set[int] = set()
        """File descriptors; when one becomes readable, dialing and sleeping stop."""

    def dial(self, session: bytes, grace: float, deadline: float) -> Greeted:
        """Connect, prove the token both ways, and begin or resume a session.

        Args:
            session: the session to resume; empty to begin one.
            grace: seconds that a new session is to outlive a lost connection.
            deadline: when to give up, on the monotonic clock.
        """
        try:
            sock, address = self._connect(deadline, again=bool(session))
            if sock.family != socket.AF_UNIX:
                self.local_host = sock.getsockname()[0]
            deadline = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
            greeted = self._greet(sock, session, grace, deadline)
            self._reached, where = address, address[1]
            if not isinstance(where, str):
                self.server = endpoint_of(*where)
            return greeted
        except StoreError as error:
            raise type(error)(f"the store at {self.endpoint}: {error}") from error
        except OSError as error:
            raise StoreConnectionError(
                f"the store at {self.endpoint} cannot be reached: {error.strerror or error}"
            ) from error

    def sleep(self, seconds: float) -> None:
        """Sleep, unless dialing is to stop.

        Raises:
            StoreClosedError: it is.
        """
        self._poll(select.poll(), seconds)

    def _connect(self, deadline: float, again: bool) -> tuple[socket.socket, Address]:
        failure: OSError = OSError(f"no address found for {self.endpoint}")
        # A session is with the one server that was reached; name services take their time.
        known = [self._reached] if again and self._reached is not None else None
        for family, address in known or self._addresses():
            limit = min(deadline, time.monotonic() + _TRY_SECONDS)
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                if family != socket.AF_UNIX:
                    keep_alive(sock)
                try:
                    sock.connect(address)
                except BlockingIOError:
                    self._await(sock.fileno(), select.POLLOUT, limit, "accept the connection")
                    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(code, os.strerror(code)) from None
            except OSError as error:
                sock.close()
                failure = error
                continue
            except BaseException:
                sock.close()
                raise
            return sock, (family, address)
        raise failure

    def _addresses(self) -> list[Address]:
        if isinstance(self._where, str):
            return [(socket.AF_UNIX, self._where)]
        host, port = self._where
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.inet_pton(family, host)
            except OSError:
                continue
            return [(family, (host, port))]
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, (str(at[0]), port)) for family, _, _, _, at in found]

    def _greet(self, sock: socket.socket, session: bytes, grace: float, deadline: float) -> Greeted:
        channel: Channel | None = None
        if self._may_start:
            grace += self._spare * round_trip(sock)
        try:
            if self._tls is None:
                channel = Channel(sock)
            else:
                from regrow.store._tls import TlsChannel

                host = self._where[0] if isinstance(self._where, tuple) else None
                channel = secure = TlsChannel(sock, self._tls, self._server_hostname or host)
                try:
                    while not secure.secured():
                        self._await(sock.fileno(), select.POLLIN, deadline, "agree on TLS")
                except ConnectionResetError as error:
                    raise StoreHungUp(
                        "it closed the connection when asked for TLS; it is not a regrow store, or "
                        "was started without certificates"
                    ) from error
            return self._prove(channel, session, grace, deadline)
        except BaseException:
            if channel is not None:
                channel.close()
            sock.close()
            raise

    def _prove(self, channel: Channel, session: bytes, grace: float, deadline: float) -> Greeted:
        reader = _Reader(self, channel, deadline)
        nonce = os.urandom(handshake.NONCE)
        sent = time.monotonic()
        channel.send(handshake.PREAMBLE + nonce)
        opening = reader.opening()
        if not self._may_start:
            grace += self._spare * (time.monotonic() - sent)
        theirs = opening[len(handshake.PREAMBLE) :]
        proof = handshake.prove(self._token, "client", nonce, theirs)
        hello = wire.frame(wire.Hello(session, grace, self._client))
        channel.send(proof + hello)
        answer = reader.take(1 + handshake.PROOF, "say whether it takes the token")
        handshake.check_answer(answer, self._token, nonce, theirs)
        length = int.from_bytes(reader.take(wire.HEADER, "open a session"), "big")
        if length > 4096:
            raise StoreProtocolError(f"its greeting has {length} bytes; is it a regrow store?")
        try:
            welcome = wire.decode_welcome(reader.take(length, "open a session"))
        except msgspec.MsgspecError as error:
            raise StoreProtocolError(f"its greeting makes no sense: {error}") from error
        if isinstance(welcome, wire.Failed):
            raise StoreConnectionError(welcome.message)
        return Greeted(channel, welcome, bytes(reader.received))

    def _await(self, fd: int, event: int, deadline: float, what: str) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not self._poll(poll, deadline - time.monotonic()):
            raise StoreTimeout(f"it did not {what} in time")

    def _poll(self, poll: select.poll, seconds: float) -> bool:
        for wake in self.wakes:
            poll.register(wake, select.POLLIN)
        ready = dict(poll.poll(max(0.0, seconds) * 1000))
        if ready.keys() & self.wakes:
            raise StoreClosedError("the client was closed")
        return bool(ready)


class _Reader:
    """Reads exact numbers of bytes from a channel."""

    def __init__(self, dialer: Dialer, channel: Channel, deadline: float) -> None:
        self.received = bytearray()
        self._dialer = dialer
        self._channel = channel
        self._deadline = deadline

    def opening(self) -> bytes:
        """Return the server's opening, refusing one that is not ours at its first byte."""
        while len(self.received) < handshake.OPENING:
            try:
                self._more("answer the handshake")
            except StoreTimeout as error:
                reason = _NOT_OURS.format(instead="stopped or overloaded")
                raise StoreTimeout(f"{error}; {reason}") from error
            except OSError as error:
                if isinstance(error, ConnectionError) and not isinstance(error, StoreError):
                    reason = _NOT_OURS.format(
                        instead="one with certificates, or not there yet behind a proxy"
                    )
                    raise StoreHungUp(
                        f"it closed the connection at the first message; {reason}"
                    ) from error
                raise
            if handshake.is_stranger(bytes(self.received[: handshake.OPENING])):
                raise handshake.describe_server(bytes(self.received))
        return self.take(handshake.OPENING, "answer the handshake")

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes; `what` the server did not do if they do not come."""
        while len(self.received) < count:
            self._more(what)
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken

    def _more(self, what: str) -> None:
        while True:
            try:
                self.received += self._channel.recv()
            except BlockingIOError:
                self._dialer._await(self._channel.fileno(), select.POLLIN, self._deadline, what)
                continue
            return
