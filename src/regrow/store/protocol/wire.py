"""The store's wire format: a handshake in which both sides prove the token, then messages.

Each message travels in one frame. The code that reads a frame limits its length:
`server.connection` and `client.transport`.

In the handshake, client and server prove to each other that they hold the token:

    client                                server
      | preamble, nonce c                   |
      | ----------------------------------> |
      |                   preamble, nonce s |
      | <---------------------------------- |
      | HMAC(token, client, c, s), Hello    |
      | ----------------------------------> |  compares; closes unless equal
      |   accepted, HMAC(token, server, c, s), Welcome
      | <---------------------------------- |

Before a side has proved the token, it receives only a random nonce. The token itself never travels.
A recorded handshake is worthless, because it contains both nonces. The server proves the token too,
so a client does not trust another program that happened to get the port.

The handshake proves the identity of both sides only at that moment. Without TLS, a third party
between the two can read and change the later traffic.

After the handshake, a frame is a length (four bytes, most significant first) and that many bytes of
msgpack: an array whose first element is the number of the message type below. msgspec checks the
type of every field while it decodes. So decoding returns one of these types or raises
`msgspec.ValidationError`. Received bytes never create any other object.

`id` numbers the requests of a session, ascending from 1. It makes a retry safe: after a reconnect,
the client repeats its unanswered requests under the same ids. The server answers a change that it
has already made from memory, and does not make it twice. `ack` is the lowest id of a change that
the client still waits for. The server may drop the answers below it. Reads have no `ack`, because a
repeated read changes nothing. `Ask` has none either, because a service makes the same promise.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from regrow.store.errors import StoreAuthError
from regrow.store.keyspace import Query

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 3
PREAMBLE: Final = b"REGROW\x00" + bytes([VERSION])
NONCE: Final = 32
PROOF: Final = 32
OPENING: Final = len(PREAMBLE) + NONCE
"""Bytes of the first message of each side."""
ACCEPTED: Final = b"\x00"
REFUSED: Final = b"\x01"

# First bytes of PyTorch's TCPStore client: its "validate" query and the number of that query.
_TCPSTORE: Final = bytes([0x00, 0xCE, 0xF7, 0x85, 0x3C])
_HTTP: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"CONN", b"PRI ")


def prove(token: bytes, side: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that a side ("client" or "server") holds the token."""
    text = b"regrow store %d %s" % (VERSION, side.encode()) + client_nonce + server_nonce
    return hmac.new(token, text, hashlib.sha256).digest()


def proves(proof: bytes, token: bytes, side: str, client_nonce: bytes, server_nonce: bytes) -> bool:
    """Return whether a proof is right, in a time that does not depend on the proof."""
    return hmac.compare_digest(proof, prove(token, side, client_nonce, server_nonce))


def is_stranger(received: bytes) -> bool:
    """Return whether the bytes received so far cannot be the start of the preamble."""
    return received[: len(PREAMBLE)] != PREAMBLE[: len(received)]


def describe_client(received: bytes) -> str:
    """Return one line for the server's log: which program sent these bytes, and what to do."""
    if received.startswith(_TCPSTORE[:1]) and _TCPSTORE.startswith(received[: len(_TCPSTORE)]):
        return (
            "it is a PyTorch TCPStore client (torchrun, or a worker that takes this port for "
            "MASTER_PORT); start every node with `regrow run`, or give torchrun another port"
        )
    if received.startswith(_HTTP):
        return "it speaks HTTP, and this port is a regrow store"
    if received.startswith(b"\x16\x03"):
        return "it speaks TLS, and this store was started without certificates"
    return describe_server(received)


def describe_server(received: bytes) -> str:
    """Describe a program that does not start with the right preamble."""
    start = len(PREAMBLE) - 1
    if received[:start] == PREAMBLE[:start]:
        return (
            f"it speaks version {received[start]} of the store's protocol, and this side version "
            f"{VERSION}; install the same regrow on all nodes"
        )
    return f"it does not speak the regrow store's protocol (its first bytes: {received[:16]!r})"


