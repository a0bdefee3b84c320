"""The rules of the rounds, one promise per test."""

from __future__ import annotations

import pytest

from regrow.rendezvous.protocol.document import decode, encode
from regrow.rendezvous.protocol.messages import (
    JOB_STOPS,
    CloseRendezvous,
    Departed,
    EndConfirmed,
    Event,
    JoinRound,
    Judged,
    LastCallOver,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    Placed,
    RoundClosed,
    RoundEnded,
    Seated,
    SpendRestart,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import (
    Round,
    departed,
    holds,
    judged,
    place,
    seated,
    stands_by,
    status_of,
    watched,
)


def node(name: str, wanted: int | None = None) -> Node:
    return Node(name, f"host-{name}", wanted)


Status = Seated | Placed | RoundEnded | RoundClosed
Learned = Status | NodeRefused | Judged


def run(state: Round, *events: Event) -> tuple[Round, list[Learned]]:
    """Apply all events; return the state, and what nodes learn from the last event.

    That is its refusal, or the changed statuses of the nodes and the verdict.
    """
    learned: list[Learned] = []
    for event in events:
        before = state
        state, refusal = step(before, event)
        assert decode(encode(state)) == state
        learned = changes(before, state) if refusal is None else [refusal]
    return state, learned


def changes(before: Round, after: Round) -> list[Learned]:
    changed: dict[Learned, None] = {}
    for id in (*after.ranks, *after.members, *after.queue, *sorted(after.awaited)):
        status = status_of(after, id)
        if status is not None and status != status_of(before, id):
            changed[status] = None
    verdict = judged(after, after.number - 1)
    if verdict and (before.unheard or verdict.charged) and verdict != judged(before, verdict.round):
        changed[verdict] = None
    return list(changed)


def joins(*names: str, token: int = 0) -> list[Event]:
    return [JoinRound(node(name), token) for name in names]


def complete(*names: str, low: int = 1, high: int = 0) -> Round:
    """Return a complete round 1 with these nodes."""
    state, _ = run(Round(low, high or len(names)), *joins(*names))
    if not state.complete:
        state, _ = run(state, LastCallOver(state.last_call))
    assert state.complete
    return state


def seats(effects: list[Learned]) -> dict[str, int]:
    return {e.id: e.rank for e in effects if isinstance(e, Seated)}


# --- forming


def test_a_full_round_completes_at_once_and_every_node_gets_its_rank() -> None:
    state, effects = run(Round(1, 3), *joins("c", "a", "b"))
    assert state.complete
    assert seats(effects) == {"a": 0, "b": 1, "c": 2}
    assert {
        (e.round, e.world_size, e.leader, e.digest) for e in effects if isinstance(e, Seated)
    } == {(1, 3, "host-a", state.digest)}


def test_a_round_below_its_minimum_waits() -> None:
    state, effects = run(Round(2, 4), *joins("a"))
    assert not state.complete
    assert effects == [Placed("a", "forming")]
    assert state.last_call == 0


def test_at_the_minimum_the_last_call_begins_and_its_end_completes_the_round() -> None:
    state, effects = run(Round(2, 4), *joins("a", "b"))
    assert effects == [Placed("b", "forming")]
    assert state.last_call
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "b": 1}


def test_more_arrivals_do_not_prolong_the_last_call() -> None:
    state, _ = run(Round(2, 4), *joins("a", "b"))
    call = state.last_call
    state, _ = run(state, *joins("c"))
    assert state.last_call == call


def test_falling_below_the_minimum_cancels_the_last_call_for_good() -> None:
    state, _ = run(Round(2, 4), *joins("a", "b"))
    old = state.last_call
    state, _ = run(state, LeaveRound("b"), *joins("c"))
    assert state.last_call not in (0, old)
    again, effects = run(state, LastCallOver(old))
    assert again is state
    assert effects == []


def test_the_end_of_no_last_call_means_nothing() -> None:
    state, _ = run(Round(2, 4), *joins("a"))
    assert run(state, LastCallOver(0)) == (state, [])


def test_a_node_lost_while_the_round_forms_is_no_member() -> None:
    state, _ = run(Round(2, 2), *joins("a"), NodeLost("a", "silence"), *joins("b"))
    assert not state.complete
    assert status_of(state, "a") is None


def test_a_repeated_join_changes_nothing_and_is_answered_the_same() -> None:
    forming, _ = run(Round(2, 2), *joins("a"))
    assert run(forming, *joins("a"))[0] is forming
    seated, _ = run(forming, *joins("b"))
    assert run(seated, *joins("a"))[0] is seated


# --- the queue


def test_a_late_node_waits_for_a_free_seat() -> None:
    state, effects = run(complete("a", "b", high=3), *joins("c"))
    assert effects == [Placed("c", "waiting")]
    assert state.waiting == 1


def test_a_late_node_without_a_free_seat_stands_by() -> None:
    state, effects = run(complete("a", "b"), *joins("c"))
    assert effects == [Placed("c", "standby")]
    assert state.waiting == 0
    assert stands_by(state, "c")


