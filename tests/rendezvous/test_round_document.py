"""The encoded state of the rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regrow.rendezvous import RendezvousStateError
from regrow.rendezvous.protocol.document import decode, encode
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    LastCallOver,
    LeaveRound,
    Node,
    NodeLost,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round

FIRST_DECODE = """
import sys
import msgspec
from regrow.rendezvous.protocol.document import Envelope, seal, unseal
from regrow.rendezvous.protocol.state import Round

class Unprepared(msgspec.Struct):
    a: int

called = []

def note(frame, event, argument):
    if event == "call" and str(frame.f_globals.get("__name__")).startswith("msgspec"):
        called.append(frame.f_code.co_name)

def calls(function, *args):
    called.clear()
    sys.setprofile(note)
    function(*args)
    sys.setprofile(None)
    return called[:]

assert calls(msgspec.json.Decoder, Unprepared), "msgspec does this work elsewhere now"
print(calls(unseal, seal(Envelope("life", Round(1, 3), {"a": 1}))))
"""

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def state() -> Round:
    """Return a state that uses every field."""
    state = Round(1, 3)
    events: list[Event] = [
        *(JoinRound(Node(name, f"host-{name}")) for name in "abc"),
        NodeLost("b", "silence"),
        JoinRound(Node("d", "host-d", wanted=0)),
        JoinRound(Node("e", "höst-e")),
        JoinRound(Node("a", "host-a"), 1),
        JoinRound(Node("c", "host-c"), 1),
        CloseRendezvous("a", "done"),
        LeaveRound("a", 2),
    ]
    for event in events:
        state, _ = step(state, event)
    assert state.complete
    assert state.queue
    assert state.gone
    return state


def unjudged() -> Round:
    """Return a round that forms after a failure; one member has not confirmed the end yet."""
    state = Round(1, 3)
    events: list[Event] = [
        *(JoinRound(Node(name, f"host-{name}", port=7)) for name in "abc"),
        WorkersFailed("a", 1, "boom"),
        EndConfirmed("b", 1),
    ]
    for event in events:
        state, _ = step(state, event)
    assert state.unheard == {"c"}
    return state


def evicting() -> Round:
    """Return a round after a charged failure, with one of three nodes back in time."""
    state = unjudged()
    events: list[Event] = [EndConfirmed("c", 1), JoinRound(Node("a", "host-a"), 1)]
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


def test_the_first_document_may_be_read_by_two_threads_at_once() -> None:
    """msgspec crashes where two threads use a class first, so no thread uses one first."""
    first = subprocess.run(
        [sys.executable, "-c", FIRST_DECODE], capture_output=True, text=True, timeout=60
    )
    assert (first.stdout, first.stderr) == ("[]\n", "")


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "document", [b"", b"\xff", b"{", b"[]", b"7", b'{"format":"other"}', b"[" * 99999]
)
def test_what_is_no_document_is_refused(document: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="It begins with"):
        decode(document)


def test_a_part_that_is_not_known_is_refused_rather_than_dropped() -> None:
    with pytest.raises(RendezvousStateError, match="this node knows: priority"):
        decode(json.dumps({**parts(), "priority": 1}).encode())


@pytest.mark.parametrize("missing", sorted(parts()))
def test_a_part_that_is_missing_is_refused(missing: str) -> None:
    document = parts()
    del document[missing]
    with pytest.raises(RendezvousStateError):
        decode(json.dumps(document).encode())


NODE = ["a", "host-a", None, 0]
WRONG: list[tuple[str, Any]] = [
    ("number", 1.5),
    ("number", True),
    ("number", -1),
    ("number", 0),
    ("members", []),
    ("members", {"a": ["a"]}),
    ("members", {"a": [*NODE, 1]}),
    ("members", {"b": NODE}),
    ("members", {"a": [1, "b", None, 0]}),
    ("members", {"a": ["a", "b", -1, 0]}),
    ("members", {"a": ["a", "b", None, -1]}),
    ("ranks", {"a": 0, "c": 0}),
    ("ranks", {"a": 0}),
    ("ranks", {}),
    ("ranks", {"a": 1, "d": 0, "c": 2}),
    ("digest", ""),
    ("queue", {"a": NODE}),
    ("awaited", ["z"]),
    ("previous", {}),
    ("last_call", 3),
    ("gone", ["z"]),
    ("closed", None),
    ("closed", []),
    ("ended", None),
    ("ended", [7, "b", "silence"]),
    ("ended", [1, "b"]),
    ("min_nodes", 0),
    ("min_nodes", 4),
    ("max_nodes", 2),
    ("unheard", ["a"]),
    ("evicting", 1),
    ("evicting", True),
    ("spent", {"a": 1}),
    ("charged", True),
]


@pytest.mark.parametrize(("part", "value"), WRONG)
def test_a_part_of_a_wrong_type_or_against_the_others_is_refused(part: str, value: object) -> None:
    with pytest.raises(RendezvousStateError):
        decode(json.dumps({**parts(), part: value}).encode())


@pytest.mark.parametrize(
    ("made", "part", "value"),
    [
        (unjudged(), "charged", True),
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
