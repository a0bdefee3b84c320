"""Rules for the eviction of a node: which node decides, and on which evidence."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from regrow.rendezvous.protocol.failure_detector import Bounds, FailureDetector
from regrow.rendezvous.protocol.messages import JoinRound, LastCallOver, LeaveRound, Node, NodeLost
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
BOUNDS = Bounds(last_call=30.0, keep_alive=1.0, misses=3)


def formed(*names: str, low: int = 1, high: int = 0) -> Round:
    state = Round(low, high or len(names))
    for name in names:
        state, _ = step(state, JoinRound(Node(name, name)))
    return state


def test_a_node_that_beats_is_never_lost() -> None:
    state, detector = formed("a"), FailureDetector()
    for second in range(100):
        detector, due, again = detector.check(state, {"a": second}, BOUNDS, float(second))
        assert due == ()
        assert again == second + 1


def test_a_silent_node_is_lost_when_its_workers_are_dead() -> None:
    state, detector = formed("a"), FailureDetector()
    seen = []
    for second in range(10, 15):
        detector, due, _ = detector.check(state, {"a": 1}, BOUNDS, float(second))
        seen.append(due)
    assert seen == [(), (), (), (), (NodeLost("a", "no heartbeat arrived for 4 s", 3),)]


def test_a_long_silence_is_shown_in_plain_seconds() -> None:
    state, detector = formed("a"), FailureDetector()
    bounds = replace(BOUNDS, keep_alive=800.0)
    for second in (0.0, 800.0, 1600.0, 2400.0, 3200.0):
        detector, due, _ = detector.check(state, {"a": 1}, bounds, second)
    assert due == (NodeLost("a", "no heartbeat arrived for 3200 s", 3),)


def test_members_of_a_round_that_is_over_are_waited_for_as_long_as_they_may_take_to_stop() -> None:
    state, _ = step(formed("a", "b"), LeaveRound("b", 0))
    state, _ = step(state, JoinRound(Node("c", "c")))
    assert state.last_call
    assert state.awaited == {"a"}
    bounds = replace(BOUNDS, last_call=5.0, grace=30.0)
    detector, due, again = FailureDetector().check(state, None, bounds, 0.0)
    assert (due, again) == ((), 31.0)
    _, due, _ = detector.check(state, None, bounds, 31.0)
    assert due == (LastCallOver(state.last_call),)
    none_awaited = structs.replace(state, awaited=frozenset())
    _, due, again = FailureDetector().check(none_awaited, None, bounds, 0.0)
    assert (due, again) == ((), 5.0)


def test_a_node_is_judged_from_when_it_is_first_seen() -> None:
    state = formed("a")
    _, due, again = FailureDetector(checked=0.0).check(state, {"a": 1}, BOUNDS, 1000.0)
    assert due == ()
    assert again == 1001.0


def test_a_driver_that_was_paused_evicts_no_node() -> None:
    state = formed("a", "b")
    detector, _, _ = FailureDetector().check(state, {"a": 1, "b": 1}, BOUNDS, 0.0)
    detector, due, again = detector.check(state, {"a": 1, "b": 1}, BOUNDS, 600.0)
    assert due == ()
    assert again == 601.0
    detector, due, _ = detector.check(state, {"a": 2, "b": 1}, BOUNDS, 601.0)
    assert due == ()
    detector, due, _ = detector.check(state, {"a": 3, "b": 1}, BOUNDS, 602.0)
    assert due == ()
    _, due, _ = detector.check(state, {"a": 4, "b": 1}, BOUNDS, 603.0)
    assert [event.id for event in due if isinstance(event, NodeLost)] == ["b"]


def test_a_driver_paused_before_its_check_reads_heartbeats_before_it_evicts() -> None:
    state, detector = formed("a", "b"), FailureDetector()
    for second in range(4):
        detector, due, _ = detector.check(state, {"a": 1, "b": 1}, BOUNDS, float(second))
    detector, due, again = detector.check(state, {"a": 1, "b": 1}, BOUNDS, 20.0)
    assert (due, again) == ((), 20.0)
    _, due, _ = detector.check(state, {"a": 15, "b": 1}, BOUNDS, 20.1)
    assert [event.id for event in due if isinstance(event, NodeLost)] == ["b"]


def test_a_clock_that_goes_back_evicts_no_node() -> None:
    state = formed("a")
    detector, _, _ = FailureDetector().check(state, {"a": 1}, BOUNDS, 100.0)
    detector, due, _ = detector.check(state, {"a": 1}, BOUNDS, 1.0)
    assert due == ()
    assert detector.silent == {"a": (1, 0.0)}


def test_a_node_that_is_not_in_the_rounds_or_is_the_waiter_itself_is_not_lost() -> None:
    state = formed("a")
    detector = FailureDetector(silent={"x": (1, 99.0), "a": (1, 99.0)})
    assert detector.check(state, {"x": 1, "a": 1}, BOUNDS, 1.0, me="a")[1] == ()


def test_a_node_that_never_beat_is_lost_like_one_that_stopped() -> None:
    state, detector = formed("a"), FailureDetector()
    for second in range(4):
        detector, due, _ = detector.check(state, {}, BOUNDS, float(second))
        assert due == ()
    assert [e.id for e in detector.check(state, {}, BOUNDS, 4.0)[1] if isinstance(e, NodeLost)] == [
        "a"
    ]


def test_where_losses_are_known_in_another_way_silence_means_nothing() -> None:
    detector = FailureDetector(silent={"a": (0, 99.0)})
    assert detector.check(formed("a"), None, BOUNDS, 1.0)[1:] == ((), None)


def test_more_frequent_checks_do_not_make_a_node_lost_sooner() -> None:
    state, detector = formed("a"), FailureDetector()
    for tick in range(30):
        detector, due, _ = detector.check(state, {"a": 1}, BOUNDS, tick / 10)
        assert due == ()


def test_the_last_call_is_over_so_long_after_it_was_first_seen() -> None:
    state = formed("a", high=2)
    detector, due, again = FailureDetector().check(state, None, BOUNDS, 100.0)
    assert (due, again) == ((), 130.0)
    detector, due, again = detector.check(state, None, BOUNDS, 129.0)
    assert (due, again) == ((), 130.0)
    assert detector.check(state, None, BOUNDS, 130.0)[1] == (LastCallOver(state.last_call),)


def test_an_evicted_node_is_awaited_as_long_as_its_workers_may_live() -> None:
    state = formed("a", "b")
    state, _ = step(state, JoinRound(Node("a", "a"), 1))
    detector, _, _ = FailureDetector().check(state, None, BOUNDS, 0.0)
    detector, due, _ = detector.check(state, None, BOUNDS, 30.0)
    state, _ = step(state, due[0])
    assert state.evicting
    detector, due, again = detector.check(state, None, BOUNDS, 30.5)
    assert (due, again) == ((), 34.5)
    assert detector.check(state, None, BOUNDS, 34.5)[1] == (LastCallOver(state.last_call),)


def test_another_last_call_has_a_wait_of_its_own() -> None:
    state = formed("a", high=2)
    detector, _, _ = FailureDetector().check(state, None, BOUNDS, 100.0)
    other = Round(1, 3, version=5)
    other, _ = step(other, JoinRound(Node("b", "b")))
    assert detector.check(other, None, BOUNDS, 131.0)[1:] == ((), 161.0)


def test_with_nothing_to_wait_for_no_further_check_is_needed() -> None:
    assert FailureDetector().check(formed("a", low=2, high=2), None, BOUNDS, 5.0)[1:] == ((), None)


@UNHURRIED
@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.sampled_from([True] + [False] * 9)), min_size=9),
    st.sampled_from([Bounds(), BOUNDS, Bounds(keep_alive=0.5, misses=4)]),
)
def test_a_node_is_lost_exactly_after_enough_silence_while_the_driver_ran(
    steps: list[tuple[float, bool]], bounds: Bounds
) -> None:
    state, beat, now, silence = formed("a"), 0, 0.0, 0.0
    detector, _, _ = FailureDetector().check(state, {"a": beat}, bounds, now)
    for gap, beats in steps:
        now += gap
        beat += beats
        listened = min(now - detector.checked, bounds.keep_alive)
        before, limit = silence, bounds.lease + bounds.kill
        silence = 0.0 if beats else silence + listened
        in_time = now - detector.checked <= bounds.keep_alive or before >= limit
        detector, due, again = detector.check(state, {"a": beat}, bounds, now)
        assert bool(due) == (silence >= limit and in_time)
        if due:
            return
        assert again is not None
        assert now <= again <= now + bounds.keep_alive


def silences(
    state: Round, beating: set[str], unleased: set[str], seconds: int
) -> dict[str, tuple[int, int]]:
    """Return when each node was lost, in whole seconds, with the place that it had."""
    detector, lost = FailureDetector(), dict[str, tuple[int, int]]()
    for second in range(seconds):
        beats = dict.fromkeys(beating, second)
        detector, due, _ = detector.check(
            state, beats, BOUNDS, float(second), unleased=frozenset(unleased - lost.keys())
        )
        for event in due:
            if isinstance(event, NodeLost):
                lost[event.id] = second, event.place
                state, _ = step(state, event)
    return lost


FOUR = {"a", "b", "c", "d"}


def test_under_overload_a_node_without_a_lease_keeps_its_place_for_a_limited_time() -> None:
    lost = silences(formed(*sorted(FOUR), high=9), {"a"}, FOUR, 60)
    assert {id: second for id, (second, _) in lost.items()} == dict.fromkeys(FOUR - {"a"}, 40)


def test_a_few_silent_nodes_are_no_overload() -> None:
    assert silences(formed(*sorted(FOUR), high=9), {"a", "b"}, FOUR, 60).keys() == {"c", "d"}
    lost = silences(formed(*sorted(FOUR), high=9), {"a", "b"}, FOUR, 6)
    assert lost.keys() == {"c", "d"}


def test_nodes_are_lost_as_usual_soon_after_the_others_are_heard_again() -> None:
    state, detector = formed(*sorted(FOUR), high=9), FailureDetector()
    for second in range(10):
        detector, due, _ = detector.check(
            state, {"a": second}, BOUNDS, float(second), unleased=FOUR
        )
        assert due == ()
    for second in range(10, 16):
        beats = dict.fromkeys(("a", "b", "c"), second)
        detector, due, _ = detector.check(state, beats, BOUNDS, float(second), unleased=FOUR)
        if due:
            break
    assert [event.id for event in due if isinstance(event, NodeLost)] == ["d"]


@UNHURRIED
@given(
    unleased=st.sets(st.sampled_from("abcdefgh")),
    beating=st.sets(st.sampled_from("abcdefgh")),
)
def test_a_node_that_may_hold_a_lease_is_lost_at_the_same_time_in_any_overload(
    unleased: set[str], beating: set[str]
) -> None:
    names = "abcdefgh"
    lost = silences(formed(*names, high=9), beating, unleased, 45)
    assert lost.keys() == {*names} - beating
    for id, (second, _) in lost.items():
        assert BOUNDS.silence <= second <= BOUNDS.patience
        if id not in unleased:
            assert second == BOUNDS.silence
