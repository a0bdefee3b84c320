"""`FaultOrders`: the connections to the workers that inject faults into themselves.

A worker connects when it imports regrow (`regrow._chaos`). The kernel adds its process id and its
user, so an order reaches the worker that it is for, and processes of other users are refused. All
methods are called in one thread.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from regrow.chaos import Rule

_PEER = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid
_MOST_CONNECTIONS = 1024
_MOST_ORDERS = 1000  # that may still be answered
_LONGEST_REPORT = 4096

logger = get_logger(__name__)


class RefusedFault(NamedTuple):
    """A worker's report that it could not inject a fault."""

    rank: int
    fault: str
    why: str


class FaultOrders:
    """Sends orders to the workers of this node, and reads their reports."""

    def __init__(self) -> None:
        # A name in the abstract namespace leaves no file, however the agent ends.
        self.address = f"regrow-chaos-{os.urandom(16).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._connections: dict[socket.socket, int] = {}  # to the pids of workers
        self._sent: dict[int, tuple[int, str]] = {}  # rank and fault by number of the order
        self._numbers = count()

    def open(self) -> None:
        """Listen at `address`."""
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        self._listener.setblocking(False)

    def close(self) -> None:
        """Close all connections."""
        for connection in (self._listener, *self._connections):
            connection.close()

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait for."""
        return [self._listener.fileno(), *(each.fileno() for each in self._connections)]

    def handle(self, readable: Collection[int]) -> list[RefusedFault]:
        """Accept and read what has arrived; return the faults that were not possible."""
        if self._listener.fileno() in readable:
            self._accept()
        refused: list[RefusedFault] = []
        for connection in [each for each in self._connections if each.fileno() in readable]:
            if not self._receive(connection, refused.append):
                del self._connections[connection]
                connection.close()
        return refused

    def send(self, rule: Rule, rank: int, pid: int, before: Callable[[], None]) -> bool:
        """Order a worker to inject a fault into itself.

        Args:
            rule: the fault.
            rank: global rank of the worker.
            pid: its process id.
            before: called before the order is sent, if the worker is connected.

        Returns:
            Whether the worker is connected.
        """
        connection = next((each for each, of in self._connections.items() if of == pid), None)
        if connection is None:
            return False
        number = next(self._numbers)
        order = {"id": number, "fault": rule.fault, "for_s": rule.for_s, "slowdown": rule.slowdown}
        self._sent[number] = rank, rule.fault
        self._sent.pop(number - _MOST_ORDERS, None)
        before()
        with suppress(OSError):  # it has just ended
            connection.send(json.dumps(order).encode() + b"\n")
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            pid, uid, _ = _PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            if uid != os.getuid() or len(self._connections) >= _MOST_CONNECTIONS:
                connection.close()
                return
            connection.setblocking(False)
            self._connections[connection] = pid

    def _receive(self, connection: socket.socket, refuse: Callable[[RefusedFault], None]) -> bool:
        """Read reports; return whether the connection stays open."""
        data = b""
        with suppress(OSError):
            data = connection.recv(_LONGEST_REPORT)
        for line in data.splitlines():
            try:
                report = json.loads(line)
                rank, fault = self._sent.pop(report["id"])
                refuse(RefusedFault(rank, fault, str(report["why"])[:200]))
            except (ValueError, TypeError, KeyError, RecursionError):
                logger.warning("--chaos: closed a connection for a malformed report: %.200r", line)
                return False
        return bool(data)
