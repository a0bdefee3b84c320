"""Bytes from one rank to another: the interface, and a transport over TCP.

A message is a buffer. The receiver knows its length. Messages from one rank to another arrive in
the order in which they were sent.

**Why not over torch's process group.** A rank may end while a state is on its way. gloo loses track
of a thread that waits for a message which was sent in part, and then the rank waits until the hard
time-out. A socket of this module ends with its process, and an interrupt ends a wait on it. It is
the same with numpy, with torch on any backend, and without both. The price is that a state does not
use a faster network than TCP.

**Who may connect.** The source publishes its address and a random key in the store of the
iteration, which only the ranks of the job can read. Source and target prove to each other that they
know the key. As with torch's own groups, nothing is encrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from regrow.state.choice import StateError
from regrow.store import listen

if TYPE_CHECKING:
    from types import TracebackType

    from regrow.store import Store

HANDSHAKE_S: Final = 5.0
"""Seconds within which a connection must prove that it belongs to a rank of the job."""
_HELLO: Final = struct.Struct("<q32s")  # initial rank, nonce
_PROOF: Final = 32  # bytes


class Transport(Protocol):
    """Sends and receives messages; ranks are initial ranks."""

    def send(self, rank: int, data: memoryview) -> None:
        """Send a message; the buffer may be changed when the call has returned."""

    def receive(self, rank: int, into: memoryview) -> None:
        """Receive a message that has the length of the buffer."""


class SocketTransport:
    """Transport over one TCP connection to each rank; a context manager that closes them.

    Args:
        store: a store that only the ranks of the job can read, with keys for this recovery.
        rank: initial rank of this process.
        timeout: how long to wait for a connection, and for each whole message.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._peers: dict[int, socket.socket] = {}

    def __enter__(self) -> SocketTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for peer in self._peers.values():
            peer.close()

    def accept(self, ranks: Collection[int]) -> None:
        """Wait until all of these ranks have connected to this one.

        Raises:
            StateError: a rank has not connected in time.
            OSError: this host has no free port.
        """
        deadline = self._deadline()
        host, key = own_host(), secrets.token_bytes(32)
        with listen(host, 0) as listener:
            address = (host, listener.getsockname()[1], key)
            self._store.set(f"source/{self._rank}", msgspec.msgpack.encode(address))
            while missing := set(ranks) - self._peers.keys():
                try:
                    listener.settimeout(_left(deadline))
                    peer, _ = listener.accept()
                except TimeoutError:
                    raise StateError(
                        f"rank {min(missing)} has not connected to rank {self._rank} at {host} "
                        f"within {self._timeout.total_seconds():g} s"
                    ) from None
                try:
                    rank = _admit(peer, key, missing, min(deadline, time.monotonic() + HANDSHAKE_S))
                except (OSError, EOFError):
                    rank = None  # a program that is no rank of this job, or a rank that has ended
                if rank is None:
                    peer.close()
                else:
                    self._add(rank, peer)

    def connect(self, rank: int) -> None:
        """Connect to a rank that waits in `accept`.

        Raises:
            StateError: there is no connection in time.
            StoreError: the rank has not published its address in time, or the store is lost.
        """
        name = f"source/{rank}"
        self._store.wait([name], self._timeout)
        host, port, key = msgspec.msgpack.decode(
            self._store.get(name), type=tuple[str, int, bytes], strict=True
        )
        deadline = self._deadline()
        try:
            peer = socket.create_connection((host, port), self._timeout.total_seconds())
        except OSError as error:
            raise StateError(
                f"rank {self._rank} cannot connect to rank {rank} at {host}, port {port}: {error}"
            ) from error
        self._add(rank, peer)
        try:
            _enter(peer, key, self._rank, deadline)
        except (OSError, EOFError) as error:
            raise StateError(
                f"the program at {host}, port {port}, has not proved that it is rank {rank}"
            ) from error

    def _add(self, rank: int, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[rank] = peer

    def send(self, rank: int, data: memoryview) -> None:
        """See `Transport`.

        Raises:
            StateError: the rank has ended, or has not read the message in time.
        """
        peer = self._peers[rank]
        peer.settimeout(self._timeout.total_seconds())  # of the whole message
        try:
            peer.sendall(data)
        except OSError as error:
            raise StateError(f"rank {rank} does not receive the state: {error}") from error

    def receive(self, rank: int, into: memoryview) -> None:
        """See `Transport`.

        Raises:
            StateError: the rank has ended, or the message has not arrived in time.
        """
        try:
            _read(self._peers[rank], into, self._deadline())
        except (OSError, EOFError) as error:
            raise StateError(f"rank {rank} does not send its state: {error}") from error

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout.total_seconds()


def own_host() -> str:
    """Return a name or address of this host that the other ranks of the job can reach.

    It is the address with which this host sends to MASTER_ADDR. On the host of MASTER_ADDR, that
    may be a loopback address; MASTER_ADDR is then what the other hosts use.
    """
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return master if own.startswith("127.") or own == "::1" else own


def _admit(
    peer: socket.socket, key: bytes, expected: Collection[int], deadline: float
) -> int | None:
    """Return the rank that has connected; None for a program that does not know the key."""
    rank, nonce = _HELLO.unpack(_read(peer, memoryview(bytearray(_HELLO.size)), deadline))
    own = secrets.token_bytes(32)
    peer.sendall(own + _proof(key, b"source", rank, nonce, own))
    proof = bytes(_read(peer, memoryview(bytearray(_PROOF)), deadline))
    known = hmac.compare_digest(proof, _proof(key, b"target", rank, own, nonce))
    return rank if known and rank in expected else None


def _enter(peer: socket.socket, key: bytes, rank: int, deadline: float) -> None:
    nonce = secrets.token_bytes(32)
    peer.sendall(_HELLO.pack(rank, nonce))
    answer = bytes(_read(peer, memoryview(bytearray(32 + _PROOF)), deadline))
    theirs, proof = answer[:32], answer[32:]
    if not hmac.compare_digest(proof, _proof(key, b"source", rank, nonce, theirs)):
        raise EOFError("it does not know the key")
    peer.sendall(_proof(key, b"target", rank, theirs, nonce))


def _proof(key: bytes, role: bytes, rank: int, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, role + _HELLO.pack(rank, first) + second, "sha256")


def _read(peer: socket.socket, into: memoryview, deadline: float) -> memoryview:
    """Fill a buffer.

    Raises:
        EOFError: the other end has closed the connection.
        TimeoutError: the deadline, a time of the monotonic clock, has passed.
    """
    rest = into
    while rest:
        peer.settimeout(_left(deadline))
        count = peer.recv_into(rest)
        if count == 0:
            raise EOFError("the connection was closed")
        rest = rest[count:]
    return into


def _left(deadline: float) -> float:
    """Return the seconds until a deadline, for `settimeout`, which does not take 0 as a time-out.

    Raises:
        TimeoutError: it has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds
