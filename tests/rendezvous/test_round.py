"""The rules of the rounds, one promise a test."""

from __future__ import annotations

import pytest

from regrow.rendezvous._document import decode, encode
from regrow.rendezvous._news import (
    Close,
    Effect,
    Event,
    Failed,
    Heard,
    Join,
    Judged,
    LastCall,
    LastCallOver,
    Leave,
    Leaving,
    Lost,
    Node,
    NodesWaiting,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._round import (
    Round,
    holds,
    judged,
    place,
    seated,
    standing,
    stands_by,
    step,
    watched,
)


def node(name: str, wanted: int | None = None) -> Node:
    return Node(name, f"host-{name}", wanted)


def run(state: Round, *events: Event) -> tuple[Round, list[Effect]]:
    """Apply all events; the effects of the last."""
    effects: tuple[Effect, ...] = ()
    for event in events:
        state, effects = step(state, event)
        assert decode(encode(state)) == state
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
    } == {(1, 3, "host-a", state.digest)}


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


def test_seats_and_last_call_follow_at_once_when_a_round_ends_while_others_wait() -> None:
    for event in (Failed("a", 1, "boom"), Leaving("a", 1, "SIGTERM")):
        state, effects = run(complete("a", "b", high=4), *joins("c", "d"), event)
        assert list(state.members) == ["c", "d"]
        assert LastCall(state.last_call) in effects


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


def test_a_late_judgement_of_a_node_that_has_got_elsewhere_since_changes_nothing() -> None:
    forming, _ = run(Round(2, 2), *joins("a"))
    seated, _ = run(forming, *joins("b"))
    again, _ = run(seated, *joins("b", "a", token=1))
    for before, after in [(forming, seated), (seated, again), (forming, again)]:
        late = Lost("a", "silence", place(before, "a"))
        assert run(after, late) == (after, [])
        assert standing(run(before, late)[0], "a") is None
    assert standing(run(again, Lost("a", "its connection broke"))[0], "a") is None


def test_who_is_judged_with_others_is_lost_with_them() -> None:
    state = complete("a", "b", "c", "d")
    judgements = [Lost(id, "silence", place(state, id)) for id in "abc"]
    state, _ = run(state, *judgements)
    assert watched(state) == {"d"}


@pytest.mark.parametrize("state", [Round(2, 2), complete("a", "b")])
def test_a_token_of_a_round_that_never_was_is_refused(state: Round) -> None:
    after, effects = run(state, Join(node("z"), 7))
    assert after is state
    assert effects == [
        Refused("z", 7, "its round 7 never was: the rendezvous has not got beyond round 1")
    ]


# --- eviction


def evicting() -> Round:
    """Of a, b and c, only a has come back within the last call."""
    state, _ = run(complete("a", "b", "c"), Join(node("a"), 1))
    return run(state, LastCallOver(state.last_call))[0]


def test_who_does_not_come_back_within_the_last_call_may_not_renew_its_lease() -> None:
    before, _ = run(complete("a", "b", "c"), Join(node("a"), 1))
    assert holds(before, "b", 1)
    state, effects = run(before, LastCallOver(before.last_call))
    assert not holds(state, "b", 1)
    assert seated(state, "b", 1)
    assert effects == [LastCall(state.last_call)]
    assert state.last_call > before.last_call


def test_its_seat_is_taken_only_when_its_lease_is_over() -> None:
    state, _ = run(evicting(), *joins("d", "e"))
    assert not state.complete
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "d": 1, "e": 2}
    assert standing(state, "b") is None
    _, effects = run(state, Join(node("b"), 1))
    assert [type(e) for e in effects] == [Refused]


def test_a_seat_that_was_kept_in_vain_goes_to_a_standby_when_the_lease_is_over() -> None:
    state, _ = run(complete("a", "b"), *joins("c"), Join(node("a"), 1))
    state, _ = run(state, LastCallOver(state.last_call))
    assert standing(state, "c") == Placed("c", "standby")
    state, effects = run(state, LastCallOver(state.last_call))
    assert seats(effects) == {"a": 0, "c": 1}


def test_who_comes_back_while_it_is_evicted_has_its_seat() -> None:
    state, effects = run(evicting(), *joins("b", "c", token=1))
    assert seats(effects) == {"a": 0, "b": 1, "c": 2}
    assert not state.evicting


def test_nobody_waits_for_a_lease_of_one_that_is_lost_or_has_left() -> None:
    _, effects = run(evicting(), Lost("b", "its connection broke"), Leave("c", 1))
    assert seats(effects) == {"a": 0}


def test_an_eviction_ends_when_too_few_are_left_to_take_the_seats() -> None:
    state, _ = run(complete("a", "b", "c", low=2), *joins("a", "b", token=1))
    state, _ = run(state, LastCallOver(state.last_call), Leave("b", 1))
    assert (state.last_call, holds(state, "c", 1)) == (0, True)


def test_a_closed_rendezvous_evicts_nobody() -> None:
    state, _ = run(evicting(), Close("a"))
    assert holds(state, "b", 1)
    assert standing(state, "b") == state.closed


