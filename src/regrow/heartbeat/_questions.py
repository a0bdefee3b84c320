"""What a worker and the store's server say to each other about beats.

These are the bodies of the questions to the service "heartbeat" and of its answers, as msgpack: an
array whose first element is the number of the message type below. Every field's type is checked
while it is decoded, on both sides. A question is as long as what one worker says of itself, and an
answer to a beat is as long as a `Standing`, however many workers there are.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from regrow.heartbeat._exchange import Progress
from regrow.heartbeat._failure import Kind, Ranks
from regrow.heartbeat._merge import NO_STEP, Agreed, Broken, Left, Standing
from regrow.heartbeat._merge import Beat as Said

NAME: Final = "heartbeat"
"""Of the service."""
BODY_BYTES: Final = 1 << 20
"""The longest question."""

Name = Annotated[str, Meta(max_length=1000)]
Size = Annotated[int, Meta(ge=1, le=1_000_000)]
Rank = Annotated[int, Meta(ge=0, lt=1_000_000)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Incarnation = Annotated[int, Meta(ge=1, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]


class Beat(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A worker beats; answered when all have, when it is known that they will not, or in time."""

    group: Name
    rank: Rank
    size: Size
    incarnation: Incarnation
    token: Annotated[int, Meta(ge=0, le=65535)]
    joined: bool
    step: Annotated[int, Meta(ge=NO_STEP, le=2**53)]
    phase: Annotated[str, Meta(max_length=64)]
    leaving: bool
    final: bool
    seen: Number
    """The number of the last full set that it was told of."""
    wait: Seconds
    """How long it waits for the others."""

    def said(self) -> Said:
        """Return what the worker says of itself."""
        return Said(
            self.rank,
            self.token,
            self.incarnation,
            self.joined,
            self.step,
            self.phase,
            self.leaving,
            self.final,
        )


class Follow(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """Answered with what ends the group, when something does."""

    group: Name
    rank: Rank
    incarnation: Incarnation
    on: bool
    """Whether to be told; if not, this question and an earlier one are answered at once."""


class Look(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Answered at once with how far everyone is."""

    group: Name


class Reduce(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """A vector; answered with the sums when all have sent theirs, or in time."""

    group: Name
    rank: Rank
    size: Size
    incarnation: Incarnation
    vector: Annotated[list[int], Meta(max_length=65536)]
    seen: Number
    wait: Seconds


Question = Beat | Follow | Look | Reduce


class Together(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """All are there and in step."""

    number: int
    """Of the full set."""
    token: int
    standing: Standing | None
    age: float


class Over(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """The group has ended."""

    kind: Kind | None
    """None: somebody left."""
    ranks: Ranks
    detail: str = ""

    def outcome(self) -> Left | Broken:
        """Return what has been told."""
        return Left(self.ranks) if self.kind is None else Broken(self.kind, self.ranks, self.detail)


class Missing(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Not all came in time."""

    ranks: Ranks


class Table(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """How far everyone is who has beaten."""

    rows: list[Progress]


class Sums(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """Of all vectors."""

    number: int
    vector: list[int]


class Hushed(Struct, array_like=True, tag=6, frozen=True, gc=False):
    """Nothing is to be told: it is not wanted any more, or the group is not known."""


Answer = Together | Over | Missing | Table | Sums | Hushed

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def over(outcome: Left | Broken) -> bytes:
    """Return the answer that tells the end of a group."""
    if isinstance(outcome, Left):
        return encode(Over(None, outcome.ranks))
    return encode(Over(outcome.kind, outcome.ranks, outcome.detail))


def together(agreed: Agreed, number: int) -> bytes:
    """Return the answer that tells that all are there."""
    return encode(Together(number, agreed.token, agreed.standing, agreed.age))
