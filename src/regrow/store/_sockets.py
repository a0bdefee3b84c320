"""What both ends of a store connection say of an address, and ask of a socket."""

from __future__ import annotations

import errno
import socket
import sys

from regrow.store._own_secret import is_loopback

BACKLOG = 4096
"""How many connections the kernel takes for a server that has not come to them yet."""
KEEP_IDLE = 5
"""Seconds of silence before the kernel asks whether the other host is still there."""
KEEP_INTERVAL = 2
"""Seconds between two such questions."""
KEEP_COUNT = 3
"""Unanswered questions after which the connection counts as lost."""
TCP_THIN_LINEAR_TIMEOUTS = 16
_RTT = slice(68, 72)  # of struct tcp_info: tcpi_rtt, in microseconds
"""Linux; Python's socket module has no name for it."""


def endpoint_of(host: str, port: int) -> str:
    """Return an address as "host:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint_of_socket(listener: socket.socket) -> str:
    """Return what to connect to for a socket that listens: "host:port" or "unix:path"."""
    address = listener.getsockname()
    return f"unix:{address}" if isinstance(address, str) else endpoint_of(*address[:2])


def listen(host: str, port: int) -> socket.socket:
    """Listen for whoever knows this host by a name or an address.

    As narrowly as possible: on the address itself, if it is one and this host's own, else on every
    address. What others know this host by may be the address of a gateway, and what a name means is
    different on different hosts.

    Args:
        host: name or address, as the others have it.
        port: the port; 0 takes a free one.

    Raises:
        OSError: it is in use (EADDRINUSE), or cannot be had.
    """
    if is_loopback(host):
        return _listen("::1" if host == "::1" else "127.0.0.1", port)
    try:
        if _is_address(host):
            return _listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    try:
        return _listen("::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _listen("0.0.0.0", port)  # a host without IPv6


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def round_trip(sock: socket.socket) -> float:
    """Seconds to the other host and back, as the kernel has measured them; 0 on this one."""
    if sock.family == socket.AF_UNIX:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.stop)
    return int.from_bytes(info[_RTT], sys.byteorder) / 1e6


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a host that vanished: about 11 s after its last sign of life."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # With one small message under way at a time, every further loss of it would double the wait for
    # the next try; a few in a row on a lossy link would cost a healthy node its lease.
    sock.setsockopt(socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_COUNT)
    lost_after_ms = (KEEP_IDLE + KEEP_INTERVAL * KEEP_COUNT) * 1000
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_ms)
