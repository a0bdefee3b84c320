"""Messages between the ranks of a group and the service "inprocess"; `ServiceLink` sends them.

A *group* is one call of a wrapped function, with one process per rank. The protocol identifies a
rank by its *initial rank* throughout the call. *Iterations* are numbered from 0. Each iteration is
one run of the function by a *world*: the ranks that lived when the previous iteration ended. A rank
goes through these steps:

    join ─► enter(0) ─► the function ─► completed(0) ─► done(0) ─► confirm(0) ─► close
               ▲            │ or, for a rank in reserve: wait_completed(0) ─► done(0)
               │            ▼ a fault on any rank
               │   report(0): if the fault is this rank's own
               │   follow(0) returns on every rank; abort may begin after the last call
               │   answer_last_call(0): over when all ranks have answered
               │   abort, finalize, health check
               └── ready(0): all ranks met; returns the lost ranks and the faults

At each step the rank may leave with `terminated` instead. Several threads of a rank use a link at
once: the main thread, the follower, and any thread that reports. Every method may be called from
any thread.

**Blocking calls.** `join`, `enter`, `ready`, `done` and `confirm` are barriers of all living ranks.
A barrier does not wait for a rank that left, is lost or was evicted. `follow` and
`wait_completed` wait for an event, `answer_last_call` for the end of the last call. The server
answers the other questions at once. A fault of the iteration ends `enter`, `wait_completed`, `done`
and `confirm` early, and they return it.

**Interrupted calls.** A signal handler may end a blocked call by an exception in its thread. The
effect is as if the call had not been made: the call may be repeated, and no other call is affected.
A call is repeated over a connection that was lost. All calls are idempotent: a fault that was
reported twice because its answer was lost is recorded once.

**Consistency.** The call of the function ends for all ranks or for none: `confirm` returns None on
every living rank or on none. `enter` returns None on a rank only if the whole world has entered. A
fault after "met" belongs to the next iteration. A fault before the last rank has confirmed restarts
all ranks, including ranks that were done. After that point, no rank continues in place of a rank
that dies.

**Soft time-outs.** The rank detects its own soft time-out. A rank that holds the interpreter's lock
or is stopped cannot. The monitor of its host then detects it and sends a `Report` of number
`OVERDUE`. The server records the first of the two, once per iteration.

**End of a rank.** Three things end a rank: its own report (`terminated`), a report of its monitor
(`ReportDead`), and the end of its connection. The end of a connection is recorded as TERMINATED if
the rank's side closed it and did not return within the grace of its session. It is recorded as
UNRESPONSIVE if the rank fell silent. A living process that was evicted gets an `EvictedError`
from its next or current call.

**Messages.** The types below are the bodies of the questions to the service and of its answers, in
msgpack: an array whose first element is the number of the message type. Decoding checks the type of
every field, on both sides.

A question names its group, its rank and its process. The process has a random name, because another
process may take over a rank, and the server must ignore messages of the previous process. A
question also names its iteration, so that a repeated or late question gets the answer of that
iteration.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

SOFT_TIMEOUT: Final = "SOFT_TIMEOUT"
"""Kind of a soft time-out; equals the name in `attribution.Interruption`."""


class Timeouts(NamedTuple):
    """How long the ranks of a group wait for each other, in seconds; the same on all ranks."""

    barrier: float = 120.0
    """Time for the last rank at `join`, `enter` or `ready`, counted from the first arrival."""
    completion: float = 120.0
    """Time for the last rank at `done`, counted from the first arrival; then again for `confirm`.

    A rank that is still missing then has a fault.
    """
    last_call: float = 1.0
    """Time for the answers to the last call, counted from the first fault."""
    replacement: float = 0.0
    """Time for the replacement of a lost rank to join, counted from the loss; 0: none is expected.

    The ranks that are ready for the next iteration wait for it.
    """


class Fault(NamedTuple):
    """An event that ended an iteration."""

    kind: str
    """The name of the `Interruption`, such as "EXCEPTION"."""
    rank: int
    """The initial rank at fault."""
    message: str
    """Description for people. It is empty for faults after the first `TEXTS` of an iteration."""
    at: float
    """When it was recorded, in seconds of the store server's monotonic clock."""
    lag: float = 0.0
    """Seconds from the fault to its record, as far as known."""


class Faults(NamedTuple):
    """The known facts about the end of an iteration; the same for every rank that asks."""

    iteration: int
    """The iteration that ended."""
    records: tuple[Fault, ...]
    """All faults recorded so far, first to last. The first is the root cause and stays first."""
    now: float
    """The server's clock when it sent this message; shows the age of each fault."""


class Met(NamedTuple):
    """All living ranks are ready for the next iteration."""

    iteration: int
    """Number of the next iteration."""
    terminated: tuple[int, ...]
    """The ranks that have ended, in the numbering of the iteration that ended.

    Rank assignments take this. Ranks that an assignment discarded are not included.
    """
    lost: tuple[int, ...]
    """The initial ranks that have ended since all ranks met for the iteration that ended.

    Ranks that an assignment discarded are not included.
    """
    faults: Faults
    """All faults of the iteration that ended."""
    world_size: int = 0
    """Number of places in that numbering, with those of ranks that have come back."""
    joined: tuple[Joined, ...] = ()
    """The ranks that another process continues from the next iteration on."""


class Joined(NamedTuple):
    """A rank whose process ended, and that another process continues."""

    rank: int
    """The initial rank."""
    place: int
    """Its place in the numbering of the iteration that ended."""
    origin: str = ""
    """How the former process ended, and how the new one has started, for people.

    It is empty for the processes that joined after the first `TEXTS`.
    """


