"""Numbers and roles of the ranks after a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ranks.assigning import Ranks
from regrow.inprocess import Compose, Mode, State
from regrow.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    FilterGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
)
from regrow.inprocess.rank_filter import WorldSizeDivisibleBy
from regrow.inprocess.ranks.assignment import assign

EXAMPLE = {1, 4, 5}  # lost of eight, as in the docstrings

losses = st.integers(1, 12).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=size - 1))
)


def renumbered(assignment: RankAssignment, size: int, lost: set[int]) -> dict[int, int]:
    """The new rank of each rank that is left."""
    new = {
        rank: assign(assignment, RankAssignmentCtx(State(rank, size), None, set(lost))).rank
        for rank in range(size)
        if rank not in lost
    }
    return {before: now for before, now in new.items() if now is not None}


# ------------------------------------------------------------------ numbering


def test_shifted_ranks_close_the_gaps_to_the_left() -> None:
    assert renumbered(ShiftRanks(), 8, EXAMPLE) == {0: 0, 2: 1, 3: 2, 6: 3, 7: 4}


def test_the_last_ranks_fill_the_gaps_in_order() -> None:
    assert renumbered(FillGaps(), 8, EXAMPLE) == {0: 0, 2: 2, 3: 3, 6: 1, 7: 4}


def test_gaps_among_the_ranks_that_would_move_are_not_filled() -> None:
    assert renumbered(FillGaps(), 8, {1, 6}) == {0: 0, 2: 2, 3: 3, 4: 4, 5: 5, 7: 1}


@given(losses)
def test_every_rank_is_given_once_and_none_is_left_out(drawn: tuple[int, set[int]]) -> None:
    size, lost = drawn
    for assignment in (ShiftRanks(), FillGaps()):
        new = renumbered(assignment, size, lost)
        assert sorted(new.values()) == list(range(size - len(lost)))


@given(losses)
def test_shifted_ranks_keep_their_order(drawn: tuple[int, set[int]]) -> None:
    new = renumbered(ShiftRanks(), *drawn)
    assert list(new.values()) == list(range(len(new)))


@given(losses)
def test_when_gaps_are_filled_the_first_ranks_stay_and_the_others_keep_their_order(
    drawn: tuple[int, set[int]],
) -> None:
    new = renumbered(FillGaps(), *drawn)
    assert all(now == before for before, now in new.items() if before < len(new))
    moved = [now for before, now in new.items() if before >= len(new)]
    assert moved == sorted(drawn[1])[: len(moved)]


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_a_rank_that_is_terminated_itself_is_discarded(assignment: RankAssignment) -> None:
    with pytest.raises(
        RankDiscarded, match=r"initial rank 4 .* rank is 4, .* terminated ranks are \[1, 4, 5\]"
    ):
        assign(assignment, RankAssignmentCtx(State(4, 8), None, set(EXAMPLE)))


# ------------------------------------------------------------------ activation


def states(assignment: Callable[..., Any], size: int) -> list[State]:
    return [assign(assignment, RankAssignmentCtx(State(r, size), None, set())) for r in range(size)]


@pytest.mark.parametrize(
    ("assignment", "active"),
    [
        (ShiftRanks(), 7),
        (FillGaps(), 7),
        (Compose(ActivateAllRanks(), ShiftRanks()), 7),
        (Compose(MaxActiveWorldSize(4), ShiftRanks()), 4),
        (Compose(MaxActiveWorldSize(9), ShiftRanks()), 7),
        (Compose(MaxActiveWorldSize(), FillGaps()), 7),
        (Compose(ActiveWorldSizeDivisibleBy(4), ShiftRanks()), 4),
        (Compose(ActiveWorldSizeDivisibleBy(), ShiftRanks()), 7),
        (Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(5), ShiftRanks()), 4),
        (Compose(ShiftRanks(), MaxActiveWorldSize(4)), 4),  # in the wrong order
    ],
)
def test_the_first_ranks_are_active_as_many_as_the_filters_allow(
    assignment: RankAssignment, active: int
) -> None:
    found = states(assignment, 7)
    assert [state.active_rank for state in found] == [*range(active), *[None] * (7 - active)]
    modes = [Mode.ACTIVE] * active + [Mode.INACTIVE] * (7 - active)
    assert [state.mode for state in found] == modes
    assert {(state.active_world_size, state.world_size) for state in found} == {(active, 7)}


@pytest.mark.parametrize("numbering", [ShiftRanks, FillGaps])
@pytest.mark.parametrize(
    ("chain", "active"),
    [
        (lambda numbering: numbering, 5),
        (lambda numbering: Compose(MaxActiveWorldSize(3), numbering), 3),
        (lambda numbering: Compose(numbering, MaxActiveWorldSize(3)), 3),
        (lambda numbering: Compose(numbering, MaxActiveWorldSize(7)), 5),
        (lambda numbering: Compose(ActiveWorldSizeDivisibleBy(4), numbering), 4),
    ],
)
def test_what_was_active_before_a_loss_does_not_matter_after_it(
    numbering: type[RankAssignment], chain: Callable[[RankAssignment], RankAssignment], active: int
) -> None:
    ranks = Ranks(8, lambda rank: chain(numbering()))
    ranks.assign()
    ranks.assign(lost=EXAMPLE)
    assert sorted(ranks.active().values()) == list(range(active))
    assert {state.active_world_size for state in ranks.states.values()} == {active}
    assert all(ranks.ranks()[initial] == rank for initial, rank in ranks.active().items())


def test_no_filter_has_more_ranks_active_than_there_are() -> None:
    class KeepsActive(RankAssignment):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            ctx.state.world_size, ctx.terminated_ranks = 5, set()
            return ctx

    chain = Compose(MaxActiveWorldSize(7), KeepsActive())
    before = State(0, 8, 0, 8, mode=Mode.ACTIVE)
    assert assign(chain, RankAssignmentCtx(before, None, {5, 6, 7})).active_world_size == 5


def test_more_ranks_are_active_again_when_there_are_more() -> None:
    small = State(0, 4, 0, 4, iteration=3, mode=Mode.ACTIVE)
    small.world_size = 8  # as if four had come back
    assert assign(ShiftRanks(), RankAssignmentCtx(small, None, set())).active_world_size == 8


def test_filters_are_rank_assignments_and_refuse_a_divisor_that_is_none() -> None:
    for kind in (ActivateAllRanks, MaxActiveWorldSize, ActiveWorldSizeDivisibleBy):
        assert issubclass(kind, RankFilter)
    for divided in (ActiveWorldSizeDivisibleBy, WorldSizeDivisibleBy):
        with pytest.raises(ValueError, match="divisor=0"):
            divided(0)


# ------------------------------------------------------------------ groups


def grouped(*conditions: int, kind: type[Any] = FilterCountGroupedByKey) -> Callable[[int], Any]:
    """Chains that want groups of two neighbours to have as many healthy ranks."""

    def make(initial: int) -> Any:
        def fits(wanted: int) -> Callable[[int], bool]:
            return lambda count: count == wanted

        parts = [kind(lambda _: f"host {initial // 2}", fits(wanted)) for wanted in conditions]
        return Compose(ShiftRanks(), *parts)

    return make


@pytest.mark.parametrize("kind", [FilterCountGroupedByKey, FilterGroupedByKey])
def test_what_is_left_of_a_group_that_lost_a_rank_is_terminated(kind: type[Any]) -> None:
    ranks = Ranks(8, grouped(2, kind=kind))
    ranks.assign()
    assert ranks.ranks() == {rank: rank for rank in range(8)}
    ranks.assign(lost=EXAMPLE)
    assert ranks.ranks() == {2: 0, 3: 1, 6: 2, 7: 3}
    assert set(ranks.discarded) == {0}
    assert isinstance(ranks.discarded[0], RankDiscarded)


def test_groups_are_counted_after_each_loss_and_by_each_filter() -> None:
    ranks = Ranks(8, grouped(2, 2))
    ranks.assign()
    ranks.assign(lost={0})
    ranks.assign(lost={6, 7})
    assert ranks.ranks() == {2: 0, 3: 1, 4: 2, 5: 3}


def test_a_filter_sees_what_the_one_before_it_has_left() -> None:
    ranks = Ranks(4, grouped(2, 1))  # the last one runs first: it wants single ranks
    ranks.assign(lost={0})
    assert ranks.ranks() == {}
    assert set(ranks.discarded) == {1, 2, 3}


def test_a_key_may_be_a_string_or_a_function_of_the_older_arguments() -> None:
    def make(initial: int) -> Any:
        by_place = FilterGroupedByKey(lambda rank, size: f"{rank % 2} of {size}", (3).__le__)
        by_name = FilterCountGroupedByKey(f"host {initial // 4}", (2).__le__)
        return Compose(ShiftRanks(), by_place, by_name)

    ranks = Ranks(8, make)
    ranks.assign()
    ranks.assign(lost={0, 1, 2})
    assert ranks.ranks() == {}
    assert set(ranks.discarded) == {3, 4, 5, 6, 7}


def test_filters_that_are_called_as_the_older_wrapper_did_do_not_mix_up_their_groups() -> None:
    class Older(RankAssignment):
        def __call__(self, state: State, terminated: set[int]) -> Any:  # type: ignore[override]
            numbering: Any = ShiftRanks()
            for number in (2, 3):
                groups: Any = FilterGroupedByKey(
                    lambda rank, _, number=number: rank // number, number.__eq__
                )
                state, terminated = groups(state, terminated)
                state, terminated = numbering(state, terminated)
            return state, terminated

    ranks = Ranks(8, lambda rank: Older())
    ranks.assign(lost={1, 6})  # pairs are left by 2 to 5, and of these a group of three
    assert ranks.ranks() == {2: 0, 3: 1, 4: 2}
    assert set(ranks.discarded) == {0, 5, 7}


def test_a_key_function_of_the_state_may_have_further_arguments_of_its_own() -> None:
    def make(initial: int) -> Any:
        key = lambda state, number=2: f"host {state.initial_rank // number}"  # noqa: E731
        return Compose(ShiftRanks(), FilterCountGroupedByKey(key, (2).__eq__))

    ranks = Ranks(4, make)
    ranks.assign(lost={0})
    assert ranks.ranks() == {2: 0, 3: 1}


def test_the_messages_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    def most(size: int) -> int:
        ranks = Ranks(size, grouped(2))
        ranks.assign()
        return max(map(len, ranks.sent.values()))

    # A rank that comes last has less to wait for, so the number may be smaller.
    assert [most(size) <= 12 for size in (2, 16, 48)] == [True] * 3