def test_free_seats_are_promised_only_as_often_as_there_are_any() -> None:
    state, effects = run(complete("a", "b", high=3), *joins("c", "d"))
    assert effects == [Placed("d", "standby")]
    assert state.waiting == 1


def test_a_standby_moves_up_when_an_earlier_waiting_node_leaves() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c", "d"))
    state, _ = run(state, LeaveRound("c"))
    assert status_of(state, "d") == Placed("d", "waiting")
    assert state.waiting == 1


def test_the_number_of_waiting_nodes_falls_when_one_leaves() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c"), LeaveRound("c"))
    assert state.waiting == 0


def test_a_standby_takes_the_seat_of_a_lost_member() -> None:
    state, effects = run(complete("a", "b"), *joins("c"), NodeLost("b", "silence"))
    assert Placed("c", "forming") in effects
    state, effects = run(state, JoinRound(node("a"), token=1))
    assert seats(effects) == {"a": 0, "c": 1}


def test_seats_are_kept_for_members_of_the_round_before_while_they_stop_their_workers() -> None:
    state, _ = run(complete("a", "b", "c", high=3), NodeLost("c", "silence"), *joins("d", "e"))
    assert status_of(state, "d") == Placed("d", "forming")
    assert status_of(state, "e") == Placed("e", "standby")
    state, effects = run(state, *joins("a", "b", token=1))
    assert seats(effects) == {"a": 0, "b": 1, "d": 2}


# --- the end of a round, and the next


def test_a_round_that_loses_a_member_ends_with_the_node_and_the_reason() -> None:
    state, effects = run(complete("a", "b", "c"), NodeLost("b", "its connection broke"))
    assert effects == [RoundEnded(1, "b", "its connection broke", lost=True)]
    assert str(effects[0]) == "lost host b: its connection broke"
    assert state.number == 2
    assert status_of(state, "a") == RoundEnded(1, "b", "its connection broke", lost=True)
    assert status_of(state, "b") is None


def test_a_member_that_asks_for_the_next_round_ends_this_one_for_all() -> None:
    state, effects = run(complete("a", "b"), JoinRound(node("b"), 1, "its worker failed"))
    assert effects == [Placed("b", "forming"), RoundEnded(1, "b", "its worker failed")]
    assert state.last_call
    state, effects = run(state, JoinRound(node("a"), 1))
    assert seats(effects) == {"a": 0, "b": 1}
    assert state.number == 2


def test_the_last_call_ends_as_soon_as_no_member_is_awaited() -> None:
    state, _ = run(
        complete("a", "b", "c", "d"), NodeLost("d", "silence"), *joins("a", "b", token=1)
    )
    assert not state.complete
    _, effects = run(state, *joins("c", token=1))
    assert seats(effects) == {"a": 0, "b": 1, "c": 2}
    _, effects = run(state, NodeLost("c", "silence"))
    assert seats(effects) == {"a": 0, "b": 1}
    _, effects = run(state, LeaveRound("c", 1))
    assert seats(effects) == {"a": 0, "b": 1}


def test_seats_and_last_call_follow_at_once_when_a_round_ends_while_others_wait() -> None:
    for event in (WorkersFailed("a", 1, "boom"), NodeLeaving("a", 1, "SIGTERM")):
        state, _ = run(complete("a", "b", high=4), *joins("c", "d"), event)
        assert list(state.members) == ["c", "d"]
        assert state.last_call


def test_below_the_minimum_the_survivors_wait_until_one_comes() -> None:
    state, _ = run(
        complete("a", "b", low=2, high=3), NodeLost("b", "silence"), *joins("a", token=1)
    )
    assert not state.complete
    _, effects = run(state, *joins("e"))
    assert seats(effects) == {"a": 0, "e": 1}


def test_a_world_of_one_goes_from_round_to_round_without_waiting() -> None:
    state = complete("a")
    state, effects = run(state, JoinRound(node("a"), 1))
    assert seats(effects) == {"a": 0}
    assert state.number == 2


def test_a_node_that_missed_its_seat_in_an_ended_round_is_awaited() -> None:
    state, _ = run(complete("a", "b"), JoinRound(node("b"), 1))
    assert run(state, JoinRound(node("a"), 0))[0] is state
    assert status_of(state, "a") == RoundEnded(1, "b", "it starts its workers again")
    _, effects = run(state, JoinRound(node("a"), 1))
    assert seats(effects) == {"a": 0, "b": 1}


# --- fencing


def test_a_node_with_a_stale_token_is_refused_with_the_reason() -> None:
    state, _ = run(complete("a", "b", "c"), NodeLost("c", "silence"), *joins("a", "b", token=1))
    after, effects = run(state, JoinRound(node("c"), 1))
    assert after is state
    (refused,) = effects
    assert isinstance(refused, NodeRefused)
    assert "round 1 continued without it" in refused.why
    assert "lost host c: silence" in refused.why


