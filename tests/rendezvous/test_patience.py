"""When somebody is given up: by whom, on what evidence."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regrow.rendezvous._news import Join, LastCallOver, Leave, Lost, Node
from regrow.rendezvous._patience import Bounds, Patience, look
from regrow.rendezvous._round import Round, step

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
BOUNDS = Bounds(last_call=30.0, keep_alive=1.0, misses=3)


def formed(*names: str, low: int = 1, high: int = 0) -> Round:
    state = Round(low, high or len(names))
    for name in names:
        state, _ = step(state, Join(Node(name, name)))
    return state


def test_a_node_that_beats_is_never_lost() -> None:
    state, patience = formed("a"), Patience()
    for second in range(100):
        patience, due, again = look(patience, state, {"a": second}, BOUNDS, float(second))
        assert due == ()
        assert again == second + 1


def test_a_silent_node_is_lost_when_its_workers_are_dead_and_it_is_said_how_long() -> None:
    state, patience = formed("a"), Patience()
    seen = []
    for second in range(10, 15):
        patience, due, _ = look(patience, state, {"a": 1}, BOUNDS, float(second))
        seen.append(due)
    assert seen == [(), (), (), (), (Lost("a", "nothing was heard of it for 4 s", 3),)]


def test_members_of_a_round_that_is_over_are_waited_for_as_long_as_they_may_take_to_stop() -> None:
    state, _ = step(formed("a", "b"), Leave("b", 0))
    state, _ = step(state, Join(Node("c", "c")))
    assert state.last_call
    assert state.awaited == {"a"}
    bounds = replace(BOUNDS, last_call=5.0, grace=30.0)
    patience, due, again = look(Patience(), state, None, bounds, 0.0)
    assert (due, again) == ((), 31.0)
    _, due, _ = look(patience, state, None, bounds, 31.0)
    assert due == (LastCallOver(state.last_call),)
    nobody_awaited = replace(state, awaited=frozenset())
    _, due, again = look(Patience(), nobody_awaited, None, bounds, 0.0)
    assert (due, again) == ((), 5.0)


def test_a_node_is_judged_from_when_it_is_first_seen() -> None:
    state = formed("a")
    _, due, again = look(Patience(looked=0.0), state, {"a": 1}, BOUNDS, 1000.0)
    assert due == ()
    assert again == 1001.0


def test_whoever_slept_itself_gives_up_nobody_for_it() -> None:
    state = formed("a", "b")
    patience, _, _ = look(Patience(), state, {"a": 1, "b": 1}, BOUNDS, 0.0)
    patience, due, again = look(patience, state, {"a": 1, "b": 1}, BOUNDS, 600.0)
    assert due == ()
    assert again == 601.0
    patience, due, _ = look(patience, state, {"a": 2, "b": 1}, BOUNDS, 601.0)
    assert due == ()
    patience, due, _ = look(patience, state, {"a": 3, "b": 1}, BOUNDS, 602.0)
    assert due == ()
    _, due, _ = look(patience, state, {"a": 4, "b": 1}, BOUNDS, 603.0)
    assert [event.id for event in due if isinstance(event, Lost)] == ["b"]


def test_whoever_slept_between_hearing_and_looking_hears_again_before_it_gives_up_anyone() -> None:
    state, patience = formed("a", "b"), Patience()
    for second in range(4):
        patience, due, _ = look(patience, state, {"a": 1, "b": 1}, BOUNDS, float(second))
    patience, due, again = look(patience, state, {"a": 1, "b": 1}, BOUNDS, 20.0)
    assert (due, again) == ((), 20.0)
    _, due, _ = look(patience, state, {"a": 15, "b": 1}, BOUNDS, 20.1)
    assert [event.id for event in due if isinstance(event, Lost)] == ["b"]


def test_a_clock_that_goes_back_harms_nobody() -> None:
    state = formed("a")
    patience, _, _ = look(Patience(), state, {"a": 1}, BOUNDS, 100.0)
    patience, due, _ = look(patience, state, {"a": 1}, BOUNDS, 1.0)
    assert due == ()
    assert patience.silent == {"a": (1, 0.0)}


def test_a_node_that_is_not_in_the_rounds_or_is_the_waiter_itself_is_not_lost() -> None:
    state = formed("a")
    patience = Patience(silent={"x": (1, 99.0), "a": (1, 99.0)})
    assert look(patience, state, {"x": 1, "a": 1}, BOUNDS, 1.0, me="a")[1] == ()


def test_a_node_that_never_beat_is_lost_like_one_that_stopped() -> None:
    state, patience = formed("a"), Patience()
    for second in range(4):
        patience, due, _ = look(patience, state, {}, BOUNDS, float(second))
        assert due == ()
    assert [e.id for e in look(patience, state, {}, BOUNDS, 4.0)[1] if isinstance(e, Lost)] == ["a"]


def test_where_losses_are_known_in_another_way_silence_means_nothing() -> None:
    patience = Patience(silent={"a": (0, 99.0)})
    assert look(patience, formed("a"), None, BOUNDS, 1.0)[1:] == ((), None)


def test_looking_more_often_does_not_make_a_node_lost_sooner() -> None:
    state, patience = formed("a"), Patience()
    for tick in range(30):
        patience, due, _ = look(patience, state, {"a": 1}, BOUNDS, tick / 10)
        assert due == ()


def test_the_last_call_is_over_so_long_after_it_was_first_seen() -> None:
    state = formed("a", high=2)
    patience, due, again = look(Patience(), state, None, BOUNDS, 100.0)
    assert (due, again) == ((), 130.0)
    patience, due, again = look(patience, state, None, BOUNDS, 129.0)
    assert (due, again) == ((), 130.0)
    assert look(patience, state, None, BOUNDS, 130.0)[1] == (LastCallOver(state.last_call),)


def test_who_is_evicted_is_waited_for_as_long_as_its_workers_may_live() -> None:
    state = formed("a", "b")
    state, _ = step(state, Join(Node("a", "a"), 1))
    patience, _, _ = look(Patience(), state, None, BOUNDS, 0.0)
    patience, due, _ = look(patience, state, None, BOUNDS, 30.0)
    state, _ = step(state, due[0])
    assert state.evicting
    patience, due, again = look(patience, state, None, BOUNDS, 30.5)
    assert (due, again) == ((), 34.5)
    assert look(patience, state, None, BOUNDS, 34.5)[1] == (LastCallOver(state.last_call),)


def test_another_last_call_is_waited_for_anew() -> None:
    state = formed("a", high=2)
    patience, _, _ = look(Patience(), state, None, BOUNDS, 100.0)
    other = Round(1, 3, version=5)
    other, _ = step(other, Join(Node("b", "b")))
    assert look(patience, other, None, BOUNDS, 131.0)[1:] == ((), 161.0)


def test_with_nothing_to_wait_for_there_is_no_need_to_look_again() -> None:
    assert look(Patience(), formed("a", low=2, high=2), None, BOUNDS, 5.0)[1:] == ((), None)


@UNHURRIED
@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.sampled_from([True] + [False] * 9)), min_size=9),
    st.sampled_from([Bounds(), BOUNDS, Bounds(keep_alive=0.5, misses=4)]),
)
def test_a_node_is_lost_exactly_after_enough_silence_that_was_listened_to(
    steps: list[tuple[float, bool]], bounds: Bounds
) -> None:
    state, beat, now, silence = formed("a"), 0, 0.0, 0.0
    patience, _, _ = look(Patience(), state, {"a": beat}, bounds, now)
    for gap, beats in steps:
        now += gap
        beat += beats
        listened = min(now - patience.looked, bounds.keep_alive)
        before, limit = silence, bounds.lease + bounds.kill
        silence = 0.0 if beats else silence + listened
        in_time = now - patience.looked <= bounds.keep_alive or before >= limit
        patience, due, again = look(patience, state, {"a": beat}, bounds, now)
        assert bool(due) == (silence >= limit and in_time)
        if due:
            return
        assert again is not None
        assert now <= again <= now + bounds.keep_alive
