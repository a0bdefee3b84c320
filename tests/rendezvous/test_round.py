"""The rules of the rounds, one promise a test."""

from __future__ import annotations

import pytest

from regrow.rendezvous._news import (
    Close,
    Effect,
    Event,
    Join,
    LastCall,
    LastCallOver,
    Leave,
    Lost,
    Node,
    NodesWaiting,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._round import Round, digest, standing, stands_by, step, watched


def node(name: str, wanted: int | None = None) -> Node:
    return Node(name, f"host-{name}", wanted)


def run(state: Round, *events: Event) -> tuple[Round, list[Effect]]:
    """Apply all events; the effects of the last."""
    effects: tuple[Effect, ...] = ()
    for event in events:
        state, effects = step(state, event)
    return state, list(effects)


def joins(*names: str, token: int = 0) -> list[Event]:
    return [Join(node(name), token) for name in names]


def complete(*names: str, low: int = 1, high: int = 0) -> Round:
    """A complete round 1 of these nodes."""
    state, _ = run(Round(low, high or len(names)), *joins(*names))
    if not state.complete:
        state, _ = run(state, LastCallOver(state.last_call))
    assert state.complete
    return state


def seats(effects: list[Effect]) -> dict[str, int]:
    return {e.id: e.rank for e in effects if isinstance(e, Seated)}


# --- forming


def test_a_full_round_completes_at_once_and_tells_everyone_its_rank() -> None:
    state, effects = run(Round(1, 3), *joins("c", "a", "b"))
    assert state.complete
    assert seats(effects) == {"a": 0, "b": 1, "c": 2}
    assert {
        (e.round, e.world_size, e.leader, e.digest) for e in effects if isinstance(e, Seated)
    } == {(1, 3, "host-a", digest(state))}


def test_a_round_below_its_minimum_waits() -> None:
    state, effects = run(Round(2, 4), *joins("a"))
    assert not state.complete
    assert effects == [Placed("a", "forming")]
    assert state.last_call == 0


def test_at_the_minimum_the_last_call_begins_and_its_end_completes_the_round() -> None:
    state, effects = run(Round(2, 4), *joins("a", "b"))
    assert effects == [Placed("b", "forming"), LastCall(state.last_call)]
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "b": 1}


def test_more_arrivals_do_not_prolong_the_last_call() -> None:
    state, _ = run(Round(2, 4), *joins("a", "b"))
    call = state.last_call
    state, effects = run(state, *joins("c"))
    assert state.last_call == call
    assert LastCall(call) not in effects


def test_falling_below_the_minimum_cancels_the_last_call_for_good() -> None:
    state, _ = run(Round(2, 4), *joins("a", "b"))
    old = state.last_call
    state, _ = run(state, Leave("b"), *joins("c"))
    assert state.last_call not in (0, old)
    again, effects = run(state, LastCallOver(old))
    assert again is state
    assert effects == []


def test_the_end_of_no_last_call_means_nothing() -> None:
    state, _ = run(Round(2, 4), *joins("a"))
    assert run(state, LastCallOver(0)) == (state, [])


def test_a_node_lost_while_the_round_forms_is_no_member() -> None:
    state, _ = run(Round(2, 2), *joins("a"), Lost("a", "silence"), *joins("b"))
    assert not state.complete
    assert standing(state, "a") is None


def test_a_repeated_join_changes_nothing_and_is_answered_the_same() -> None:
    forming, _ = run(Round(2, 2), *joins("a"))
    assert run(forming, *joins("a")) == (forming, [Placed("a", "forming")])
    seated, _ = run(forming, *joins("b"))
    again, effects = run(seated, *joins("a"))
    assert again is seated
    assert effects == [standing(seated, "a")]


# --- the queue


def test_who_comes_too_late_waits_for_a_free_seat_and_the_members_are_told() -> None:
    state, effects = run(complete("a", "b", high=3), *joins("c"))
    assert effects == [Placed("c", "waiting"), NodesWaiting(1, 1)]
    assert state.waiting == 1


def test_who_comes_when_no_seat_is_left_stands_by_and_nobody_is_disturbed() -> None:
    state, effects = run(complete("a", "b"), *joins("c"))
    assert effects == [Placed("c", "standby")]
    assert state.waiting == 0
    assert stands_by(state, "c")


def test_free_seats_are_promised_only_as_often_as_there_are_any() -> None:
    state, effects = run(complete("a", "b", high=3), *joins("c", "d"))
    assert effects == [Placed("d", "standby")]
    assert state.waiting == 1