def test_only_members_that_are_there_hold_their_seats() -> None:
    state = complete("a", "b", "c")
    assert [holds(state, "a", token) for token in range(3)] == [False, True, False]
    assert not holds(state, "z", 1)
    state, _ = run(state, Failed("a", 1, "boom"), Join(node("b"), 1), Lost("c", "silence"))
    assert [holds(state, id, 1) for id in "abc"] == [True, False, False]
    assert not holds(run(complete("a"), Close("a"), Leave("a"))[0], "a", 1)


# --- failures


BOOM = RoundEnded(1, "a", "its workers failed", "boom")


def failed(*names: str, high: int = 0) -> Round:
    """The workers of the first of these members have failed."""
    return run(complete(*names, high=high), Failed(names[0], 1, "boom"))[0]


def test_a_failure_ends_the_round_at_once_and_all_are_told_what_failed() -> None:
    state, effects = run(complete("a", "b", "c"), Failed("a", 1, "boom"))
    assert effects == [BOOM]
    assert [standing(state, id) for id in "abc"] == [BOOM] * 3
    assert judged(state, 1) is None


def test_a_failure_is_charged_when_every_other_member_has_been_heard_of() -> None:
    state, effects = run(failed("a", "b", "c"), Heard("b", 1))
    assert effects == []
    state, effects = run(state, Join(node("c"), 1))
    assert effects[0] == Judged(1, True, 1, BOOM) == judged(state, 1)
    _, effects = run(state, *joins("a", "b", token=1))
    assert {e.failures for e in effects if isinstance(e, Seated)} == {1}


def test_in_a_world_of_one_there_is_nobody_to_hear_of() -> None:
    _, effects = run(complete("a"), Failed("a", 1, "boom"))
    assert effects == [BOOM, Judged(1, True, 1, BOOM)]


def test_failures_on_two_nodes_are_charged_once_and_the_first_is_the_cause() -> None:
    state, effects = run(failed("a", "b"), Failed("b", 1, "gloo: connection closed"))
    assert effects == [Judged(1, True, 1, BOOM)]
    again, effects = run(state, Failed("b", 1, "gloo: connection closed"))
    assert (again, effects) == (state, [Judged(1, True, 1, BOOM)])


def test_a_failure_that_is_reported_again_is_not_charged_again() -> None:
    state, _ = run(failed("a", "b"))
    assert run(state, Failed("a", 1, "boom")) == (state, [])
    state, _ = run(state, Heard("b", 1))
    assert run(state, Failed("a", 1, "boom")) == (state, [judged(state, 1)])


@pytest.mark.parametrize(
    "end",
    [
        Lost("c", "its connection broke"),
        Leaving("c", 1, "its connection broke"),
        Leave("c", 1, "its connection broke"),
    ],
)
def test_a_failure_is_not_charged_when_a_member_is_lost_or_leaving_before_it_was_heard_of(
    end: Event,
) -> None:
    state, effects = run(failed("a", "b", "c"), Heard("b", 1), end)
    cause = RoundEnded(1, "c", "its connection broke")
    assert effects[0] == Judged(1, False, 0, cause)
    assert standing(state, "a") == cause
    assert judged(state, 1) == Judged(1, False, 0, cause)
    assert state.failures == 0


def test_a_failure_is_not_charged_when_the_node_that_reported_it_is_lost_before_the_verdict() -> (
    None
):
    state, effects = run(failed("a", "b"), Lost("a", "its connection broke"))
    assert isinstance(effects[0], Judged)
    assert not effects[0].charged
    assert run(state, Heard("b", 1)) == (state, [])


def test_the_loss_of_a_node_that_was_no_member_excuses_no_failure() -> None:
    state, effects = run(failed("a", "b", high=3), *joins("c"), Lost("c", "silence"))
    assert not any(isinstance(e, Judged) for e in effects)
    assert run(state, Heard("b", 1))[0].charged


def test_what_is_lost_after_the_verdict_does_not_change_it() -> None:
    state, _ = run(failed("a", "b"), Heard("b", 1), Lost("b", "silence"))
    assert judged(state, 1) == Judged(1, True, 1, BOOM)


def test_a_failure_after_the_round_has_ended_otherwise_is_not_charged() -> None:
    state, _ = run(complete("a", "b", "c"), Lost("c", "silence"))
    verdict = Judged(1, False, 0, RoundEnded(1, "c", "silence"))
    assert run(state, Failed("a", 1, "gloo: connection closed")) == (state, [verdict])


def test_a_member_that_is_evicted_unheard_is_taken_as_the_cause() -> None:
    state, _ = run(complete("a", "b", "c", "d"), Failed("d", 1, "boom"), *joins("a", token=1))
    state, effects = run(state, LastCallOver(state.last_call))
    (verdict,) = (e for e in effects if isinstance(e, Judged))
    assert verdict.cause == RoundEnded(1, "b", "nothing was heard of it within the last call")
    assert not verdict.charged
    assert run(state, Heard("c", 1)) == (state, [])