def test_a_refused_node_can_come_back_as_a_new_one() -> None:
    state, _ = run(complete("a", "b", "c"), NodeLost("c", "silence"), *joins("a", "b", token=1))
    state, effects = run(state, JoinRound(node("c2")))
    assert effects == [Placed("c2", "waiting")]


def test_a_late_join_of_an_older_round_does_not_end_the_current_one() -> None:
    state, _ = run(complete("a", "b"), *joins("b", "a", token=1))
    assert state.number == 2
    assert run(state, JoinRound(node("a"), 1))[0] is state


def test_a_late_leave_of_an_older_round_does_not_end_the_current_one() -> None:
    state, _ = run(complete("a", "b"), *joins("b", "a", token=1))
    again, effects = run(state, LeaveRound("a", 1))
    assert again is state
    assert [type(e) for e in effects] == [NodeRefused]


def test_a_late_loss_of_a_node_that_is_gone_changes_nothing() -> None:
    state, _ = run(complete("a", "b"), NodeLost("b", "silence"))
    assert run(state, NodeLost("b", "silence")) == (state, [])


def test_a_late_judgement_of_a_node_that_has_got_elsewhere_since_changes_nothing() -> None:
    forming, _ = run(Round(2, 2), *joins("a"))
    seated, _ = run(forming, *joins("b"))
    again, _ = run(seated, *joins("b", "a", token=1))
    for before, after in [(forming, seated), (seated, again), (forming, again)]:
        late = NodeLost("a", "silence", place(before, "a"))
        assert run(after, late) == (after, [])
        assert status_of(run(before, late)[0], "a") is None
    assert status_of(run(again, NodeLost("a", "its connection broke"))[0], "a") is None


def test_nodes_that_are_lost_together_are_all_removed() -> None:
    state = complete("a", "b", "c", "d")
    judgements = [NodeLost(id, "silence", place(state, id)) for id in "abc"]
    state, _ = run(state, *judgements)
    assert watched(state) == {"d"}


@pytest.mark.parametrize("state", [Round(2, 2), complete("a", "b")])
def test_a_token_of_a_round_that_never_was_is_refused(state: Round) -> None:
    after, effects = run(state, JoinRound(node("z"), 7))
    assert after is state
    assert effects == [NodeRefused("z", "it names round 7, and the current round is 1")]


# --- eviction


def evicting() -> Round:
    """Return a round of a, b and c; only a has rejoined within the last call."""
    state, _ = run(complete("a", "b", "c"), JoinRound(node("a"), 1))
    return run(state, LastCallOver(state.last_call))[0]


def test_a_node_that_misses_the_last_call_cannot_renew_its_lease() -> None:
    before, _ = run(complete("a", "b", "c"), JoinRound(node("a"), 1))
    assert holds(before, "b", 1)
    state, effects = run(before, LastCallOver(before.last_call))
    assert not holds(state, "b", 1)
    assert seated(state, "b", 1)
    assert effects == []
    assert state.last_call > before.last_call


def test_its_seat_is_taken_only_when_its_lease_is_over() -> None:
    state, _ = run(evicting(), *joins("d", "e"))
    assert not state.complete
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "d": 1, "e": 2}
    assert status_of(state, "b") is None
    _, effects = run(state, JoinRound(node("b"), 1))
    assert [type(e) for e in effects] == [NodeRefused]


def test_the_seat_of_an_evicted_node_goes_to_a_standby_when_the_lease_is_over() -> None:
    state, _ = run(complete("a", "b"), *joins("c"), JoinRound(node("a"), 1))
    state, _ = run(state, LastCallOver(state.last_call))
    assert status_of(state, "c") == Placed("c", "standby")
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "c": 1}


def test_a_node_that_comes_back_during_its_eviction_keeps_its_seat() -> None:
    state, effects = run(evicting(), *joins("b", "c", token=1))
    assert seats(effects) == {"a": 0, "b": 1, "c": 2}
    assert not state.evicting


def test_the_lease_of_a_lost_or_left_node_is_not_awaited() -> None:
    _, effects = run(evicting(), NodeLost("b", "its connection broke"), LeaveRound("c", 1))
    assert seats(effects) == {"a": 0}


def test_an_eviction_ends_when_too_few_are_left_to_take_the_seats() -> None:
    state, _ = run(complete("a", "b", "c", low=2), *joins("a", "b", token=1))
    state, _ = run(state, LastCallOver(state.last_call), LeaveRound("b", 1))
    assert (state.last_call, holds(state, "c", 1)) == (0, True)


def test_a_closed_rendezvous_evicts_no_node() -> None:
    state, _ = run(evicting(), CloseRendezvous("a"))
    assert holds(state, "b", 1)
    assert status_of(state, "b") == state.ended


def test_only_members_that_are_there_hold_their_seats() -> None:
    state = complete("a", "b", "c")
    assert [holds(state, "a", token) for token in range(3)] == [False, True, False]
    assert not holds(state, "z", 1)
    state, _ = run(
        state, WorkersFailed("a", 1, "boom"), JoinRound(node("b"), 1), NodeLost("c", "silence")
    )
    assert [holds(state, id, 1) for id in "abc"] == [True, False, False]
    assert not holds(run(complete("a"), CloseRendezvous("a"), LeaveRound("a"))[0], "a", 1)


