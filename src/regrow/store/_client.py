"""The client of a store server: the calls of a `WatchStore`, over a `Connection`."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, cast

from regrow.store import _wire as wire
from regrow.store._api import (
    DEFAULT_TIMEOUT,
    Change,
    Changes,
    Characteristics,
    Timeout,
    Value,
    to_bytes,
    to_seconds,
)
from regrow.store._calls import ConnectionState
from regrow.store._connection import Connection
from regrow.store._dial import Dialer
from regrow.store._errors import (
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreProtocolError,
    StoreServiceError,
    StoreTimeout,
    StoreValueError,
)
from regrow.store._keyspace import INT64_MAX, INT64_MIN, Query
from regrow.store._memory import timeout_message
from regrow.store._token import check_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from regrow.store._process import ServerProcess
    from regrow.store._tls import Tls

SESSION_GRACE = timedelta(seconds=5)
"""How long a session outlives a lost connection unless the client asks otherwise."""

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
    stop: int | None = None,
) -> StoreClient:
    """Connect to a store server and begin a session.

    Both sides prove at the beginning that they hold the token. Without `tls`, nothing
    protects what is said afterwards from somebody between the two: use it where others
    share the network.

    Args:
        endpoint: "host:port", "[::1]:port" or "unix:/path".
        token: the job's secret, proved by both sides.
        timeout: how long to try, also while no server listens there yet.
        session_grace: how long the session (its ephemeral keys, the memory of what was
            done) outlives a lost connection; the server may grant less.
        call_timeout: how long a call may take by default.
        tls: certificates, if the server has them.
        on_state: told of every change of state, from the client's own thread; it must
            return soon and make no call.
        spare_round_trips: how often a message may go to the server and back while the
            session waits for its client, on top of `session_grace`: time to connect anew
            on a slow link, as measured on the first connection.
        server_may_start: the server may be started by this connection, and answer late for that;
            so a round trip is what the kernel has measured, which a proxy would shorten.
        refusal_is_final: do not try again when nobody listens there, or what does hangs up.
        stop: a file descriptor; while connecting for the first time, StoreClosedError is
            raised when it becomes readable.

    Raises:
        StoreConnectionError: no server could be reached in that time.
        StoreAuthError: the two sides do not hold the same token.
        StoreProtocolError: what listens there is not a store server of ours; if it only hangs up,
            it is tried again until then, since a proxy does so before its server is there.
        StoreTimeout: it did not answer in time.
    """
    check_token(token)
    context = None if tls is None else tls.client_context()
    hostname = None if tls is None else tls.server_hostname
    name = f"{socket.gethostname()} pid {os.getpid()}"[:200]
    connection = Connection(
        Dialer(endpoint, token, context, hostname, name, spare_round_trips, server_may_start),
        to_seconds(session_grace),
        to_seconds(timeout),
        on_state,
        refusal_is_final=refusal_is_final,
        stop=stop,
    )
    return StoreClient(connection, call_timeout, encrypted=tls is not None)


class StoreClient:
    """A session with a store server; a `WatchStore`. Made by `connect`.

    All methods may be called from any thread, and a blocked call delays no other. Each
    call takes effect at most once; `StoreError.applied` says what is known if it fails.
    While the connection is lost, calls wait for it to come back, at most for their
    timeout. After a fork, the child's copy is closed and the parent's is unharmed.
    """

    def __init__(self, connection: Connection, timeout: Timeout, *, encrypted: bool) -> None:
        self._connection = connection
        self._seconds = to_seconds(timeout)
        self._server: ServerProcess | None = None
        self._characteristics = Characteristics(
            shared=True,
            watch=True,
            sessions=True,
            at_most_once=True,
            concurrent=True,
            authenticated=True,
            encrypted=encrypted,
        )

    @property
    def state(self) -> ConnectionState:
        """What may be believed about the session now."""
        return self._connection.state

    @property
    def server(self) -> str:
        """The endpoint of the server, with the address that was reached in place of a name."""
        return self._connection.server

    @property
    def local_host(self) -> str:
        """This host's address on the way to the server; "" over a unix socket."""
        return self._connection.local_host

    @property
    def characteristics(self) -> Characteristics:
        """What this store guarantees."""
        return self._characteristics

    def set(self, key: str, value: Value, /, *, ephemeral: bool = False) -> None:
        """See `WatchStore.set`."""
        self._change(wire.Set, _key(key), to_bytes(value), bool(ephemeral))

    def get(self, key: str, /) -> bytes:
        """See `Store.get`."""
        query = Query("get", (_key(key),))
        return cast("bytes", self._read(wire.Get, query, key, seconds=self._seconds))

    def add(self, key: str, amount: int, /) -> int:
        """See `Store.add`."""
        number = index(amount)
        if not INT64_MIN <= number <= INT64_MAX:
            raise StoreValueError(f"add() takes a number of 64 bits, not {amount}")
        return cast("int", self._change(wire.Add, _key(key), number))

    def compare_set(
        self, key: str, expected: Value, desired: Value, /, *, ephemeral: bool = False
    ) -> bytes:
        """See `WatchStore.compare_set`."""
        old, new = to_bytes(expected), to_bytes(desired)
        return cast("bytes", self._change(wire.CompareSet, _key(key), old, new, bool(ephemeral)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None, /) -> None:
        """See `Store.wait`."""
        query = Query("wait", _keys(keys))
        seconds = self._seconds if timeout is None else to_seconds(timeout)
        self._read(wire.Wait, query, query.keys, seconds=seconds)

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store.check`."""
        return cast("bool", self._ask(wire.Check, _keys(keys)))

    def delete_key(self, key: str, /) -> bool:
        """See `Store.delete_key`."""
        return cast("bool", self._change(wire.Delete, _key(key)))

    def append(self, key: str, value: Value, /) -> None:
        """See `Store.append`."""
        self._change(wire.Append, _key(key), to_bytes(value))

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store.multi_get`."""
        query = Query("multi_get", _keys(keys))
        values = self._read(wire.MultiGet, query, query.keys, seconds=self._seconds)
        return cast("list[bytes]", values)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value], /) -> None:
        """See `Store.multi_set`."""
        self._change(wire.MultiSet, _keys(keys), [to_bytes(value) for value in values])

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return cast("int", self._ask(wire.NumKeys))

    def set_timeout(self, timeout: Timeout, /) -> None:
        """See `Store.set_timeout`."""
        self._seconds = to_seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long a call of this handle may take by default."""
        return timedelta(seconds=self._seconds)

    def watch(
        self,
        keys: Sequence[str],
        /,
        after: int = 0,
        *,
        prefix: bool = False,
        timeout: Timeout | None = None,
    ) -> Changes:
        """See `WatchStore.watch`."""
        query = Query("watch", _keys(keys), min(max(0, index(after)), INT64_MAX), bool(prefix))
        seconds = self._seconds if timeout is None else to_seconds(timeout)
        args = (query.keys, query.after, query.prefix)
        return cast("Changes", self._read(wire.Watch, query, *args, seconds=seconds))

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
        args = (service, body)
        try:
            reply = self._connection.call(
                wire.Ask,
                *args,
                changes=False,
                seconds=seconds,
                nudge=seconds if nudge is None else to_seconds(nudge),
            )
            return cast("bytes", _result(reply))
        except (StoreTimeout, StoreConnectionError, StoreServiceError) as error:
            error.applied = "unknown"
            raise

    def leave_on_close(self, server: ServerProcess) -> None:
        """Take a server that lingers: it is left to its other clients when this one is closed."""
        self._server = server

    def close(self, timeout: Timeout = 2.0) -> None:
        """End the session; calls blocked in other threads raise StoreClosedError.

        Args:
            timeout: how long to wait until the server has confirmed it: then the ephemeral
                keys are gone. With 0 they will be, as soon as it hears of it.
        """
        self._connection.close(to_seconds(timeout))
        server, self._server = self._server, None
        if server is not None:
            server.close(wait=0.0)

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _change(self, request: Callable[..., msgspec.Struct], *args: object) -> object:
        reply = self._connection.call(request, *args, changes=True, seconds=self._seconds)
        return _result(reply)

    def _ask(self, request: Callable[..., msgspec.Struct], *args: object) -> object:
        reply = self._connection.call(request, *args, changes=False, seconds=self._seconds)
        return _result(reply)

    def _read(
        self,
        request: Callable[..., msgspec.Struct],
        query: Query,
        *args: object,
        seconds: float,
    ) -> object:
        # A timeout of zero asks about now: it is the server that must say "not yet".
        at_once = seconds <= 0
        try:
            reply = self._connection.call(
                request,
                *args,
                changes=False,
                seconds=DEFAULT_TIMEOUT.total_seconds() if at_once else seconds,
                lasting=query.kind in ("wait", "watch"),
                at_once=at_once,
            )
        except StoreTimeout as error:
            if self._connection.state is ConnectionState.CONNECTED and not at_once:
                raise StoreTimeout(timeout_message(query, seconds)) from None
            raise error
        if isinstance(reply, wire.Failed) and reply.kind == "cancelled":
            raise StoreTimeout(timeout_message(query, seconds))
        return _result(reply)


def _result(reply: wire.Reply) -> object:
    if type(reply) is wire.Done:
        return reply.result
    if isinstance(reply, wire.Seen):
        changes = tuple(Change(*change) for change in reply.changes)
        return Changes(reply.revision, changes, reply.snapshot)
    if isinstance(reply, wire.Failed):
        raise _ERRORS.get(reply.kind, StoreProtocolError)(reply.message)
    raise StoreProtocolError(f"the server answered {reply!r:.80}")


def _key(key: str) -> str:
    if type(key) is not str:
        if isinstance(key, str):
            return str(key)
        raise StoreValueError(f"a store's key is a str, not {type(key).__name__}: {key!r:.80}")
    return key


def _keys(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise StoreValueError(f"a list of keys is needed, not one key: {keys!r:.80}")
    return tuple([_key(key) for key in keys])
