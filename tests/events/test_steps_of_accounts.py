"""Figures from the accounts of workers: paces, steps that were done again, the time to load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.events.accounts import accounts_of, loading_s, redone_s, step_s


def account(counts: dict[str, Any], seconds: dict[str, Any]) -> dict[str, Any]:
    return {"counts": counts, "seconds": seconds}


RESTARTED = account(
    {"steps": 30, "repeated_steps": 5, "first_step": 1, "first_repeated_step": 1},
    {"steps": 3.0, "repeated_steps": 0.5, "first_step": 4.0, "first_repeated_step": 2.1},
)
"""Steps of 0.1 s; after an in-process restart the function loads for 2 s, and repeats 6 steps."""


def test_the_time_to_load_is_that_of_the_first_repeated_step_less_a_step() -> None:
    assert loading_s([RESTARTED], 1) == pytest.approx(2.0)
    assert redone_s({"accounts": {"0": RESTARTED}}) == pytest.approx([0.6])
    assert step_s([RESTARTED]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("restarts", "changed"),
    [
        (0, {}),  # the attempt itself began with a step that had been done before
        (2, {}),  # after one of them no step was repeated
        (1, {"first_step": 0}),  # a new process, which had to start first
        (1, {"steps": 0, "repeated_steps": 0}),  # no pace is known
    ],
)
def test_the_time_to_load_is_unknown_where_something_else_may_be_in_it(
    restarts: int, changed: dict[str, int]
) -> None:
    other = account(RESTARTED["counts"] | changed, RESTARTED["seconds"])
    assert loading_s([other], restarts) is None
    assert loading_s([other, RESTARTED], 1) == pytest.approx(2.0, abs=1.0)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(max_size=3), each),
    max_leaves=5,
)


_ACCOUNT = st.dictionaries(st.sampled_from(["counts", "seconds"]), _ANY) | _ANY


@given(st.dictionaries(st.text(max_size=2), _ACCOUNT) | _ANY, st.integers(0, 3))
def test_accounts_of_other_types_are_no_accounts(found: object, restarts: int) -> None:
    event = {"accounts": found}
    known = accounts_of([event])
    loading_s(known, restarts)
    step_s(known)
    redone_s(event)
