"""The rules of one worker: windows, failures in a row, and fatal results."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.heartbeat import HeartbeatFailure
from regrow.heartbeat.beats import (
    BeatState,
    Extend,
    Fail,
    HeartbeatPlan,
    LeaveRequest,
    Listen,
    LogLine,
    Result,
    SetStallRule,
    Sleep,
    Stalled,
    Step,
    TryExchange,
    Woke,
    begin,
    step,
)
from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.merge import (
    Agreed,
    Broken,
    ExchangeFailed,
    Outcome,
    StalledSteps,
    WorkersLeft,
)

PLAN = HeartbeatPlan(rank=1, size=4, period=10.0, timeout=2.0, failures=3, start_timeout=30.0)
TOKEN = 4711
T0 = 1000.0
"""When the first exchange of `joined` succeeded."""
MISSING = ExchangeFailed("nothing came", Ranks.of([3]))

A = TypeVar("A")


def joined(plan: HeartbeatPlan = PLAN) -> BeatState:
    """A worker that has had its first exchange."""
    return step(begin(plan, 0, T0 - 1.0)[0], Result(Agreed(TOKEN), T0))[0]


def one(result: Step, kind: type[A]) -> A:
    """The action of this kind; there is one."""
    [action] = [action for action in result[1] if isinstance(action, kind)]
    return action


def fail(state: BeatState, outcome: Outcome = MISSING) -> Step:
    """The next try fails, at the end of its window."""
    state, actions = step(state, Woke(state.since))
    while isinstance(actions[-1], Sleep):
        state, actions = step(state, Woke(actions[-1].until))
    exchange = actions[-1]
    assert isinstance(exchange, TryExchange)
    return step(state, Result(outcome, state.asked + exchange.timeout))


def failure_of(result: Step) -> HeartbeatFailure:
    assert result[0].over
    return one(result, Fail).failure


def test_the_bound_is_logged_first() -> None:
    _, actions = begin(PLAN, 0, T0)
    assert "within 36 s" in one((joined(), actions), LogLine).text
    assert actions[-1] == TryExchange(30.0, final=True)


def test_the_first_exchange_brings_the_token_and_sets_the_deadline() -> None:
    state, actions = step(begin(PLAN, 0, T0 - 1.0)[0], Result(Agreed(TOKEN), T0))
    assert state.token == TOKEN
    assert actions == (Extend(36.0), Listen(), Sleep(T0 + 10.0))


def test_the_next_exchange_begins_a_period_after_a_successful_one() -> None:
    state, actions = step(joined(), Woke(T0 + 10.0))
    assert actions == (TryExchange(2.0),)
    state, actions = step(state, Result(Agreed(TOKEN), T0 + 10.5))
    assert actions == (Extend(36.0), Sleep(T0 + 20.5))
    assert state.beats == 2


def test_the_third_failure_in_a_row_is_fatal() -> None:
    state = joined()
    for failures in (1, 2):
        state, _ = result = fail(state)
        assert f"failure {failures} of 3 in a row" in one(result, LogLine).text
    failure = failure_of(fail(state))
    assert (failure.kind, failure.ranks, failure.beat, failure.seconds) == (
        "missing",
        (3,),
        1,
        36.0,
    )
    assert "rank 3 is missing" in str(failure)


def test_a_failed_exchange_changes_no_token() -> None:
    state, _ = fail(joined())
    assert (state.token, state.beats, state.over) == (TOKEN, 1, False)


@pytest.mark.parametrize("before", [1, 2])
def test_any_success_resets_the_count(before: int) -> None:
    state = joined()
    for _ in range(before):
        state, _ = fail(state)
    now = state.since + 12.0 * before + 10.5
    state, actions = step(step(state, Woke(now))[0], Result(Agreed(TOKEN), now))
    assert actions[0] == Extend(36.0)
    for _ in range(2):
        state, _ = fail(state)
    assert not state.over


def test_the_last_allowed_try_is_marked_as_final() -> None:
    state = joined()
    finals = []
    for window in range(3):
        state, actions = step(state, Woke(T0 + 12.0 * window + 10.0))
        finals.append(one((state, actions), TryExchange).final)
        state, _ = step(state, Result(MISSING, T0 + 12.0 * (window + 1)))
    assert finals == [False, False, True]


def test_a_late_answer_counts_from_the_time_of_its_set() -> None:
    state, actions = step(
        step(joined(), Woke(T0 + 10.0))[0], Result(Agreed(TOKEN, age=1.5), T0 + 12)
    )
    assert state.since == T0 + 10.5
    assert actions == (Extend(34.5), Sleep(T0 + 20.5))


def test_a_late_worker_uses_the_rest_of_a_window() -> None:
    assert step(joined(), Woke(T0 + 11.0))[1] == (TryExchange(1.0),)
    assert step(joined(), Woke(T0 + 11.9))[1] == (Sleep(T0 + 12.0),)
    assert step(joined(), Woke(T0 + 13.0))[1] == (TryExchange(11.0),)
    assert step(joined(), Woke(T0 + 30.0))[1] == (TryExchange(6.0, final=True),)


def test_a_worker_with_a_failed_exchange_waits_through_the_next_window() -> None:
    state, actions = fail(joined())
    assert actions[-1] == TryExchange(12.0)
    state, actions = step(state, Result(MISSING, T0 + 24.0))
    assert actions[-1] == TryExchange(12.0, final=True)


def test_an_exchange_that_fails_early_is_not_retried_before_the_next_window() -> None:
    state, _ = step(joined(), Woke(T0 + 10.0))
    state, actions = step(state, Result(MISSING, T0 + 10.01))
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
    """`speed` is the share of its time-out after which each exchange fails."""
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
            assert isinstance(action, TryExchange)
            assert 0 < action.timeout <= (plan.cycle if tries else timeout) * (1 + 1e-9)
            tries.append(state.window)
            now += action.timeout * (speed.pop() if speed else 1.0)
            state, actions = step(state, Result(MISSING, now))
    assert tries == list(range(failures))
    assert now <= T0 + plan.bound + 1e-6 * plan.bound


@pytest.mark.parametrize(
    ("outcome", "kind", "text"),
    [
        (Broken("out of step", Ranks.of([2])), "out of step", "rank 2 shows another token"),
        (
            Broken("out of step", Ranks.of([1]), "the others show 7"),
            "out of step",
            "this process, or another process with rank 1, shows another token, so it belongs to "
            "another run (the others show 7)",
        ),
        (
            Broken("restarted", Ranks.of([2])),
            "restarted",
            "rank 2 was restarted while the other workers",
        ),
        (
            Broken("restarted", Ranks.of([1])),
            "restarted",
            "another process started in place of this one",
        ),
        (Broken("lost", Ranks.of([0])), "lost", "the process of rank 0 ended without leaving"),
        (Broken("twice", Ranks.of([1])), "twice", "another process also has rank 1"),
        (Broken("missing", Ranks.of([1])), "missing", "this process was missing"),
        (Broken("missing", Ranks.of([0, 2])), "missing", "ranks 0, 2 are missing"),
        (
            Broken("wrong world size", Ranks.of([2]), "8 instead of 4"),
            "wrong world size",
            "rank 2 expects another number of workers (8 instead of 4); start all workers with",
        ),
    ],
)
def test_a_broken_group_is_fatal_at_once(outcome: Broken, kind: str, text: str) -> None:
    failure = failure_of(step(joined(), Result(outcome, T0 + 4.0)))
    assert (failure.kind, failure.ranks, failure.beat) == (kind, outcome.ranks.named, 1)
    assert text in str(failure)
    assert (failure.rank, failure.world_size, failure.seconds) == (1, 4, 4.0)


def test_another_token_than_its_own_is_fatal() -> None:
    failure = failure_of(step(joined(), Result(Agreed(TOKEN + 1), T0 + 4.0)))
    assert (failure.kind, failure.ranks) == ("out of step", (1,))


def test_failures_without_missing_ranks_are_of_the_kind_no_exchange() -> None:
    state = joined()
    for _ in range(2):
        state, _ = fail(state, ExchangeFailed("ConnectionError: refused"))
    failure = failure_of(fail(state, ExchangeFailed("ConnectionError: refused")))
    assert (failure.kind, failure.ranks) == ("no exchange", ())
    assert "no exchange has succeeded for 36 s (ConnectionError: refused)" in str(failure)


def test_the_heartbeat_ends_without_a_failure_when_a_worker_leaves() -> None:
    state, actions = step(joined(), Result(WorkersLeft(Ranks.of([2])), T0 + 4.0))
    assert state.over
    assert state.left == Ranks.of([2])
    assert [type(action) for action in actions] == [LogLine]
    assert step(state, Result(Broken("lost", Ranks.of([2])), T0 + 5.0)) == (state, ())


@pytest.mark.parametrize(
    "outcome", [WorkersLeft(Ranks.of([1])), MISSING, Broken("lost", Ranks.of([3])), Agreed(TOKEN)]
)
def test_a_worker_leaves_by_one_exchange_with_any_result(outcome: Outcome) -> None:
    state, actions = step(joined(), LeaveRequest(T0 + 3.0))
    assert state.leaving
    assert actions == (TryExchange(9.0),)  # to the end of the window in which the others come
    state, actions = step(state, Result(outcome, T0 + 10.0))
    assert state.over
    assert actions == ()


def test_a_second_leave_request_ends_the_heartbeat_at_once() -> None:
    state, _ = step(joined(), LeaveRequest(T0 + 3.0))
    assert step(state, LeaveRequest(T0 + 4.0))[1] == ()


# --- the first exchange


def test_a_missing_rank_of_the_first_exchange_never_started() -> None:
    failure = failure_of(step(begin(PLAN, 0, T0)[0], Result(MISSING, T0 + 30.0)))
    assert (failure.kind, failure.ranks, failure.beat) == ("never started", (3,), 0)
    assert "rank 3 did not arrive within 30 s" in str(failure)


def test_a_long_time_is_shown_in_plain_seconds() -> None:
    failure = failure_of(step(begin(PLAN, 0, T0)[0], Result(MISSING, T0 + 1834.5)))
    assert "rank 3 did not arrive within 1834.5 s" in str(failure)


def test_a_new_worker_in_a_running_group_is_reported() -> None:
    late = Result(Broken("restarted", Ranks.of([1])), T0)
    assert "the other workers had already started their heartbeats" in str(
        failure_of(step(begin(PLAN, 0, T0)[0], late))
    )


def test_a_patient_worker_waits_without_limit_and_logs_the_missing_ranks() -> None:
    state, actions = begin(replace(PLAN, patient=True), 0, T0)
    assert actions[-1] == TryExchange(30.0, final=False)
    for _ in range(50):
        now = state.asked + 30.0
        state, actions = result = step(state, Result(MISSING, now))
        text = one(result, LogLine).text
        assert text.startswith("heartbeat: rank 3 of 4 has not started heartbeats, ")
        assert "A worker starts its heartbeat when it imports regrow" in text
        assert "start_timeout" in text
        assert actions[-1] == Sleep(now)
        state, actions = step(state, Woke(now))
        assert actions == (TryExchange(30.0, final=False),)
    assert step(state, Result(Agreed(TOKEN), now + 1.0))[0].beats == 1


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
def test_one_waiting_worker_logs_the_missing_ranks_as_a_warning(
    rank: int, missing: Iterable[int], level: int
) -> None:
    state, _ = begin(replace(PLAN, rank=rank, size=20, patient=True), 0, T0)
    failed = ExchangeFailed("nothing came", Ranks.of(missing))
    assert one(step(state, Result(failed, T0 + 30.0)), LogLine).level == level


def test_a_patient_worker_tries_once_a_period() -> None:
    state, _ = begin(replace(PLAN, patient=True), 0, T0)
    assert step(state, Result(ExchangeFailed("refused"), T0 + 0.1))[1][-1] == Sleep(T0 + 10.0)


def test_a_worker_that_has_not_joined_ends_at_once() -> None:
    state, _ = begin(replace(PLAN, patient=True), 0, T0)
    assert step(state, LeaveRequest(T0 + 1.0))[1] == ()


# --- stalls

STALLED = StalledSteps(6, Ranks.of([2]), 5, "load", 90)


def test_a_stall_is_reported_once() -> None:
    state = joined(replace(PLAN, stalled_after=6))
    result = step(state, Result(Agreed(TOKEN, STALLED._replace(beats=5)), T0 + 10))
    assert not [action for action in result[1] if isinstance(action, Stalled)]
    result = step(result[0], Result(Agreed(TOKEN, STALLED), T0 + 20))
    text = one(result, Stalled).text
    assert "rank 2 sends heartbeats, but stays at step 5 in phase 'load' for 6 beats" in text
    result = step(result[0], Result(Agreed(TOKEN, STALLED._replace(beats=7)), T0 + 30))
    assert not [action for action in result[1] if isinstance(action, Stalled)]
    state, _ = step(result[0], Result(Agreed(TOKEN, None), T0 + 40))
    assert one(step(state, Result(Agreed(TOKEN, STALLED), T0 + 50)), Stalled)


def test_the_stall_rule_can_be_changed() -> None:
    state = joined()
    state, actions = step(state, SetStallRule(6, True, T0 + 3.0))
    assert actions == (Sleep(T0 + 10.0),)
    failure = failure_of(step(state, Result(Agreed(TOKEN, STALLED), T0 + 10)))
    assert failure.kind == "stalled"
    calm, _ = step(state, SetStallRule(None, False, T0 + 4.0))
    assert calm == joined()


def test_a_new_stall_rule_does_not_shorten_a_wait() -> None:
    state, _ = begin(replace(PLAN, patient=True), 0, T0)
    state, _ = step(state, Result(ExchangeFailed("refused"), T0 + 0.1))
    assert step(state, SetStallRule(6, True, T0 + 3.0))[1] == (Sleep(T0 + 10.0),)


def test_a_stall_is_fatal_by_choice() -> None:
    plan = replace(PLAN, stalled_after=6, stall_is_fatal=True)
    failure = failure_of(step(joined(plan), Result(Agreed(TOKEN, STALLED), T0 + 10)))
    assert (failure.kind, failure.ranks) == ("stalled", (2,))


def test_without_a_stall_rule_a_stall_is_ignored() -> None:
    result = step(joined(), Result(Agreed(TOKEN, STALLED), T0 + 10))
    assert [type(action) for action in result[1]] == [Extend, Sleep]