def test_a_standby_moves_up_when_one_who_waited_before_it_leaves() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c", "d"))
    state, _ = run(state, Leave("c"))
    assert standing(state, "d") == Placed("d", "waiting")
    assert state.waiting == 1


def test_members_are_told_when_nobody_waits_any_more() -> None:
    _, effects = run(complete("a", "b", high=3), *joins("c"), Leave("c"))
    assert effects == [NodesWaiting(1, 0)]


def test_a_standby_takes_the_seat_of_a_lost_member() -> None:
    state, effects = run(complete("a", "b"), *joins("c"), Lost("b", "silence"))
    assert Placed("c", "forming") in effects
    state, effects = run(state, Join(node("a"), token=1))
    assert seats(effects) == {"a": 0, "c": 1}


def test_seats_are_kept_for_members_of_the_round_before_while_they_stop_their_workers() -> None:
    state, _ = run(complete("a", "b", "c", high=3), Lost("c", "silence"), *joins("d", "e"))
    assert standing(state, "d") == Placed("d", "forming")
    assert standing(state, "e") == Placed("e", "standby")
    state, effects = run(state, *joins("a", "b", token=1))
    assert seats(effects) == {"a": 0, "b": 1, "d": 2}


# --- the end of a round, and the next


def test_a_round_that_loses_a_member_is_over_and_everyone_is_told_who_and_why() -> None:
    state, effects = run(complete("a", "b", "c"), Lost("b", "its connection broke"))
    assert effects == [RoundEnded(1, "b", "its connection broke")]
    assert str(effects[0]) == "round 1 is over: node b: its connection broke"
    assert state.number == 2
    assert standing(state, "a") == RoundEnded(1, "b", "its connection broke")
    assert standing(state, "b") is None


def test_a_member_that_asks_for_the_next_round_ends_this_one_for_all() -> None:
    state, effects = run(complete("a", "b"), Join(node("b"), 1, "its worker failed"))
    assert effects == [
        RoundEnded(1, "b", "its worker failed"),
        Placed("b", "forming"),
        LastCall(state.last_call),
    ]
    state, effects = run(state, Join(node("a"), 1))
    assert seats(effects) == {"a": 0, "b": 1}
    assert state.number == 2


def test_the_last_call_ends_as_soon_as_nobody_is_left_to_wait_for() -> None:
    state, _ = run(complete("a", "b", "c", "d"), Lost("d", "silence"), *joins("a", "b", token=1))
    assert not state.complete
    _, effects = run(state, *joins("c", token=1))
    assert seats(effects) == {"a": 0, "b": 1, "c": 2}
    _, effects = run(state, Lost("c", "silence"))
    assert seats(effects) == {"a": 0, "b": 1}
    _, effects = run(state, Leave("c", 1))
    assert seats(effects) == {"a": 0, "b": 1}


def test_a_member_that_does_not_come_back_within_the_last_call_loses_its_seat() -> None:
    state, _ = run(complete("a", "b", high=3), Join(node("a"), 1))
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0}
    _, effects = run(state, Join(node("b"), 1))
    assert [type(e) for e in effects] == [Refused]


def test_a_seat_that_was_kept_in_vain_goes_to_a_standby_when_the_last_call_is_over() -> None:
    state, _ = run(complete("a", "b"), *joins("c"), Join(node("a"), 1))
    assert standing(state, "c") == Placed("c", "standby")
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "c": 1}


def test_below_the_minimum_the_survivors_wait_until_one_comes() -> None:
    state, _ = run(complete("a", "b", low=2, high=3), Lost("b", "silence"), *joins("a", token=1))
    assert not state.complete
    _, effects = run(state, *joins("e"))
    assert seats(effects) == {"a": 0, "e": 1}


def test_a_world_of_one_goes_from_round_to_round_without_waiting() -> None:
    state = complete("a")
    state, effects = run(state, Join(node("a"), 1))
    assert seats(effects) == {"a": 0}
    assert state.number == 2


def test_a_node_seated_in_a_round_that_ended_before_it_heard_is_still_expected() -> None:
    state, _ = run(complete("a", "b"), Join(node("b"), 1))
    again, effects = run(state, Join(node("a"), 0))
    assert again is state
    assert effects == [RoundEnded(1, "b", "it asked for a new round")]
    _, effects = run(state, Join(node("a"), 1))
    assert seats(effects) == {"a": 0, "b": 1}


# --- fencing


def test_a_node_that_comes_back_with_a_stale_token_is_refused_and_told_what_happened() -> None:
    state, _ = run(complete("a", "b", "c"), Lost("c", "silence"), *joins("a", "b", token=1))
    after, effects = run(state, Join(node("c"), 1))
    assert after is state
    (refused,) = effects
    assert isinstance(refused, Refused)
    assert "round 1 went on without it" in refused.why
    assert "node c: silence" in refused.why


