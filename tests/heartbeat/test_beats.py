"""The rules of one worker: windows, failures in a row, what is fatal and what it is called."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.heartbeat import HeartbeatFailure
from regrow.heartbeat._beats import (
    Beating,
    End,
    Exchange,
    Fail,
    Heard,
    Judge,
    Listen,
    Plan,
    Rearm,
    Say,
    Sleep,
    Stalled,
    Step,
    Stop,
    Woke,
    begin,
    step,
)
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._merge import Agreed, Broken, Failed, Left, Outcome, Standing

PLAN = Plan(rank=1, size=4, period=10.0, timeout=2.0, failures=3, start_timeout=30.0)
TOKEN = 4711
T0 = 1000.0
"""When the first exchange of `joined` succeeded."""
MISSING = Failed("nothing came", Ranks.of([3]))

A = TypeVar("A")


def joined(plan: Plan = PLAN) -> Beating:
    """A worker that has had its first exchange."""
    return step(begin(plan, 0, T0 - 1.0)[0], Heard(Agreed(TOKEN), T0))[0]


def one(result: Step, kind: type[A]) -> A:
    """The action of this kind; there is one."""
    [action] = [action for action in result[1] if isinstance(action, kind)]
    return action


def fail(state: Beating, outcome: Outcome = MISSING) -> Step:
    """The next try fails, at the end of its window."""
    state, actions = step(state, Woke(state.since))
    while isinstance(actions[-1], Sleep):
        state, actions = step(state, Woke(actions[-1].until))
    exchange = actions[-1]
    assert isinstance(exchange, Exchange)
    return step(state, Heard(outcome, state.asked + exchange.timeout))


def failure_of(result: Step) -> HeartbeatFailure:
    assert result[0].over
    return one(result, Fail).failure


def test_the_bound_is_said_before_anything_happens() -> None:
    _, actions = begin(PLAN, 0, T0)
    assert "within 36 s" in one((joined(), actions), Say).text
    assert actions[-1] == Exchange(30.0, final=True)


def test_the_first_exchange_brings_the_token_and_sets_the_deadline() -> None:
    state, actions = step(begin(PLAN, 0, T0 - 1.0)[0], Heard(Agreed(TOKEN), T0))
    assert state.token == TOKEN
    assert actions == (Rearm(36.0), Listen(), Sleep(T0 + 10.0))


def test_a_period_after_an_exchange_that_succeeded_comes_the_next() -> None:
    state, actions = step(joined(), Woke(T0 + 10.0))
    assert actions == (Exchange(2.0),)
    state, actions = step(state, Heard(Agreed(TOKEN), T0 + 10.5))
    assert actions == (Rearm(36.0), Sleep(T0 + 20.5))
    assert state.beats == 2


def test_one_and_two_failures_in_a_row_are_survived_and_the_third_is_fatal() -> None:
    state = joined()
    for left in (2, 1):
        state, _ = result = fail(state)
        assert f"{left} more until the limit" in one(result, Say).text
    failure = failure_of(fail(state))
    assert (failure.kind, failure.ranks, failure.beat, failure.seconds) == (
        "missing",
        (3,),
        1,
        36.0,
    )
    assert "rank 3 is missing" in str(failure)


def test_a_failed_exchange_is_compared_with_nothing() -> None:
    state, _ = fail(joined())
    assert (state.token, state.beats, state.over) == (TOKEN, 1, False)


@pytest.mark.parametrize("before", [1, 2])
def test_any_success_resets_the_count(before: int) -> None:
    state = joined()
    for _ in range(before):
        state, _ = fail(state)
    now = state.since + 12.0 * before + 10.5
    state, actions = step(step(state, Woke(now))[0], Heard(Agreed(TOKEN), now))
    assert actions[0] == Rearm(36.0)
    for _ in range(2):
        state, _ = fail(state)
    assert not state.over


def test_the_last_try_says_that_it_is() -> None:
    state = joined()
    finals = []
    for window in range(3):
        state, actions = step(state, Woke(T0 + 12.0 * window + 10.0))
        finals.append(one((state, actions), Exchange).final)
        state, _ = step(state, Heard(MISSING, T0 + 12.0 * (window + 1)))
    assert finals == [False, False, True]


def test_what_was_told_late_counts_from_when_it_was_so() -> None:
    state, actions = step(
        step(joined(), Woke(T0 + 10.0))[0], Heard(Agreed(TOKEN, age=1.5), T0 + 12)
    )
    assert state.since == T0 + 10.5
    assert actions == (Rearm(34.5), Sleep(T0 + 20.5))


def test_who_was_held_up_comes_to_what_is_left_of_a_window() -> None:
    assert step(joined(), Woke(T0 + 11.0))[1] == (Exchange(1.0),)
    assert step(joined(), Woke(T0 + 11.9))[1] == (Sleep(T0 + 12.0),)
    assert step(joined(), Woke(T0 + 13.0))[1] == (Exchange(11.0),)
    assert step(joined(), Woke(T0 + 30.0))[1] == (Exchange(6.0, final=True),)


def test_who_has_failed_is_there_until_the_next_failure() -> None:
    state, actions = fail(joined())
    assert actions[-1] == Exchange(12.0)
    state, actions = step(state, Heard(MISSING, T0 + 24.0))
    assert actions[-1] == Exchange(12.0, final=True)


def test_an_exchange_that_fails_at_once_is_not_hurried() -> None:
    state, _ = step(joined(), Woke(T0 + 10.0))
    state, actions = step(state, Heard(MISSING, T0 + 10.01))
    assert actions[-1] == Sleep(T0 + 12.0)


@given(
    st.floats(0.01, 1000.0),
    st.floats(0.01, 1000.0),
    st.integers(1, 5),
    st.lists(st.floats(0.0, 1.0), max_size=8),
)
def test_the_last_failure_is_never_after_the_bound_and_there_is_one_try_a_window(
    period: float, timeout: float, failures: int, speed: list[float]
) -> None:
    """However soon each exchange fails within the time that it is given."""
    plan = replace(PLAN, period=period, timeout=timeout, failures=failures)
    state = joined(plan)
    state, actions = step(state, Woke(T0))
    now, tries = T0, list[int]()
    while not state.over:
        action = actions[-1]
        if isinstance(action, Sleep):
            assert action.until > now
            now = action.until
            state, actions = step(state, Woke(now))
        else:
            assert isinstance(action, Exchange)
            assert 0 < action.timeout <= (plan.cycle if tries else timeout) * (1 + 1e-9)
            tries.append(state.window)
            now += action.timeout * (speed.pop() if speed else 1.0)
            state, actions = step(state, Heard(MISSING, now))
    assert tries == list(range(failures))
    assert now <= T0 + plan.bound + 1e-6 * plan.bound


@pytest.mark.parametrize(
    ("outcome", "kind", "said"),
    [
        (Broken("out of step", Ranks.of([2])), "out of step", "rank 2 shows another token"),
        (
            Broken("out of step", Ranks.of([1]), "the others show 7"),
            "out of step",
            "this process, or another one of rank 1, shows another token, and is of another run "
            "(the others show 7)",
        ),
        (Broken("restarted", Ranks.of([2])), "restarted", "rank 2 was started again behind"),
        (Broken("restarted", Ranks.of([1])), "restarted", "another process was started in"),
        (Broken("lost", Ranks.of([0])), "lost", "the process of rank 0 ended without a goodbye"),
        (Broken("twice", Ranks.of([1])), "twice", "another process says that it is rank 1"),
        (Broken("missing", Ranks.of([1])), "missing", "this process was missing"),
        (Broken("missing", Ranks.of([0, 2])), "missing", "ranks 0, 2 are missing"),
        (
            Broken("wrong world size", Ranks.of([2]), "it says 8, and rank 0 says 4"),
            "wrong world size",
            "rank 2 expects another number of workers (it says 8, and rank 0 says 4)",
        ),
    ],
)
def test_what_shows_that_this_is_no_group_is_fatal_at_once(
    outcome: Broken, kind: str, said: str
) -> None:
    failure = failure_of(step(joined(), Heard(outcome, T0 + 4.0)))
    assert (failure.kind, failure.ranks, failure.beat) == (kind, outcome.ranks.named, 1)
    assert said in str(failure)
    assert (failure.rank, failure.world_size, failure.seconds) == (1, 4, 4.0)


def test_a_token_that_is_not_its_own_is_fatal_though_all_agree_on_it() -> None:
    failure = failure_of(step(joined(), Heard(Agreed(TOKEN + 1), T0 + 4.0)))
    assert (failure.kind, failure.ranks) == ("out of step", (1,))


def test_an_exchange_that_says_nothing_of_who_is_missing_is_named_for_that() -> None:
    state = joined()
    for _ in range(2):
        state, _ = fail(state, Failed("ConnectionError: refused"))
    failure = failure_of(fail(state, Failed("ConnectionError: refused")))
    assert (failure.kind, failure.ranks) == ("no exchange", ())
    assert "no exchange has succeeded for 36 s (ConnectionError: refused)" in str(failure)


def test_that_somebody_leaves_ends_the_beating_without_alarm() -> None:
    state, actions = step(joined(), Heard(Left(Ranks.of([2])), T0 + 4.0))
    assert state.over
    assert state.left == Ranks.of([2])
    assert isinstance(actions[-1], End)
    assert step(state, Heard(Broken("lost", Ranks.of([2])), T0 + 5.0)) == (state, ())


@pytest.mark.parametrize(
    "outcome", [Left(Ranks.of([1])), MISSING, Broken("lost", Ranks.of([3])), Agreed(TOKEN)]
)
def test_who_leaves_does_so_by_one_exchange_however_that_ends(outcome: Outcome) -> None:
    state, actions = step(joined(), Stop(T0 + 3.0))
    assert state.leaving
    assert actions == (Exchange(9.0),)  # to the end of the window in which the others come
    state, actions = step(state, Heard(outcome, T0 + 10.0))
    assert state.over
    assert actions == (End(),)


def test_who_is_asked_to_leave_twice_does_not_wait() -> None:
    state, _ = step(joined(), Stop(T0 + 3.0))
    assert step(state, Stop(T0 + 4.0))[1] == (End(),)


# --- the first exchange


def test_a_worker_that_does_not_come_in_time_never_started() -> None:
    failure = failure_of(step(begin(PLAN, 0, T0)[0], Heard(MISSING, T0 + 30.0)))
    assert (failure.kind, failure.ranks, failure.beat) == ("never started", (3,), 0)
    assert "rank 3 did not come within 30 s" in str(failure)


def test_who_comes_to_a_group_that_beats_already_is_told_so() -> None:
    late = Heard(Broken("restarted", Ranks.of([1])), T0)
    assert "started while the others were beating" in str(
        failure_of(step(begin(PLAN, 0, T0)[0], late))
    )


def test_one_that_is_patient_waits_for_ever_and_says_for_whom() -> None:
    state, actions = begin(replace(PLAN, patient=True), 0, T0)
    assert actions[-1] == Exchange(30.0, final=False)
    for _ in range(50):
        now = state.asked + 30.0
        state, actions = result = step(state, Heard(MISSING, now))
        said = one(result, Say).text
        assert said.startswith("heartbeat: rank 3 of 4 has not begun to beat, ")
        assert "A worker begins when it imports regrow" in said
        assert "start_timeout" in said
        assert actions[-1] == Sleep(now)
        state, actions = step(state, Woke(now))
        assert actions == (Exchange(30.0, final=False),)
    assert step(state, Heard(Agreed(TOKEN), now + 1.0))[0].beats == 1


@pytest.mark.parametrize(
    ("rank", "missing", "level"),
    [
        (0, [3], logging.WARNING),
        (1, [3], logging.INFO),
        (1, [0], logging.WARNING),
        (2, [0], logging.INFO),
        (19, range(19), logging.WARNING),
    ],
)
def test_who_is_still_waited_for_is_said_loud_by_one_of_those_who_know(
    rank: int, missing: Iterable[int], level: int
) -> None:
    state, _ = begin(replace(PLAN, rank=rank, size=20, patient=True), 0, T0)
    failed = Failed("nothing came", Ranks.of(missing))
    assert one(step(state, Heard(failed, T0 + 30.0)), Say).level == level


def test_one_that_is_patient_does_not_hurry_when_an_exchange_fails_at_once() -> None:
    state, _ = begin(replace(PLAN, patient=True), 0, T0)
    assert step(state, Heard(Failed("refused"), T0 + 0.1))[1][-1] == Sleep(T0 + 10.0)


def test_who_has_not_joined_need_not_leave() -> None:
    state, _ = begin(replace(PLAN, patient=True), 0, T0)
    assert step(state, Stop(T0 + 1.0))[1] == (End(),)


# --- standing still

STILL = Standing(5, Ranks.of([2]), 90, Ranks.of([0, 1, 3]), 6, Ranks.of([2]), 5, "load")


def test_one_that_stands_still_for_too_long_is_reported_once() -> None:
    state = joined(replace(PLAN, stalled_after=6))
    result = step(state, Heard(Agreed(TOKEN, STILL._replace(still=5)), T0 + 10))
    assert not [action for action in result[1] if isinstance(action, Stalled)]
    result = step(result[0], Heard(Agreed(TOKEN, STILL), T0 + 20))
    text = one(result, Stalled).text
    assert "rank 2 beats, but stands still at step 5 in phase 'load' for 6 beats" in text
    result = step(result[0], Heard(Agreed(TOKEN, STILL._replace(still=7)), T0 + 30))
    assert not [action for action in result[1] if isinstance(action, Stalled)]
    state, _ = step(result[0], Heard(Agreed(TOKEN, STILL._replace(still=0)), T0 + 40))
    assert one(step(state, Heard(Agreed(TOKEN, STILL), T0 + 50)), Stalled)


def test_what_is_thought_of_standing_still_can_be_changed_and_nothing_else_is() -> None:
    state = joined()
    state, actions = step(state, Judge(6, True, T0 + 3.0))
    assert actions == (Sleep(T0 + 10.0),)
    failure = failure_of(step(state, Heard(Agreed(TOKEN, STILL), T0 + 10)))
    assert failure.kind == "stalled"
    calm, _ = step(state, Judge(None, False, T0 + 4.0))
    assert calm == joined()


def test_who_waits_for_the_others_does_not_hurry_when_that_is_changed() -> None:
    state, _ = begin(replace(PLAN, patient=True), 0, T0)
    state, _ = step(state, Heard(Failed("refused"), T0 + 0.1))
    assert step(state, Judge(6, True, T0 + 3.0))[1] == (Sleep(T0 + 10.0),)


def test_one_that_stands_still_is_fatal_by_choice() -> None:
    plan = replace(PLAN, stalled_after=6, stall_is_fatal=True)
    failure = failure_of(step(joined(plan), Heard(Agreed(TOKEN, STILL), T0 + 10)))
    assert (failure.kind, failure.ranks) == ("stalled", (2,))


def test_standing_still_is_nothing_to_who_did_not_ask() -> None:
    result = step(joined(), Heard(Agreed(TOKEN, STILL), T0 + 10))
    assert [type(action) for action in result[1]] == [Rearm, Sleep]
