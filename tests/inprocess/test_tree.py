"""The tree of ranks: worked examples, and properties that hold for all losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ranks.assigning import Ranks
from regrow.inprocess import Mode, State
from regrow.inprocess.rank_assignment import RankDiscarded, Tree
from regrow.inprocess.ranks.tree import (
    Layer,
    LayerFlag,
    Seats,
    Topology,
    TreeMember,
    first_seats,
    grow,
    reseat,
)

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def host(size: int) -> Callable[[State], str]:
    return lambda state: f"host {(state.initial_rank or 0) // size}"


def tree(*layers: Layer, world_size_filter: Callable[[int], int] | None = None) -> Any:
    return lambda initial: Tree(layers, world_size_filter)


# ------------------------------------------------------------------ examples


def test_ranks_are_active_in_order_while_all_branches_above_them_allow_more() -> None:
    ranks = Ranks(9, tree(Layer(max_ranks=5), Layer(max_ranks=2, key_or_fn=host(3))))
    ranks.assign()
    assert ranks.active() == {0: 0, 1: 1, 3: 2, 4: 3, 6: 4}
    assert ranks.ranks() == {rank: rank for rank in range(9)}
    assert ranks.states[2].mode is Mode.INACTIVE
    assert {state.active_world_size for state in ranks.states.values()} == {5}


def test_a_lost_rank_is_replaced_on_its_own_host_first() -> None:
    layers = Layer(flag=RESERVE), Layer(max_ranks=2, key_or_fn=host(3), flag=RESERVE)
    ranks = Ranks(6, tree(*layers))
    ranks.assign()
    ranks.assign(lost={1})
    assert ranks.active() == {0: 0, 2: 1, 3: 2, 4: 3}
    ranks.assign(lost={0})  # host 0 has none left in reserve, host 1 has rank 5
    assert ranks.active() == {2: 1, 3: 2, 4: 3, 5: 0}
    assert ranks.ranks() == {2: 0, 3: 1, 4: 2, 5: 3}


def test_no_rank_of_another_host_replaces_a_rank_without_the_flag() -> None:
    layers = Layer(), Layer(max_ranks=2, key_or_fn=host(3), flag=RESERVE)
    ranks = Ranks(6, tree(*layers))
    ranks.assign()
    ranks.assign(lost={0, 1})
    assert ranks.active() == {2: 0, 3: 1, 4: 2}
    assert ranks.states[5].mode is Mode.INACTIVE


@pytest.mark.parametrize("flag", [RESERVE, BACKFILL])
def test_a_flag_counts_from_the_nearest_branch_up_without_a_gap(flag: LayerFlag) -> None:
    layers = Layer(max_ranks=5, flag=flag), Layer(key_or_fn=host(3))
    ranks = Ranks(6, tree(*layers))
    ranks.assign()
    ranks.assign(lost={1})
    assert ranks.active() == {0: 0, 2: 1, 3: 2, 4: 3}


def test_a_host_with_too_few_ranks_is_given_up_and_another_takes_its_place() -> None:
    layers = (
        Layer(min_ranks=4, max_ranks=4, key_or_fn="job", flag=RESERVE),
        Layer(min_ranks=2, max_ranks=2, key_or_fn=host(2), flag=RESERVE),
    )
    ranks = Ranks(6, tree(*layers))
    ranks.assign()
    ranks.assign(lost={1})
    assert set(ranks.discarded) == {0}
    assert isinstance(ranks.discarded[0], RankDiscarded)
    assert ranks.active() == {2: 2, 3: 3, 4: 1, 5: 0}
    ranks.assign(lost={5})  # now two are left of the four that the job needs
    assert ranks.states == {}


def test_the_active_rank_with_the_largest_index_moves_into_a_gap() -> None:
    ranks = Ranks(8, tree(Layer(), Layer(key_or_fn=host(4), flag=BACKFILL)))
    ranks.assign()
    ranks.assign(lost={1, 4})
    # 3 moves to 1 and 7 to 4, each within its host; then the second host's ranks move down by one.
    assert ranks.active() == {0: 0, 2: 2, 3: 1, 5: 4, 6: 5, 7: 3}


def test_gaps_that_no_rank_may_fill_are_closed_by_a_shift() -> None:
    ranks = Ranks(6, tree(Layer(), Layer(key_or_fn=host(3))))
    ranks.assign()
    ranks.assign(lost={1, 3})
    assert ranks.active() == {0: 0, 2: 1, 4: 2, 5: 3}


def test_a_filter_sends_the_last_ranks_into_reserve_from_where_they_come_back() -> None:
    by_four = tree(Layer(flag=RESERVE), world_size_filter=lambda size: size // 4 * 4)
    ranks = Ranks(10, by_four)
    ranks.assign()
    assert ranks.active() == {rank: rank for rank in range(8)}
    ranks.assign(lost={3})
    assert ranks.active() == {0: 0, 1: 1, 2: 2, 4: 4, 5: 5, 6: 6, 7: 7, 9: 3}
    ranks.assign(lost={0, 1})
    assert len(ranks.active()) == 4


@pytest.mark.parametrize("answer", [-1, 3])
def test_a_filter_that_asks_for_what_there_is_not_is_named(answer: int) -> None:
    ranks = Ranks(2, tree(Layer(), world_size_filter=lambda size: answer))
    ranks.assign()
    assert f"world_size_filter(2) returned {answer}" in str(ranks.discarded[0])


def test_ranks_of_a_host_become_neighbours_which_is_warned_of() -> None:
    every_other = tree(Layer(), Layer(key_or_fn=lambda state: f"host {(state.rank or 0) % 2}"))
    ranks = Ranks(4, every_other)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ranks.assign()
    assert ranks.ranks() == ranks.active() == {0: 0, 1: 2, 2: 1, 3: 3}
    assert "2 of 4 get another number" in str(warned[0].message)


def test_ranks_that_are_not_of_one_root_are_refused() -> None:
    ranks = Ranks(2, tree(Layer(key_or_fn=lambda state: f"job {state.rank}")))
    ranks.assign()
    assert "different keys at the root of the tree (job 0, job 1)" in str(ranks.discarded[1])


def test_a_tree_without_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="one layer or more"):
        Tree([])


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        ("host", TypeError, "must be a Layer, got 'host'"),
        (Layer(min_ranks="3"), TypeError, "min_ranks of a Layer must be an int, got '3'"),  # type: ignore[arg-type]
        (Layer(min_ranks=-3), ValueError, "min_ranks of a Layer must be at least 0, got -3"),
        (Layer(max_ranks=0), ValueError, "max_ranks of a Layer must be at least 1, got 0"),
        (Layer(key_or_fn=3), TypeError, "key_or_fn of a Layer must be a str or a function"),  # type: ignore[arg-type]
        (Layer(flag="RESERVE"), TypeError, "flag of a Layer must be a LayerFlag or None"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_layer_is_refused_when_the_tree_is_made(
    layer: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Tree([layer])


def test_a_second_call_of_the_wrapper_begins_with_a_new_tree() -> None:
    made = [Tree([Layer(max_ranks=2)]) for _ in range(3)]
    first = Ranks(3, lambda rank: made[rank])
    first.assign()
    first.assign(lost={0})
    second = Ranks(2, lambda rank: made[rank + 1])
    second.assign()
    assert second.active() == {0: 0, 1: 1}


def test_the_messages_of_a_rank_do_not_grow_with_the_number_of_ranks_and_end_after_the_first() -> (
    None
):
    def sent(size: int) -> tuple[int, int]:
        ranks = Ranks(size, tree(Layer(), Layer(key_or_fn=host(2))))
        ranks.assign()
        at_first = max(map(len, ranks.sent.values()))
        ranks.assign(lost={0})
        return at_first, max(map(len, ranks.sent.values()))

    assert sent(4) == sent(16)
    assert sent(4) <= (6, 0)


# ------------------------------------------------------------------ what always holds

flags = st.sampled_from([None, RESERVE, BACKFILL, RESERVE | BACKFILL])


@st.composite
def topologies(draw: st.DrawFn, flag: st.SearchStrategy[LayerFlag | None] = flags) -> Topology:
    size, depth = draw(st.integers(1, 10)), draw(st.integers(1, 3))
    layer = st.builds(Layer, st.integers(0, 3), st.none() | st.integers(0, size), st.just(""), flag)
    layers = [draw(layer) for _ in range(depth)]
    key = st.sampled_from("ab")
    members = [
        TreeMember(rank, rank, ("root", *(draw(key) for _ in range(depth - 1))))
        for rank in range(size)
    ]
    return grow(layers, members)


def lives(
    draw: st.DataObject, topology: Topology, keep: Callable[[int], int] | None
) -> list[Seats]:
    """The seats of a job that loses ranks a few times, from before the first assignment on."""
    history = [first_seats(topology)]
    history.append(reseat(topology, history[0], (), keep))
    for _ in range(draw.draw(st.integers(0, 3))):
        living = list(history[-1].living())
        lost = draw.draw(st.sets(st.sampled_from(living), max_size=3)) if living else set()
        history.append(reseat(topology, history[-1], lost, keep))
    return history


def multiple_of(number: int | None) -> Callable[[int], int] | None:
    return None if number is None else lambda size: size // number * number


def active(seats: Seats) -> dict[int, int]:
    return {leaf: rank for leaf, rank in enumerate(seats.active_ranks) if rank is not None}


@given(topologies(), st.data(), st.sampled_from([None, 1, 2, 3]))
def test_active_ranks_are_given_once_and_leave_no_gap(
    topology: Topology, draw: st.DataObject, number: int | None
) -> None:
    for seats in lives(draw, topology, multiple_of(number)):
        assert sorted(active(seats).values()) == list(range(seats.active_world_size))


@given(topologies(), st.data(), st.sampled_from([None, 2]))
def test_every_rank_is_active_in_reserve_or_out_for_good(
    topology: Topology, draw: st.DataObject, number: int | None
) -> None:
    out: set[int] = set()
    for seats in lives(draw, topology, multiple_of(number)):
        by_mode = {
            mode: {leaf for leaf, is_mode in enumerate(seats.modes) if is_mode is mode}
            for mode in (Mode.ACTIVE, Mode.INACTIVE, Mode.TERMINATED)
        }
        assert sum(map(len, by_mode.values())) == len(topology.leaves)
        assert by_mode[Mode.ACTIVE] == set(active(seats))
        assert by_mode[Mode.INACTIVE] == set(seats.reserve)
        assert len(seats.reserve) == len(set(seats.reserve))
        assert out <= by_mode[Mode.TERMINATED]
        out = by_mode[Mode.TERMINATED]


@given(topologies(), st.data())
def test_a_branch_has_as_many_healthy_ranks_as_it_needs_or_none(
    topology: Topology, draw: st.DataObject
) -> None:
    for seats in lives(draw, topology, None)[1:]:
        living = set(seats.living())
        for branch in topology.branches:
            left = len(living.intersection(range(branch.first, branch.end)))
            assert left == 0 or left >= branch.layer.min_ranks


@given(topologies())
def test_at_the_beginning_all_branches_are_full_and_none_is_too_full(
    topology: Topology,
) -> None:
    seats = first_seats(topology)
    bounds = {
        branch: math.inf if branch.layer.max_ranks is None else branch.layer.max_ranks
        for branch in topology.branches
    }
    counts = {
        branch: sum(leaf in active(seats) for leaf in range(branch.first, branch.end))
        for branch in topology.branches
    }
    assert all(counts[branch] <= bounds[branch] for branch in topology.branches)
    for leaf in seats.reserve:
        assert any(counts[branch] == bounds[branch] for branch in topology.above[leaf])


@given(topologies(), st.data(), st.sampled_from([None, 2, 3]))
def test_without_a_loss_nothing_changes(
    topology: Topology, draw: st.DataObject, number: int | None
) -> None:
    seats = lives(draw, topology, multiple_of(number))[-1]
    assert reseat(topology, seats, (), multiple_of(number)) == seats


@given(topologies(st.just(RESERVE)), st.data())
def test_where_all_may_come_from_reserve_none_waits_while_an_active_one_is_missing(
    topology: Topology, draw: st.DataObject
) -> None:
    for before, seats in pairwise(lives(draw, topology, None)):
        living = sum(1 for _ in seats.living())
        assert seats.active_world_size == min(before.active_world_size, living)
        still = active(before).keys() & active(seats).keys()
        if seats.active_world_size == before.active_world_size:
            assert all(active(before)[leaf] == active(seats)[leaf] for leaf in still)


@given(topologies(st.sampled_from([None, RESERVE])), st.data())
def test_without_backfill_those_that_stay_active_keep_their_order(
    topology: Topology, draw: st.DataObject
) -> None:
    for before, seats in pairwise(lives(draw, topology, None)):
        still = sorted(active(before).keys() & active(seats).keys(), key=active(before).__getitem__)
        after = [active(seats)[leaf] for leaf in still]
        assert after == sorted(after)


@given(topologies(st.just(BACKFILL)), st.data())
def test_with_backfill_everywhere_one_loss_moves_one_rank(
    topology: Topology, draw: st.DataObject
) -> None:
    before = lives(draw, topology, None)[-1]
    if not active(before) or any(branch.layer.min_ranks > 1 for branch in topology.branches):
        return
    lost, rank = draw.draw(st.sampled_from(sorted(active(before).items())))
    after = active(reseat(topology, before, [lost]))
    moved = [leaf for leaf, now in after.items() if active(before)[leaf] != now]
    largest = max(active(before), key=active(before).__getitem__)
    assert moved == ([] if lost == largest else [largest])
    assert all(after[leaf] == rank for leaf in moved)
