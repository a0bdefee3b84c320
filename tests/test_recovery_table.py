"""The table of recovery times at the end of `make hosts`."""

from __future__ import annotations

from typing import Literal

import pytest

from helpers.suite.recovery import table


def report(
    name: str, when: Literal["setup", "call", "teardown"], *properties: tuple[str, object]
) -> pytest.TestReport:
    return pytest.TestReport(
        f"tests/hosts/test_x.py::test_{name}",
        ("test_x.py", 1, name),
        {},
        "passed",
        None,
        when,
        user_properties=properties,
    )


def test_each_scenario_that_healed_has_a_line_with_its_times() -> None:
    one, two = ("recovery", (0.5, 2.25)), ("recovery", [1.0, None])
    reports = [
        report("what_does_not_heal", "call", ("another", 1)),
        report("two[etcd]", "setup", two),
        report("two[etcd]", "call", two),
        report("one", "call", one),
        report("one", "teardown", one),
    ]
    assert [line.split() for line in table(reports)] == [
        ["workers", "started", "first", "all-reduce"],
        ["one", "0.50", "2.25"],
        ["two[etcd]", "1.00", "none"],
    ]
    assert table(reports[:2]) == []
