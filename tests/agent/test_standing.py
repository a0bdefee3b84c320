"""Where the ranks of several nodes stood: what one tells the others, and what they make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent import _report
from regrow.agent._standing import MAX_BYTES, Standing, decode, encode, gather
from regrow.timer._places import compare_places
from regrow.workers import ProcessFailure

FAILURE = ProcessFailure(0, 42, -9, "")
PLACES = st.sampled_from(
    ["in load (a.py:1)", "in recv (b.py:2)", "stopped by a signal", "unknown: x"]
)
JOBS = st.dictionaries(st.integers(0, 63), PLACES, min_size=1)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["attempt", "places", "standing"]), inner, max_size=3)
    ),
    max_leaves=9,
)
ALMOST = st.fixed_dictionaries(
    {
        "attempt": st.integers(),
        "places": st.lists(st.tuples(st.text(), st.lists(st.integers() | ANYTHING)) | ANYTHING),
    }
)


@given(JOBS, st.integers(1, 8))
def test_what_the_nodes_tell_one_another_compares_as_if_all_ranks_were_here(
    job: dict[int, str], per_node: int
) -> None:
    nodes: dict[int, dict[int, str]] = {}
    for rank, place in job.items():
        nodes.setdefault(rank // per_node, {})[rank] = place
    told = [Standing(3, places) for places in nodes.values()]
    lines = "\n".join(json.dumps(encode(each)) for each in (*told, Standing(2, {99: "in old"})))
    assert compare_places(gather(3, lines.encode())) == compare_places(job)
    for each in told:
        assert _report.standing(_report.encode(1, FAILURE, "host-a", each)) == each


@given(st.integers(2, 64), st.integers(0, 63))
def test_of_ranks_that_agree_the_one_that_stands_elsewhere_is_named(size: int, odd: int) -> None:
    places = dict.fromkeys(range(size + 1), "in recv (b.py:2)") | {odd % size: "in load (a.py:1)"}
    assert compare_places(places)[1] == f"rank {odd % size} alone stands in load (a.py:1)"


def test_all_is_said_of_all_ranks_of_the_job_only() -> None:
    here = {0: "in recv (b.py:2)", 1: "in recv (b.py:2)"}
    assert compare_places(here, 2) == ["all 2 ranks stand in recv (b.py:2)"]
    assert compare_places(here, 4) == ["ranks 0, 1 stand in recv (b.py:2)"]


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}", "\0"])
def test_it_is_bounded_and_leaves_the_rest_of_a_report_its_room(letter: str) -> None:
    standing = Standing(0, {rank: f"{rank} {letter * 1000}" for rank in range(500)})
    assert len(json.dumps(encode(standing))) <= MAX_BYTES
    report = _report.encode(1, FAILURE, letter * 10_000, standing)
    assert len(report) <= _report.MAX_BYTES
    read = _report.standing(report)
    assert read is not None
    assert 0 in read.places
    assert read.places.keys() < standing.places.keys()


@given(ALMOST | ANYTHING)
def test_whatever_another_release_says_is_read_or_passed_over(anything: Any) -> None:
    for read in (decode(anything), _report.standing(json.dumps({"standing": anything}))):
        for rank, place in (read.places if read is not None else {}).items():
            assert type(rank) is int
            assert place.isprintable()
    gather(0, json.dumps(anything).encode() + b"\n\xff{[\n")
    _report.standing(json.dumps(anything))
