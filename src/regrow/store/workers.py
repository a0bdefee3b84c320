"""The store that the workers of a job share, and how each worker finds it.

Under `regrow run`, the agent of node rank 0 holds a listening socket, and starts the server when
the first worker connects. The environment has the address and the token (REGROW_STORE,
REGROW_STORE_TOKEN). Other launchers provide only the addresses of torch. Then the worker of rank 0
starts the server, on a port beside MASTER_PORT, and the other workers try until it listens. The
server is a process of its own. It continues while a worker is connected, so the others learn why
rank 0 died. The bind of the port shows whether a server of an earlier rank 0 still exists.

The end of a worker is detected at once by the end of its connection. Its session then has half a
second to resume, plus a few round trips of a slow network. On the server's own host the session has
a tenth of that, because there only the end of a process breaks a connection. A host that vanishes
sends nothing. In this case the server's kernel probes the host (`protocol.sockets.keep_alive`). The
kernel of a worker answers, even when the worker is stopped or holds the GIL. After 11 s without an
answer, the connection is lost.

Every program that can connect can use the services below. The server loads each service at its
first question.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from regrow.store.errors import StoreAuthError, StoreConnectionError, StoreError, StoreHungUp
from regrow.store.limits import (
    HANG_UPS,
    LOCAL_WORKER_GRACE_S,
    PORT_PAUSE_S,
    SPARE_ROUND_TRIPS,
    WORKER_GRACE_S,
)
from regrow.store.protocol import sockets
from regrow.store.protocol.token import load_token, own_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.store.client.client import StoreClient
    from regrow.store.protocol.tls import Tls
    from regrow.store.server.process import ServerProcess

STORE_ENV: Final = "REGROW_STORE"
"""Address of the workers' store: "unix:/path" or "host:port"."""
STORE_TOKEN_ENV: Final = "REGROW_STORE_TOKEN"
"""Token with which workers connect to the store."""
STORE_PORT_ENV: Final = "REGROW_STORE_PORT"
"""Port on which the worker of rank 0 serves the store, if no agent serves it."""
LAUNCHED_SIZE_ENV: Final = "REGROW_WORLD_SIZE"
"""WORLD_SIZE as the launcher set it; only where a wrapper has changed WORLD_SIZE."""
STORE_TLS_ENV: Final = "REGROW_STORE_TLS"
"""A JSON object with the fields of `Tls`; empty: connections are not encrypted."""

SERVICES: Final = {
    "heartbeat": "regrow.heartbeat.service:create",
    "inprocess": "regrow.inprocess.group.group_service:InprocessService",
}
"""The services of the workers' store besides keys."""


def worker_store(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    token: bytes | None = None,
    timeout: float = 30.0,
    stop: int | None = None,
) -> StoreClient:
    """Connect to the store that all workers of this job share, under any launcher.

    Under `regrow run`, the agent's environment has the address. Under other launchers, the worker
    of rank 0 starts the server, if none exists. The server outlives that worker as long as other
    workers are connected.

    Args:
        rank: rank of this worker; default RANK.
        world_size: number of workers; default WORLD_SIZE as the launcher set it. It is only
            compared with LOCAL_WORLD_SIZE: if they are equal, all workers meet on 127.0.0.1.
        host: name or address of the host of rank 0; default MASTER_ADDR. If host or port is given,
            the agent's store is not used.
        port: port of the store; default REGROW_STORE_PORT, else MASTER_PORT + 1.
        token: secret that all workers share; default the agent's, else REGROW_TOKEN or
            REGROW_TOKEN_FILE. If all workers are on this host, the last default is the user's own
            secret, from a file.
        timeout: seconds within which the connection must succeed.
        stop: a descriptor; if it becomes readable during the connection to the agent's store,
            StoreClosedError is raised.

    Returns:
        A session with the store, which ends at most half a second after this process ends.

    Raises:
        ValueError: an argument or a variable is missing or invalid.
        StoreConnectionError: the store is not reachable in that time, or cannot be served.
        StoreAuthError: there is no token, or it differs from the token of the other workers.
        StoreProtocolError: another service listens on that port.
        StoreTimeout: the program on that port did not answer.
    """
    endpoint, secret, address = locate(rank, world_size, host, port, token)
    if address is None:
        return _connect(endpoint, secret, timeout, stop=stop)
    try:
        if address.serves:
            return _serve_or_connect(address, secret, time.monotonic() + timeout)
        return _connect(endpoint, secret, timeout)
    except StoreError as error:
        raise type(error)(
            f"{error}. The workers' store has port {address.port} of {address.host} "
            f"({address.port_from}), and rank 0 serves it: if another program uses that port, set "
            f"{STORE_PORT_ENV} to a free one, the same for all workers"
        ) from error


def visit(endpoint: str, token: bytes, timeout: float) -> StoreClient:
    """Start a session with the workers' store at an endpoint; the store must already run.

    Raises:
        StoreError: the store is not reachable in `timeout` seconds; the text has the reason.
    """
    return _connect(endpoint, token, timeout, refusal_is_final=True)


class StoreAddress(NamedTuple):
    """Where the workers' store listens if no agent serves it, as under other launchers."""

    host: str
    """Name or address of the host of rank 0."""
    port: int
    serves: bool
    """Whether this worker serves the store."""
    port_from: str
    """Where the port number comes from, for error texts."""


