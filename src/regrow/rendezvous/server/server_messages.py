"""Messages between a node and the store server about the rounds.

The messages are the bodies of questions to the service "rendezvous", and of its answers. Each body
is a msgpack array, and its first element is the number of the message type. Both sides check the
type of every field when they decode a message. Events and statuses travel as the name of their type
and the fields of that type in `messages.py`.

A question names its job and the job's settings, so that the first node's question creates the job.
An answer names the life of the job. The life differs after the server was restarted, and after the
job was deleted because its last node had left. So a node detects that its earlier job is gone.

A node that follows sends a short mark of its last snapshot instead of the snapshot. So a parked
question costs the same in a job of any size.

Agents that keep a copy of the job's record, and may take over as its server, use the questions
`CopyRequest`, `GrantRequest` and `ResignRequest` (`succession.py`). A server that does not run the
rounds of the job answers every question with `ElsewhereReply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta, Raw, Struct

from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    Departed,
    EndConfirmed,
    Event,
    JoinRound,
    Judged,
    LeaveRound,
    NodeLeaving,
    NodeRefused,
    Placed,
    RoundClosed,
    RoundEnded,
    Seated,
    SpendRestart,
    Voter,
    WorkersFailed,
)
from regrow.rendezvous.protocol.succession import MOST_SUCCESSORS, Succession
from regrow.store import host_of

NAME: Final = "rendezvous"
"""The name of the service."""
BODY_BYTES: Final = 1 << 20
"""The maximum length of a question, in bytes. A grant may be longer, because it contains the whole
record; only the store limits its length."""
MOST_RECORDS: Final = 2000
"""Number of records at which a copy is combined into one record. A server that takes over applies
all records of its grant again, and answers no question meanwhile."""

Name = Annotated[str, Meta(max_length=1000)]
Nodes = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=1e10)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


class JobSettings(Struct, array_like=True, frozen=True, gc=False):
    """The settings of a job; the settings of the first node apply to all nodes."""

    min_nodes: Nodes
    max_nodes: Nodes
    keep_alive: Seconds
    misses: Annotated[int, Meta(ge=1, le=1_000_000)]
    last_call: Seconds
    grace: Annotated[float, Meta(ge=0, le=1e10)] = 0.0
    fixed: bool = False
    successors: Annotated[int, Meta(ge=0, le=MOST_SUCCESSORS)] = 0
    """Most agents on other hosts that may take over as server."""
    witness: bool = False
    """Whether the agents have a directory for a witness."""


class SubmitRequest(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """Submit an event about a node; the answer is the node's snapshot after the event."""

    job: Name
    settings: JobSettings
    kind: Annotated[str, Meta(max_length=32)]
    event: Raw
    life: Annotated[str, Meta(max_length=100)] = ""
    """The life of the job that the node knows; empty: the event may begin one."""


