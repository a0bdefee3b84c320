"""The store that the workers of a job share, and how each of them finds it.

Under `regrow run` the agent of the first node holds a socket that listens, and starts the server
when the first worker connects; where that is, and by which token, the environment says
(REGROW_STORE, REGROW_STORE_TOKEN). Under any other launcher nobody has prepared anything but the
addresses of torch: then the worker of rank 0 starts the server, on a port beside MASTER_PORT, and
the others try until it is there. The server is a process of its own that goes on while anybody is
connected, so that rank 0 may die of what the others want to hear of. Whether there is one already,
of an earlier rank 0, is decided by binding the port.

A worker that ends is known at once by the end of its connection: its session has half a second to
come back, and a few round trips of a slow network; a tenth of that on the server's own host, where
no connection breaks but by the end of a process. A host that vanishes says nothing; then it is
the server's kernel that asks (`_sockets.keep_alive`), and the kernel of a worker answers, also when
the worker is stopped or holds the interpreter's lock. After 11 s without an answer the connection
is lost.

Who can connect can ask the services below. The server loads each of them when it is first asked.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from regrow.store._errors import StoreAuthError, StoreConnectionError, StoreError, StoreHungUp
from regrow.store._token import load_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.store._client import StoreClient
    from regrow.store._process import ServerProcess
    from regrow.store._tls import Tls

STORE_ENV: Final = "REGROW_STORE"
"""Where the workers' store is: "unix:/path" or "host:port"."""
STORE_TOKEN_ENV: Final = "REGROW_STORE_TOKEN"
"""The secret by which workers reach it."""
STORE_PORT_ENV: Final = "REGROW_STORE_PORT"
"""The port on which the worker of rank 0 serves it, where no agent does."""
STORE_TLS_ENV: Final = "REGROW_STORE_TLS"
"""A JSON object of the fields of `Tls`; empty: connections are not encrypted."""

SERVICES: Final = {
    "heartbeat": "regrow.heartbeat._service:create",
    "inprocess": "regrow.inprocess._service:create",
}
"""What the workers' store can be asked besides keys."""
SESSION_GRACE: Final = 0.5
"""Seconds in which a worker whose connection broke may come back to its session."""
LOCAL_SESSION_GRACE: Final = 0.05
"""The same on the host of the server."""
SPARE_ROUND_TRIPS: Final = 6.0
"""How many round trips it has on top of that: to connect anew takes three, if none is lost."""

_PAUSE: Final = 0.05
"""Seconds before a port is tried again whose server has just ended."""
_HANG_UPS: Final = 3
"""So often may what listens there hang up before it is taken for a stranger: a server that is about
to end may do it once."""


def worker_store(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    token: bytes | None = None,
    timeout: float = 30.0,
) -> StoreClient:
    """Connect to the store that all workers of this job share, whoever has started them.

    Under `regrow run` the agent's environment says where it is. Elsewhere the worker of rank 0
    starts the server, if none is there; it outlives that worker as long as others are connected.

    Args:
        rank: this worker's; default RANK.
        world_size: how many workers there are; default WORLD_SIZE. Only compared with
            LOCAL_WORLD_SIZE: if they are equal, all meet on 127.0.0.1.
        host: name or address of the host of rank 0; default MASTER_ADDR. If host or port is given,
            the agent's store is not used.
        port: default REGROW_STORE_PORT, else MASTER_PORT + 1.
        token: the secret that all workers share; default the agent's, else REGROW_TOKEN or
            REGROW_TOKEN_FILE, and on this host alone the user's own secret, from a file.
        timeout: seconds within which the store must be reached.

    Returns:
        A session with the store, which ends half a second after this process does, or sooner.

    Raises:
        ValueError: an argument or a variable is missing, or makes no sense.
        StoreConnectionError: the store cannot be reached in that time, or not be served.
        StoreAuthError: there is no token, or it is not that of the others.
        StoreProtocolError: something else listens on that port.
        StoreTimeout: what listens on that port did not answer.
    """
    environ = os.environ
    agents = _agents(environ, host, port, token)
    if agents is not None:
        return _connect(*agents, timeout)
    place = find(environ, rank, world_size, host, port)
    secret = token or _token(environ, place.host)
    deadline = time.monotonic() + timeout
    try:
        return _serve_or_connect(place, secret, deadline)
    except StoreError as error:
        raise _advised(error, place) from error


