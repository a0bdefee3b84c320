"""Connection setup to a store server: address, connection, handshake, greeting, retries.

All calls block the calling thread, until a deadline or until one of the file descriptors `wakes`
becomes readable. So closing a client does not wait for an unreachable host.

During the first connection (`dial_first`), no server may listen yet, or only a proxy that hangs up.
The client then tries again until the time-out, unless a refusal is final. The client fails at once
if the program on that port is not a regrow store, or does not hold the token.

After a loss (`dial_again`), the client retries after every failure, because the server did exist.
It stops when its own clock shows that the grace of the session has ended. By then the server has
ended the session, or soon will. If the server greets the client with another session, the server
has lost this one.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from regrow.store.client.names import look_up
from regrow.store.client.transport import LONGEST_POLL_S, REPLY_ROOM, Transport
from regrow.store.errors import (
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreHungUp,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
)
from regrow.store.limits import FIRST_PAUSE_S, HANDSHAKE_S, LONGEST_PAUSE_S, TRY_S, WARN_AFTER_S
from regrow.store.protocol import wire
from regrow.store.protocol.sockets import (
    endpoint_of,
    family_of,
    keep_alive,
    parse_endpoint,
    round_trip,
)
from regrow.utils import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store.protocol.tls import Tls, TlsSocket

_NOT_OURS: Final = (
    "either it is not a regrow store (a PyTorch TCPStore behaves like this), or it is {instead}"
)

_MOST_GREETING_BYTES: Final = 4096
"""Maximum length of a regrow store's greeting; a longer one is from another program."""

Address = tuple[socket.AddressFamily, str | tuple[str, int]]


class Greeted(NamedTuple):
    """A connection with a new or a resumed session."""

    transport: Transport
    welcome: wire.Welcome
    """The terms that the server granted."""


