"""The places of ranks on several nodes: their encoding and their comparison."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.features.comparison import (
    MAX_BYTES,
    WorkerPlaces,
    as_evidence,
    decode,
    encode,
    from_report,
    gather,
)
from regrow.agent.records import shared_failure
from regrow.timer.stacks.report import compare_places
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
        | st.dictionaries(st.sampled_from(["attempt", "places"]), inner, max_size=3)
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
def test_places_from_several_nodes_compare_like_those_of_one_node(
    job: dict[int, str], per_node: int
) -> None:
    nodes: dict[int, dict[int, str]] = {}
    for rank, place in job.items():
        nodes.setdefault(rank // per_node, {})[rank] = place
    encoded = [WorkerPlaces(3, places) for places in nodes.values()]
    lines = "\n".join(
        json.dumps(encode(each)) for each in (*encoded, WorkerPlaces(2, {99: "in old"}))
    )
    assert compare_places(gather(3, lines.encode())) == compare_places(job)
    for each in encoded:
        assert from_report(shared_failure.encode(1, FAILURE, "host-a", as_evidence(each))) == each


@given(st.integers(2, 64), st.integers(0, 63))
def test_the_only_rank_at_another_place_is_named(size: int, odd: int) -> None:
    places = dict.fromkeys(range(size + 1), "in recv (b.py:2)") | {odd % size: "in load (a.py:1)"}
    assert compare_places(places)[1] == f"rank {odd % size} alone is in load (a.py:1)"


def test_the_word_all_is_used_for_all_ranks_of_the_job_only() -> None:
    here = {0: "in recv (b.py:2)", 1: "in recv (b.py:2)"}
    assert compare_places(here, 2) == ["all 2 ranks are in recv (b.py:2)"]
    assert compare_places(here, 4) == ["ranks 0, 1 are in recv (b.py:2)"]


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}", "\0"])
def test_places_are_bounded_and_fit_into_a_report(letter: str) -> None:
    worker_places = WorkerPlaces(0, {rank: f"{rank} {letter * 1000}" for rank in range(500)})
    assert len(json.dumps(encode(worker_places))) <= MAX_BYTES
    report = shared_failure.encode(1, FAILURE, letter * 10_000, as_evidence(worker_places))
    assert len(report) <= shared_failure.MAX_BYTES
    read = from_report(report)
    assert read is not None
    assert 0 in read.places
    assert read.places.keys() < worker_places.places.keys()


@given(ALMOST | ANYTHING)
def test_any_places_of_another_release_are_read_or_skipped(anything: Any) -> None:
    for read in (decode(anything), from_report(json.dumps({"places": anything}))):
        for rank, place in (read.places if read is not None else {}).items():
            assert type(rank) is int
            assert place.isprintable()
    gather(0, json.dumps(anything).encode() + b"\n\xff{[\n")
    from_report(json.dumps(anything))