def locate(
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    token: bytes | None = None,
) -> tuple[str, bytes, StoreAddress | None]:
    """Find the workers' store; the arguments are those of `worker_store`.

    Returns:
        The endpoint, the token, and the address. The agent's store has no `StoreAddress`.

    Raises:
        ValueError: an argument or a variable is missing or invalid.
        StoreAuthError: there is no token.
    """
    environ = os.environ
    endpoint = environ.get(STORE_ENV)
    if endpoint and host is None and port is None:
        token = token or environ.get(STORE_TOKEN_ENV, "").encode()
        return endpoint, token or _token(environ, sockets.host_of(endpoint)), None
    address = find(environ, rank, world_size, host, port)
    endpoint = sockets.endpoint_of(address.host, address.port)
    return endpoint, token or _token(environ, address.host), address


def find(
    environ: Mapping[str, str],
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> StoreAddress:
    """Return where the workers meet; the arguments are those of `worker_store`.

    Raises:
        ValueError: a value is missing or invalid.
    """
    rank = _number(environ, "RANK", "rank=", 0) if rank is None else rank
    if world_size is None:
        world_size = launched_world_size(environ)
    if rank < 0 or (world_size is not None and rank >= world_size):
        size = "" if world_size is None else f" in a world of {world_size}"
        raise ValueError(f"no worker has rank {rank}{size}: ranks count from 0")
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
    return StoreAddress(host, port, rank == 0, source)


def launched_world_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of workers that the launcher started; None if it is not known.

    A wrapper (`regrow.inprocess`) sets WORLD_SIZE to the number of active ranks, which is never
    more than the launcher's. A greater WORLD_SIZE is that of another launcher, started since.

    Raises:
        ValueError: the variable is not a number.
    """
    names = ("WORLD_SIZE", LAUNCHED_SIZE_ENV)
    sizes = [_number(environ, name, "world_size=", 1) for name in names if name in environ]
    return max(sizes, default=None)


def _number(environ: Mapping[str, str], name: str, argument: str, least: int) -> int:
    text = environ.get(name, "")
    if not text:
        raise ValueError(_missing(name, argument))
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{name}={text!r} is not a whole number of at least {least}")
    return int(text)


def _missing(name: str, argument: str) -> str:
    return (
        f"the workers' store cannot be found: neither {STORE_ENV} nor {name} is set; start the "
        f"workers with a launcher that sets them (regrow run, torchrun), or give {argument}"
    )


def _serve_or_connect(address: StoreAddress, token: bytes, deadline: float) -> StoreClient:
    """Start the server, or connect to the server that an earlier rank 0 has started."""
    endpoint = sockets.endpoint_of(address.host, address.port)
    hang_ups = 0
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        server = _serve(address, token, left)
        try:
            client = _connect(endpoint, token, left, refusal_is_final=True)
        except StoreError as error:
            if server is not None:
                server.close()
                raise
            # The server of an earlier rank 0 may have held the port, and may have ended now.
            hang_ups += isinstance(error, StoreHungUp)
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            again = refused or (isinstance(error, StoreHungUp) and hang_ups < HANG_UPS)
            if not again or time.monotonic() + PORT_PAUSE_S >= deadline:
                if refused:
                    why = "it is in use, and no program listens there (a connection may have it)"
                    raise _cannot_listen(address, why) from error
                raise
            time.sleep(PORT_PAUSE_S)
        else:
            if server is not None:
                client.leave_on_close(server)
            return client


def _serve(address: StoreAddress, token: bytes, timeout: float) -> ServerProcess | None:
    """Start the server; return None if a server listens there already."""
    import errno

    from regrow.store.server.process import start_server

    try:
        listener = sockets.listen(address.host, address.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise _cannot_listen(address, error.strerror or str(error)) from error
    with listener:
        return start_server(
            token=token,
            listener=listener,
            tls=worker_tls(os.environ),
            on_demand=SERVICES,
            linger=True,
            timeout=timeout,
        )


def _cannot_listen(address: StoreAddress, why: str) -> StoreConnectionError:
    return StoreConnectionError(
        f"rank 0 serves the workers' store, and cannot listen on port {address.port} for "
        f"{address.host}: {why}"
    )


def _connect(
    endpoint: str,
    token: bytes,
    timeout: float,
    *,
    refusal_is_final: bool = False,
    stop: int | None = None,
) -> StoreClient:
    from regrow.store.client.client import connect

    here = sockets.is_loopback(sockets.host_of(endpoint))
    return connect(
        endpoint,
        token=token,
        tls=worker_tls(os.environ),
        timeout=timeout,
        session_grace=LOCAL_WORKER_GRACE_S if here else WORKER_GRACE_S,
        spare_round_trips=SPARE_ROUND_TRIPS,
        server_may_start=True,
        refusal_is_final=refusal_is_final,
        stop=stop,
    )


def worker_tls(environ: Mapping[str, str]) -> Tls | None:
    """Return the TLS settings from REGROW_STORE_TLS.

    Raises:
        ValueError: the variable is not a JSON object with the fields of `Tls`.
    """
    text = environ.get(STORE_TLS_ENV)
    if not text:
        return None
    import json

    from regrow.store.protocol.tls import Tls

    try:
        return Tls(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{STORE_TLS_ENV}={text!r} is not a JSON object of certfile, keyfile, cafile, "
            f"server_hostname and digest: {error}"
        ) from error


def _token(environ: Mapping[str, str], host: str) -> bytes:
    token = load_token(environ)
    if token is not None:
        return token
    if sockets.is_loopback(host):
        return own_secret(environ)
    raise StoreAuthError(
        f"the workers of several hosts need a token to share a store at {host}. Make one, once: "
        f"regrow token ~/job.token (and copy it to hosts that do not see your home directory); "
        f"then set REGROW_TOKEN_FILE=~/job.token for all workers"
    )
