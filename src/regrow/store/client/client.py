"""The client of a store server: the calls of a store, over a `Session`."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, cast

from regrow.store.api import Timeout, to_key, to_seconds
from regrow.store.calls import Handle, timeout_message
from regrow.store.client.connecting import Dialer
from regrow.store.client.session import ConnectionState, Session
from regrow.store.errors import (
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreProtocolError,
    StoreServiceError,
    StoreTimeout,
    StoreValueError,
)
from regrow.store.limits import CLOSE_S, DEFAULT_TIMEOUT, SESSION_GRACE
from regrow.store.protocol import wire
from regrow.store.protocol.token import check_token_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.store.keyspace import Query
    from regrow.store.protocol.tls import Tls
    from regrow.store.server.process import ServerProcess


_ERRORS: dict[str, type[StoreError]] = {
    "limit": StoreLimitError,
    "value": StoreValueError,
    "service": StoreServiceError,
}


def connect(
    endpoint: str,
    *,
    token: bytes,
    timeout: Timeout = 60.0,
    session_grace: Timeout = SESSION_GRACE,
    call_timeout: Timeout = DEFAULT_TIMEOUT,
    tls: Tls | None = None,
    on_state: Callable[[ConnectionState], None] | None = None,
    spare_round_trips: float = 0.0,
    server_may_start: bool = False,
    refusal_is_final: bool = False,
    refusal_ends: Callable[[], bool] = lambda: False,
    visits: bool = False,
    stop: int | None = None,
) -> StoreClient:
    """Connect to a store server and start a session.

    Both sides prove at the start that they hold the token. Without `tls`, a third party between the
    two can read and change the later traffic. So use TLS on networks that other users share.

    Args:
        endpoint: "host:port", "[::1]:port" or "unix:/path".
        token: the job's secret; both sides prove that they hold it.
        timeout: time for all tries, including the time before the server listens.
        session_grace: time for which the session outlives a lost connection, with the memory of
            its finished changes; the server may grant less.
        call_timeout: default time-out of a call.
        tls: certificates, if the server uses TLS.
        on_state: called with every change of state, by a thread of the client; it must return
            quickly and make no call.
        spare_round_trips: number of round trips to the server that are added to `session_grace`:
            time to reconnect on a slow link. The kernel measures it while it connects, so that a
            busy server does not make it longer; behind a proxy it is the way to the proxy only.
        server_may_start: whether this connection may start the server. If not, and no server
            listens there, no warning is logged.
        refusal_is_final: do not try again if no server listens there, or the server hangs up.
        refusal_ends: called, by a thread of the client, if the session has lost its connection and
            no server listens there; returns whether the session ends at once, because another
            server may have taken over. By default it ends after its grace.
        visits: a lingering server may end while this client has a session.
        stop: a file descriptor; if it becomes readable during the first connection,
            StoreClosedError is raised.

    Raises:
        StoreConnectionError: no server was reachable in that time.
        StoreAuthError: the two sides do not hold the same token.
        StoreProtocolError: the program on that port is not a regrow store server. A program that
            only hangs up is tried again until the time-out, because a proxy does so before its
            server runs.
        StoreTimeout: the server did not answer in time.
    """
    check_token_length(token)
    name = f"{socket.gethostname()} pid {os.getpid()}"[:200]
    session = Session(
        Dialer(endpoint, token, tls, name, spare_round_trips, server_may_start, visits),
        to_seconds(session_grace),
        to_seconds(timeout),
        on_state,
        refusal_is_final=refusal_is_final,
        refusal_ends=refusal_ends,
        stop=stop,
    )
    return StoreClient(session, call_timeout)


class StoreClient(Handle):
    """A session with a store server. Created by `connect`.

    Any thread may call all methods, and a blocked call delays no other call. Each call takes effect
    at most once. If it fails, `StoreError.applied` gives its possible effect. While the connection
    is lost, calls wait for a reconnect, at most for their time-out. After a fork, the child's copy
    is closed and the parent's copy works as before.

    A signal handler may raise an exception in the middle of a call, but must not call this object:
    the call that it has interrupted may hold the lock that its own call would wait for.
    """

    def __init__(self, session: Session, timeout: Timeout) -> None:
        super().__init__(timeout)
        self._session = session
        self._server: ServerProcess | None = None

    @property
    def state(self) -> ConnectionState:
        """The current state of the session."""
        return self._session.state

    @property
    def server(self) -> str:
        """The endpoint of the server, with the connected address instead of a name."""
        return self._session.dialer.server

    @property
    def local_host(self) -> str:
        """This host's address on the route to the server; "" over a unix socket."""
        return self._session.dialer.local_host

    @property
    def session_grace(self) -> float:
        """Seconds for which the session outlives a lost connection, as the server granted."""
        return self._session.welcome.grace

    def delete_prefix(self, prefix: str, /) -> int:
        """Delete all keys that start with a prefix, in one step; return how many there were.

        The server reads the names of all its keys for this. Meanwhile it serves no other client.

        Args:
            prefix: text with which the names of the keys start.

        Raises:
            StoreValueError: the prefix is empty, so the call would delete every key of the store.
        """
        return cast("int", self._change("delete_prefix", to_key(prefix)))

    def ask(
        self, service: str, body: bytes, timeout: Timeout, *, nudge: Timeout | None = None
    ) -> bytes:
        """Ask a service of the server, and wait for the answer.

        The question is repeated after a reconnect, so it may be carried out more than once;
        services take that into account.

        Args:
            service: the name under which the server has it.
            body: the question.
            timeout: seconds or timedelta.
            nudge: for a question that is answered at once: seconds or timedelta without an answer
                after which more is sent, so that what was lost on the way is sent again sooner.

        Raises:
            StoreServiceError: the service refused, failed, or is not there.
            StoreTimeout: it did not answer in that time.
        """
        seconds = to_seconds(timeout)
        try:
            reply = self._session.call(
                wire.Ask,
                service,
                body,
                seconds=seconds,
                nudge=seconds if nudge is None else to_seconds(nudge),
            )
            return cast("bytes", _result(reply))
        except (StoreTimeout, StoreConnectionError, StoreServiceError) as error:
            error.applied = "unknown"
            raise

    def leave_on_close(self, server: ServerProcess) -> None:
        """Take over a lingering server; closing this client leaves it to its other clients."""
        self._server = server

    def close(self, timeout: Timeout = CLOSE_S) -> None:
        """End the session; calls blocked in other threads raise StoreClosedError.

        Args:
            timeout: time to wait until the server has ended the session. With 0, the call does not
                wait: the server ends the session when the message arrives, or the grace is over.
        """
        self._session.close(to_seconds(timeout))
        server, self._server = self._server, None
        if server is not None:
            server.close(wait=0.0)

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _change(self, name: str, *args: object) -> object:
        return _result(self._session.call(wire.CHANGES[name], *args, seconds=self._seconds))

    def _read(self, query: Query, seconds: float) -> object:
        # A time-out of zero asks for the current state, so the server must answer "not yet".
        waits = seconds > 0
        try:
            reply = self._session.call(
                wire.Read,
                query,
                waits,
                seconds=seconds if waits else DEFAULT_TIMEOUT.total_seconds(),
                lasting=query.kind == "wait",
            )
        except StoreTimeout:
            blocks = waits and query.kind in ("multi_get", "wait")
            if blocks and self._session.state is ConnectionState.CONNECTED:
                raise StoreTimeout(timeout_message(query, seconds)) from None
            raise
        if isinstance(reply, wire.Failed) and reply.kind == "cancelled":
            raise StoreTimeout(timeout_message(query, seconds))
        return _result(reply)


def _result(reply: wire.Reply) -> object:
    if isinstance(reply, wire.Failed):
        raise _ERRORS.get(reply.kind, StoreProtocolError)(reply.message)
    return reply.result
