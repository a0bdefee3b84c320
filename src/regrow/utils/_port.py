"""A TCP port kept for another process until that process listens on it.

A launcher must tell all workers the port on which worker rank 0 will listen,
before that worker exists. To find a free port, close it and hope is a race
that a busy host loses: between the close and the worker's `listen` any
connection out of this host may be given the port by the kernel.

The way out is that a bound socket which does not listen holds its port. With
SO_REUSEADDR set on both sides, Linux lets a second socket bind the same port
and listen on it. torch's TCPStore and every common server sets the option.

Guaranteed while the reservation is held:
- the kernel gives the port to nobody who asks for *any* port, neither to
  `bind(0)` nor to a `connect` without a bind;
- a `bind` to this very port without SO_REUSEADDR is refused;
- a `bind` with it succeeds, and one socket of those may listen.

Not guaranteed: that the process which names this very port, with
SO_REUSEADDR, is the one meant. Nobody finds the port by chance, but two jobs
that were given the same number by hand still collide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from types import TracebackType
    from typing import Self


class PortReservation:
    """A free TCP port, held bound and not listening until `close`.

    Args:
        host: the address literal to hold the port on; "" is every address of the host,
            IPv6 and IPv4.
        port: the port to hold; 0 takes a free one.

    Raises:
        OSError: the port cannot be had; the text names it.
    """

    __slots__ = ("_socket", "port")

    port: int
    """The TCP port that is held."""

    def __init__(self, host: str = "", port: int = 0) -> None:
        self._socket = _bind(host, port)
        self.port = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back; a socket that meanwhile listens on it is not disturbed."""
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
        f"cannot hold port {port or '(any)'} on {host or 'all addresses'}: {failure.strerror}",
    )
