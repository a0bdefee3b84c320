"""The rule of a recovery: the newest complete step, one sender for each receiver, in balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.state import StateError
from regrow.state.choice import DifferentParts, RankReport, RecoveryPlan, choose

PARTS = (("model", "optim"), ("rng",))
NO_PRIVATE = (("model", "optim"), ())
PRINTS = {"model": "m", "optim": "o"}

Situation = tuple[list[RankReport], list[list[int]]]


def clean(rank: int, step: int, *private: int) -> RankReport:
    return RankReport(rank, step, True, PRINTS, PARTS, private or (step,))


def dirty(rank: int, step: int, *private: int) -> RankReport:
    return RankReport(rank, step, False, {}, PARTS, private)


def new(rank: int, *private: int) -> RankReport:
    return RankReport(rank, None, True, {}, PARTS, private)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    ranks = draw(st.permutations(range(draw(st.integers(1, 12)))))
    count = draw(st.integers(1, len(ranks)))
    groups = [list(ranks[start::count]) for start in range(count)]
    names = draw(st.sampled_from([PARTS, NO_PRIVATE]))
    reports = []
    for rank in ranks:
        step = draw(st.none() | st.integers(0, 4))
        is_clean = draw(st.booleans())
        kept = tuple(draw(st.sets(st.integers(0, 4), max_size=2)) | ({step} if step else set()))
        prints = PRINTS if is_clean and step is not None else {}
        reports.append(RankReport(rank, step, is_clean, prints, names, kept))
    return reports, groups


def is_complete(step: int, reports: Sequence[RankReport], groups: Sequence[Sequence[int]]) -> bool:
    held = {each.rank for each in reports if each.clean and each.step == step}
    return all(held & set(group) for group in groups) and all(
        step in each.private for each in reports if each.names[1]
    )


@given(situations())
def test_the_newest_complete_step_is_chosen(situation: Situation) -> None:
    reports, groups = situation
    complete = [step for step in range(5) if is_complete(step, reports, groups)]
    assert choose(reports, groups).step == max(complete, default=None)


@given(situations())
def test_every_rank_that_is_not_a_holder_receives_from_one_holder_of_its_group(
    situation: Situation,
) -> None:
    reports, groups = situation
    plan = choose(reports, groups)
    if plan.step is None:
        assert plan.transfers == ()
        return
    held = {each.rank for each in reports if each.clean and each.step == plan.step}
    assert sorted(each.target for each in plan.transfers) == sorted(
        {each.rank for each in reports} - held
    )
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    for source, target in plan.transfers:
        assert source in held
        assert group_of[source] == group_of[target]


@given(situations())
def test_the_holders_of_a_group_send_equally_often(situation: Situation) -> None:
    reports, groups = situation
    plan = choose(reports, groups)
    held = {each.rank for each in reports if each.clean and each.step == plan.step}
    sent = Counter(each.source for each in plan.transfers)
    for group in groups if plan.step is not None else ():
        loads = [sent[rank] for rank in group if rank in held]
        assert max(loads) - min(loads) <= 1


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_reports_has_no_effect(situation: Situation, order: object) -> None:
    reports, groups = situation
    plan = choose(reports, groups)
    order.shuffle(reports)  # type: ignore[attr-defined]
    assert choose(reports, groups) == plan


@given(situations())
def test_a_plan_without_a_step_has_a_reason_if_a_rank_had_a_state(situation: Situation) -> None:
    reports, groups = situation
    plan = choose(reports, groups)
    nothing = all(each.step is None for each in reports)
    assert bool(plan.reason) == (plan.step is None and not nothing)


@given(st.integers(2, 8), st.data())
def test_one_step_apart_is_never_a_loss_with_one_group_and_prepared_private_parts(
    size: int, data: st.DataObject
) -> None:
    """A rank commits step 5 only after all have prepared it; one rank dies at any point."""
    victim = data.draw(st.integers(0, size - 1))
    ahead = data.draw(st.sets(st.sampled_from([r for r in range(size) if r != victim])))
    reports = []
    for rank in range(size):
        prepared = (4, 5) if ahead else data.draw(st.sampled_from([(4,), (4, 5)]))
        if rank == victim:
            reports.append(new(rank, *prepared))
        else:
            reports.append(clean(rank, 5 if rank in ahead else 4, *prepared))
    assert choose(reports, None).step == (5 if ahead else 4)


def test_nothing_anywhere_calls_the_default_without_a_warning() -> None:
    assert choose([new(0), new(1)], None) == RecoveryPlan(None)


def test_a_dirty_rank_receives_the_step_that_the_others_have_completed() -> None:
    plan = choose([clean(0, 7), dirty(1, 6, 6, 7), new(2, 7)], None)
    assert plan == RecoveryPlan(7, ((0, 1), (0, 2)))  # type: ignore[arg-type]


def test_ranks_that_are_a_step_ahead_go_back_if_only_the_older_step_is_complete() -> None:
    groups = [[0, 1], [2, 3]]
    reports = [clean(0, 7, 6, 7), clean(1, 6), clean(2, 6), new(3, 6)]
    assert choose(reports, groups) == RecoveryPlan(6, ((1, 0), (2, 3)))  # type: ignore[arg-type]


def test_a_private_part_that_was_not_kept_is_named() -> None:
    plan = choose([clean(0, 7), new(1, 6)], None)
    assert plan.step is None
    assert plan.reason == "the private parts of rank 1 for step 7 were not kept"


def test_a_group_without_a_holder_is_named() -> None:
    plan = choose([clean(0, 7), clean(2, 7), new(1, 7), new(3, 7)], [[0, 2], [1, 3]])
    assert plan.step is None
    assert plan.reason == "no rank of the replica group of ranks 1, 3 has a clean state of step 7"


def test_a_group_of_which_no_rank_is_left_makes_no_step_complete() -> None:
    plan = choose([clean(0, 7), clean(2, 7)], [[0, 2], [1, 3]])
    assert plan == RecoveryPlan(None, reason="all ranks of a replica group are lost")


def test_holders_with_different_structures_are_refused_with_the_name_of_the_part() -> None:
    other = clean(1, 7)._replace(prints={"model": "m", "optim": "another"})
    with pytest.raises(DifferentParts, match=r"replicated\['optim'\].* rank 1 than on rank 0"):
        choose([clean(0, 7), other], None)


def test_shards_of_different_groups_may_have_different_structures() -> None:
    other = clean(1, 7)._replace(prints={"model": "another", "optim": "o"})
    assert choose([clean(0, 7), other], [[0], [1]]).step == 7


def test_a_part_that_a_rank_lacks_is_named() -> None:
    other = new(1)._replace(names=(("model",), ("rng",)))
    with pytest.raises(StateError, match=r"rank 0 has the part replicated\['optim'\], and rank 1"):
        choose([clean(0, 7), other], None)


def test_a_rank_in_no_group_is_named() -> None:
    with pytest.raises(StateError, match="rank 1 is in no group"):
        choose([clean(0, 7), clean(1, 7)], [[0]])
