"""Free ports, and torch's TCPStore for programs that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils.lazy import lazily

if TYPE_CHECKING:
    import socket

    from regrow.utils.torch_store import create_c10d_store

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

__getattr__, __dir__ = lazily(globals(), {"torch_store": "create_c10d_store"})


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on a free port of the loopback address.

    The port is reserved as long as the socket is open. A caller that closes the socket and passes
    the port to another process has a race: any process that requests a port may get this one.
    `PortReservation` has no such race.

    Raises:
        OSError: neither 127.0.0.1 nor ::1 has a free port.
    """
    import socket

    # Literal addresses, because a name server may have to resolve "localhost", which takes seconds.
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
    """Return a free TCP port of the loopback address; the port is not reserved."""
    with get_socket_with_port() as listener:
        port: int = listener.getsockname()[1]
        return port