# --- nodes that did not rejoin


def test_all_that_are_lost_at_once_are_named_in_the_next_round() -> None:
    state, _ = run(complete("a", "b", "c", "d"), NodeLost("c", "silence"), *joins("a", token=1))
    state, effects = run(state, NodeLost("b", "its connection broke"), *joins("d", token=1))
    named = (Departed("b", 1, "its connection broke"), Departed("c", 2, "silence"))
    assert [e.departed for e in effects if isinstance(e, Seated)] == [named, named]
    state, _ = run(state, *joins("d", "a", token=2))
    again = status_of(state, "a")
    assert isinstance(again, Seated)
    assert again.departed == (), "they are named once"


def test_a_member_that_left_or_was_evicted_is_named_too() -> None:
    state, _ = run(
        complete("a", "b", "c"),
        NodeLeaving("b", 1, "its agent got SIGTERM"),
        LeaveRound("b", 1, "its agent got SIGTERM"),
        *joins("a", token=1),
    )
    state, _ = run(state, LastCallOver(state.last_call))
    state, effects = run(state, LastCallOver(state.last_call))
    (seat,) = (e for e in effects if isinstance(e, Seated))
    assert seat.departed == (
        Departed("b", 1, "its agent got SIGTERM"),
        Departed("c", 2, "it did not come back within the last call"),
    )


def test_nodes_that_joined_are_named_in_the_round_that_they_join() -> None:
    _, effects = run(complete("a", "b", high=3), *joins("c"), *joins("a", "b", token=1))
    assert [e.joined for e in effects if isinstance(e, Seated)] == [("c",)] * 3
    first = status_of(complete("a", "b"), "a")
    assert isinstance(first, Seated)
    assert first.joined == (), "all nodes of the first round are new"


def test_a_node_that_only_waited_is_not_missed() -> None:
    state, _ = run(complete("a", "b"), *joins("c"), NodeLost("c", "silence"))
    state, effects = run(state, *joins("a", "b", token=1))
    assert {e.departed for e in effects if isinstance(e, Seated)} == {()}


# --- failures


BOOM = RoundEnded(1, "a", "its workers failed", "boom")


def failed(*names: str, high: int = 0) -> Round:
    """Return a round in which the workers of the first node have failed."""
    return run(complete(*names, high=high), WorkersFailed(names[0], 1, "boom"))[0]


def test_a_failure_ends_the_round_at_once_for_all_with_the_report() -> None:
    state, effects = run(complete("a", "b", "c"), WorkersFailed("a", 1, "boom"))
    assert effects == [BOOM]
    assert [status_of(state, id) for id in "abc"] == [BOOM] * 3
    assert judged(state, 1) is None


def test_a_failure_is_charged_when_every_other_member_has_sent_a_message() -> None:
    state, effects = run(failed("a", "b", "c"), EndConfirmed("b", 1))
    assert effects == []
    state, effects = run(state, JoinRound(node("c"), 1))
    assert Judged(1, True, 1, BOOM) in effects
    assert judged(state, 1) == Judged(1, True, 1, BOOM)
    _, effects = run(state, *joins("a", "b", token=1))
    assert {e.failures for e in effects if isinstance(e, Seated)} == {1}


def test_a_failure_in_a_world_of_one_is_charged_at_once() -> None:
    _, effects = run(complete("a"), WorkersFailed("a", 1, "boom"))
    assert effects == [BOOM, Judged(1, True, 1, BOOM)]


def test_failures_on_two_nodes_are_charged_once_and_the_first_is_the_cause() -> None:
    state, effects = run(failed("a", "b"), WorkersFailed("b", 1, "gloo: connection closed"))
    assert effects == [Judged(1, True, 1, BOOM)]
    again, effects = run(state, WorkersFailed("b", 1, "gloo: connection closed"))
    assert (again, effects) == (state, [])


def test_a_replacement_costs_one_restart_and_the_round_goes_on() -> None:
    before = complete("a", "b")
    state, effects = run(before, SpendRestart("a", 1, 1))
    assert effects == []
    assert (state.number, state.complete, state.failures) == (1, True, 1)
    assert [status_of(state, id) for id in "ab"] == [status_of(before, id) for id in "ab"]
    assert run(state, SpendRestart("a", 1, 1)) == (state, []), "it is charged once"
    state, _ = run(state, SpendRestart("b", 1, 1))
    assert state.failures == 2
    state, _ = run(state, SpendRestart("a", 1, 3))
    assert state.failures == 4, "the second one was not received"
    state, effects = run(state, *joins("a", "b", token=1))
    assert {e.failures for e in effects if isinstance(e, Seated)} == {4}
    assert state.spent == {}


