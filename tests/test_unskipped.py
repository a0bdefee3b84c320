"""Skipped tests count as failed where REGROW_TEST_ALL promises all that tests need."""

from __future__ import annotations

from typing import Literal

import pytest

from helpers.suite.unskipped import A_GPU, ALL, NO_GPU, unskip

Outcome = Literal["passed", "failed", "skipped"]


def report(outcome: Outcome, reason: str = "") -> pytest.TestReport:
    longrepr = ("test_it.py", 3, f"Skipped: {reason}") if outcome == "skipped" else None
    return pytest.TestReport("id", ("test_it.py", 3, "test"), {}, outcome, longrepr, "setup")


@pytest.mark.parametrize(
    ("environ", "before", "reason", "after"),
    [
        ({ALL: "1"}, "skipped", "needs openssl", "failed"),
        ({ALL: "1"}, "skipped", A_GPU, "skipped"),
        ({ALL: "1"}, "skipped", NO_GPU, "skipped"),
        ({ALL: "1"}, "skipped", f"{NO_GPU} and no openssl", "failed"),
        ({ALL: "1"}, "skipped", "torch 2.13.0+cpu cannot use /dev/nvidia0", "failed"),
        ({}, "skipped", "needs openssl", "skipped"),
        ({ALL: "0"}, "skipped", "needs openssl", "skipped"),
        ({ALL: "1"}, "passed", "", "passed"),
    ],
)
def test_what_is_missing_where_nothing_may_be_is_a_failure(
    environ: dict[str, str], before: Outcome, reason: str, after: Outcome
) -> None:
    one = report(before, reason)
    unskip(one, environ)
    assert one.outcome == after
    if after == "failed":
        assert str(one.longrepr) == f"{ALL} is 1, so nothing may be skipped: Skipped: {reason}"


def test_what_is_expected_to_fail_may() -> None:
    one = report("skipped", "a known fault")
    one.wasxfail = "a known fault"
    unskip(one, {ALL: "1"})
    assert one.outcome == "skipped"
