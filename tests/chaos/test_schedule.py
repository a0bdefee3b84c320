"""When faults are due: the same on every node, and the same in every run."""

from __future__ import annotations

import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from regrow.chaos import DueFault, Schedule, parse


def first(text: str, count: int) -> list[DueFault]:
    """Return the first faults of a plan."""
    schedule = Schedule(parse(text))
    found: list[DueFault] = []
    while len(found) < count and schedule.next_s is not None:
        found += schedule.due(schedule.next_s)
    return found[:count]


def test_the_faults_of_all_rules_come_in_the_order_of_their_times() -> None:
    found = first("stop rank=2 for=5s every=20s; kill rank=1 at=30s", 4)
    assert [(each.at_s, each.rule.fault) for each in found] == [
        (20, "stop"),
        (30, "kill"),
        (40, "stop"),
        (60, "stop"),
    ]


def test_a_repeated_fault_begins_at_its_time_and_ends_after_its_number_of_times() -> None:
    found = first("kill rank=1 at=5s every=10s times=3", 10)
    assert [each.at_s for each in found] == [5, 15, 25]


def test_a_fault_that_is_due_once_waits_for_its_rank_and_the_others_do_not() -> None:
    found = first("kill at=1s; stop every=1s for=1s times=1; mtbf=1h", 3)
    assert [each.waits for each in found] == [True, False, False]


def test_faults_are_removed_when_they_are_due() -> None:
    schedule = Schedule(parse("kill every=10s"))
    assert schedule.due(9.9) == []
    assert [each.at_s for each in schedule.due(25)] == [10, 20]
    assert schedule.next_s == 30


def test_every_node_draws_the_same_faults_times_and_ranks() -> None:
    text = "mtbf=60s seed=7; kill rank=any every=50s"
    one, other = first(text, 100), first(text, 100)
    assert [(each.at_s, each.rule, each.rank(8)) for each in one] == [
        (each.at_s, each.rule, each.rank(8)) for each in other
    ]
    assert len({each.rank(8) for each in one}) == 8
    assert {each.rule.fault for each in one} == {"kill", "stop", "raise"}


def test_another_seed_draws_other_times() -> None:
    assert first("mtbf=60s seed=7", 1)[0].at_s != first("mtbf=60s seed=8", 1)[0].at_s


def test_another_rule_in_the_plan_does_not_change_the_random_times_of_a_rule() -> None:
    alone = first("mtbf=60s seed=7", 20)
    both = [each for each in first("mtbf=60s seed=7; kill rank=0 every=30s", 60) if not each.index]
    assert [each.at_s for each in both[:10]] == [each.at_s for each in alone[:10]]


def test_random_gaps_have_the_mean_that_was_asked_for() -> None:
    times = [0.0, *(each.at_s for each in first("mtbf=120s seed=7", 5000))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert abs(statistics.mean(gaps) - 120) < 6
    assert abs(statistics.stdev(gaps) - 120) < 8  # as of an exponential distribution


@given(st.integers(0, 1000), st.integers(1, 2000))
def test_a_drawn_rank_is_a_rank_of_the_job(seed: int, size: int) -> None:
    for due in first(f"mtbf=1s seed={seed}", 20):
        assert 0 <= due.rank(size) < size