def test_a_node_that_is_no_member_of_the_round_spends_no_restart() -> None:
    state = complete("a", "b")
    for event in (SpendRestart("c", 1, 1), SpendRestart("a", 2, 1)):
        after, (refusal,) = run(state, event)
        assert after == state
        assert isinstance(refusal, NodeRefused)
    ended, _ = run(failed("a", "b"))
    after, effects = run(ended, SpendRestart("b", 1, 1))
    assert after == ended
    assert isinstance(effects[0], NodeRefused)
    closed, _ = run(state, CloseRendezvous("a", "it is done"))
    assert run(closed, SpendRestart("b", 1, 1)) == (closed, [closed.closed])


def test_a_failure_that_is_reported_again_is_not_charged_again() -> None:
    state, _ = run(failed("a", "b"))
    assert run(state, WorkersFailed("a", 1, "boom")) == (state, [])
    state, _ = run(state, EndConfirmed("b", 1))
    assert run(state, WorkersFailed("a", 1, "boom")) == (state, [])


@pytest.mark.parametrize(
    "end",
    [
        NodeLost("c", "its connection broke"),
        NodeLeaving("c", 1, "its connection broke"),
        LeaveRound("c", 1, "its connection broke"),
    ],
)
def test_a_failure_is_not_charged_when_a_member_is_lost_or_leaving_before_it_confirms(
    end: Event,
) -> None:
    state, effects = run(failed("a", "b", "c"), EndConfirmed("b", 1), end)
    cause = RoundEnded(1, "c", "its connection broke", lost=not isinstance(end, NodeLeaving))
    assert Judged(1, False, 0, cause) in effects
    assert status_of(state, "a") == cause
    assert judged(state, 1) == Judged(1, False, 0, cause)
    assert state.failures == 0


def test_a_failure_is_not_charged_when_the_node_that_reported_it_is_lost_before_the_verdict() -> (
    None
):
    state, effects = run(failed("a", "b"), NodeLost("a", "its connection broke"))
    assert [e.charged for e in effects if isinstance(e, Judged)] == [False]
    assert run(state, EndConfirmed("b", 1)) == (state, [])


def test_the_loss_of_a_node_that_was_no_member_excuses_no_failure() -> None:
    state, effects = run(failed("a", "b", high=3), *joins("c"), NodeLost("c", "silence"))
    assert not any(isinstance(e, Judged) for e in effects)
    assert run(state, EndConfirmed("b", 1))[0].charged


def test_a_loss_after_the_verdict_does_not_change_it() -> None:
    state, _ = run(failed("a", "b"), EndConfirmed("b", 1), NodeLost("b", "silence"))
    assert judged(state, 1) == Judged(1, True, 1, BOOM)


def test_a_failure_after_the_round_has_ended_otherwise_is_not_charged() -> None:
    state, _ = run(complete("a", "b", "c"), NodeLost("c", "silence"))
    verdict = Judged(1, False, 0, RoundEnded(1, "c", "silence", lost=True))
    assert run(state, WorkersFailed("a", 1, "gloo: connection closed")) == (state, [])
    assert judged(state, 1) == verdict


def test_a_member_that_is_evicted_before_it_confirms_is_the_cause() -> None:
    state, _ = run(
        complete("a", "b", "c", "d"), WorkersFailed("d", 1, "boom"), *joins("a", token=1)
    )
    state, effects = run(state, LastCallOver(state.last_call))
    (verdict,) = (e for e in effects if isinstance(e, Judged))
    why = "it sent no message within the last call"
    assert verdict.cause == RoundEnded(1, "b", why, lost=True)
    assert not verdict.charged
    assert run(state, EndConfirmed("c", 1)) == (state, [])


def test_a_failure_with_a_stale_token_ends_no_round() -> None:
    state, _ = run(complete("a", "b"), *joins("b", "a", token=1))
    after, effects = run(state, WorkersFailed("a", 1, "boom"))
    assert after is state
    assert [type(e) for e in effects] == [NodeRefused]
    assert run(state, EndConfirmed("a", 1)) == (state, [])
    assert run(state, NodeLeaving("a", 1, "SIGTERM")) == (state, [])


def test_a_failure_is_still_judged_when_the_job_is_closed_meanwhile() -> None:
    state, _ = run(failed("a", "b"), CloseRendezvous("b"), EndConfirmed("b", 1))
    assert judged(state, 1) == Judged(1, True, 1, BOOM)
    assert status_of(state, "a") == state.ended


def test_failures_add_up_over_the_rounds_and_other_ends_cost_nothing() -> None:
    state, _ = run(failed("a", "b"), *joins("b", "a", token=1))
    state, _ = run(state, NodeLost("b", "silence"), *joins("a", token=2))
    assert (state.number, state.failures, state.charged) == (3, 1, False)
    state, effects = run(state, WorkersFailed("a", 3, "again"))
    assert effects[-1] == Judged(3, True, 2, RoundEnded(3, "a", "its workers failed", "again"))


def test_a_member_that_is_leaving_ends_the_round_and_keeps_its_seat_until_its_workers_ended() -> (
    None
):
    state, effects = run(complete("a", "b", "c", high=3), NodeLeaving("c", 1, "SIGTERM"))
    assert effects == [RoundEnded(1, "c", "SIGTERM")]
    assert holds(state, "c", 1)
    state, _ = run(state, *joins("a", "b", token=1))
    assert not state.complete
    _, effects = run(state, LeaveRound("c", 1))
    assert seats(effects) == {"a": 0, "b": 1}


