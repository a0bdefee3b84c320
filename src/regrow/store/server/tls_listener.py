"""The listening socket of a server with TLS: it limits the connections that agree on TLS.

asyncio creates the transport of a connection when both sides have agreed on TLS. Until then the
server has nothing to close, and any program that reaches the port could use up its descriptors. So
this socket remembers the connections that it has accepted. If there are too many, it ends the
oldest one; asyncio then closes it.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class TlsListener(socket.socket):
    """A listening socket in place of another one, which it closes.

    Args:
        listener: the other socket.
        most: most connections that may agree on TLS at the same time.
        ended: called with the address of each connection that this object ends.
    """

    def __init__(self, listener: socket.socket, most: int, ended: Callable[[object], None]) -> None:
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self._most, self._ended = most, ended
        self._begun: dict[int, tuple[socket.socket, object]] = {}
        """The connections that agree on TLS, or have failed, by descriptor; the oldest first."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; end the oldest one if there are too many."""
        sock, address = super().accept()
        self.agreed(sock.fileno())  # an earlier connection had this number
        self._begun[sock.fileno()] = sock, address
        if len(self._begun) > self._most:
            for fd in [fd for fd, (begun, _) in self._begun.items() if begun.fileno() != fd]:
                del self._begun[fd]
        if len(self._begun) > self._most:
            oldest, its_address = self._begun.pop(next(iter(self._begun)))
            with suppress(OSError):  # the other side has just closed it
                oldest.shutdown(socket.SHUT_RDWR)
            self._ended(its_address)
        return sock, address

    def agreed(self, fd: int) -> None:
        """Forget the connection with a descriptor, because both sides have agreed on TLS."""
        self._begun.pop(fd, None)
