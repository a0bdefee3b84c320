"""What the ranks of a group and the store server say to each other.

These are the bodies of the questions to the service "inprocess" and of its answers, as msgpack: an
array whose first element is the number of the message type below. Every field's type is checked
while it is decoded, on both sides.

A question says of which group and rank it is, and of which process: a random name, since a rank may
be taken over by another process, and the word of the one before must not count for it. It also says
of which iteration it is, so that what was asked twice, or late, is answered as it was then.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from regrow.inprocess._link import SOFT_TIMEOUT, Fault, Faults, Met, Timeouts

NAME: Final = "inprocess"
"""Of the service."""
BODY_BYTES: Final = 1 << 16
"""The longest question."""
RANKS: Final = 65_536
"""The most ranks of a group."""
TEXT: Final = 1000
"""The longest message of a fault, in characters; what is longer is cut."""
OVERDUE: Final = 0
"""The number of the reports of a soft time-out."""
TEXTS: Final = 16
"""How many faults of an iteration keep their messages."""

Name = Annotated[str, Meta(max_length=500)]
Rank = Annotated[int, Meta(ge=0, lt=RANKS)]
Size = Annotated[int, Meta(ge=1, le=RANKS)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Kind = Annotated[str, Meta(min_length=1, max_length=64)]
Lag = Annotated[float, Meta(ge=0)]


class Question(Struct, array_like=True, frozen=True, gc=False):
    """Something that a rank says or wants to know."""

    group: Name
    rank: Rank
    """The initial rank that it is about; that of who asks, but for what is seen from outside."""
    process: Annotated[str, Meta(max_length=64)]
    """Which process of that rank; empty, for what is seen from outside: whichever there is."""


class Join(Question, tag=1, frozen=True, gc=False):
    """`Link.join`."""

    size: Size
    """How many ranks the group has."""
    timeouts: Timeouts


class OfIteration(Question, frozen=True, gc=False):
    """A question about one iteration."""

    iteration: Number


class Enter(OfIteration, tag=2, frozen=True, gc=False):
    """`Link.enter`."""

    place: Rank
    """The rank in the new world."""
    world_size: Size


class Follow(OfIteration, tag=3, frozen=True, gc=False):
    """`Link.follow`."""


class Report(OfIteration, tag=4, frozen=True, gc=False):
    """`Link.report` and `Link.overdue`."""

    number: Number
    """Of this process's reports; the same when the question is repeated. That of a soft time-out is
    always `OVERDUE`, whether it is the rank that says so or its monitor."""
    kind: Kind
    message: str
    lag: Lag = 0.0


def overdue(group: str, rank: int, process: str, iteration: int, message: str) -> Report:
    """Return what `Link.overdue` says."""
    return Report(group, rank, process, iteration, OVERDUE, SOFT_TIMEOUT, message[:TEXT])


class Heard(OfIteration, tag=5, frozen=True, gc=False):
    """`Link.heard`."""


class Ready(OfIteration, tag=6, frozen=True, gc=False):
    """`Link.ready`."""


class Completed(OfIteration, tag=7, frozen=True, gc=False):
    """`Link.completed`."""


class WaitCompleted(OfIteration, tag=8, frozen=True, gc=False):
    """`Link.wait_completed`."""


class Done(OfIteration, tag=9, frozen=True, gc=False):
    """`Link.done`."""


class Leave(OfIteration, tag=10, frozen=True, gc=False):
    """`Link.terminated`."""

    kind: Kind
    message: str
    discarded: bool
    lag: Lag = 0.0


class Accuse(Question, tag=11, frozen=True, gc=False):
    """`Link.accuse`; an empty `group` means all groups."""

    kind: Kind
    message: str


Asked = (
    Join
    | Enter
    | Follow
    | Report
    | Heard
    | Ready
    | Completed
    | WaitCompleted
    | Done
    | Leave
    | Accuse
)


class Go(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """What was waited for has come: all have joined, all have entered, some rank has completed."""

    iteration: int


class Interrupted(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The iteration has ended by faults."""

    faults: Faults


class Gathered(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """All are ready for the next iteration."""

    met: Met


class Over(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """There is nothing more to wait for: all are done, or the rank that asks has left."""


class Left(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """The rank that asks is out by its own word."""

    faults: Faults


class CountedOut(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The rank that asks was given up by others."""

    fault: Fault


class Failed(Struct, array_like=True, tag=6, frozen=True, gc=False):
    """The ranks did not come together, so none of them can go on."""

    timeout: bool
    """Somebody was missing; else there were too many, or others than expected."""
    text: str


class Noted(Struct, array_like=True, tag=7, frozen=True, gc=False):
    """What was said is known now."""

    news: bool
    """Of an accusation: whether it ended the rank."""


class Unknown(Struct, array_like=True, tag=8, frozen=True, gc=False):
    """The server does not know the group, or this process as one of it."""

    text: str


class Problem(Struct, array_like=True, tag=9, frozen=True, gc=False):
    """The question was refused, and changed nothing."""

    text: str


Told = Go | Interrupted | Gathered | Over | Left | CountedOut | Failed | Noted | Unknown | Problem

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Asked).decode
decode_answer = msgspec.msgpack.Decoder(Told).decode