# --- closing


def test_closing_wakes_every_node_with_the_node_and_the_reason() -> None:
    state, effects = run(Round(2, 3), *joins("a"), CloseRendezvous("a", "the job failed"))
    assert effects == [RoundClosed("a", "the job failed")]
    assert status_of(state, "a") == RoundClosed("a", "the job failed")


def test_no_node_joins_after_closing() -> None:
    state, _ = run(complete("a", "b", high=3), CloseRendezvous("a"))
    for event in [*joins("c"), JoinRound(node("a"), 1)]:
        after, effects = run(state, event)
        assert after is state
        assert effects == [state.closed]


def test_a_closed_round_continues_and_its_members_leave_without_an_effect() -> None:
    state, _ = run(complete("a", "b"), CloseRendezvous("a"))
    assert isinstance(status_of(state, "b"), Seated)
    state, _ = run(state, LeaveRound("a", 1))
    assert isinstance(status_of(state, "b"), Seated)
    assert status_of(state, "a") == state.closed
    assert watched(state) == {"b"}
    assert run(state, JoinRound(node("a"))) == (state, [state.closed])


def test_after_closing_a_lost_member_is_still_reported_but_one_that_left_is_not() -> None:
    state, _ = run(complete("a", "b", "c"), CloseRendezvous("a"), LeaveRound("a", 1))
    assert run(state, NodeLost("a", "its connection broke")) == (state, [])
    state, effects = run(state, NodeLost("b", "silence"))
    assert effects == [RoundEnded(1, "b", "silence", lost=True)]
    assert watched(state) == {"c"}


@pytest.mark.parametrize("event", [NodeLost("a", "silence"), NodeLeaving("a", 1, "SIGTERM")])
def test_a_closed_round_that_cannot_continue_ends_for_the_others(event: Event) -> None:
    state, effects = run(complete("a", "b"), CloseRendezvous("b"), event)
    assert isinstance(effects[0], RoundEnded)
    assert status_of(state, "b") == state.ended
    _, effects = run(state, JoinRound(node("b"), 1))
    assert effects == [RoundClosed("b", "it closed the rendezvous")]


@pytest.mark.parametrize(
    "event", [WorkersFailed("a", 1, "boom"), CloseRendezvous("a", "it failed", "boom")]
)
def test_a_failure_in_a_closed_round_is_final_for_all(event: Event) -> None:
    state, _ = run(complete("a", "b", "c"), CloseRendezvous("b"), LeaveRound("b", 1), event)
    assert state.ended
    for id in "ac":
        status = status_of(state, id)
        assert isinstance(status, RoundClosed)
        assert (status.id, status.report) == ("a", "boom")
    assert run(state, WorkersFailed("c", 1, "another")) == (state, [state.closed])
    assert run(state, CloseRendezvous("c", "it failed", "another")) == (state, [])


def test_a_failure_in_a_closed_round_names_the_node_that_closed_it() -> None:
    state, _ = run(
        complete("a", "b"), CloseRendezvous("b", "it is done"), WorkersFailed("a", 1, "boom")
    )
    assert state.closed is not None
    assert state.closed.why == "its workers failed; no round follows, because host b: it is done"


def test_when_the_job_has_failed_for_good_no_round_continues() -> None:
    state, _ = run(
        complete("a", "b", high=4), *joins("c"), CloseRendezvous("b", "it failed", "boom")
    )
    assert state.ended == RoundEnded(1, "b", "it failed", "boom", full_grace=True)
    assert {status_of(state, id) for id in "abc"} == {RoundClosed("b", "it failed", "boom")}
    assert state.last_call == 0


def test_members_learn_whether_their_workers_have_the_whole_grace_to_stop_and_may_live_on() -> None:
    for full, keep in ((False, False), (True, False), (True, True)):
        leaving = NodeLeaving("a", 1, "1 node waits to join", full_grace=full, keep=keep)
        state, effects = run(complete("a", "b"), leaving)
        over = RoundEnded(1, "a", "1 node waits to join", full_grace=full, keep=keep)
        assert effects[0] == status_of(state, "b") == over
        assert decode(encode(state)).ended == over
    for event in (WorkersFailed("a", 1, "boom"), NodeLost("a", "silence")):
        ended = run(complete("a", "b"), event)[0].ended
        assert ended is not None
        assert not ended.full_grace
        assert not ended.keep


def leaving(name: str) -> NodeLeaving:
    return NodeLeaving(name, 1, f"{name} got SIGTERM", full_grace=True, until_left=True)


