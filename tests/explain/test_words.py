"""Ranks, times and tracebacks as words of a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.explain import RUNG_NAMES
from regrow.explain.words import many_ranks, relative, seconds


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/architecture.md"])
def test_the_names_of_the_rungs_are_those_of_the_documentation(page: str) -> None:
    text = Path(__file__).parents[2].joinpath(page).read_text()
    rows = re.findall(r"^\| (\d)\. ([a-z ]*[a-z])", text, re.MULTILINE)
    assert {int(rung): name for rung, name in rows} == RUNG_NAMES


def test_neighbouring_ranks_are_a_range() -> None:
    assert many_ranks([3]) == "rank 3"
    assert many_ranks([2, 0, 1, 5, 7, 8]) == "ranks 0-2, 5, 7, 8"


@given(st.sets(st.integers(0, 5000), max_size=600))
def test_many_ranks_fit_into_two_lines(ranks: set[int]) -> None:
    assert len(many_ranks(ranks)) < 200


def test_a_time_before_or_after_the_failure() -> None:
    assert relative(1.0, 3.0) == "2.0 s before the failure"
    assert relative(3.0, 1.0, "it fell silent") == "2.0 s after it fell silent"
    assert relative(None, 1.0) == ""
    assert (seconds(None), seconds(0.0), seconds(0.25)) == ("an unknown time", "0 s", "250 ms")
