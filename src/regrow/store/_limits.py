"""How much one store holds and one client may ask of it, so that no client can harm another."""

from __future__ import annotations

from dataclasses import dataclass

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a store; a server tells its clients the first four."""

    key_bytes: int = 4096
    """The longest key, in bytes of UTF-8."""
    value_bytes: int = 16 * MiB
    """The longest value, in bytes."""
    frame_bytes: int = 20 * MiB
    """The longest message on a connection, in bytes; at least a value and its key."""
    keys_per_call: int = 65_536
    """The most keys one call may name."""
    keys: int = 1_000_000
    """The most keys the store holds."""
    total_bytes: int = 1024 * MiB
    """The most that all keys and values together may take, in bytes."""
    tombstones: int = 65_536
    """The most deleted keys remembered for watchers; older ones are forgotten."""
    sessions: int = 65_536
    """The most sessions open at once."""
    parked: int = 8192
    """The most blocked calls of one session."""
    unconfirmed: int = 8192
    """The most answers kept for one session until it confirms them."""
    handshakes: int = 4096
    """The most connections that have not proved the token yet; the oldest gives way."""
    handshake_seconds: float = 10.0
    """How long a connection may take to prove the token, in seconds."""
    outgoing_bytes: int = 64 * MiB
    """The most that waits to be read by one client, in bytes; then it is cut off."""
    session_grace_seconds: float = 300.0
    """The longest grace a client may ask for to come back to its session, in seconds."""

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