def test_a_round_goes_on_until_a_node_that_leaves_with_notice_has_left() -> None:
    state, effects = run(complete("a", "b", "c"), leaving("b"))
    assert (effects, state.number, state.complete) == ([], 1, True)
    assert run(state, leaving("b")) == (state, []), "a repeated call"
    assert all(holds(state, id, 1) for id in "abc")
    state, effects = run(state, LeaveRound("b", 1, "b got SIGTERM"))
    over = RoundEnded(1, "b", "b got SIGTERM", full_grace=True, keep=True)
    assert status_of(state, "a") == status_of(state, "c") == effects[0] == over
    assert watched(state) == {"a", "c"}
    state, _ = run(state, *joins("a", "c", token=1))
    assert [*state.ranks] == ["a", "c"]
    assert departed(state) == (Departed("b", 1, "b got SIGTERM"),)


@pytest.mark.parametrize("end", [LeaveRound("b", 1), NodeLost("b", "it was killed in its grace")])
def test_a_round_goes_on_until_all_have_left_that_leave_with_notice(end: Event) -> None:
    state, effects = run(complete("a", "b", "c"), leaving("c"), leaving("b"), end)
    assert (effects, state.complete, {*state.gone}) == ([], True, {"b"})
    assert watched(state) == {"a", "c"}
    assert not holds(state, "b", 1)
    assert status_of(state, "b") is None
    assert run(state, end) == (state, []), "a repeated call"
    assert isinstance(run(state, *joins("b"))[1][0], NodeRefused)
    state, _ = run(state, LeaveRound("c", 1), *joins("a", token=1))
    assert [*state.ranks] == ["a"]
    assert {node.id for node in departed(state)} == {"b", "c"}


def test_a_round_is_over_at_once_if_too_few_nodes_would_stay() -> None:
    state, effects = run(complete("a", "b", "c", low=2), leaving("b"), leaving("c"))
    assert effects[0] == RoundEnded(1, "c", "c got SIGTERM", full_grace=True)
    assert holds(state, "b", 1), "it goes on with the end of its workers"
    state, _ = run(fixed("a", "b"), leaving("b"))
    assert state.ended == RoundEnded(1, "b", "b got SIGTERM", full_grace=True)


def test_a_node_that_stands_by_stays_for_one_that_leaves_with_notice() -> None:
    state, effects = run(complete("a", "b", low=2), *joins("spare"), leaving("b"))
    assert (effects, state.complete, state.waiting) == ([], True, 0)
    moved, _ = run(state, LeaveRound("b", 1), *joins("a", token=1))
    assert {*moved.ranks} == {"a", "spare"}
    state, effects = run(state, LeaveRound("spare"))
    assert effects[0] == RoundEnded(1, "b", "b got SIGTERM", full_grace=True)


def test_no_node_is_let_in_while_another_leaves() -> None:
    state, _ = run(complete("a", "b", high=3), leaving("b"), *joins("c"))
    assert state.waiting == 0
    state, _ = run(state, LeaveRound("b", 1), *joins("a", token=1))
    assert [*state.ranks] == ["a", "c"]


def test_a_failure_while_a_node_leaves_with_notice_is_not_charged() -> None:
    state, _ = run(complete("a", "b", "c"), leaving("b"), WorkersFailed("a", 1, "connection reset"))
    verdict = judged(state, 1)
    assert verdict is not None
    assert (verdict.charged, verdict.cause.id, state.failures) == (False, "b", 0)
    assert holds(state, "b", 1), "it goes on with the end of its workers"
    assert state.ended is not None
    assert state.ended.full_grace, "the workers of c may save, as when a node leaves"
    one_has_left = (leaving("c"), leaving("b"), LeaveRound("c", 1))
    state, _ = run(complete("a", "b", "c"), *one_has_left, WorkersFailed("a", 1, "reset"))
    assert state.ended == RoundEnded(1, "b", "b got SIGTERM", full_grace=True)


@pytest.mark.parametrize("gone", [(), (leaving("c"), LeaveRound("c", 1))])
def test_a_round_that_is_closed_ends_for_nodes_that_leave_with_notice(
    gone: tuple[Event, ...],
) -> None:
    """As if they had announced it later: the others may wait for them."""
    state, _ = run(complete("a", "b", "c", "d"), leaving("b"), *gone, CloseRendezvous("a"))
    over = RoundEnded(1, "b", "b got SIGTERM", full_grace=True)
    assert status_of(state, "a") == status_of(state, "d") == over
    state, _ = run(state, LeaveRound("b", 1))
    assert run(state, *joins("d", token=1))[1] == [state.closed]


def test_closing_is_final_and_the_first_reason_counts() -> None:
    state, _ = run(complete("a", "b"), CloseRendezvous("a", "done"))
    assert run(state, CloseRendezvous("b", "failed")) == (state, [])


