"""Which node serves the place where all meet.

All nodes are given the same endpoint, and the first agent on that host is to serve it. Which host
that is cannot be guessed from names: a host has many, and some of them mean another host elsewhere.
So it is tried. An address that can be bound is one of this host's own (EADDRNOTAVAIL: it is not),
and a port on which somebody listens already (EADDRINUSE) is served, by an agent that was faster or
by a server that somebody runs for several jobs. Of two agents that try at the same time, one
listens and the other does not.

What the server listens on is as narrow as it can be: an address that the user gave is that address
and no other. A name may mean different addresses on different hosts (on many systems a host's own
name means 127.0.1.1 to itself), so there it is every address.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous._errors import RendezvousConnectionError
from regrow.store import StoreConnectionError, StoreError

if TYPE_CHECKING:
    from regrow.store import ServerProcess, Tls

SERVICES = {"rendezvous": "regrow.rendezvous._service:create"}


class Own(NamedTuple):
    """An address of the endpoint that is this host's own."""

    listen: str
    """What to listen on, as an address."""
    loopback: bool
    """Whether other hosts mean another address when they use the same name."""


def find_own(host: str, port: int) -> Own | None:
    """Return the first address of the endpoint that is this host's; None if there is none.

    Args:
        host: name or address.
        port: the port, from 1.
    """
    literal = _family(host)
    if literal is not None:
        return Own(host, False) if _binds(literal, host, port) else None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None  # nobody can be reached by it yet; connecting says so if that stays
    for family, _, _, _, at in found:
        address = str(at[0])
        if _binds(family, address, port):
            if host == "localhost":
                return Own(address, False)
            return Own("::" if family == socket.AF_INET6 else "0.0.0.0", is_loopback(address))
    return None


def serve(
    host: str, port: int, token: bytes, tls: Tls | None, is_host: bool | None
) -> tuple[ServerProcess | None, Own | None]:
    """Start the server if it is this node's to do.

    Args:
        host: name or address of the endpoint.
        port: its port, from 1.
        token: the job's secret.
        tls: certificates.
        is_host: what the user says about that; None: find out.

    Returns:
        The server, None if another node serves; and this host's address of the endpoint, if it
        has one.

    Raises:
        RendezvousConnectionError: this node is to serve, and cannot.
    """
    if is_host is False:
        return None, None
    own = find_own(host, port)
    if own is None and is_host:
        own = Own("::" if _family(host) == socket.AF_INET6 else "0.0.0.0", True)
    if own is None:
        return None, None
    from regrow.store import start_server

    try:
        server = start_server(
            own.listen, port, token=token, tls=tls, services=SERVICES, linger=True
        )
    except (OSError, ValueError, StoreError) as error:
        if _is_in_use(error):
            return None, own
        raise RendezvousConnectionError(
            f"this node is to serve the rendezvous on port {port} of {own.listen}, since {host} is "
            f"its own address, and cannot: {error}"
        ) from error
    return server, own


def is_loopback(address: str) -> bool:
    """Return whether an address means the host of whoever uses it."""
    return address == "::1" or address.startswith("127.")


def _family(host: str) -> socket.AddressFamily | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family
    return None


def _binds(family: socket.AddressFamily, address: str, port: int) -> bool:
    """Return whether the address is this host's, whoever has the port."""
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            # Anything but "not available" is about the port, and is said by whoever listens on it.
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _is_in_use(error: BaseException) -> bool:
    cause = error.__cause__
    return (
        isinstance(error, StoreConnectionError)
        and isinstance(cause, OSError)
        and cause.errno == errno.EADDRINUSE
    )
