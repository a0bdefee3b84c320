"""Bytes from one rank to another: the interface, and a transport through the workers' store.

A message is a buffer. The receiver knows its length. Messages from one rank to another arrive in
the order in which they were sent.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from regrow.state.choice import StateError

if TYPE_CHECKING:
    from regrow.store import Store

UNREAD: Final = 4
"""Messages that a sender may be ahead of a receiver; this bounds the memory of the store."""


class Transport(Protocol):
    """Sends and receives messages; ranks are initial ranks."""

    def send(self, rank: int, data: memoryview) -> None:
        """Send a message; the buffer may be changed when the call has returned."""

    def receive(self, rank: int, into: memoryview) -> None:
        """Receive a message that has the length of the buffer."""


class StoreTransport:
    """Transport through the store of the iteration, for ranks without a process group.

    Args:
        store: the store; a message must fit into one of its values.
        rank: initial rank of this process.
        timeout: how long one message may take.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(self, rank: int, data: memoryview) -> None:
        """See `Transport`.

        Raises:
            StoreError: the store is lost, or the receiver has not read earlier messages in time.
        """
        number = self._sent[rank]
        self._sent[rank] += 1
        if number >= UNREAD:
            read = f"{self._rank}>{rank}/{number - UNREAD}/read"
            self._store.wait([read], self._timeout)
            self._store.delete_key(read)
        self._store.set(f"{self._rank}>{rank}/{number}", bytes(data))

    def receive(self, rank: int, into: memoryview) -> None:
        """See `Transport`.

        Raises:
            StoreError: the store is lost, or the message has not arrived in time.
            StateError: the message has another length.
        """
        key = f"{rank}>{self._rank}/{self._received[rank]}"
        self._received[rank] += 1
        self._store.wait([key], self._timeout)
        data = self._store.get(key)
        self._store.delete_key(key)
        self._store.set(f"{key}/read", b"")
        if len(data) != len(into):
            raise StateError(
                f"rank {rank} has sent a message of {len(data)} bytes in place of {len(into)}"
            )
        into[:] = data
