"""How client and server prove to each other that they hold the token.

    client                                server
      | preamble, nonce c                   |
      | ----------------------------------> |
      |                   preamble, nonce s |
      | <---------------------------------- |
      | HMAC(token, client, c, s), Hello    |
      | ----------------------------------> |  compares; closes unless equal
      |   accepted, HMAC(token, server, c, s), Welcome
      | <---------------------------------- |

Nobody learns anything but a random nonce before having proved the token, the token itself
never travels, and a recorded handshake is worth nothing, since both nonces are in it. The
server proves itself too, so a client does not talk to whoever happened to get the port.

This proves who is there at that moment and no more: without TLS, what travels afterwards
can be read and changed by whoever sits between the two.

Everything here is a function of bytes; the server and the client do the reading.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from regrow.store._errors import StoreAuthError, StoreProtocolError

VERSION: Final = 1
PREAMBLE: Final = b"REGROW\x00" + bytes([VERSION])
NONCE: Final = 32
PROOF: Final = 32
OPENING: Final = len(PREAMBLE) + NONCE
"""Bytes of the first message of either side."""
ACCEPTED: Final = b"\x00"
REFUSED: Final = b"\x01"

# What PyTorch's TCPStore client sends first: its "validate" query and that query's number.
_TCPSTORE: Final = bytes([0x00, 0xCE, 0xF7, 0x85, 0x3C])
_HTTP: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"CONN", b"PRI ")


def prove(token: bytes, side: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that a side ("client" or "server") holds the token."""
    text = b"regrow store %d %s" % (VERSION, side.encode()) + client_nonce + server_nonce
    return hmac.new(token, text, hashlib.sha256).digest()


def proves(proof: bytes, token: bytes, side: str, client_nonce: bytes, server_nonce: bytes) -> bool:
    """Say whether a proof is right, in a time that does not depend on it."""
    return hmac.compare_digest(proof, prove(token, side, client_nonce, server_nonce))


def is_stranger(received: bytes) -> bool:
    """Say whether the first bytes received, perhaps only a few, cannot be our preamble."""
    return received[: len(PREAMBLE)] != PREAMBLE[: len(received)]


def describe_client(received: bytes) -> str:
    """Say in one line who it was that sent these first bytes to a server, and what to do."""
    if received.startswith(_TCPSTORE[:1]) and _TCPSTORE.startswith(received[: len(_TCPSTORE)]):
        return (
            "it is a PyTorch TCPStore client (torchrun, or a worker that takes this port for "
            "MASTER_PORT); start every node with `regrow run`, or give torchrun another port"
        )
    if received.startswith(_HTTP):
        return "it speaks HTTP, and this port is a regrow store"
    if received.startswith(b"\x16\x03"):
        return "it speaks TLS, and this store was started without certificates"
    return _describe_preamble(received)


def describe_server(received: bytes) -> StoreProtocolError:
    """Return the error for a server whose first bytes are not ours."""
    return StoreProtocolError(_describe_preamble(received))


def _describe_preamble(received: bytes) -> str:
    start = len(PREAMBLE) - 1
    if received[:start] == PREAMBLE[:start]:
        return (
            f"it speaks version {received[start]} of the store's protocol, and this side version "
            f"{VERSION}; install the same regrow on all nodes"
        )
    return f"it does not speak the regrow store's protocol (its first bytes: {received[:16]!r})"


def check_answer(answer: bytes, token: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
    """Check what the server answers to the client's proof: a verdict and its own proof.

    Raises:
        StoreAuthError: the server refused the token, or does not hold it itself.
    """
    if answer[:1] == REFUSED:
        raise StoreAuthError(
            "the server refused the token; all nodes of a job need the same one, in REGROW_TOKEN "
            "or in the file that REGROW_TOKEN_FILE names"
        )
    if not proves(answer[1 : 1 + PROOF], token, "server", client_nonce, server_nonce):
        raise StoreAuthError(
            "the server accepted the token without knowing it: it is not this job's store"
        )