class Dialer:
    """Opens connections to one server.

    Args:
        endpoint: "host:port" or "unix:path".
        token: the secret that both sides prove.
        tls: certificates, if the server uses TLS.
        client: name of this client for the server.
        spare: number of round trips to the server that are added to the grace of a session. The
            kernel has measured them while it connected: a busy server may answer much later.
        may_start: whether the first connection may start the server.
        visits: whether a lingering server may end while this client has a session.
    """

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        tls: Tls | None,
        client: str,
        spare: float,
        may_start: bool = False,
        visits: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._where = parse_endpoint(endpoint)
        self._token = token
        self._tls = tls
        self._context = None if tls is None else tls.client_context()
        self._client = client
        self._spare = spare
        self.may_start = may_start
        self._visits = visits
        self._reached: Address | None = None
        self.server = endpoint
        """The endpoint, with the connected address instead of a name."""
        self.local_host = ""
        """This host's address on the last connection; "" over a unix socket."""
        self.wakes: set[int] = set()
        """File descriptors that stop dialing and sleeping when one becomes readable."""

    def dial(self, session: bytes, grace: float, deadline: float) -> Greeted:
        """Connect, prove the token in both directions, and start or resume a session.

        Args:
            session: the session to resume; empty: start a new session.
            grace: seconds for which a new session should outlive a lost connection.
            deadline: end of all tries, on the monotonic clock.
        """
        try:
            sock, address = self._connect(deadline, again=bool(session))
            if sock.family != socket.AF_UNIX:
                self.local_host = sock.getsockname()[0]
            deadline = min(deadline, time.monotonic() + HANDSHAKE_S)
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
        """Sleep, unless dialing must stop.

        Raises:
            StoreClosedError: dialing must stop.
        """
        self._poll(select.poll(), seconds)

    def _connect(self, deadline: float, again: bool) -> tuple[socket.socket, Address]:
        failure = OSError(f"no address found for {self.endpoint}")
        # A session belongs to the server of the first connection, and a name lookup takes time.
        known = [self._reached] if again and self._reached is not None else None
        for family, address in known or self._addresses(deadline):
            limit = min(deadline, time.monotonic() + TRY_S)
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
        try:
            raise failure
        finally:
            del failure  # it refers to this frame, which would refer to it

    def _addresses(self, deadline: float) -> list[Address]:
        if isinstance(self._where, str):
            return [(socket.AF_UNIX, self._where)]
        host, port = self._where
        family = family_of(host)
        if family is not None:
            return [(family, (host, port))]

        def wait(fd: int) -> None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not self._poll(poll, deadline - time.monotonic()):
                raise StoreTimeout(f"no name service resolved {host} in time")

        return [(family, (address, port)) for family, address in look_up(host, wait)]

    def _greet(self, sock: socket.socket, session: bytes, grace: float, deadline: float) -> Greeted:
        connected: socket.socket | TlsSocket = sock
        grace += self._spare * round_trip(sock)
        try:
            if self._tls is not None and self._context is not None:
                from regrow.store.protocol.tls import TlsSocket

                host = self._where[0] if isinstance(self._where, tuple) else None
                name = self._tls.server_hostname or host
                connected = TlsSocket(sock, self._context, name, self._tls.digest)
                while event := connected.handshake():
                    self._await(connected.fileno(), event, deadline, "agree on TLS")
            return self._prove(Transport(connected), session, grace, deadline)
        except BaseException:
            connected.close()
            sock.close()
            raise

    def _prove(
        self, transport: Transport, session: bytes, grace: float, deadline: float
    ) -> Greeted:
        nonce = os.urandom(wire.NONCE)
        transport.send(wire.PREAMBLE + nonce)
        theirs = self._opening(transport, deadline)[len(wire.PREAMBLE) :]
        proof = wire.prove(self._token, "client", nonce, theirs)
        hello = wire.Hello(session, grace, self._client, self._visits)
        transport.send(proof + wire.frame(hello))
        answer = self._take(transport, 1 + wire.PROOF, deadline, "accept or refuse the token")
        wire.check_answer(answer, self._token, nonce, theirs)
        header = self._take(transport, wire.HEADER, deadline, "open a session")
        length = int.from_bytes(header, "big")
        if length > _MOST_GREETING_BYTES:
            raise StoreProtocolError(
                f"its first reply announces {length} bytes, but a regrow store sends at most "
                f"{_MOST_GREETING_BYTES}: check that this is the port of a regrow store"
            )
        greeting = self._take(transport, length, deadline, "open a session")
        try:
            welcome = wire.decode_welcome(greeting)
        except msgspec.MsgspecError as error:
            raise StoreProtocolError(
                f"the server's greeting is malformed: check that this is the port of a regrow "
                f"store, and run the same release of regrow on all nodes ({error})"
            ) from error
        if isinstance(welcome, wire.Failed):
            raise StoreConnectionError(welcome.message)
        transport.longest = welcome.frame_bytes + REPLY_ROOM
        return Greeted(transport, welcome)

    def _opening(self, transport: Transport, deadline: float) -> bytes:
        """Return the server's opening; refuse a wrong one at its first byte."""
        while len(transport.received) < wire.OPENING:
            try:
                self._receive(transport, deadline, "answer the handshake")
            except StoreTimeout as error:
                reason = _NOT_OURS.format(instead="stopped or overloaded")
                raise StoreTimeout(f"{error}; {reason}") from error
            except ConnectionError as error:
                if isinstance(error, StoreError):
                    raise
                reason = _NOT_OURS.format(
                    instead="one with certificates, or not there yet behind a proxy"
                )
                raise StoreHungUp(
                    f"it closed the connection at the first message; {reason}"
                ) from error
            if wire.is_stranger(bytes(transport.received[: wire.OPENING])):
                raise StoreProtocolError(wire.describe_server(bytes(transport.received)))
        return self._take(transport, wire.OPENING, deadline, "answer the handshake")

    def _take(self, transport: Transport, count: int, deadline: float, what: str) -> bytes:
        """Return the next bytes; `what` is the server's missing action if they do not arrive."""
        while len(transport.received) < count:
            self._receive(transport, deadline, what)
        taken = bytes(transport.received[:count])
        del transport.received[:count]
        return taken

    def _receive(self, transport: Transport, deadline: float, what: str) -> None:
        """Receive bytes, or wait until there are bytes to receive."""
        try:
            transport.received += transport.recv()
        except BlockingIOError:
            self._await(transport.fd, select.POLLIN, deadline, what)

    def _await(self, fd: int, event: int, deadline: float, what: str) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not self._poll(poll, deadline - time.monotonic()):
            raise StoreTimeout(f"it did not {what} in time")

    def _poll(self, poll: select.poll, seconds: float) -> bool:
        for wake in self.wakes:
            poll.register(wake, select.POLLIN)
        ready = dict(poll.poll(min(max(0.0, seconds), LONGEST_POLL_S) * 1000))
        if ready.keys() & self.wakes:
            raise StoreClosedError("the client was closed")
        return bool(ready)


