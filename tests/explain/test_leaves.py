"""The pages of a job of which one agent leaves, and that `regrow stop` ends later."""

from __future__ import annotations

import pytest

from helpers.explained.leaving import ASKED_S, END_S, STOP_S, UNDECIDED_S, elastic_job
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
    (stopping,) = stop.timeline
    assert stopping.name == "stopping"
    assert stopping.length_s == pytest.approx(END_S - STOP_S)
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


def test_a_leave_begins_with_the_signal_and_not_with_the_decision_about_it() -> None:
    leave, _ = explanations(on_two_hosts())
    assert leave.at_s == pytest.approx(ASKED_S)
    first, second, *_ = leave.timeline
    assert first.name == "deciding"
    assert first.length_s == pytest.approx(UNDECIDED_S)
    assert first.meaning == "the agents decided which ranks stop"
    assert second.name == "notification"


def test_without_the_log_of_the_host_a_leave_begins_with_the_request_that_others_got() -> None:
    logs = on_two_hosts()
    del logs["1"]
    leave, _ = explanations(logs)
    assert leave.at_s == pytest.approx(ASKED_S, abs=0.1)


def test_a_signal_to_the_whole_job_counts_the_wait_for_a_common_step() -> None:
    logs = {"1": on_two_hosts()["1"]}
    (stop,) = list(explain(logs).values())[-1]
    assert stop.at_s == pytest.approx(ASKED_S - 0.1)  # this log begins 0.1 s later
    assert [phase.name for phase in stop.timeline] == ["deciding", "stopping"]


def test_a_host_that_leaves_with_notice_is_a_change_and_no_failure() -> None:
    leave, _ = explanations(on_two_hosts())
    assert leave.is_planned
    assert page(leave).startswith("Change 1 of job")
