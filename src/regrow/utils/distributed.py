"""Free ports, and torch's TCPStore for those who want one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from ._torch_store import create_c10d_store

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]


def __getattr__(name: str) -> object:
    if name != "create_c10d_store":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._torch_store import create_c10d_store

    return create_c10d_store


def get_socket_with_port() -> socket.socket:
    """A socket that listens on a free port of the loopback address.

    The port is taken as long as the socket is open. Whoever closes it to hand the
    port to somebody else races with every other process that asks for a port:
    `PortReservation` does not.

    Raises:
        OSError: neither 127.0.0.1 nor ::1 gave a port.
    """
    import socket

    # Literal addresses: resolving "localhost" may ask a name server, which takes seconds.
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            reason = error
            continue
        try:
            listener.bind((address, 0))
            listener.listen(0)
        except OSError as error:
            listener.close()
            reason = error
            continue
        return listener
    raise OSError(reason.errno, f"no free port on 127.0.0.1 or ::1: {reason.strerror}")


def get_free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago (it is not reserved)."""
    with get_socket_with_port() as listener:
        port: int = listener.getsockname()[1]
        return port