def test_a_refused_node_can_come_back_as_a_new_one() -> None:
    state, _ = run(complete("a", "b", "c"), Lost("c", "silence"), *joins("a", "b", token=1))
    state, effects = run(state, Join(node("c2")))
    assert effects == [Placed("c2", "waiting"), NodesWaiting(2, 1)]


def test_a_late_join_of_an_older_round_does_not_end_the_current_one() -> None:
    state, _ = run(complete("a", "b"), *joins("b", "a", token=1))
    assert state.number == 2
    again, effects = run(state, Join(node("a"), 1))
    assert again is state
    assert effects == [standing(state, "a")]


def test_a_late_leave_of_an_older_round_does_not_end_the_current_one() -> None:
    state, _ = run(complete("a", "b"), *joins("b", "a", token=1))
    again, effects = run(state, Leave("a", 1))
    assert again is state
    assert [type(e) for e in effects] == [Refused]


def test_a_late_loss_of_a_node_that_is_gone_changes_nothing() -> None:
    state, _ = run(complete("a", "b"), Lost("b", "silence"))
    assert run(state, Lost("b", "silence")) == (state, [])


@pytest.mark.parametrize("state", [Round(2, 2), complete("a", "b")])
def test_a_token_of_a_round_that_never_was_is_refused(state: Round) -> None:
    after, effects = run(state, Join(node("z"), 7))
    assert after is state
    assert effects == [
        Refused("z", 7, "its round 7 never was: the rendezvous has not got beyond round 1")
    ]


# --- closing


def test_closing_wakes_everyone_with_who_and_why() -> None:
    state, effects = run(Round(2, 3), *joins("a"), Close("a", "the job failed"))
    assert effects == [RoundClosed("a", "the job failed")]
    assert standing(state, "a") == RoundClosed("a", "the job failed")


def test_nobody_joins_after_closing() -> None:
    state, _ = run(complete("a", "b", high=3), Close("a"))
    for event in [*joins("c"), Join(node("a"), 1)]:
        after, effects = run(state, event)
        assert after is state
        assert effects == [state.closed]


def test_a_closed_round_goes_on_and_its_members_leave_in_peace() -> None:
    state, _ = run(complete("a", "b"), Close("a"))
    assert isinstance(standing(state, "b"), Seated)
    state, effects = run(state, Leave("a", 1))
    assert effects == []
    assert isinstance(standing(state, "b"), Seated)
    assert standing(state, "a") == state.closed
    assert watched(state) == {"b"}
    assert run(state, Join(node("a"))) == (state, [state.closed])


def test_after_closing_a_lost_member_is_still_reported_but_one_that_left_is_not() -> None:
    state, _ = run(complete("a", "b", "c"), Close("a"), Leave("a", 1))
    assert run(state, Lost("a", "its connection broke")) == (state, [])
    state, effects = run(state, Lost("b", "silence"))
    assert effects == [RoundEnded(1, "b", "silence")]
    assert watched(state) == {"c"}


def test_closing_is_final_and_the_first_reason_counts() -> None:
    state, _ = run(complete("a", "b"), Close("a", "done"))
    assert run(state, Close("b", "failed")) == (state, [])


def test_no_round_completes_after_closing() -> None:
    state, _ = run(Round(1, 2), *joins("a"))
    call = state.last_call
    state, _ = run(state, Close("a"), LastCallOver(call))
    assert not state.complete
    assert state.last_call == 0


def test_a_closed_rendezvous_has_nobody_waiting() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c"), Close("a"))
    assert state.waiting == 0


def test_whoever_stood_by_until_the_end_can_tell() -> None:
    state, _ = run(complete("a", "b", high=3), *joins("c", "d"), Close("a"))
    assert (stands_by(state, "c"), stands_by(state, "d")) == (False, True)


# --- ranks over rounds


def test_nodes_that_stay_keep_their_ranks() -> None:
    state, _ = run(complete("a", "b", "c", "d"), Lost("b", "silence"), *joins("z"))
    state, effects = run(state, *joins("d", "c", "a", token=1))
    assert seats(effects) == {"a": 0, "z": 1, "c": 2, "d": 3}


def test_the_digest_tells_memberships_apart() -> None:
    one, two = complete("a", "b"), complete("a", "c")
    three, _ = run(one, *joins("a", "b", token=1))
    assert len({digest(one), digest(two), digest(three)}) == 3
    assert digest(one) == digest(complete("b", "a"))