def _pauses() -> Backoff:
    """Pauses between tries, in seconds; short at first, so a reset connection costs little."""
    return Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)


def dial_first(dialer: Dialer, grace: float, seconds: float, *, refusal_is_final: bool) -> Greeted:
    """Start a session.

    Args:
        dialer: opens connections to the server.
        grace: seconds for which the session should outlive a lost connection.
        seconds: time within which the session must start.
        refusal_is_final: do not try again if no server listens, or the server hangs up.

    Raises:
        StoreClosedError: one of the dialer's `wakes` became readable.
    """
    began = time.monotonic()
    pauses, deadline, warn_at = _pauses(), began + seconds, began + WARN_AFTER_S
    failure: StoreError | None = None
    try:
        while True:
            refused = False
            try:
                return dialer.dial(b"", grace, min(deadline, warn_at))
            except StoreConnectionError as error:
                failure = error
                refused = isinstance(error, StoreHungUp) or isinstance(
                    error.__cause__, ConnectionRefusedError
                )
                if isinstance(error, StoreClosedError) or (refused and refusal_is_final):
                    raise
                dialer.sleep(pauses.next(deadline - time.monotonic()))
            except StoreTimeout as error:
                failure = failure or error
            now = time.monotonic()
            if now >= deadline:
                raise type(failure)(f"{failure} (tried for {round(seconds, 2):g} s)") from failure
            if now >= warn_at:
                warn_at = deadline
                # An agent whose coordinator does not run yet prints its own line.
                if dialer.may_start or not refused:
                    from regrow.utils import get_logger

                    get_logger(__name__).warning(
                        "%s; the client has tried for %.0f s and tries for another %.0f s. Check "
                        "that the address is right, and that no other program has that port",
                        failure,
                        now - began,
                        deadline - now,
                    )
    finally:
        del failure  # it refers to this frame, which would refer to it


def dial_again(
    dialer: Dialer,
    session: bytes,
    grace: float,
    lost_at: float,
    refusal_is_final: Callable[[], bool] = lambda: False,
) -> Greeted:
    """Connect again, and resume the session.

    Args:
        dialer: has connected to the server before.
        session: session id from the server.
        grace: seconds for which the session outlives a lost connection.
        lost_at: time of the connection loss, on the monotonic clock.
        refusal_is_final: returns whether to stop as soon as no server listens there.

    Raises:
        StoreClosedError: one of the dialer's `wakes` became readable.
        StoreSessionLost: the session has ended.
    """
    deadline, pauses = lost_at + grace, _pauses()
    failure = "the connection was lost"
    while time.monotonic() < deadline:
        try:
            greeted = dialer.dial(session, grace, deadline)
        except StoreClosedError:
            raise
        except StoreError as error:
            failure = str(error)
            if isinstance(error.__cause__, ConnectionRefusedError) and refusal_is_final():
                raise StoreSessionLost(f"the session is lost: {failure}") from error
            dialer.sleep(pauses.next(deadline - time.monotonic()))
            continue
        if greeted.welcome.session == session:
            return greeted
        greeted.transport.close()
        failure = f"the store at {dialer.endpoint} no longer knows this session"
        break
    raise StoreSessionLost(f"the session is lost after {grace:g} s of grace: {failure}")