class FollowRequest(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """Wait for a new snapshot of a node; the answer comes when it differs from the mark."""

    job: Name
    settings: JobSettings
    id: Name
    seen: Annotated[bytes, Meta(max_length=16)]
    """`mark` of the node's current snapshot; empty if the node has none."""
    life: Annotated[str, Meta(max_length=100)] = ""
    """See `SubmitRequest`."""


class BeatRequest(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Report that a node is alive; the answer is whether the node still holds its seat."""

    job: Name
    id: Name
    token: Number
    answered: Number
    """How many heartbeats of the node have been answered so far; an increase is the sign of life.

    A node that sends but receives nothing cannot renew its lease, and is evicted like a silent
    node.
    """
    epoch: Number = 0
    """The newest epoch that the node knows."""


class ExplainRequest(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """Report that a node's wait has timed out; the answer names the missing nodes."""

    job: Name
    id: Name
    waited: Seconds


class CopyRequest(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """Wait for changes of the job's record; the question confirms that the voter has those before.

    The answer comes when there are changes, or after a pause.
    """

    job: Name
    life: Annotated[str, Meta(max_length=100)]
    """The life of the job of which the voter has a copy; empty if it has none."""
    voter: Voter
    hosts: bool
    """Whether the agent of this voter hosts the server."""
    promised: Number
    """The newest epoch that the voter has granted or follows."""
    epoch: Annotated[int, Meta(ge=-1, le=2**53)]
    """The epoch of the voter's copy; -1 if it has none."""
    seq: Number
    """The number of changes in the copy."""
    answer: Number
    """The number of the latest answer that the voter has received in this epoch; 0: none."""
    listed: Annotated[str, Meta(max_length=1000)] = ""
    """The endpoint that its agent serves, if the user has listed several."""
    keeper: Annotated[str, Meta(max_length=1000)] = ""
    """If the voter is a witness: the id of the voter whose agent asks in its name."""
    checked: Number = 0
    """The number of the latest answer after which this keeper has checked the directory."""


class GrantRequest(Struct, array_like=True, tag=6, frozen=True):
    """Grant an epoch to the server that is asked; the answer comes when it serves, or never will.

    The server takes over when a majority of the voters has granted it the epoch.
    """

    job: Name
    life: Annotated[str, Meta(max_length=100)]
    """The life of the job of which the voter has a copy; empty in the first election."""
    candidate: Voter
    """The voter whose agent hosts the server that is asked."""
    voter: Name
    """The id of the voter that grants."""
    epoch: Number
    copy_epoch: Number
    """The epoch of the voter's copy."""
    seq: Number
    succession: Succession
    ended: bool
    waited: bool
    """For both, see `Grant`."""
    records: Annotated[tuple[Raw, ...], Meta(max_length=MOST_RECORDS)]
    """The copy: the record of the whole job, and the records after it."""
    elects: Voter | None = None
    """For the first election, in which `voter` is an endpoint: the voter that its agent is."""


class ResignRequest(Struct, array_like=True, tag=7, frozen=True, gc=False):
    """Resign: the voter grants no epoch from now on, because its agent leaves."""

    job: Name
    voter: Name
    epoch: Number
    """The newest epoch that the voter has granted or follows."""


class MovedRequest(Struct, array_like=True, tag=8, frozen=True, gc=False):
    """Report which server runs the rounds, to a server that nodes may ask by mistake."""

    job: Name
    epoch: Number
    endpoint: Name


class TurnRequest(Struct, array_like=True, tag=9, frozen=True, gc=False):
    """The client asks another server from now on; its process lives, so its nodes are not lost."""

    job: Name


Question = (
    SubmitRequest
    | FollowRequest
    | BeatRequest
    | ExplainRequest
    | CopyRequest
    | GrantRequest
    | ResignRequest
    | MovedRequest
    | TurnRequest
)


class SnapshotReply(Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The snapshot of a node."""

    life: str
    version: int
    kind: str
    status: Raw
    waiting: int
    judged: Judged | None
    closed: bool
    others: int = 0
    failures: int = 0
    leaving: tuple[tuple[str, str], ...] = ()
    first_waiting: tuple[str, ...] = ()


class BeatReply(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The answer to a heartbeat."""

    life: str
    """Empty if the server does not know the job."""
    holds: bool
    epoch: int = 0
    servers: tuple[Voter, ...] = ()
    """The agents that may serve, first the present one; empty if no other one may."""
    may_lose: int = 0
    """How many of their hosts may be lost at one time."""
    keeps_copy: bool = False
    """Whether the agent of the node should keep a copy of the record."""


class ExplainReply(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Why a wait has timed out; see `Driver.explain_timeout`."""

    text: str
    departed: tuple[Departed, ...] = ()


class RefusedReply(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A refusal; the question changed nothing."""

    text: str
    removed: bool = False
    """To a voter: whether it was removed, so that it has to continue under another id."""


class CopyReply(Struct, array_like=True, tag=4, frozen=True):
    """Changes of the record, or none."""

    life: str
    epoch: int
    seq: int
    """The number of changes in the copy after these."""
    answer: int
    """The number of this answer."""
    whole: bool
    """Whether the records replace those that the voter has."""
    records: tuple[Raw, ...]
    succession: Succession
    wanted: bool
    """Whether the agent should continue to keep a copy."""
    witness: tuple[str, int] | None = None
    """The id of the job's witness, and the number of the latest answer to it; None: no witness."""
    creates: bool = False
    """To a witness: whether this keeper may create its ballot."""
    checks: bool = False
    """To a witness: whether to check the directory only, without a confirmation in the ballot."""


class ElsewhereReply(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """This server does not run the rounds of the job, or may not at present."""

    epoch: int
    """The newest epoch that the server knows."""
    endpoint: str
    """The server of that epoch; empty if it is not known."""
    waits: bool = False
    """Whether this server runs the rounds, but waits for a majority of the voters."""
    lost: bool = False
    """Whether it has waited for so long that none may ever come back."""


class DoneReply(Struct, array_like=True, tag=6, frozen=True, gc=False):
    """The server has taken note; or, to a `GrantRequest`, it runs the rounds."""

    epoch: int


Answer = (
    SnapshotReply | BeatReply | ExplainReply | RefusedReply | CopyReply | ElsewhereReply | DoneReply
)

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def decoders(*types: Any) -> Mapping[str, msgspec.msgpack.Decoder[Any]]:
    """Return a decoder for each type, by the name of the type."""
    return {type.__name__: msgspec.msgpack.Decoder(type) for type in types}


# Events that a node may send about itself; the server decides about the other events.
EVENTS: Final = decoders(
    JoinRound, WorkersFailed, SpendRestart, EndConfirmed, NodeLeaving, LeaveRound, CloseRendezvous
)
_STATUSES: Final = decoders(Seated, Placed, RoundEnded, RoundClosed, NodeRefused, type(None))


def submit(job: str, settings: JobSettings, event: Event, life: str = "") -> bytes:
    """Return the question that submits an event."""
    return encode(SubmitRequest(job, settings, type(event).__name__, Raw(encode(event)), life))


def read_event(question: SubmitRequest) -> Event:
    """Return the event that a question submits.

    Raises:
        ValueError: a node may not submit this event, or one of its fields is not valid.
    """
    decoder = EVENTS.get(question.kind)
    if decoder is None:
        raise ValueError(f"{question.kind!r} is no event that a node may submit")
    event = cast("Event", decoder.decode(question.event))
    node = event.node if isinstance(event, JoinRound) else None
    id = node.id if node else getattr(event, "id")  # noqa: B009 - all others have one
    wrong = [
        what
        for what, holds in (
            ("its id is empty or too long", 1 <= len(id) <= 1000),
            ("its token is not the number of a round", 0 <= getattr(event, "token", 0) <= 2**53),
            ("its number is out of range", 0 <= getattr(event, "number", 0) <= 2**53),
            ("its reason is too long", len(getattr(event, "why", "")) <= 10_000),
            ("its address is empty or too long", node is None or 1 <= len(node.addr) <= 1000),
            ("its port is not from 0 to 65535", node is None or 0 <= node.port < 65536),
            ("its voter is not valid", node is None or _may_serve(node.voter)),
            ("its rank is not from 0 to 2**53", node is None or 0 <= (node.wanted or 0) <= 2**53),
        )
        if not holds
    ]
    if wrong:
        raise ValueError(f"the event {str(event)!r:.300} is not valid: {', '.join(wrong)}")
    return event


def _may_serve(voter: Voter | None) -> bool:
    return voter is None or (
        1 <= len(voter.id) <= 1000 and 1 <= len(voter.host) <= 1000 and 0 < voter.port < 65536
    )


def check_servers(question: CopyRequest | GrantRequest | MovedRequest) -> None:
    """Refuse a question that names a server with an invalid address; all nodes would try it.

    Raises:
        ValueError: the host, the port or the endpoint is not valid.
    """
    match question:
        case MovedRequest(endpoint=endpoint):
            host_of(endpoint)
            return
        case CopyRequest():  # a witness is on no host
            named: list[Voter | None] = [] if question.keeper else [question.voter]
        case GrantRequest():
            named = [question.candidate, question.elects]
    for voter in named:
        if not _may_serve(voter):
            raise ValueError(f"the voter {str(voter)!r:.300} is not valid")


def encode_snapshot(life: str, snapshot: Snapshot) -> bytes:
    """Return the answer that carries a snapshot."""
    kind, body = type(snapshot.status).__name__, Raw(encode(snapshot.status))
    return encode(SnapshotReply(life, snapshot.version, kind, body, *snapshot[2:]))


def read_snapshot(answer: SnapshotReply) -> Snapshot:
    """Return the snapshot that an answer carries.

    Raises:
        ValueError: this release does not know the status in the snapshot.
    """
    decoder = _STATUSES.get(answer.kind)
    if decoder is None:
        raise ValueError(f"{answer.kind!r} is not a status that this release of regrow knows")
    status = decoder.decode(answer.status)
    waiting, judged, closed = answer.waiting, answer.judged, answer.closed
    more = answer.others, answer.failures, answer.leaving, answer.first_waiting
    return Snapshot(answer.version, status, waiting, judged, closed, *more)


def mark(snapshot: Snapshot | None) -> bytes:
    """Return a short hash of a snapshot without its version; empty for None."""
    if snapshot is None:
        return b""
    return blake2b(encode((type(snapshot.status).__name__, *snapshot[1:])), digest_size=8).digest()
