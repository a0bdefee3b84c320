"""What travels on a connection once the handshake is done.

A frame is a length (four bytes, most significant first) and that many bytes of msgpack:
an array whose first element is the number of the message type below. msgspec checks every
field's type while it decodes, so what arrives is either one of these types or a
`msgspec.ValidationError`; nothing else is ever built from received bytes.

`id` numbers the requests of a session, ascending from 1. It makes a retry safe: a client
that had to reconnect sends what is unanswered again under the same ids, and the server
answers a change it has already made from memory instead of making it twice. `ack` is the
lowest id of a change that the client still waits for, which tells the server what it may
forget. Reads have no `ack`: doing one twice changes nothing. Neither has `Ask`: a service
promises as much.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

HEADER: Final = 4
"""Bytes of the length in front of every message."""

Id = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Revision = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Hello(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """First message of a client: begin a session, or go on with one."""

    session: bytes
    """The session to go on with; empty to begin one."""
    grace: Annotated[float, Meta(ge=0, le=86_400)]
    """Seconds that the session outlives a lost connection."""
    client: Annotated[str, Meta(max_length=200)] = ""
    """Who this is, for the server's log."""


class Mutation(Struct, array_like=True, frozen=True, gc=False):
    """A request that changes something; it is answered once and never done twice."""

    id: Id
    ack: Id


class Set(Mutation, tag=1, frozen=True, gc=False):
    """`Store.set`."""

    key: str
    value: bytes
    ephemeral: bool = False


class Add(Mutation, tag=2, frozen=True, gc=False):
    """`Store.add`."""

    key: str
    amount: Int64


class CompareSet(Mutation, tag=3, frozen=True, gc=False):
    """`Store.compare_set`."""

    key: str
    expected: bytes
    desired: bytes
    ephemeral: bool = False


class Append(Mutation, tag=4, frozen=True, gc=False):
    """`Store.append`."""

    key: str
    value: bytes


class Delete(Mutation, tag=5, frozen=True, gc=False):
    """`Store.delete_key`."""

    key: str


class MultiSet(Mutation, tag=6, frozen=True, gc=False):
    """`Store.multi_set`."""

    keys: list[str]
    values: list[bytes]


class Get(Struct, array_like=True, tag=10, frozen=True, gc=False):
    """`Store.get`."""

    id: Id
    key: str


class MultiGet(Struct, array_like=True, tag=11, frozen=True, gc=False):
    """`Store.multi_get`."""

    id: Id
    keys: list[str]


class Wait(Struct, array_like=True, tag=12, frozen=True, gc=False):
    """`Store.wait`."""

    id: Id
    keys: list[str]


class Watch(Struct, array_like=True, tag=13, frozen=True, gc=False):
    """`WatchStore.watch`."""

    id: Id
    keys: list[str]
    after: Revision
    prefix: bool


class Check(Struct, array_like=True, tag=14, frozen=True, gc=False):
    """`Store.check`."""

    id: Id
    keys: list[str]


class NumKeys(Struct, array_like=True, tag=15, frozen=True, gc=False):
    """`Store.num_keys`."""

    id: Id


class Cancel(Struct, array_like=True, tag=16, frozen=True, gc=False):
    """Stop waiting for request `id`; if it is still unanswered, answer it "cancelled"."""

    id: Id


class Ask(Struct, array_like=True, tag=18, frozen=True, gc=False):
    """`StoreClient.ask`; answered with Done, now or later."""

    id: Id
    service: Annotated[str, Meta(max_length=100)]
    body: bytes


class Bye(Struct, array_like=True, tag=17, frozen=True, gc=False):
    """End the session now; answered with Done."""

    id: Id


Request = (
    Set
    | Get
    | Add
    | CompareSet
    | Append
    | Delete
    | MultiSet
    | MultiGet
    | Wait
    | Watch
    | Check
    | NumKeys
    | Cancel
    | Ask
    | Bye
)


class Welcome(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The server's answer to Hello."""

    session: bytes
    """The session; it differs from the one asked for when that one is over."""
    grace: float
    """Seconds that the session outlives a lost connection, as granted."""
    key_bytes: int
    value_bytes: int
    frame_bytes: int
    keys_per_call: int


class Done(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The answer to a request."""

    id: Id
    result: bytes | int | bool | list[bytes] | None = None


class Seen(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """The answer to a Watch."""

    id: Id
    revision: Revision
    changes: list[tuple[str, int, bytes | None]]
    snapshot: bool


class Failed(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """The request was refused, without effect. With id 0: the whole connection was."""

    id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    kind: Annotated[str, Meta(max_length=32)]
    """One of "limit", "value", "cancelled", "protocol", "service"."""
    message: str


Reply = Done | Seen | Failed

_encoder = msgspec.msgpack.Encoder()
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome | Failed).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Struct) -> bytes:
    """Return a message as it travels."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "big") + body
