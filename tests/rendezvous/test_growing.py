"""Mappings and sets of which thousands of versions are made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.rendezvous._growing import Dwindling, Growing

KEYS = st.text("abcdef", max_size=2)


@given(
    st.dictionaries(KEYS, st.integers(), max_size=4),
    st.lists(st.tuples(st.integers(0, 50), KEYS, st.integers()), max_size=30),
)
def test_every_version_stays_what_it_was_whichever_is_added_to(
    first: dict[str, int], additions: list[tuple[int, str, int]]
) -> None:
    versions = [(Growing(first), dict(first))]
    for choice, key, value in additions:
        grown, model = versions[choice % len(versions)]
        if key not in model:
            versions.append((grown.plus(key, value), {**model, key: value}))
    every = {key for _, model in versions for key in model} | {"none of them"}
    for grown, model in versions:
        assert list(grown.items()) == list(model.items())
        assert grown == model == grown
        assert len(grown) == len(model)
        for key in every:
            assert (key in grown) == (key in model)
            assert grown.get(key) == model.get(key)
        assert repr(grown) == repr(model)


def test_what_a_later_version_has_an_earlier_one_has_not() -> None:
    early: Growing[int] = Growing()
    early.plus("a", 1)
    with pytest.raises(KeyError):
        early["a"]


@given(
    st.sets(KEYS, max_size=8), st.lists(st.tuples(st.integers(0, 50), st.sets(KEYS)), max_size=20)
)
def test_what_was_taken_from_one_version_is_in_those_before(
    first: set[str], takings: list[tuple[int, set[str]]]
) -> None:
    versions = [(Dwindling(dict.fromkeys(first)), frozenset(first))]
    for choice, taken in takings:
        left, model = versions[choice % len(versions)]
        versions.append((left - taken, model - taken))
    for left, model in versions:
        same: object = model
        assert left == same
        assert set(left) == model
        assert len(left) == len(model)
        assert left <= model <= left
        assert left & {"a", "b"} == model & {"a", "b"}
        assert bool(left) == bool(model)
        assert eval(repr(left)) == model
