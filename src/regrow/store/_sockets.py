"""What both ends of a store connection say of an address, and ask of a socket."""

from __future__ import annotations

import socket

KEEP_IDLE = 5
"""Seconds of silence before the kernel asks whether the other host is still there."""
KEEP_INTERVAL = 2
"""Seconds between two such questions."""
KEEP_COUNT = 3
"""Unanswered questions after which the connection counts as lost."""
TCP_THIN_LINEAR_TIMEOUTS = 16
"""Linux; Python's socket module has no name for it."""


def endpoint_of(host: str, port: int) -> str:
    """Return an address as "host:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
