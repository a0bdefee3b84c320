"""The state of the rendezvous as a document that nodes of a job read and write.

The document is JSON with a name and a version, every part has one type, and nothing is guessed: a
node that reads a document with a part that it does not know, or one that contradicts itself, says
so and stops, since it would otherwise write it back without what it did not understand. Two nodes
write the same state as the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from regrow.rendezvous._errors import RendezvousStateError
from regrow.rendezvous._news import Node, RoundClosed, RoundEnded
from regrow.rendezvous._state import Round, digest_of

FORMAT = "regrow.round"
VERSION = 2


def encode(state: Round) -> bytes:
    """Return the document of a state."""
    document = {
        "format": FORMAT,
        "format_version": VERSION,
        "min_nodes": state.min_nodes,
        "max_nodes": state.max_nodes,
        "number": state.number,
        "version": state.version,
        "members": [list(node) for node in state.members.values()],
        "ranks": list(state.ranks),
        "queue": [list(node) for node in state.queue.values()],
        "previous": list(state.previous),
        "awaited": sorted(state.awaited),
        "unheard": sorted(state.unheard),
        "evicting": int(state.evicting),
        "failures": state.failures,
        "charged": int(state.charged),
        "last_call": state.last_call,
        "ended": list(state.ended) if state.ended else None,
        "closed": list(state.closed) if state.closed else None,
        "gone": sorted(state.gone),
        "fixed": int(state.fixed),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode(document: bytes) -> Round:
    """Return the state that a document holds.

    Raises:
        RendezvousStateError: it is no such document, of another version, or contradicts itself.
    """
    try:
        parts: Any = json.loads(document)
    except (ValueError, RecursionError) as error:
        _refuse(f"it is not JSON ({error})", document)
    if not isinstance(parts, dict) or parts.get("format") != FORMAT:
        _refuse(f"it is not a document of the format {FORMAT!r}", document)
    if parts.get("format_version") != VERSION:
        _refuse(
            f"it has format version {parts.get('format_version')!r}, and this node knows "
            f"{VERSION}: run the same release of regrow on all nodes",
            document,
        )
    try:
        state = _read(parts)
    except (KeyError, TypeError, ValueError) as error:
        _refuse(f"{type(error).__name__}: {error}", document)
    wrong = next(contradictions(state), None)
    if wrong is not None:
        _refuse(wrong, document)
    return state


def _refuse(why: str, document: bytes) -> NoReturn:
    raise RendezvousStateError(
        f"the state of the rendezvous cannot be used: {why}. It begins with {document[:100]!r}"
    )


def _read(parts: dict[str, Any]) -> Round:
    left = dict(parts)
    del left["format"], left["format_version"]
    ended, closed = left.pop("ended"), left.pop("closed")
    number, ranks = _count(left.pop("number")), _ranks(left.pop("ranks"))
    state = Round(
        min_nodes=_count(left.pop("min_nodes")),
        max_nodes=_count(left.pop("max_nodes")),
        number=number,
        version=_count(left.pop("version")),
        members=_nodes(left.pop("members")),
        ranks=ranks,
        digest=digest_of(number, ranks) if ranks else "",
        queue=_nodes(left.pop("queue")),
        previous=_ranks(left.pop("previous")),
        awaited=frozenset(_ranks(left.pop("awaited"))),
        unheard=frozenset(_ranks(left.pop("unheard"))),
        evicting=bool(_count(left.pop("evicting"))),
        failures=_count(left.pop("failures")),
        charged=bool(_count(left.pop("charged"))),
        last_call=_count(left.pop("last_call")),
        ended=None if ended is None else _ended(*ended),
        closed=None if closed is None else _closed(*closed),
        gone=frozenset(_ranks(left.pop("gone"))),
        fixed=bool(_count(left.pop("fixed"))),
    )
    if left:
        raise ValueError(f"it has parts that this node does not know: {', '.join(sorted(left))}")
    return state


def _ended(round: object, id: object, why: object, report: object) -> RoundEnded:
    return RoundEnded(_count(round), _text(id), _text(why), _text(report))


def _closed(id: object, why: object, report: object, lost: object) -> RoundClosed:
    if not isinstance(lost, bool):
        raise TypeError(f"{lost!r:.100} is neither true nor false")
    return RoundClosed(_text(id), _text(why), _text(report), lost)


def _nodes(value: object) -> dict[str, Node]:
    nodes = {}
    for id, addr, wanted, port in _list(value):
        asked = None if wanted is None else _count(wanted)
        node = Node(_text(id), _text(addr), asked, _count(port))
        if node.id in nodes:
            raise ValueError(f"node {node.id!r} is there twice")
        nodes[node.id] = node
    return nodes


def _ranks(value: object) -> dict[str, int]:
    ranks = {_text(id): rank for rank, id in enumerate(_list(value))}
    if len(ranks) != len(_list(value)):
        raise ValueError(f"a node is there twice: {value!r:.200}")
    return ranks


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.100} is not a list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not a text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.100} is not a number from 0")
    return value


def contradictions(state: Round) -> Iterator[str]:
    """Yield what cannot be in a state that the rules have made, as texts."""
    members = state.members.keys()
    if not 1 <= state.min_nodes <= state.max_nodes:
        yield f"it has {state.min_nodes} to {state.max_nodes} nodes"
    if state.number < 1:
        yield f"it has a round {state.number}"
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
        yield "it evicts nobody"
    if not state.gone <= members or (state.gone and not (state.closed and state.complete)):
        yield "members are gone that cannot be"
    if not state.unheard <= state.awaited or (state.unheard and (state.charged or state.evicting)):
        yield "members are to be heard of that cannot be"
    if state.failures >= state.number or (state.charged and not state.failures):
        yield f"it cannot have {state.failures} failures"
    if (state.ended is None) != (state.number == 1) or (
        state.ended and state.ended.round != state.number - 1
    ):
        yield "it does not say how the round before ended"
    if bool(state.previous) != (state.number > 1) or not state.awaited <= state.previous.keys():
        yield "the round before does not fit"


def _apart(state: Round) -> Iterable[tuple[str, Iterable[str], Iterable[str]]]:
    yield "a member and in the queue", state.members, state.queue
    yield "a member and awaited", state.members, state.awaited
    yield "in the queue and awaited", state.queue, state.awaited