def whereabouts(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    token: bytes | None = None,
) -> tuple[str, bytes]:
    """Return the endpoint and the token by which `worker_store` reaches that store.

    For `visit`, by a process beside the workers that serves nothing; the arguments are those of
    `worker_store`.

    Raises:
        ValueError: an argument or a variable is missing, or makes no sense.
        StoreAuthError: there is no token.
    """
    from regrow.store._sockets import endpoint_of

    environ = os.environ
    agents = _agents(environ, host, port, token)
    if agents is not None:
        return agents
    place = find(environ, rank, world_size, host, port)
    return endpoint_of(place.host, place.port), token or _token(environ, place.host)


def visit(endpoint: str, token: bytes, timeout: float) -> StoreClient:
    """Begin a session with the workers' store at an endpoint, which has to be there.

    Raises:
        StoreError: it cannot be reached in `timeout` seconds; says why.
    """
    return _connect(endpoint, token, timeout, refusal_is_final=True)


def _agents(
    environ: Mapping[str, str], host: str | None, port: int | None, token: bytes | None
) -> tuple[str, bytes] | None:
    """Return where the agent's store is, and its token; None where another one is used."""
    endpoint = environ.get(STORE_ENV)
    if host is not None or port is not None or not endpoint:
        return None
    secret = token or environ.get(STORE_TOKEN_ENV, "").encode()
    return endpoint, secret or _token(environ, _host_of(endpoint))


class Place(NamedTuple):
    """Where the workers of a job without an agent's store meet."""

    host: str
    """Name or address of the host of rank 0."""
    port: int
    serves: bool
    """Whether it is this worker that serves."""
    port_from: str
    """Who has named the port."""


