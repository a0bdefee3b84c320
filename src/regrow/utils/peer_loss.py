"""Errors of a process whose peer has ended or closed its connection."""

from __future__ import annotations

LOST_CONNECTION = (
    "broken pipe",
    "brokenpipeerror",
    "closed the connection",
    "connection aborted",
    "connection closed",
    "connection refused",
    "connection reset",
    "connection was closed",
    "connection was likely closed",
    "connection was lost",
    "connectionabortederror",
    "connectionrefusederror",
    "connectionreseterror",
    "eoferror",
    "remote end closed connection",
    "remote process exited",
    "socket closed",
)
"""Texts by which an exception about a lost connection is recognized: lower-case parts of its
message, as written by Python, gloo, NCCL, torch's store, gRPC (which JAX uses) and regrow."""

_FOLLOWS = (
    *LOST_CONNECTION,
    "nccl communicator was aborted",
    "ncclremoteerror",
    "ncclsystemerror",
    "watchdog caught collective operation timeout",
    "recvvalue failed",
)


def is_lost_connection(message: str) -> bool:
    """Return whether an exception's message is about a lost connection."""
    text = message.lower()
    return any(part in text for part in LOST_CONNECTION)


def follows_from_a_peer(message: str) -> bool:
    """Return whether an error often follows from the end of another worker.

    Wider than `is_lost_connection`: also the errors that a collective raises when it is aborted,
    or waits for a rank that has ended.
    """
    text = message.lower()
    return any(part in text for part in _FOLLOWS)
