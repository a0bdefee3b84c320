"""The pages of a job of which one agent leaves, and that `regrow stop` ends later."""

from __future__ import annotations

import pytest

from helpers.explained.leaving import END_S, STOP_S, elastic_job
from helpers.many_restarts import Line
from regrow.explain import Explanation, explain, page


def explanations(logs: dict[str, list[Line]]) -> tuple[Explanation, Explanation]:
    """Return those of the leave and of the stop."""
    leave, stop = list(explain(logs).values())[-1]
    return leave, stop


def on_two_hosts() -> dict[str, list[Line]]:
    return elastic_job("nodeA", "nodeB", ("10.0.0.1", "10.0.0.2"))


def facts(found: Explanation) -> list[tuple[str, str]]:
    return [(fact.label, fact.text) for fact in found.evidence]


def test_a_stop_begins_with_the_request_that_was_followed_and_not_with_an_older_one() -> None:
    _, stop = explanations(on_two_hosts())
    assert stop.at_s == pytest.approx(STOP_S)
    assert [(phase.name, phase.end_s) for phase in stop.timeline] == [
        ("stopping", pytest.approx(END_S - STOP_S))
    ]
    assert ("asked by", "regrow stop") in facts(stop)
    assert "the other nodes go on" not in page(stop)


def test_of_two_agents_on_one_host_the_page_shows_the_one_that_left() -> None:
    leave, _ = explanations(elastic_job("vm", "vm", ("127.0.0.1", "127.0.0.1")))
    assert ("left with it", "rank 1") in facts(leave)
    assert [text for label, text in facts(leave) if label == "exit"] == [
        "exit code 143 of its agent"
    ]
    assert [label for label, _ in facts(leave)].count("its workers") == 1
    assert [peer[:6] for peer in leave.peers] == ["rank 0"]