def find(
    environ: Mapping[str, str],
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Place:
    """Return where the workers meet; the arguments are those of `worker_store`.

    Raises:
        ValueError: something is missing, or makes no sense.
    """
    rank = _number(environ, "RANK", "rank=", 0) if rank is None else rank
    if world_size is None and "WORLD_SIZE" in environ:
        world_size = _number(environ, "WORLD_SIZE", "world_size=", 1)
    if rank < 0 or (world_size is not None and rank >= world_size):
        size = "" if world_size is None else f" in a world of {world_size}"
        raise ValueError(f"rank {rank}{size} is no worker's: ranks count from 0")
    if host is None:
        local = environ.get("LOCAL_WORLD_SIZE")
        if world_size is not None and local == str(world_size):
            host = "127.0.0.1"
        elif not (host := environ.get("MASTER_ADDR")):
            raise ValueError(_missing("MASTER_ADDR", "host="))
    source = "it was given as port="
    if port is None:
        if environ.get(STORE_PORT_ENV):
            port = _number(environ, STORE_PORT_ENV, "port=", 1)
            source = f"it is that of {STORE_PORT_ENV}"
        else:
            port = _number(environ, "MASTER_PORT", "port=", 1) + 1
            source = "it is MASTER_PORT + 1"
    if not 0 < port < 65536:
        raise ValueError(
            f"the workers' store cannot have port {port} ({source}): set {STORE_PORT_ENV} to a "
            f"number from 1 to 65535, the same for all workers"
        )
    return Place(host, port, rank == 0, source)


def _number(environ: Mapping[str, str], name: str, argument: str, least: int) -> int:
    text = environ.get(name, "")
    if not text:
        raise ValueError(_missing(name, argument))
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{name}={text!r} is no number from {least}")
    return int(text)


def _missing(name: str, argument: str) -> str:
    return (
        f"the workers' store cannot be found: neither {STORE_ENV} nor {name} is set; start the "
        f"workers with a launcher that does (regrow run, torchrun), or give {argument}"
    )


def _serve_or_connect(place: Place, token: bytes, deadline: float) -> StoreClient:
    from regrow.store._sockets import endpoint_of

    endpoint = endpoint_of(place.host, place.port)
    hang_ups = 0
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        if not place.serves:
            return _connect(endpoint, token, left)
        server = _serve(place, token, left)
        try:
            client = _connect(endpoint, token, left, refusal_is_final=True)
        except StoreError as error:
            if server is not None:
                server.close()
                raise
            # What had the port may have been the server of an earlier rank 0, that has ended now.
            hang_ups += isinstance(error, StoreHungUp)
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            again = refused or (isinstance(error, StoreHungUp) and hang_ups < _HANG_UPS)
            if not again or time.monotonic() + _PAUSE >= deadline:
                if refused:
                    why = "it is in use, and nobody listens there (a connection may have it)"
                    raise _cannot_listen(place, why) from error
                raise
            time.sleep(_PAUSE)
        else:
            if server is not None:
                client.leave_on_close(server)
            return client


def _serve(place: Place, token: bytes, timeout: float) -> ServerProcess | None:
    """Start the server; return None if somebody listens there already."""
    import errno

    from regrow.store._process import start_server
    from regrow.store._sockets import listen

    try:
        listener = listen(place.host, place.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise _cannot_listen(place, error.strerror or str(error)) from error
    with listener:
        return start_server(
            token=token,
            listener=listener,
            tls=worker_tls(os.environ),
            on_demand=SERVICES,
            linger=True,
            timeout=timeout,
        )


def _cannot_listen(place: Place, why: str) -> StoreConnectionError:
    return StoreConnectionError(
        f"rank 0 is to serve the workers' store, and cannot listen on port {place.port} for "
        f"{place.host}: {why}"
    )


def _connect(
    endpoint: str, token: bytes, timeout: float, *, refusal_is_final: bool = False
) -> StoreClient:
    from regrow.store._client import connect
    from regrow.store._own_secret import is_loopback

    here = is_loopback(_host_of(endpoint))
    return connect(
        endpoint,
        token=token,
        tls=worker_tls(os.environ),
        timeout=timeout,
        session_grace=LOCAL_SESSION_GRACE if here else SESSION_GRACE,
        spare_round_trips=SPARE_ROUND_TRIPS,
        server_may_start=True,
        refusal_is_final=refusal_is_final,
    )


def worker_tls(environ: Mapping[str, str]) -> Tls | None:
    """Return what REGROW_STORE_TLS says of certificates.

    Raises:
        ValueError: it is not a JSON object of the fields of `Tls`.
    """
    text = environ.get(STORE_TLS_ENV)
    if not text:
        return None
    import json

    from regrow.store._tls import Tls

    try:
        return Tls(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{STORE_TLS_ENV}={text!r} is no JSON object of certfile, keyfile, cafile and "
            f"server_hostname: {error}"
        ) from error


def _token(environ: Mapping[str, str], host: str) -> bytes:
    from regrow.store._own_secret import is_loopback, own_secret

    token = load_token(environ)
    if token is not None:
        return token
    if is_loopback(host):
        return own_secret(environ)
    raise StoreAuthError(
        f"the workers of several hosts need a token to share a store at {host}. Make one, once: "
        f"regrow token ~/job.token (and copy it to hosts that do not see your home directory); "
        f"then set REGROW_TOKEN_FILE=~/job.token for all workers"
    )


def _host_of(endpoint: str) -> str:
    """The host of an endpoint; that of a unix socket is this one."""
    from regrow.store._dial import parse_endpoint

    where = parse_endpoint(endpoint)
    return "localhost" if isinstance(where, str) else where[0]


def _advised(error: StoreError, place: Place) -> StoreError:
    """The same error, with what can be done about the port."""
    return type(error)(
        f"{error}. The workers' store has port {place.port} of {place.host} ({place.port_from}), "
        f"and rank 0 serves it: if that port is another program's, set {STORE_PORT_ENV} to a free "
        f"one, the same for all workers"
    )
