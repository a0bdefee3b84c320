"""The settings of a store: limits that users may set (`Limits`), and fixed times and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

MiB = 1 << 20

# --- calls and connections of a client

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""Default time-out of a call, as in c10d."""
SESSION_GRACE: Final = timedelta(seconds=5)
"""Default time for which a session outlives a lost connection."""
CLOSE_S: Final = 2.0
"""Seconds that closing a client waits for the server, and for a thread that looks up a name."""
HANDSHAKE_S: Final = 10.0
"""Seconds within which a server that accepted the connection must answer."""
TRY_S: Final = 2.0
"""Seconds for one try of an address, before the next address or the same one again.

The kernel doubles its wait after each of its own tries, so it would reconnect long after a link is
up again.
"""
FIRST_PAUSE_S: Final = 0.01
"""Seconds before the second try; so short that callers do not notice a connection reset."""
LONGEST_PAUSE_S: Final = 0.5
"""Maximum seconds between two tries."""
WARN_AFTER_S: Final = 5.0
"""Seconds after which the client reports, once, that a first connection takes long.

The report has the address and the last error. Without it, a program that does not answer on that
port would use up the whole time-out without a log line.
"""

# --- sockets

BACKLOG: Final = 4096
"""Connections that the kernel keeps for a server that has not accepted them yet."""
KEEP_IDLE_S: Final = 5
"""Seconds of silence before the kernel probes the other host."""
KEEP_INTERVAL_S: Final = 2
"""Seconds between two probes."""
KEEP_COUNT: Final = 3
"""Number of unanswered probes after which the connection counts as lost."""
CHUNK: Final = 1 << 16
"""Bytes that one `recv` reads at most."""

# --- the server

TURN_FRAMES: Final = 128
"""Requests of one client that the server runs before it serves the other clients."""
TURN_BYTES: Final = 1 << 18
"""Bytes of answers after which a client's turn ends."""
LATE_S: Final = 0.05
"""Seconds by which a late timer shows that the server itself was stopped or busy."""
SERVICE_REST_S: Final = 1.0
"""Seconds without calls for a service that raised an exception at its deadline."""
FIRST_CLIENTS_S: Final = 2.0
"""Seconds from the start of a lingering server within which its first clients may connect."""
QUIET_S: Final = 1.0
"""Seconds without a session after which a lingering server expects no client to reconnect."""
LOG_CLOSE_S: Final = 0.5
"""Seconds within which a server that ends writes its last lines."""
REFUSALS_S: Final = 60.0
"""Seconds between two lines about refusals of one address."""
REFUSED_PEERS: Final = 64
"""Number of addresses that have lines of their own at the same time."""

# --- the workers' store

WORKER_GRACE_S: Final = 0.5
"""Seconds within which a worker with a broken connection may resume its session."""
LOCAL_WORKER_GRACE_S: Final = 0.05
"""The same grace on the host of the server."""
SPARE_ROUND_TRIPS: Final = 6.0
"""Round trips added to that grace: a reconnect takes three, if no packet is lost."""
PORT_PAUSE_S: Final = 0.05
"""Seconds before the next try of a port with a server that has just ended."""
HANG_UPS: Final = 3
"""Number of times that the program on the port may hang up before it counts as another service.

A server that is about to end may hang up once.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a store; a server sends its clients `frame_bytes` only."""

    key_bytes: int = 4096
    """Maximum length of a key, in bytes of UTF-8."""
    value_bytes: int = 16 * MiB
    """Maximum length of a value, in bytes."""
    frame_bytes: int = 20 * MiB
    """Maximum length of a message on a connection, in bytes; at least a value and its key."""
    keys_per_call: int = 65_536
    """Maximum number of keys in one call."""
    keys: int = 1_000_000
    """Maximum number of keys in the store."""
    total_bytes: int = 1024 * MiB
    """Maximum size of all keys and values together, in bytes."""
    sessions: int = 65_536
    """Maximum number of open sessions."""
    parked: int = 8192
    """Maximum number of blocked calls of one session."""
    unconfirmed: int = 8192
    """Maximum number of answers that one session keeps until the client confirms them."""
    handshakes: int = 4096
    """Maximum number of connections without a proven token; the oldest is closed for a new one."""
    handshake_seconds: float = 10.0
    """Seconds within which a connection must prove the token."""
    outgoing_bytes: int = 64 * MiB
    """Maximum bytes that wait for one client to read; above it, the client is disconnected."""
    session_grace_seconds: float = 300.0
    """Maximum grace that a client may request to resume its session, in seconds."""

    def __post_init__(self) -> None:
        room = self.key_bytes + self.value_bytes + 1024
        if self.frame_bytes < room:
            raise ValueError(
                f"frame_bytes={self.frame_bytes} is too small for one key and one value: "
                f"key_bytes + value_bytes + 1024 = {room}"
            )
        if self.outgoing_bytes < self.frame_bytes:
            raise ValueError(
                f"outgoing_bytes={self.outgoing_bytes} is too small for one message of "
                f"frame_bytes={self.frame_bytes}"
            )


DEFAULT_LIMITS = Limits()
