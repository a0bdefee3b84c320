"""The state on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regrow.rendezvous import RendezvousStateError
from regrow.rendezvous._document import decode, encode
from regrow.rendezvous._news import (
    Close,
    Event,
    Failed,
    Heard,
    Join,
    LastCallOver,
    Leave,
    Lost,
    Node,
)
from regrow.rendezvous._round import Round, step

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def state() -> Round:
    """A state in which every part is used."""
    state = Round(1, 3)
    events: list[Event] = [
        *(Join(Node(name, f"host-{name}")) for name in "abc"),
        Lost("b", "silence"),
        Join(Node("d", "host-d", wanted=0)),
        Join(Node("e", "höst-e")),
        Join(Node("a", "host-a"), 1),
        Join(Node("c", "host-c"), 1),
        Close("a", "done"),
        Leave("a", 2),
    ]
    for event in events:
        state, _ = step(state, event)
    assert state.complete
    assert state.queue
    assert state.gone
    return state


def unjudged() -> Round:
    """A round that forms, after a failure of which not everyone has been heard."""
    state = Round(1, 3)
    events: list[Event] = [
        *(Join(Node(name, f"host-{name}", port=7)) for name in "abc"),
        Failed("a", 1, "boom"),
        Heard("b", 1),
    ]
    for event in events:
        state, _ = step(state, event)
    assert state.unheard == {"c"}
    return state


def evicting() -> Round:
    """One of three has come back in time, after a failure that was charged."""
    state = unjudged()
    events: list[Event] = [Heard("c", 1), Join(Node("a", "host-a"), 1)]
    for event in events:
        state, _ = step(state, event)
    state, _ = step(state, LastCallOver(state.last_call))
    assert state.evicting
    assert state.charged
    return state


def parts() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encode(state()))
    return document


@pytest.mark.parametrize("made", [Round(1, 2), state(), unjudged(), evicting()])
def test_a_document_is_read_as_it_was_written(made: Round) -> None:
    assert decode(encode(made)) == made


def test_two_nodes_write_the_same_state_as_the_same_bytes() -> None:
    first = encode(decode(encode(state())))
    assert first == encode(state())


def test_a_document_of_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        RendezvousStateError, match=r"version 3, and this node knows 2: run the same"
    ):
        decode(json.dumps({**parts(), "format_version": 3}).encode())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "document", [b"", b"\xff", b"{", b"[]", b"7", b'{"format":"other"}', b"[" * 99999]
)
def test_what_is_no_document_is_refused(document: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="It begins with"):
        decode(document)


def test_a_part_that_is_not_known_is_refused_rather_than_dropped() -> None:
    with pytest.raises(RendezvousStateError, match="does not know: priority"):
        decode(json.dumps({**parts(), "priority": 1}).encode())


@pytest.mark.parametrize("missing", sorted(parts()))
def test_a_part_that_is_missing_is_refused(missing: str) -> None:
    document = parts()
    del document[missing]
    with pytest.raises(RendezvousStateError):
        decode(json.dumps(document).encode())


WRONG: list[tuple[str, Any]] = [
    ("number", 1.0),
    ("number", True),
    ("number", -1),
    ("number", 0),
    ("members", {}),
    ("members", [["a", "b"]]),
    ("members", [["a", "b", "c"]]),
    ("members", [["a", "b", None], ["a", "b", None]]),
    ("members", [[1, "b", None]]),
    ("ranks", ["a", "a", "c"]),
    ("ranks", ["a"]),
    ("ranks", []),
    ("queue", [["a", "a", None]]),
    ("awaited", ["z"]),
    ("previous", []),
    ("last_call", 3),
    ("gone", ["z"]),
    ("closed", None),
    ("closed", ["a"]),
    ("ended", None),
    ("ended", [7, "b", "silence"]),
    ("ended", [1, "b"]),
    ("min_nodes", 0),
    ("min_nodes", 4),
    ("max_nodes", 2),
    ("unheard", ["a"]),
    ("evicting", 1),
    ("evicting", True),
    ("failures", 2),
    ("charged", 1),
]


@pytest.mark.parametrize(("part", "value"), WRONG)
def test_a_part_of_a_wrong_type_or_against_the_others_is_refused(part: str, value: object) -> None:
    with pytest.raises(RendezvousStateError):
        decode(json.dumps({**parts(), part: value}).encode())


@pytest.mark.parametrize(
    ("made", "part", "value"),
    [
        (unjudged(), "charged", 1),
        (unjudged(), "unheard", ["z"]),
        (evicting(), "unheard", ["b"]),
        (evicting(), "awaited", []),
        (evicting(), "last_call", 0),
        (evicting(), "failures", 0),
    ],
)
def test_a_judgement_or_an_eviction_that_cannot_be_is_refused(
    made: Round, part: str, value: object
) -> None:
    document = {**json.loads(encode(made)), part: value}
    with pytest.raises(RendezvousStateError):
        decode(json.dumps(document).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@UNHURRIED
@given(st.dictionaries(st.sampled_from(sorted(parts())), json_values))
def test_no_document_does_worse_than_be_refused(changes: dict[str, Any]) -> None:
    document = json.dumps({**parts(), **changes}).encode()
    try:
        decoded = decode(document)
    except RendezvousStateError:
        return
    assert decode(encode(decoded)) == decoded


@UNHURRIED
@given(st.binary(max_size=40))
def test_no_bytes_do_worse_than_be_refused(document: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        decode(document)