def test_a_failure_with_a_stale_token_ends_no_round() -> None:
    state, _ = run(complete("a", "b"), *joins("b", "a", token=1))
    after, effects = run(state, Failed("a", 1, "boom"))
    assert after is state
    assert [type(e) for e in effects] == [Refused]
    assert run(state, Heard("a", 1)) == (state, [])
    assert run(state, Leaving("a", 1, "SIGTERM")) == (state, [])


def test_a_failure_is_still_judged_when_the_job_is_closed_meanwhile() -> None:
    state, _ = run(failed("a", "b"), Close("b"), Heard("b", 1))
    assert judged(state, 1) == Judged(1, True, 1, BOOM)
    assert standing(state, "a") == state.closed


def test_failures_add_up_over_the_rounds_and_other_ends_cost_nothing() -> None:
    state, _ = run(failed("a", "b"), *joins("b", "a", token=1))
    state, _ = run(state, Lost("b", "silence"), *joins("a", token=2))
    assert (state.number, state.failures, state.charged) == (3, 1, False)
    state, effects = run(state, Failed("a", 3, "again"))
    assert effects[-1] == Judged(3, True, 2, RoundEnded(3, "a", "its workers failed", "again"))


def test_a_member_that_is_leaving_ends_the_round_and_keeps_its_seat_until_its_workers_ended() -> (
    None
):
    state, effects = run(complete("a", "b", "c", high=3), Leaving("c", 1, "SIGTERM"))
    assert effects == [RoundEnded(1, "c", "SIGTERM")]
    assert holds(state, "c", 1)
    state, _ = run(state, *joins("a", "b", token=1))
    assert not state.complete
    _, effects = run(state, Leave("c", 1))
    assert seats(effects) == {"a": 0, "b": 1}


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


@pytest.mark.parametrize("event", [Failed("a", 1, "boom"), Leaving("a", 1, "SIGTERM")])
def test_a_closed_round_that_cannot_go_on_ends_for_the_others(event: Event) -> None:
    state, effects = run(complete("a", "b"), Close("b"), event)
    assert isinstance(effects[0], RoundEnded)
    assert standing(state, "b") == state.closed
    assert judged(state, 1) is None or isinstance(event, Leaving)


def test_when_the_job_has_failed_for_good_no_round_goes_on() -> None:
    state, effects = run(complete("a", "b", high=4), *joins("c"), Close("z", "it failed", "boom"))
    assert effects[0] == RoundEnded(1, "z", "it failed", "boom")
    assert {standing(state, id) for id in "abc"} == {RoundClosed("z", "it failed", "boom")}
    assert state.last_call == 0


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


# --- members that nobody can replace


def fixed(*names: str) -> Round:
    """The complete first round of a job whose nodes are fixed."""
    state, _ = run(Round(len(names), len(names), fixed=True), *joins(*names))
    assert state.complete
    return state


@pytest.mark.parametrize("event", [Lost("b", "it went"), Leave("b", 1, "it went")])
def test_who_cannot_be_replaced_ends_the_round_and_refuses_the_others_another(event: Event) -> None:
    state, effects = run(fixed("a", "b", "c"), event)
    over = RoundEnded(1, "b", "it went")
    assert over in effects
    assert standing(state, "a") == over  # which is when it stops its workers
    assert holds(state, "a", 1)
    _, effects = run(state, *joins("a", token=1))
    assert effects == [RoundClosed("b", "it went", lost=True)]


def test_who_waits_for_one_that_cannot_be_replaced_is_told_that_it_has_left() -> None:
    state, _ = run(fixed("a", "b"), Leaving("b", 1, "SIGTERM"), *joins("a", token=1))
    assert standing(state, "a") == Placed("a", "forming")
    state, _ = run(state, Leave("b", 1, "SIGTERM"))
    assert standing(state, "a") == RoundClosed("b", "SIGTERM", lost=True)


def test_a_failure_that_such_a_loss_has_caused_is_not_charged() -> None:
    state, effects = run(fixed("a", "b"), Failed("a", 1, "boom"), Lost("b", "it went"))
    assert Judged(1, False, 0, RoundEnded(1, "b", "it went")) in effects
    assert state.closed == RoundClosed("b", "it went", lost=True)


def test_before_the_first_round_is_complete_anybody_may_come_and_go() -> None:
    state, _ = run(Round(2, 2, fixed=True), *joins("a"), Lost("a", "it went"), *joins("b", "c"))
    assert state.complete
    assert state.closed is None


# --- ranks over rounds


def test_nodes_that_stay_keep_their_ranks() -> None:
    state, _ = run(complete("a", "b", "c", "d"), Lost("b", "silence"), *joins("z"))
    state, effects = run(state, *joins("d", "c", "a", token=1))
    assert seats(effects) == {"a": 0, "z": 1, "c": 2, "d": 3}


def test_the_digest_tells_memberships_apart() -> None:
    one, two = complete("a", "b"), complete("a", "c")
    three, _ = run(one, *joins("a", "b", token=1))
    assert len({one.digest, two.digest, three.digest}) == 3
    assert one.digest == complete("b", "a").digest