NAME: Final = "inprocess"
"""Name of the service."""
BODY_BYTES: Final = 1 << 16
"""Longest question in bytes."""
RANKS: Final = 65_536
"""Most ranks of a group."""
TEXT: Final = 1000
"""Longest message of a fault in characters; longer ones are cut."""
ORIGIN: Final = 180
"""Longest description of a process that replaces another one, in characters."""
OVERDUE: Final = 0
"""Report number of a soft time-out."""
TEXTS: Final = 16
"""Number of faults of an iteration that keep their messages, and of new processes that keep their
origin."""

Name = Annotated[str, Meta(max_length=500)]
Rank = Annotated[int, Meta(ge=0, lt=RANKS)]
Size = Annotated[int, Meta(ge=1, le=RANKS)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Kind = Annotated[str, Meta(min_length=1, max_length=64)]
Lag = Annotated[float, Meta(ge=0)]


class Question(Struct, array_like=True, frozen=True, gc=False):
    """Base of the questions and reports from ranks and monitors."""

    group: Name
    rank: Rank
    """The initial rank that the question is about. A monitor names the rank that it watches."""
    process: Annotated[str, Meta(max_length=64)]
    """Random name of the rank's process."""


class Join(Question, tag=1, frozen=True, gc=False):
    """See `ServiceLink.join`."""

    size: Size
    """Number of ranks in the group."""
    timeouts: Timeouts
    incarnation: Number = 0
    """Number of processes that had this rank before; 0 for the first one."""
    origin: Annotated[str, Meta(max_length=ORIGIN)] = ""
    """See `Joined.origin`."""


class OfIteration(Question, frozen=True, gc=False):
    """Base of the questions about one iteration."""

    iteration: Number


class Enter(OfIteration, tag=2, frozen=True, gc=False):
    """See `ServiceLink.enter`."""

    place: Rank
    """The rank in the new world."""
    world_size: Size
    active: bool = True
    """False: the rank waits in reserve."""


class Follow(OfIteration, tag=3, frozen=True, gc=False):
    """See `ServiceLink.follow`."""


class Report(OfIteration, tag=4, frozen=True, gc=False):
    """Report of `ServiceLink.report`, or of a monitor about a soft time-out."""

    number: Number
    """Number of the report, counted per process; a repeated question has the same number.

    A soft time-out has the number `OVERDUE`, whether the rank or its monitor reports it.
    """
    kind: Kind
    message: str
    lag: Lag = 0.0


class AnswerLastCall(OfIteration, tag=5, frozen=True, gc=False):
    """See `ServiceLink.answer_last_call`."""


class Ready(OfIteration, tag=6, frozen=True, gc=False):
    """See `ServiceLink.ready`."""


class Completed(OfIteration, tag=7, frozen=True, gc=False):
    """Report of `ServiceLink.completed`."""


class WaitCompleted(OfIteration, tag=8, frozen=True, gc=False):
    """See `ServiceLink.wait_completed`."""


class RankDone(OfIteration, tag=9, frozen=True, gc=False):
    """See `ServiceLink.done`."""


class LeaveGroup(OfIteration, tag=10, frozen=True, gc=False):
    """Report of `ServiceLink.terminated`."""

    kind: Kind
    message: str
    discarded: bool
    lag: Lag = 0.0
    replaced: bool = False
    """Whether another process may continue the rank."""


class Confirm(OfIteration, tag=12, frozen=True, gc=False):
    """See `ServiceLink.confirm`."""


class ReportDead(Question, tag=11, frozen=True, gc=False):
    """Report of a monitor that a rank has ended."""

    kind: Kind
    message: str


class NotReplaced(Struct, array_like=True, tag=13, frozen=True, gc=False):
    """Report of an agent that no process replaces a rank that was lost."""

    rank: Rank
    """The initial rank, in every group of this store."""


Asked = (
    Join
    | Enter
    | Follow
    | Report
    | AnswerLastCall
    | Ready
    | Completed
    | WaitCompleted
    | RankDone
    | Confirm
    | LeaveGroup
    | ReportDead
)


class Go(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The awaited event happened: all ranks joined, all entered, one completed, or all are done."""

    iteration: int


class Interrupted(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The iteration ended by faults."""

    faults: Faults


class Gathered(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """All ranks are ready for the next iteration."""

    met: Met


class Over(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """No event is left to wait for: all ranks have confirmed, or the rank that asks has left."""


class Left(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """The rank that asks has left by its own report."""

    faults: Faults


class Noted(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The server received the report."""


Reason = Literal["missing", "mismatch", "evicted", "unknown", "impossible"]


class GroupRefusal(Struct, array_like=True, tag=6, frozen=True, gc=False):
    """The rank that asks cannot continue, or its question was refused."""

    reason: Reason
    """What happened.

    missing: ranks did not come to a barrier in time, so no rank can continue.
    mismatch: there were too many ranks, or unexpected ones, so no rank can continue.
    evicted: the other ranks continue without this one.
    unknown: the server does not know the group, or does not know this process as a member.
    impossible: the question is malformed or does not fit the state; nothing changed.
    """
    text: str


class Admitted(Struct, array_like=True, tag=7, frozen=True, gc=False):
    """The rank that asks replaces a process that ended; it takes part from this meeting on."""

    met: Met
    place: int
    """The rank's place in the numbering of the iteration that ended."""


GroupReply = Go | Interrupted | Gathered | Over | Left | Noted | GroupRefusal | Admitted

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Asked | NotReplaced).decode
decode_reply = msgspec.msgpack.Decoder(GroupReply).decode