def check_answer(answer: bytes, token: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
    """Check the server's answer to the client's proof: a verdict and the server's own proof.

    Raises:
        StoreAuthError: the server refused the token, or does not hold the token itself.
    """
    if answer[:1] == REFUSED:
        raise StoreAuthError(
            "the server refused the token; all nodes of a job need the same one: in the file of "
            "--rdzv-token-file or REGROW_TOKEN_FILE, or in REGROW_TOKEN"
        )
    if not proves(answer[1 : 1 + PROOF], token, "server", client_nonce, server_nonce):
        raise StoreAuthError(
            "the server did not prove that it has the token, so it is not this job's store: check "
            "the endpoint, and the token of the process that serves it"
        )


# --- messages

HEADER: Final = 4
"""Bytes of the length before every message."""

Id = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Hello(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """First message of a client: start a session, or resume one."""

    session: bytes
    """The session to resume; empty: start a new session."""
    grace: Annotated[float, Meta(ge=0, le=86_400)]
    """Seconds for which the session outlives a lost connection."""
    client: Annotated[str, Meta(max_length=200)] = ""
    """Name of the client, for the server's log."""
    visits: bool = False
    """Whether a lingering server may end while this client has a session."""


class Mutation(Struct, array_like=True, frozen=True, gc=False):
    """A request that changes data; the server answers it once and never runs it twice."""

    id: Id
    ack: Id


class Set(Mutation, tag=1, frozen=True, gc=False):
    """Request for `Store.set`."""

    key: str
    value: bytes


class Add(Mutation, tag=2, frozen=True, gc=False):
    """Request for `Store.add`."""

    key: str
    amount: Int64


class CompareSet(Mutation, tag=3, frozen=True, gc=False):
    """Request for `Store.compare_set`."""

    key: str
    expected: bytes
    desired: bytes


class Append(Mutation, tag=4, frozen=True, gc=False):
    """Request for `Store.append`."""

    key: str
    value: bytes


class Delete(Mutation, tag=5, frozen=True, gc=False):
    """Request for `Store.delete_key`."""

    key: str


class MultiSet(Mutation, tag=6, frozen=True, gc=False):
    """Request for `Store.multi_set`."""

    keys: list[str]
    values: list[bytes]


class DeletePrefix(Mutation, tag=7, frozen=True, gc=False):
    """Request for `StoreClient.delete_prefix`."""

    prefix: str


CHANGES: Final[Mapping[str, type[Mutation]]] = {
    "set": Set,
    "add": Add,
    "compare_set": CompareSet,
    "append": Append,
    "delete": Delete,
    "multi_set": MultiSet,
    "delete_prefix": DeletePrefix,
}
"""Message types, by the method of `KeySpace` that makes the change.

The fields after `ack` are the arguments of the method, in its order.
"""


class Read(Struct, array_like=True, tag=10, frozen=True, gc=False):
    """A read of keys; the answer is Done."""

    id: Id
    query: Query
    waits: bool = True
    """Whether the answer may come later; else "cancelled" answers a query that is not ready."""


class Cancel(Struct, array_like=True, tag=16, frozen=True, gc=False):
    """Stop waiting for request `id`; if it is still unanswered, the answer is "cancelled"."""

    id: Id


class Ask(Struct, array_like=True, tag=18, frozen=True, gc=False):
    """Request for `StoreClient.ask`; the answer is Done, now or later."""

    id: Id
    service: Annotated[str, Meta(max_length=100)]
    body: bytes


class Bye(Struct, array_like=True, tag=17, frozen=True, gc=False):
    """End the session now; the answer is Done."""

    id: Id


Request = (
    Set | Add | CompareSet | Append | Delete | MultiSet | DeletePrefix | Read | Cancel | Ask | Bye
)


class Welcome(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The server's answer to Hello."""

    session: bytes
    """The session; a different one than requested if the requested session has ended."""
    grace: float
    """Seconds for which the session outlives a lost connection, as the server granted."""
    frame_bytes: int
    """Length of the longest message that the server accepts."""


class Done(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The answer to a request."""

    id: Id
    result: bytes | int | bool | list[bytes] | None = None


class Failed(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """The server refused the request, without effect; id 0: it refused the whole connection."""

    id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    kind: Annotated[str, Meta(max_length=32)]
    """One of "limit", "value", "cancelled", "protocol", "service"."""
    message: str


Reply = Done | Failed

_encoder = msgspec.msgpack.Encoder()
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome | Failed).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Struct) -> bytes:
    """Encode a message as a frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "big") + body
