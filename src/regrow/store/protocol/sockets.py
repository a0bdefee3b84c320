"""Addresses and socket options that both ends of a store connection use."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from contextlib import suppress

from regrow.store.limits import BACKLOG, KEEP_COUNT, KEEP_IDLE_S, KEEP_INTERVAL_S

TCP_THIN_LINEAR_TIMEOUTS = 16
_RTT = slice(68, 72)  # of struct tcp_info: tcpi_rtt, in microseconds
"""Linux only; Python's socket module has no name for either constant."""


def parse_endpoint(endpoint: str) -> tuple[str, int] | str:
    """Return "host:port" as (host, port) and "unix:path" as the path."""
    if endpoint.startswith("unix:"):
        return endpoint[len("unix:") :]
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f'{endpoint!r} is not a store endpoint; use "host:port", "[::1]:port" or "unix:/path"'
        )
    return host.strip("[]"), int(port)


def host_of(endpoint: str) -> str:
    """Return the host of an endpoint; for a unix socket, this host."""
    where = parse_endpoint(endpoint)
    return "localhost" if isinstance(where, str) else where[0]


def endpoint_of(host: str, port: int) -> str:
    """Return an address as "host:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint_of_socket(listener: socket.socket) -> str:
    """Return the endpoint of a listening socket: "host:port" or "unix:path"."""
    address = listener.getsockname()
    return f"unix:{address}" if isinstance(address, str) else endpoint_of(*address[:2])


def is_loopback(host: str) -> bool:
    """Return whether a name or address is a loopback address of this host."""
    number = host.startswith("127.") and host.replace(".", "").isdecimal()
    return host in ("localhost", "::1") or number


def listen(host: str, port: int) -> socket.socket:
    """Listen for clients that know this host by a name or an address.

    The socket listens as narrowly as possible. If `host` is an address of this host, it listens on
    that address only. Otherwise it listens on every address: the other hosts may know this host by
    the address of a gateway, and a name may resolve differently on each host.

    Args:
        host: name or address that the other hosts use.
        port: the port; 0: a free port.

    Raises:
        OSError: the address is in use (EADDRINUSE), or is not available.
    """
    if is_loopback(host):
        return listen_at("::1" if host == "::1" else "127.0.0.1", port)
    try:
        if family_of(host) is not None:
            return listen_at(host, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    try:
        return listen_at("::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return listen_at("0.0.0.0", port)  # a host without IPv6


def family_of(host: str) -> socket.AddressFamily | None:
    """Return the family of an IP address; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):  # a null character
            socket.inet_pton(family, host)
            return family
    return None


def listen_at(address: str, port: int, *, only_v6: bool = False) -> socket.socket:
    """Listen on one address, or on every address ("::", "0.0.0.0").

    Args:
        address: an address of this host.
        port: the port; 0: a free port.
        only_v6: if the address is "::", accept no connections over IPv4.

    Raises:
        OSError: the address is in use (EADDRINUSE), or is not available.
    """
    both = address == "::" and not only_v6 and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server(
        (address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
    )


def listen_unix(path: str) -> socket.socket:
    """Listen on a unix socket that only this user may open; replace one that a server left there.

    Raises:
        OSError: the path is not available.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116 - pathlib takes long to import
            os.unlink(path)
    listener = socket.create_server(path, family=socket.AF_UNIX, backlog=BACKLOG)
    os.chmod(path, 0o600)  # noqa: PTH101 - as above
    return listener


def round_trip(sock: socket.socket) -> float:
    """Return the round-trip time to the other host in seconds, as the kernel measured it.

    The result is 0 if the other end is on this host.
    """
    if sock.family == socket.AF_UNIX:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.stop)
    return int.from_bytes(info[_RTT], sys.byteorder) / 1e6


def keep_alive(sock: socket.socket) -> None:
    """Make the kernel detect a host that vanished, about 11 s after its last sign of life."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Only one small message is in flight at a time, so each further loss would double the wait for
    # the next try. A few losses in a row on a bad link would cost a healthy node its lease.
    sock.setsockopt(socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_COUNT)
    lost_after_ms = (KEEP_IDLE_S + KEEP_INTERVAL_S * KEEP_COUNT) * 1000
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_ms)
