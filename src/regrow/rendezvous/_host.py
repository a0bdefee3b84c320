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

What a name means may change: that of a host that has just been started may be unknown at first, or
mean the one before it, and then not even that host would serve. So while no server is reached, it
is found out again, ever more rarely.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous._errors import RendezvousConnectionError
from regrow.rendezvous.utils import check_host
from regrow.store import StoreConnectionError, StoreError
from regrow.store._own_secret import is_loopback

if TYPE_CHECKING:
    from regrow.store import ServerProcess, Tls

SERVICES = {"rendezvous": "regrow.rendezvous._service:create"}
LOOK_AGAIN = 2.0
"""Seconds without a server after which it is found out again whose the endpoint is, where that is
a name; later twice as many."""
LONGEST_LOOK = 15.0
"""The most of them."""


class Tries:
    """How long each try to reach the server lasts before it is found out again who serves.

    Args:
        host: name or address of the endpoint; what an address means does not change.
        is_host: what the user says about who serves, which does not either; None: find out.
        seconds: for all tries together.
    """

    def __init__(self, host: str, is_host: bool | None, seconds: float) -> None:
        self._certain = is_host is not None or _family(host) is not None
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._patience = LOOK_AGAIN
        self.last = False
        """Whether no try follows this one."""
        self.before = ""
        """What to add to its error: that there were others."""

    def next(self, *, here: bool) -> float:
        """Return the seconds for the next try; `here`: the endpoint is this host's own."""
        if self._certain or here:
            self.last, self.before = True, ""
            return self._seconds
        left = max(self._deadline - time.monotonic(), 0.0)
        limit = min(left, self._patience)
        self._patience = min(self._patience * 2, LONGEST_LOOK)
        self.last, self.before = limit == left, f", the last of {self._seconds:g} s"
        return limit


class Own(NamedTuple):
    """An address of the endpoint that is this host's own."""

    address: str
    listen: str
    """What to listen on: the address, or every one."""


class Place(NamedTuple):
    """Where the nodes meet, as this one sees it."""

    server: ServerProcess | None
    """Its server; None if another node serves."""
    reach: str
    """The name or address by which this node reaches it."""
    addr: str | None
    """This node's address as the others reach it, where that of its connection means another host
    to them; None elsewhere."""
    here: bool
    """Whether the endpoint is this host's own."""


def find_own(host: str, port: int) -> Own | None:
    """Return the first address of the endpoint that is this host's; None if there is none.

    Args:
        host: name or address.
        port: the port, from 1.

    Raises:
        ValueError: it is neither a name nor an address.
    """
    if host == "localhost":
        host = "127.0.0.1"  # which may be its second meaning, and is what everyone takes it for
    literal = _family(host)
    if literal is not None:
        return Own(host, host) if _binds(literal, host, port) else None
    check_host(host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None  # nobody can be reached by it yet; connecting says so if that stays
    for family, _, _, _, at in found:
        address = str(at[0])
        if _binds(family, address, port):
            return Own(address, _every(family))
    return None


def settle(host: str, port: int, token: bytes, tls: Tls | None, is_host: bool | None) -> Place:
    """Find out whether it is this node's to serve, and if so, start the server.

    Args:
        host: name or address of the endpoint.
        port: its port, from 1.
        token: the job's secret.
        tls: certificates.
        is_host: what the user says about that; None: find out.

    Raises:
        RendezvousConnectionError: this node is to serve, and cannot.
    """
    own = None if is_host is False else find_own(host, port)
    if own is not None:
        server = _serve(own.listen, port, token, tls)
        beyond = is_loopback(own.address) and not is_loopback(host)
        if server is None and own.listen != own.address and not beyond:
            # What is in the way may listen on another address of this host.
            server = _serve(own.address, port, token, tls)
        return Place(server, host, host if beyond else None, True)
    if not is_host:
        return Place(None, host, None, False)
    family = _family(host) or socket.AF_INET
    server = _serve(_every(family), port, token, tls)
    return Place(server, "::1" if family == socket.AF_INET6 else "127.0.0.1", host, True)


def _serve(listen: str, port: int, token: bytes, tls: Tls | None) -> ServerProcess | None:
    """Start the server; return None if somebody listens there already."""
    from regrow.store import start_server

    try:
        return start_server(listen, port, token=token, tls=tls, services=SERVICES, linger=True)
    except (OSError, ValueError, StoreError) as error:
        if _is_in_use(error):
            return None
        raise RendezvousConnectionError(
            f"this node is to serve the rendezvous, since the endpoint is its own address, and "
            f"cannot serve on port {port} of {listen}: {error}"
        ) from error


def _family(host: str) -> socket.AddressFamily | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family
    return None


def _every(family: int) -> str:
    return "::" if family == socket.AF_INET6 else "0.0.0.0"


def _binds(family: int, address: str, port: int) -> bool:
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
