"""The language of --chaos: what it means, and errors that name the place."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.chaos import Plan, RandomFaults, Rule, parse


def test_a_plan_of_three_rules() -> None:
    plan = parse("kill rank=1 at=30s; stop rank=2 for=5s every=60s; mtbf=120s seed=7")
    assert plan == Plan(
        (
            Rule("kill", rank=1, at_s=30),
            Rule("stop", rank=2, every_s=60, for_s=5),
            RandomFaults(120),
        ),
        seed=7,
    )
    assert plan.faults == {"kill", "stop", "raise"}


@pytest.mark.parametrize("text", ["stop at=1s; kill rank={} at=1s", "mtbf=1s; mtbf=2s rank={}"])
def test_a_rank_beyond_those_of_the_job_is_an_error(text: str) -> None:
    assert parse(text.format(1), most_ranks=2).rules[1].rank == 1
    wrong = re.escape("at character 18, 'rank=2': the job has at most 2 ranks, numbered from 0")
    with pytest.raises(ValueError, match=wrong):
        parse(text.format(2), most_ranks=2)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("raise at=500ms", Rule("raise", at_s=0.5)),
        ("hang rank=any at=0s", Rule("hang", at_s=0)),
        ("gil at=1h for=2m", Rule("gil", at_s=3600, for_s=120)),
        ("slow rank=0 at=1.5s by=10 for=1s", Rule("slow", 0, 1.5, for_s=1, slowdown=10)),
        ("segfault every=5s times=3", Rule("segfault", every_s=5, times=3)),
        ("fill path=/tmp at=1s for=2s", Rule("fill", at_s=1, for_s=2, path="/tmp")),
        ("cut rank=3 at=1s for=2s", Rule("cut", 3, 1, for_s=2)),
        ("delay by=100ms at=1s for=2s", Rule("delay", at_s=1, for_s=2, latency_s=0.1)),
        ("mtbf=2m faults=kill,hang rank=1 for=3s", RandomFaults(120, ("kill", "hang"), 1, 3)),
        (";; kill at=1s ;", Rule("kill", at_s=1)),
    ],
)
def test_a_rule(text: str, rule: Rule | RandomFaults) -> None:
    assert parse(text).rules == (rule,)


def test_a_seed_may_stand_alone() -> None:
    assert parse("seed=3; kill at=1s") == Plan((Rule("kill", at_s=1),), seed=3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "the plan has no fault"),
        ("seed=3", "the plan has no fault"),
        ("kil rank=1 at=1s", "at character 1, 'kil': not a fault; the faults are kill, stop,"),
        ("kill at=1s; stop rnk=1", "at character 18, 'rnk=1': stop takes at, every, for, rank,"),
        ("kill rank=1 at=30", "at character 13, 'at=30': not a time; give a number with a unit"),
        ("kill rank=-1 at=1s", "at character 6, 'rank=-1': not a whole number from 0 to"),
        ("kill rank=1", "at character 1, 'kill': needs at= (once) or every="),
        ("kill rank=1 now", "at character 13, 'now': not KEY=VALUE"),
        ("kill at=1s at=2s", "at character 12, 'at=2s': at is given twice"),
        ("kill at=1s times=2", "at character 12, 'times=2': only with every="),
        ("kill every=1ms", "at character 6, 'every=1ms': not between 0.1 s and 86400 s"),
        (
            "kill at=1s seed=7",
            "at character 12, 'seed=7': kill takes at, every, rank, times, not seed;"
            " seed= is a rule of its own: write a semicolon before it",
        ),
        ("kill at=2000h", "at character 6, 'at=2000h': not between 0 s and 86400 s"),
        ("fill at=1s", "at character 1, 'fill': needs path=, for="),
        ("slow at=1s by=0.5", "at character 12, 'by=0.5': not a factor above 1"),
        ("rank=1", "at character 1, 'rank=1': a rule begins with a fault, or has mtbf=TIME"),
        ("mtbf=1s faults=fill", "at character 9, 'faults=fill': 'fill' is not one of kill,"),
        ("mtbf=1s seed=1; mtbf=2s seed=2", "at character 25, 'seed=2': the plan has a seed"),
        (";".join(["kill at=1s"] * 101), "at character 1101, 'kill': a plan has at most 100 rules"),
    ],
)
def test_an_error_names_the_place_and_the_word(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=r"^") as raised:
        parse(text)
    assert str(raised.value).startswith(error)


_WORDS = st.sampled_from(
    ["kill", "mtbf=1s", "seed=1", "rank=1", "at=1s", "every=2s", "for=3s", ";", "by=2", "=", "at=²"]
)


@given(st.lists(_WORDS | st.text(max_size=5)).map(" ".join))
def test_any_text_is_a_plan_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse(text).rules
