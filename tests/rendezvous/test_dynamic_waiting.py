"""What a node makes of what it hears: when a wait is over, and what its agent must be told."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.rendezvous._driver import View
from regrow.rendezvous._news import (
    Judged,
    NodesWaiting,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._waiting import Reborn, TimedOut, Told, Waiting, judge, tidings


def seated(round: int) -> Seated:
    return Seated("me", round, 0, 2, "host", "01234567", 1234)


def seen(news: Any, waiting: int = 0, judged: Judged | None = None) -> View:
    return View(1, news, waiting, judged)


OVER = RoundEnded(2, "other", "its connection broke")
CLOSED = RoundClosed("other", "enough")


# --- a wait


@pytest.mark.parametrize(
    ("news", "outcome"),
    [
        (seated(3), seated(3)),
        (seated(2), None),  # the seat that it has given up by asking
        (CLOSED, CLOSED),
        (Refused("me", 2, "stale"), Reborn("stale")),
        (None, Reborn("it was given up while it waited")),
        (OVER, None),
        (RoundEnded(3, "other", "it left"), RoundEnded(3, "other", "it left")),
        (Placed("me", "forming"), None),
        (Placed("me", "waiting"), None),
        (Placed("me", "standby"), None),
    ],
)
def test_a_wait_ends_with_what_came_of_it(news: Any, outcome: object) -> None:
    assert judge(Waiting(token=2, timeout=60.0), seen(news), now=10.0)[1] == outcome


@pytest.mark.parametrize("place", ["forming", "waiting"])
def test_a_wait_is_too_long_when_its_time_is_up(place: str) -> None:
    view = seen(Placed("me", place))
    waiting, outcome = judge(Waiting(0, 60.0), view, now=10.0)
    assert (waiting.deadline, outcome) == (70.0, None)
    assert judge(waiting, view, now=69.9)[1] is None
    assert judge(waiting, view, now=70.0)[1] == TimedOut()


def test_the_time_in_which_a_node_stands_by_does_not_count() -> None:
    waiting, _ = judge(Waiting(0, 60.0), seen(Placed("me", "waiting")), now=0.0)
    waiting, outcome = judge(waiting, seen(Placed("me", "standby")), now=50.0)
    assert (waiting.deadline, waiting.standby, outcome) == (None, True, None)
    waiting, outcome = judge(waiting, seen(Placed("me", "standby")), now=1e9)
    assert outcome is None
    waiting, outcome = judge(waiting, seen(Placed("me", "forming")), now=1e9)
    assert (waiting.deadline, waiting.standby, outcome) == (1e9 + 60, False, None)


def test_who_stood_by_until_the_end_is_known_to_have_done_so() -> None:
    waiting, _ = judge(Waiting(0, 60.0), seen(Placed("me", "standby")), now=0.0)
    waiting, outcome = judge(waiting, seen(CLOSED), now=1.0)
    assert (waiting.standby, outcome) == (True, CLOSED)


# --- what an agent is told


def told(*views: View) -> list[object]:
    """What an agent with a seat in round 2 is told when these are seen one after the other."""
    state = Told(2)
    news: list[object] = []
    for view in views:
        state, more = tidings(state, view, "me")
        news += more
    return news


def test_who_has_no_seat_is_told_nothing() -> None:
    for news in (OVER, CLOSED, None, Refused("me", 2, "stale")):
        assert tidings(Told(), seen(news), "me") == (Told(), ())


def test_the_end_of_the_round_by_anothers_doing_is_told_once() -> None:
    assert told(seen(seated(2)), seen(OVER), seen(OVER)) == [OVER]


def test_the_end_of_a_round_by_its_own_doing_is_no_news() -> None:
    assert told(seen(RoundEnded(2, "me", "its workers failed", "a report"))) == []


def test_the_end_of_another_round_is_no_news() -> None:
    assert told(seen(RoundEnded(1, "other", "it left"))) == []


@pytest.mark.parametrize(
    ("news", "why"),
    [(None, "the others have given it up"), (Refused("me", 2, "it is stale"), "it is stale")],
)
def test_who_was_given_up_is_told_that_its_round_is_over(news: Any, why: str) -> None:
    assert told(seen(news), seen(news)) == [RoundEnded(2, "me", why)]


def test_how_many_nodes_wait_is_told_when_it_changes_and_is_not_none() -> None:
    views = [seen(seated(2), waiting) for waiting in (0, 1, 1, 2, 0, 1)]
    assert told(*views) == [NodesWaiting(2, 1), NodesWaiting(2, 2), NodesWaiting(2, 1)]


def test_nodes_that_wait_for_a_round_that_is_over_are_no_news() -> None:
    assert told(seen(OVER, waiting=3)) == [OVER]


def test_the_end_of_the_job_is_told_once_and_not_to_who_ended_it() -> None:
    assert told(seen(OVER), seen(CLOSED), seen(CLOSED)) == [OVER, CLOSED]
    assert told(seen(RoundClosed("me", "enough"))) == []


def test_a_judgement_that_agrees_is_no_news() -> None:
    assert told(seen(OVER), seen(OVER, judged=Judged(2, False, 0, OVER))) == [OVER]


def test_a_judgement_that_corrects_the_cause_is_told_once() -> None:
    failed = RoundEnded(2, "other", "its workers failed", "a report")
    verdict = Judged(2, False, 0, RoundEnded(2, "third", "its connection broke"))
    views = [seen(failed), seen(verdict.cause, judged=verdict), seen(verdict.cause, judged=verdict)]
    assert told(*views) == [failed, verdict]


def test_a_judgement_of_its_own_failure_is_not_told_but_returned() -> None:
    failed = RoundEnded(2, "me", "its workers failed", "a report")
    verdict = Judged(2, False, 0, RoundEnded(2, "third", "its connection broke"))
    assert told(seen(failed), seen(verdict.cause, judged=verdict)) == []


def test_a_judgement_of_another_round_is_no_news() -> None:
    verdict = Judged(1, True, 1, RoundEnded(1, "third", "its workers failed", "a report"))
    assert told(seen(seated(2), judged=verdict), seen(OVER, judged=verdict)) == [OVER]
