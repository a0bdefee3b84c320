"""Decisions of a node about snapshots: when a wait is over, and which notifications are due."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.node.node_rules import (
    JobStopped,
    Notified,
    Rejoin,
    SeatRequest,
    TimedOut,
    beat_pause,
    end_wait,
    is_evicted,
    notifications,
)
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.protocol.messages import (
    JOB_STOPS,
    Departed,
    Judged,
    LeavingAnnounced,
    NodeRefused,
    NodesWaiting,
    Placed,
    RestartSpent,
    RoundClosed,
    RoundEnded,
    Seated,
)


def seated(round: int) -> Seated:
    return Seated("me", round, 0, 2, "host", "01234567", 1234)


def seen(status: Any, waiting: int = 0, judged: Judged | None = None) -> Snapshot:
    return Snapshot(1, status, waiting, judged)


OVER = RoundEnded(2, "other", "its connection broke")
CLOSED = RoundClosed("other", "enough")


# --- a wait


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (seated(3), seated(3)),
        (seated(2), None),  # the node gave this seat up when it joined again
        (CLOSED, CLOSED),
        (NodeRefused("me", "stale"), Rejoin("stale")),
        (None, Rejoin("the other nodes evicted it while it waited")),
        (OVER, None),
        (RoundEnded(3, "other", "it left"), RoundEnded(3, "other", "it left")),
        (Placed("me", "forming"), None),
        (Placed("me", "waiting"), None),
        (Placed("me", "standby"), None),
    ],
)
def test_a_wait_ends_with_its_outcome(status: Any, outcome: object) -> None:
    assert end_wait(SeatRequest(token=2, timeout=60.0), seen(status), now=10.0)[1] == outcome


@pytest.mark.parametrize("place", ["forming", "waiting"])
def test_a_wait_is_too_long_when_its_time_is_up(place: str) -> None:
    view = seen(Placed("me", place))
    waiting, outcome = end_wait(SeatRequest(0, 60.0), view, now=10.0)
    assert (waiting.deadline, outcome) == (70.0, None)
    assert end_wait(waiting, view, now=69.9)[1] is None
    assert end_wait(waiting, view, now=70.0)[1] == TimedOut()


def test_the_time_in_which_a_node_stands_by_does_not_count() -> None:
    waiting, _ = end_wait(SeatRequest(0, 60.0), seen(Placed("me", "waiting")), now=0.0)
    waiting, outcome = end_wait(waiting, seen(Placed("me", "standby")), now=50.0)
    assert (waiting.deadline, waiting.standby, outcome) == (None, True, None)
    waiting, outcome = end_wait(waiting, seen(Placed("me", "standby")), now=1e9)
    assert outcome is None
    waiting, outcome = end_wait(waiting, seen(Placed("me", "forming")), now=1e9)
    assert (waiting.deadline, waiting.standby, outcome) == (1e9 + 60, False, None)


def test_a_node_that_was_on_standby_until_the_end_is_recognized() -> None:
    waiting, _ = end_wait(SeatRequest(0, 60.0), seen(Placed("me", "standby")), now=0.0)
    waiting, outcome = end_wait(waiting, seen(CLOSED), now=1.0)
    assert (waiting.standby, outcome) == (True, CLOSED)


STOPPED = Placed("me", "forming", "regrow stop")
SEATED = seated(3)._replace(departed=(Departed("other", 0, f"{JOB_STOPS}regrow stop"),))


@pytest.mark.parametrize("status", [STOPPED, STOPPED._replace(place="standby"), SEATED])
def test_a_node_that_stands_by_does_not_go_on_with_a_job_that_was_stopped(status: Any) -> None:
    waiting, _ = end_wait(SeatRequest(0, 60.0), seen(Placed("me", "standby")), now=0.0)
    assert end_wait(waiting, seen(status), now=1.0)[1] == JobStopped("regrow stop")


@pytest.mark.parametrize("status", [STOPPED, SEATED])
def test_the_next_run_of_a_job_that_was_stopped_may_have_its_id(status: Any) -> None:
    outcome = end_wait(SeatRequest(0, 60.0), seen(status), now=1.0)[1]
    assert outcome == (None if status is STOPPED else status)


# --- notifications


def notified(*views: Snapshot) -> list[object]:
    """Return an agent's notifications for these snapshots; the agent has a seat in round 2."""
    state = Notified(2)
    found: list[object] = []
    for view in views:
        state, more = notifications(state, view, "me")
        found += more
    return found


def test_a_node_without_a_seat_gets_no_notification() -> None:
    for status in (OVER, CLOSED, None, NodeRefused("me", "stale")):
        assert notifications(Notified(), seen(status), "me") == (Notified(), ())


def test_the_end_of_the_round_by_another_node_is_notified_once() -> None:
    assert notified(seen(seated(2)), seen(OVER), seen(OVER)) == [OVER]