@pytest.mark.parametrize(
    ("state", "stranger"),
    [
        (Round(1, 2), "a node of an earlier run"),
        (run(Round(2, 2), *joins("a"))[0], "a node of an earlier run"),
        (complete("a", "b"), "a rejected node"),
        (run(complete("a", "b", high=3), *joins("c"))[0], "c"),  # it waits
        (run(complete("a", "b", high=2), *joins("c"))[0], "c"),  # it is on standby
        (run(complete("a", "b", high=3), NodeLost("b", "silence"))[0], "b"),
        (run(complete("a", "b", high=3), LeaveRound("b", 1))[0], "b"),
    ],
)
def test_only_a_member_of_the_round_closes(state: Round, stranger: str) -> None:
    after, (refused,) = run(state, CloseRendezvous(stranger, "it ends", "its agent has failed"))
    assert after is state
    assert isinstance(refused, NodeRefused)
    assert refused.id == stranger
    assert f"it has no seat in round {state.number}" in refused.why


def test_a_member_whose_round_is_over_can_still_close() -> None:
    state, _ = run(
        complete("a", "b"), WorkersFailed("a", 1, "boom"), CloseRendezvous("a", "it failed", "boom")
    )
    assert status_of(state, "b") == RoundClosed("a", "it failed", "boom")


def test_no_round_completes_after_closing() -> None:
    state, _ = run(Round(1, 2), *joins("a"))
    call = state.last_call
    state, _ = run(state, CloseRendezvous("a"), LastCallOver(call))
    assert not state.complete
    assert state.last_call == 0


def test_a_closed_rendezvous_has_no_waiting_nodes() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c"), CloseRendezvous("a"))
    assert state.waiting == 0


def test_a_standby_is_recognized_after_the_end() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c", "d"), CloseRendezvous("a"))
    assert (stands_by(state, "c"), stands_by(state, "d")) == (False, True)


# --- fixed members


def fixed(*names: str) -> Round:
    """Return the complete first round of a job with fixed nodes."""
    state, _ = run(Round(len(names), len(names), fixed=True), *joins(*names))
    assert state.complete
    return state


@pytest.mark.parametrize("event", [NodeLost("b", "it went"), LeaveRound("b", 1, "it went")])
def test_the_loss_of_a_fixed_node_ends_the_round_and_refuses_another(event: Event) -> None:
    state, effects = run(fixed("a", "b", "c"), event)
    over = RoundEnded(1, "b", "it went", lost=True)
    assert over in effects
    assert status_of(state, "a") == over  # on this notification it stops its workers
    assert holds(state, "a", 1)
    _, effects = run(state, *joins("a", token=1))
    assert effects == [RoundClosed("b", "it went", lost=True)]


def test_a_node_that_waits_for_a_fixed_node_learns_that_it_has_left() -> None:
    state, _ = run(fixed("a", "b"), NodeLeaving("b", 1, "SIGTERM"), *joins("a", token=1))
    assert status_of(state, "a") == Placed("a", "forming")
    state, _ = run(state, LeaveRound("b", 1, "SIGTERM"))
    assert status_of(state, "a") == RoundClosed("b", "SIGTERM", lost=True)


def test_a_failure_that_such_a_loss_has_caused_is_not_charged() -> None:
    state, effects = run(fixed("a", "b"), WorkersFailed("a", 1, "boom"), NodeLost("b", "it went"))
    assert Judged(1, False, 0, RoundEnded(1, "b", "it went", lost=True)) in effects
    assert state.closed == RoundClosed("b", "it went", lost=True)


def test_all_that_cannot_be_replaced_are_named_when_several_are_lost() -> None:
    state, _ = run(fixed("a", "b", "c"), NodeLost("b", "it went"), NodeLost("c", "it fell silent"))
    _, effects = run(state, *joins("a", token=1))
    assert effects == [RoundClosed("b", "it went; host c: it fell silent", lost=True)]


def test_before_the_first_round_is_complete_nodes_may_join_and_leave() -> None:
    state, _ = run(Round(2, 2, fixed=True), *joins("a"), NodeLost("a", "it went"), *joins("b", "c"))
    assert state.complete
    assert state.closed is None


# --- ranks over rounds


def test_nodes_that_stay_keep_their_ranks() -> None:
    state, _ = run(complete("a", "b", "c", "d"), NodeLost("b", "silence"), *joins("z"))
    state, effects = run(state, *joins("d", "c", "a", token=1))
    assert seats(effects) == {"a": 0, "z": 1, "c": 2, "d": 3}


def test_different_memberships_have_different_digests() -> None:
    one, two = complete("a", "b"), complete("a", "c")
    three, _ = run(one, *joins("a", "b", token=1))
    assert len({one.digest, two.digest, three.digest}) == 3
    assert one.digest == complete("b", "a").digest


def test_nodes_that_stand_by_learn_that_the_job_is_stopped_until_the_next_round() -> None:
    state, _ = run(complete("a", "b", low=2), *joins("c", "d"))
    state, effects = run(state, LeaveRound("a", 1, f"{JOB_STOPS}SIGTERM"))
    assert Placed("c", "forming", "SIGTERM") in effects
    assert status_of(state, "d") == Placed("d", "standby", "SIGTERM")
    state, _ = run(state, LeaveRound("b", 1, "it left"), LeaveRound("c"), LeaveRound("d"))
    state, _ = run(state, *joins("e", "f", "g"))  # the next run
    assert state.complete
    assert status_of(state, "g") == Placed("g", "standby")
