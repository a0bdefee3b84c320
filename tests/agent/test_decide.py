"""The agent's decisions, held to their promises without a process or a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from regrow.agent import WorkerState
from regrow.agent import _decide as core
from regrow.agent import _words as words
from regrow.agent._decide import Phase, State, decide

RUNNING = State(remaining_restarts=3, phase=Phase.RUNNING, started_at=100.0, looking=True)


def report(state: WorkerState, *, waiting: int = 0, now: float = 200.0) -> words.Report:
    return words.Report(state, waiting, now)


def test_a_run_begins_by_forming_a_round() -> None:
    state, actions = decide(State(remaining_restarts=1), words.Begin())
    assert state.phase is Phase.FORMING
    assert actions == (words.Form(),)


def test_a_formed_group_is_looked_at_at_once() -> None:
    state, actions = decide(State(1, Phase.FORMING), words.Formed(7.0))
    assert actions == (words.Look(),)
    assert (state.phase, state.started_at) == (Phase.RUNNING, 7.0)


def test_a_failure_with_budget_left_restarts_and_spends_one() -> None:
    state, actions = decide(RUNNING, report(WorkerState.FAILED))
    assert actions == (words.Restart("worker failure"),)
    assert state.remaining_restarts == 2


def test_a_failure_without_budget_stops_the_workers_and_then_fails_the_job() -> None:
    state, actions = decide(replace(RUNNING, remaining_restarts=0), report(WorkerState.FAILED))
    assert actions == (words.Stop(),)
    state, actions = decide(state, words.Stopped())
    assert actions == (words.Finish(WorkerState.FAILED),)


def test_success_passes_the_exit_barrier_before_the_job_ends() -> None:
    state, actions = decide(RUNNING, report(WorkerState.SUCCEEDED))
    assert actions == (words.Barrier(),)
    state, actions = decide(state, words.BarrierPassed())
    assert actions == (words.Finish(WorkerState.SUCCEEDED),)
    assert state.phase is Phase.ENDED


def test_waiting_nodes_start_a_new_round_without_spending_budget() -> None:
    state, actions = decide(RUNNING, report(WorkerState.HEALTHY, waiting=2))
    assert actions == (words.Restart("2 nodes wait to join"),)
    assert state.remaining_restarts == RUNNING.remaining_restarts


def test_a_broken_round_starts_a_new_one_without_spending_budget() -> None:
    state, actions = decide(RUNNING, words.MembershipChanged("node b was lost", 200.0))
    assert actions == (words.Restart("node b was lost"),)
    assert state.remaining_restarts == RUNNING.remaining_restarts


def test_a_group_in_an_unknown_state_is_given_up() -> None:
    _, actions = decide(RUNNING, report(WorkerState.UNKNOWN))
    assert actions == (words.GiveUp("Worker group in UNKNOWN state"),)


def test_a_change_during_a_look_is_looked_at_afterwards() -> None:
    state, actions = decide(RUNNING, words.Changed())
    assert actions == ()
    _, actions = decide(state, report(WorkerState.HEALTHY))
    assert actions == (words.Look(),)


def test_the_first_quick_failure_restarts_at_once_and_a_crash_loop_backs_off() -> None:
    state, delays = RUNNING, []
    for _ in range(3):
        state, (action,) = decide(state, report(WorkerState.FAILED, now=101.0))
        delays.append(action.seconds if isinstance(action, words.Delay) else 0.0)
        if state.phase is Phase.BACKOFF:
            state, (action,) = decide(state, words.DelayOver())
        assert action == words.Restart("worker failure")
        state = replace(state, phase=Phase.RUNNING)
    assert delays == [0.0, core.BACKOFF_BASE_S, 2 * core.BACKOFF_BASE_S]


def test_an_attempt_that_lived_ends_the_crash_loop() -> None:
    looping = replace(RUNNING, quick_ends=5)
    state, actions = decide(looping, report(WorkerState.FAILED, now=100.0 + core.QUICK_S))
    assert actions == (words.Restart("worker failure"),)
    assert state.quick_ends == 0


@given(st.integers(0, 10_000))
def test_the_back_off_never_shrinks_and_never_passes_its_cap(failures: int) -> None:
    assert core.backoff(failures) <= core.backoff(failures + 1) <= core.BACKOFF_CAP_S


EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.just(words.Begin()),
    st.builds(words.Formed, st.floats(0, 1e6)),
    st.just(words.Changed()),
    st.builds(words.Report, st.sampled_from(WorkerState), st.integers(0, 3), st.floats(0, 1e6)),
    st.just(words.MembershipChanged("why", 1.0)),
    st.just(words.DelayOver()),
    st.just(words.Stopped()),
    st.just(words.BarrierPassed()),
    st.builds(words.Signaled, st.just(15)),
)
OPERATIONS = (words.Form, words.Restart, words.Stop, words.Barrier)


@given(st.integers(0, 4), st.lists(EVENTS, max_size=40))
def test_whatever_happens_the_budget_holds_and_the_end_is_final(
    budget: int, events: list[Any]
) -> None:
    state = State(remaining_restarts=budget)
    restarts_for_failure = 0
    ended = False
    for event in events:
        before = state
        state, actions = decide(state, event)
        assert not (ended and (actions or state != before)), "something happened after the end"
        assert sum(isinstance(action, OPERATIONS) for action in actions) <= 1
        if state.remaining_restarts < before.remaining_restarts:
            restarts_for_failure += 1
            assert isinstance(event, words.Report)
        assert 0 <= state.remaining_restarts == budget - restarts_for_failure
        ended = state.phase is Phase.ENDED


@given(st.integers(0, 4), st.lists(EVENTS, max_size=20))
def test_a_signal_ends_the_run_from_every_phase_it_can_be_in(
    budget: int, events: list[Any]
) -> None:
    state = State(remaining_restarts=budget)
    for event in events:
        state, _ = decide(state, event)
    if state.phase is not Phase.ENDED:
        state, actions = decide(state, words.Signaled(2))
        assert actions == (words.Interrupt(2),)
    assert state.phase is Phase.ENDED