def test_the_end_of_a_round_by_the_node_itself_is_not_notified() -> None:
    assert notified(seen(RoundEnded(2, "me", "its workers failed", "a report"))) == []


def test_the_end_of_another_round_is_not_notified() -> None:
    assert notified(seen(RoundEnded(1, "other", "it left"))) == []


@pytest.mark.parametrize(
    ("status", "why"),
    [(None, "the other nodes evicted it"), (NodeRefused("me", "it is stale"), "it is stale")],
)
def test_an_evicted_node_learns_that_its_round_is_over(status: Any, why: str) -> None:
    assert notified(seen(status), seen(status)) == [RoundEnded(2, "me", why, lost=True)]


def test_a_changed_number_of_waiting_nodes_above_zero_is_notified() -> None:
    views = [seen(seated(2), waiting) for waiting in (0, 1, 1, 2, 0, 1)]
    assert notified(*views) == [NodesWaiting(2, 1), NodesWaiting(2, 2), NodesWaiting(2, 1)]


def test_another_node_that_waits_is_notified_with_its_name() -> None:
    views = [seen(seated(2), 1)._replace(first_waiting=(id,)) for id in ("a", "a", "b")]
    assert notified(*views) == [NodesWaiting(2, 1, ("a",)), NodesWaiting(2, 1, ("b",))]


def test_a_restart_that_is_spent_in_the_round_is_notified_once() -> None:
    at_the_start = seated(2)._replace(failures=1)
    views = [seen(at_the_start)._replace(failures=number) for number in (1, 2, 2, 3)]
    over = seen(OVER)._replace(failures=4)  # the failure that ended the round
    assert notified(*views, over) == [RestartSpent(2, 2), RestartSpent(2, 3), OVER]


def test_each_node_that_announces_to_leave_is_notified_once_and_not_to_itself() -> None:
    leaving = (("b", "SIGTERM"), ("me", "SIGINT"), ("c", "SIGTERM"))
    views = [seen(seated(2))._replace(leaving=leaving[:count]) for count in (0, 1, 1, 3)]
    over = seen(OVER)
    assert notified(*views, over) == [
        LeavingAnnounced(2, "b", "SIGTERM"),
        LeavingAnnounced(2, "c", "SIGTERM"),
        OVER,
    ]


def test_nodes_that_wait_for_a_round_that_is_over_are_not_notified() -> None:
    assert notified(seen(OVER, waiting=3)) == [OVER]


def test_the_end_of_the_job_is_notified_once_and_not_to_the_node_that_ended_it() -> None:
    assert notified(seen(OVER), seen(CLOSED), seen(CLOSED)) == [OVER, CLOSED]
    assert notified(seen(RoundClosed("me", "enough"))) == []


def test_a_verdict_that_agrees_is_not_notified() -> None:
    assert notified(seen(OVER), seen(OVER, judged=Judged(2, False, 0, OVER))) == [OVER]


def test_a_verdict_that_corrects_the_cause_is_notified_once() -> None:
    failed = RoundEnded(2, "other", "its workers failed", "a report")
    verdict = Judged(2, False, 0, RoundEnded(2, "third", "its connection broke"))
    views = [seen(failed), seen(verdict.cause, judged=verdict), seen(verdict.cause, judged=verdict)]
    assert notified(*views) == [failed, verdict]


def test_a_verdict_on_the_own_failure_is_returned_and_not_notified() -> None:
    failed = RoundEnded(2, "me", "its workers failed", "a report")
    verdict = Judged(2, False, 0, RoundEnded(2, "third", "its connection broke"))
    assert notified(seen(failed), seen(verdict.cause, judged=verdict)) == []


def test_a_verdict_of_another_round_is_not_notified() -> None:
    verdict = Judged(1, True, 1, RoundEnded(1, "third", "its workers failed", "a report"))
    assert notified(seen(seated(2), judged=verdict), seen(OVER, judged=verdict)) == [OVER]


@pytest.mark.parametrize(
    ("status", "evicted"),
    [(None, True), (NodeRefused("me", "stale"), True), (seated(1), False), (OVER, False)],
)
def test_a_node_that_the_others_do_not_know_or_refuse_was_evicted_from_its_seat(
    status: Any, evicted: bool
) -> None:
    assert is_evicted(Notified(1), seen(status)) is evicted
    assert not is_evicted(Notified(), seen(status))


def test_heartbeats_of_a_node_without_a_lease_get_rarer_if_answers_are_slow() -> None:
    bounds = Bounds(keep_alive=1.0, misses=3)

    def pause(took: float, *, answered: bool = True, leased: bool = False) -> float:
        return beat_pause(bounds, took, answered=answered, leased=leased)

    assert [pause(took) for took in (0.0, 0.5, 1.0, 1.4, 9.0)] == [1.0, 1.0, 2.0, 2.8, 3.0]
    assert pause(0.1, answered=False) == 1.0
    assert pause(2.0, leased=True) == 1.0
    assert pause(2.0, answered=False, leased=True) == 0.25
