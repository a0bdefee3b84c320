"""The pages of a job of which one agent leaves, and that `regrow stop` ends later."""

from __future__ import annotations

import pytest

from helpers.explained.leaving import END_S, STOP_S, agent_that_goes_on, agent_that_leaves
from regrow.explain import Explanation, explain, page


def explanations(first: str = "nodeA", second: str = "nodeB") -> list[Explanation]:
    """Return those of the leave and of the stop."""
    address, other = "10.0.0.1", "10.0.0.2"
    logs = {
        "0": agent_that_goes_on(first, address, f"{other}/8/abc/{second}"),
        "1": agent_that_leaves(second, other),
    }
    return list(explain(logs).values())[-1]


def test_a_stop_begins_with_the_request_that_was_followed_and_not_with_an_older_one() -> None:
    _, stop = explanations()
    assert stop.at_s == pytest.approx(STOP_S)
    assert [(phase.name, phase.end_s) for phase in stop.timeline] == [
        ("stopping", pytest.approx(END_S - STOP_S))
    ]
    assert [fact.text for fact in stop.evidence if fact.label == "asked by"] == ["regrow stop"]
    assert "the other nodes go on" not in page(stop)
