"""The state of the rendezvous as a document that the nodes of a job read and write.

The document is a JSON object, and each part has one type. Decoding is strict. If a document
contains an unknown part, or contradicts itself, the node reports the problem and stops. Otherwise
it would write the document back without the part that it did not understand. Two nodes write the
same state as the same bytes.

A backend stores the document in an envelope of two lines. The first line has the name and the
version of the format, and the name of the job's life. It also holds the heartbeats of the nodes, if
the backend has no other place for them. The second line is the document. It stays the same, byte
for byte, while nodes only send heartbeats.

The life of a job is a random name that the first writing node draws. If a backend is emptied while
nodes still run, the next node that writes begins another life. Rounds are then counted from the
start again. A node from the old life detects the change, because tokens of one life are not valid
in another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from regrow.rendezvous.errors import RendezvousStateError
from regrow.rendezvous.protocol.state import Count, Round, digest_of

FORMAT = "regrow.rendezvous"
VERSION = 5


class Envelope(NamedTuple):
    """The content of a backend: the state, the name of the job's life, and heartbeats."""

    life: str
    """The name of the job's life, drawn at the first write to the backend."""
    state: Round
    """The state of the rounds."""
    beats: Mapping[str, int]
    """The latest heartbeat of each node; empty if the backend keeps heartbeats elsewhere."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of an envelope."""

    format: str
    format_version: int
    life: str
    beats: dict[str, Count]


# msgspec derives how to read a class at its first use, and two threads that do so at the same time
# crash the process (msgspec 0.22). The import lock lets only one thread do it here.
for _read in (_Head, Round):
    msgspec.json.Decoder(_read)


def seal(envelope: Envelope) -> bytes:
    """Return an envelope as bytes."""
    head = _Head(FORMAT, VERSION, envelope.life, dict(envelope.beats))
    return json.dumps(asdict(head), separators=(",", ":")).encode() + b"\n" + encode(envelope.state)


def unseal(data: bytes) -> Envelope:
    """Return the envelope that the bytes contain.

    Raises:
        RendezvousStateError: the bytes are not an envelope, or have another version.
    """
    first, _, rest = bytes(data).partition(b"\n")
    try:
        parts = _parsed(first)
        if parts.get("format") != FORMAT:
            raise ValueError(f"it is not a document of the format {FORMAT!r}")
        if parts.get("format_version") != VERSION:
            raise ValueError(
                f"it has format version {parts.get('format_version')!r}, and this node knows "
                f"{VERSION}: run the same release of regrow on all nodes"
            )
        head = msgspec.convert(parts, _Head)
    except (ValueError, msgspec.ValidationError) as error:
        raise RendezvousStateError(
            f"{_unusable(error, data)}. If another program wrote this state, use another --rdzv-id"
        ) from error
    return Envelope(head.life, decode(rest), head.beats)


def encode(state: Round) -> bytes:
    """Return the document of a state."""
    sets = {name: sorted(getattr(state, name)) for name in ("awaited", "unheard", "gone")}
    return json.dumps({**asdict(state), **sets}, separators=(",", ":")).encode()


def decode(document: bytes) -> Round:
    """Return the state that a document contains.

    Raises:
        RendezvousStateError: a part is missing, unknown or of a wrong type, or contradicts another.
    """
    try:
        parts = _parsed(document)
        if odd := sorted(parts.keys() ^ {*Round.__struct_fields__}):
            raise ValueError(f"its parts are not those that this node knows: {', '.join(odd)}")
        state = msgspec.convert(parts, Round)
        for wrong in contradictions(state):
            raise ValueError(wrong)
    except (ValueError, msgspec.ValidationError) as error:
        raise RendezvousStateError(_unusable(error, document)) from error
    return state


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        parts: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"regrow did not write it ({error})") from error
    if not isinstance(parts, dict):
        raise ValueError("regrow did not write it (it is not a JSON object)")
    return parts


def _unusable(error: Exception, text: bytes) -> str:
    return f"the state of the rendezvous cannot be used: {error}. It begins with {text[:100]!r}"


def contradictions(state: Round) -> Iterator[str]:
    """Yield a text for each contradiction in a state; the rules produce no such state."""
    members = state.members.keys()
    if not 1 <= state.min_nodes <= state.max_nodes:
        yield f"it has {state.min_nodes} to {state.max_nodes} nodes"
    if state.number < 1:
        yield f"it has a round {state.number}"
    for id, node in (*state.members.items(), *state.queue.items()):
        ports = node.port, node.voter.port if node.voter else 0
        if node.id != id or min(ports) < 0 or (node.wanted or 0) < 0:
            yield f"its node {id!r} is {node}"
    for ranks in (state.ranks, state.previous):
        if [*ranks.values()] != [*range(len(ranks))]:
            yield f"its ranks are not those of {len(ranks)} nodes, in order"
    if state.digest != (digest_of(state.number, state.ranks) if state.ranks else ""):
        yield f"{state.digest!r} is not the digest of its members"
    for name, some, others in _apart(state):
        if both := sorted({*some} & {*others}):
            yield f"{', '.join(both)} cannot be {name}"
    if len(members) + len(state.awaited) > state.max_nodes:
        yield f"it has more members than {state.max_nodes}"
    if state.complete:
        if state.ranks.keys() != members:
            yield "its ranks are not those of its members"
        if len(members) < state.min_nodes:
            yield f"it is complete with fewer members than {state.min_nodes}"
        if state.awaited or state.last_call:
            yield "it is complete and still waits for members"
    elif not state.closed:
        if len(members) == state.max_nodes:
            yield "it is full and not complete"
        if state.queue and state.free > 0:
            yield "it has a queue and free seats"
        if (state.last_call != 0) != (len(members) >= state.min_nodes):
            yield "its last call does not fit its members"
    if state.closed and state.last_call:
        yield "it is closed and has a last call"
    if state.evicting and not (state.last_call and state.awaited):
        yield "it evicts members, and awaits none"
    if state.leaving and (state.closed or not state.leaving.keys() <= state.ranks.keys()):
        yield "nodes are leaving that are not in a round that goes on"
    if not state.gone <= (members if state.closed else state.leaving.keys()) or (
        state.gone and not state.complete
    ):
        yield "members are gone that cannot be"
    if state.leaving and not state.leaving.keys() - state.gone:
        yield "all that were leaving have left, and the round goes on"
    if not state.unheard <= state.awaited or (state.unheard and (state.charged or state.evicting)):
        yield "its verdict waits for nodes that cannot confirm the end"
    if sum(state.spent.values()) + state.charged > state.failures:
        yield f"it cannot have {state.failures} failures"
    if not state.spent.keys() <= state.ranks.keys():
        yield "nodes have spent restarts that are not in the round"
    if (state.ended is None) != (state.number == 1) or (
        state.ended and state.ended.round != state.number - 1
    ):
        yield "its reason for the end of the previous round does not fit"
    if bool(state.previous) != (state.number > 1) or not state.awaited <= state.previous.keys():
        yield "its previous round does not fit"
    if not state.departed.keys() <= state.previous.keys() - state.awaited:
        yield "nodes have departed that were not in the previous round"


def _apart(state: Round) -> Iterable[tuple[str, Iterable[str], Iterable[str]]]:
    yield "a member and in the queue", state.members, state.queue
    yield "a member and awaited", state.members, state.awaited
    yield "in the queue and awaited", state.queue, state.awaited
