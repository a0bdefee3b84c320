"""The order of the nodes' ranks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regrow.rendezvous.protocol.messages import Node
from regrow.rendezvous.protocol.ranks import assign_ranks, natural_key

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def nodes(*names: str, **wanted: int) -> dict[str, Node]:
    return {name: Node(name, name, wanted.get(name)) for name in (*names, *wanted)}


@pytest.mark.parametrize(
    "in_order",
    [
        ["node7", "node66", "node100"],
        ["10.0.0.9", "10.0.0.10", "10.0.1.1"],
        ["rack2-node10", "rack10-node2"],
        ["7", "a"],
        ["node", "node1"],
        ["a" + "9" * 5000, "a1" + "0" * 5000],
    ],
)
def test_the_order_is_natural(in_order: list[str]) -> None:
    names = list(reversed(in_order))
    names.sort(key=natural_key)
    assert names == in_order


@UNHURRIED
@given(st.text(), st.text())
def test_any_two_names_can_be_compared(one: str, other: str) -> None:
    assert natural_key(one) <= natural_key(other) or natural_key(other) <= natural_key(one)


@UNHURRIED
@given(st.integers(0, 10**30), st.integers(0, 10**30))
def test_numbers_sort_as_numbers(one: int, other: int) -> None:
    assert (natural_key(str(one)) < natural_key(str(other))) == (one < other)


def test_new_nodes_rank_in_natural_order() -> None:
    assert list(assign_ranks(nodes("node66", "node100", "node7"), {})) == [
        "node7",
        "node66",
        "node100",
    ]


def test_the_given_node_ranks_are_the_ranks() -> None:
    assert assign_ranks(nodes(a=2, b=0, c=1), {}) == {"b": 0, "c": 1, "a": 2}


def test_the_node_that_asked_for_rank_0_has_it_even_if_another_had_it_before() -> None:
    ranks = assign_ranks(nodes("a", "b", z=0), {"a": 0, "b": 1})
    assert ranks == {"z": 0, "b": 1, "a": 2}


def test_of_two_nodes_that_asked_for_rank_0_the_holder_keeps_it() -> None:
    assert assign_ranks(nodes(a=0, b=0), {"b": 0}) == {"b": 0, "a": 1}


def test_a_rank_beyond_the_smaller_world_moves_into_the_gap_and_no_other_moves() -> None:
    assert assign_ranks(nodes("a", "c", "d"), {"a": 0, "b": 1, "c": 2, "d": 3}) == {
        "a": 0,
        "d": 1,
        "c": 2,
    }


def test_earlier_nodes_fill_gaps_before_new_nodes() -> None:
    assert assign_ranks(nodes("a", "b2", "d"), {"a": 0, "b": 1, "c": 2, "d": 3}) == {
        "a": 0,
        "d": 1,
        "b2": 2,
    }


names = st.text("ab019.", min_size=1, max_size=5)


@UNHURRIED
@given(
    st.dictionaries(names, st.none() | st.integers(0, 6), min_size=1, max_size=8),
    st.lists(names, unique=True, max_size=8),
    st.randoms(use_true_random=False),
)
def test_ranks_are_a_permutation_and_stay_wherever_they_can(
    wanted: dict[str, int | None], before: list[str], random: object
) -> None:
    members = {name: Node(name, name, rank) for name, rank in wanted.items()}
    previous = {name: rank for rank, name in enumerate(before)}
    ranks = assign_ranks(members, previous)
    assert sorted(ranks.values()) == list(range(len(members)))
    assert list(ranks.values()) == sorted(ranks.values())
    assert ranks.keys() == members.keys()
    shuffled = list(members.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign_ranks(dict(shuffled), previous) == ranks
    if 0 in wanted.values():
        assert wanted[next(iter(ranks))] == 0
    for name, rank in ranks.items():
        if previous.get(name, len(members)) < len(members) and rank != previous[name]:
            assert 0 in wanted.values()
            assert 0 in (previous[name], rank)
