"""Reservation of a TCP port for another process, until that process listens on it.

A launcher must send all workers the port of worker rank 0 before that worker exists. Finding a free
port, closing it and using it later is a race that a busy host loses. Between the close and the
worker's `listen`, the kernel may assign the port to any outgoing connection of this host.

The solution is a bound socket that does not listen: it holds its port. If both sockets set
SO_REUSEADDR, Linux lets a second socket bind the same port and listen on it. torch's TCPStore and
every common server set the option.

Guaranteed while the reservation is held:
- The kernel assigns the port to no process that requests *any* port, neither by `bind(0)` nor by a
  `connect` without a bind.
- A `bind` to this port without SO_REUSEADDR is refused.
- A `bind` with SO_REUSEADDR succeeds, and one of these sockets may listen.

Not guaranteed: that the process that names this port, with SO_REUSEADDR, is the intended one. No
process gets the port by chance, but two jobs that are configured with the same number still
collide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from types import TracebackType
    from typing import Self


class PortReservation:
    """A free TCP port, held by a bound socket that does not listen, until `close`.

    Args:
        host: the literal address on which to hold the port; "" is every address of the host, IPv6
            and IPv4.
        port: the port to hold; 0 takes a free one.

    Raises:
        OSError: the port is not available; the text names it.
    """

    __slots__ = ("_socket", "port")

    port: int
    """The reserved TCP port."""

    def __init__(self, host: str = "", port: int = 0) -> None:
        self._socket = _bind(host, port)
        self.port = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port; a process that already listens on it keeps it."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _bind(host: str, port: int) -> socket.socket:
    import socket

    choices = (
        [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
        if host == ""
        else [(socket.AF_INET6 if ":" in host else socket.AF_INET, host)]
    )
    failure: OSError | None = None
    for family, address in choices:
        holder: socket.socket | None = None
        try:
            holder = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "" and family == socket.AF_INET6:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.bind((address, port))
        except OSError as error:
            if holder is not None:
                holder.close()
            failure = error
            continue
        return holder
    assert failure is not None
    raise OSError(
        failure.errno,
        f"cannot reserve port {port or '(any)'} on {host or 'all addresses'}: {failure.strerror}",
    )
