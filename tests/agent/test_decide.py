"""The agent's decisions, without a process or a clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent import WorkerState
from regrow.agent.decisions import decide as core
from regrow.agent.decisions import events as words
from regrow.agent.decisions.decide import AgentPhase, AgentState


class Actions(tuple[words.Action, ...]):
    """Actions that are equal only to actions of the same classes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        return [(type(a), *a) for a in self] == [(type(b), *b) for b in other]

    __hash__ = None  # type: ignore[assignment]


def decide(state: AgentState, event: words.Event) -> tuple[AgentState, tuple[words.Action, ...]]:
    state, actions = core.decide(state, event)
    return state, Actions(actions)


RUNNING = AgentState(
    remaining_restarts=3, phase=AgentPhase.RUNNING, started_at=100.0, checking=True
)


def report(state: WorkerState, *, waiting: int = 0, now: float = 200.0) -> words.CheckResult:
    return words.CheckResult(state, waiting, now)


def test_a_formed_group_is_checked_at_once() -> None:
    state, actions = decide(AgentState(1, AgentPhase.FORMING), words.Formed(7.0))
    assert actions == (words.CheckWorkers(),)
    assert (state.phase, state.started_at) == (AgentPhase.RUNNING, 7.0)


def test_a_failure_with_budget_left_restarts_and_spends_one() -> None:
    state, actions = decide(RUNNING, report(WorkerState.FAILED))
    assert actions == (words.Restart("worker failure"),)
    assert state.remaining_restarts == 2


def test_a_failure_without_budget_stops_the_workers_and_then_fails_the_job() -> None:
    state, actions = decide(RUNNING._replace(remaining_restarts=0), report(WorkerState.FAILED))
    assert actions == (words.StopWorkers(),)
    state, actions = decide(state, words.Stopped())
    assert actions == (words.Finish(WorkerState.FAILED),)


def test_success_passes_the_exit_barrier_before_the_job_ends() -> None:
    state, actions = decide(RUNNING, report(WorkerState.SUCCEEDED))
    assert actions == (words.Barrier(),)
    state, actions = decide(state, words.BarrierOver(200.0, passed=True))
    assert actions == (words.Finish(WorkerState.SUCCEEDED),)
    assert state.phase is AgentPhase.ENDED


def test_waiting_nodes_start_a_new_round_without_spending_budget() -> None:
    state, actions = decide(RUNNING, report(WorkerState.HEALTHY, waiting=2))
    assert actions == (words.Restart("2 nodes wait to join", full_grace=True),)
    assert state.remaining_restarts == RUNNING.remaining_restarts


def test_a_broken_round_starts_a_new_one_without_spending_budget() -> None:
    state, actions = decide(RUNNING, words.MembershipChanged("node b was lost", 200.0))
    assert actions == (words.Restart("node b was lost", full_grace=True),)
    assert state.remaining_restarts == RUNNING.remaining_restarts


def test_a_group_in_an_unknown_state_is_given_up() -> None:
    _, actions = decide(RUNNING, report(WorkerState.UNKNOWN))
    assert actions == (words.Raise("Worker group in UNKNOWN state"),)


def test_a_change_during_a_check_causes_another_check() -> None:
    state, actions = decide(RUNNING, words.Changed())
    assert actions == ()
    _, actions = decide(state, report(WorkerState.HEALTHY))
    assert actions == (words.CheckWorkers(),)


def test_the_first_quick_failure_restarts_at_once_and_a_crash_loop_backs_off() -> None:
    state, delays = RUNNING, []
    for _ in range(3):
        state, (action,) = decide(state, report(WorkerState.FAILED, now=101.0))
        delays.append(action.seconds if isinstance(action, words.Delay) else 0.0)
        if state.phase is AgentPhase.BACKOFF:
            state, (action,) = decide(state, words.DelayOver())
        assert action == words.Restart("worker failure")
        state = state._replace(phase=AgentPhase.RUNNING)
    assert delays == [0.0, core.BACKOFF_BASE_S, 2 * core.BACKOFF_BASE_S]


def test_an_attempt_that_lived_ends_the_crash_loop() -> None:
    looping = RUNNING._replace(quick_ends=5)
    state, actions = decide(looping, report(WorkerState.FAILED, now=100.0 + core.QUICK_S))
    assert actions == (words.Restart("worker failure"),)
    assert state.quick_ends == 0


@given(st.integers(0, 10_000))
def test_the_back_off_never_shrinks_and_never_passes_its_cap(failures: int) -> None:
    assert core.backoff(failures) <= core.backoff(failures + 1) <= core.BACKOFF_CAP_S


TIMES = st.floats(0, 1e6)
ROUNDS = st.integers(1, 5)
EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(words.Formed, TIMES, st.none() | ROUNDS, st.booleans(), st.booleans()),
    st.just(words.Changed()),
    st.just(words.Failing()),
    st.builds(
        words.CheckResult, st.sampled_from(WorkerState), st.integers(0, 3), TIMES, st.booleans()
    ),
    st.builds(words.Verdict, st.booleans(), st.booleans(), st.booleans(), st.just("why"), TIMES),
    st.builds(words.RoundOver, ROUNDS, st.just("node b was lost"), TIMES),
    st.builds(words.JoinRequested, ROUNDS, st.integers(0, 3), st.booleans(), TIMES),
    st.builds(words.Closed, st.booleans(), st.booleans()),
    st.builds(words.LeaseOver, ROUNDS, st.just("why"), TIMES),
    st.builds(words.MembershipChanged, st.just("why"), TIMES),
    st.just(words.DelayOver()),
    st.builds(words.GatherOver, TIMES, st.integers(0, 3)),
    st.just(words.Stopped()),
    st.builds(words.BarrierOver, TIMES, st.booleans()),
    st.builds(words.Signaled, st.just(15)),
)
OPERATIONS = (
    words.Form,
    words.Restart,
    words.ReportFailure,
    words.Delay,
    words.StopWorkers,
    words.Barrier,
)


@given(st.lists(EVENTS, max_size=30))
def test_no_agent_stays_in_a_round_after_its_end_is_reported(events: list[Any]) -> None:
    state = AgentState(remaining_restarts=3)
    for event in events:
        state, _ = decide(state, event)
        if state.phase in (AgentPhase.RUNNING, AgentPhase.BARRIER) and state.round is not None:
            assert state.closed or (state.over is None or state.over.round < state.round)


@given(st.lists(EVENTS, max_size=30), ROUNDS)
def test_no_notification_of_an_older_round_ends_a_newer_one(events: list[Any], older: int) -> None:
    state = AgentState(remaining_restarts=3)
    for event in events:
        state, _ = decide(state, event)
        if state.round is not None and older < state.round:
            stale: list[words.Event] = [
                words.LeaseOver(older, "old", 1e7),
                words.RoundOver(older, "old", 1e7),
                words.JoinRequested(older, 1, full=True, now=1e7),
            ]
            for notification in stale:
                after, actions = decide(state, notification)
                assert (after.phase, actions) == (state.phase, ())


@given(st.lists(EVENTS, max_size=30))
def test_the_failure_of_the_job_ends_a_node_in_every_phase(events: list[Any]) -> None:
    state = AgentState(remaining_restarts=3)
    for event in events:
        state, _ = decide(state, event)
    state, _ = decide(state, words.Closed(failed=True))
    answers: dict[AgentPhase, words.Event] = {
        AgentPhase.FORMING: words.Closed(failed=True, refused=True),
        AgentPhase.STOPPING: words.Stopped(),
    }
    if state.phase in answers:
        state, _ = decide(state, answers[state.phase])
    assert state.phase is AgentPhase.ENDED


@given(st.integers(0, 4), st.lists(EVENTS, max_size=40))
def test_the_budget_holds_and_the_end_is_final_after_any_events(
    budget: int, events: list[Any]
) -> None:
    state = AgentState(remaining_restarts=budget)
    restarts_for_failure = 0
    ended = False
    for event in events:
        before = state
        state, actions = decide(state, event)
        assert not (ended and (actions or state != before)), "something happened after the end"
        assert sum(isinstance(action, OPERATIONS) for action in actions) <= 1
        if state.remaining_restarts < before.remaining_restarts:
            restarts_for_failure += 1
            assert isinstance(event, words.CheckResult)
            assert not before.shared
        assert 0 <= state.remaining_restarts == budget - restarts_for_failure
        ended = state.phase is AgentPhase.ENDED


@given(st.integers(0, 4), st.lists(EVENTS, max_size=20))
def test_a_signal_ends_the_run_from_every_phase_it_can_be_in(
    budget: int, events: list[Any]
) -> None:
    state = AgentState(remaining_restarts=budget)
    for event in events:
        state, _ = decide(state, event)
    if state.phase is not AgentPhase.ENDED:
        state, actions = decide(state, words.Signaled(2))
        assert actions == (words.Interrupt(2),)
    assert state.phase is AgentPhase.ENDED


# --- over many hosts

MEMBER = RUNNING._replace(round=2, shared=True)


def verdict(*, charged: bool = True, final: bool = False, mine: bool = True) -> words.Verdict:
    return words.Verdict(charged, final, mine, "worker failure" if charged else "a host", 200.0)


def after_verdict(
    found: words.Verdict, state: AgentState = MEMBER
) -> tuple[AgentState, tuple[words.Action, ...]]:
    state, actions = decide(state, words.Failing())
    assert actions == (words.ReportFailure(),)
    state, _ = decide(state, found)
    return decide(state, report(WorkerState.FAILED))


def test_a_failure_is_reported_while_other_workers_stop_and_counts_after_its_verdict() -> None:
    state, actions = decide(MEMBER, words.Failing())
    assert actions == (words.ReportFailure(),)
    state, actions = decide(state, report(WorkerState.HEALTHY))
    assert actions == ()
    state, actions = decide(state, report(WorkerState.FAILED))
    assert actions == ()
    state, actions = decide(state, verdict())
    assert actions == (words.Restart("worker failure"),)


def test_a_failure_beyond_the_jobs_budget_ends_it_for_all() -> None:
    state, actions = after_verdict(verdict(final=True))
    assert actions == (words.StopWorkers(report=True),)
    assert decide(state, words.Stopped())[1] == (words.Finish(WorkerState.FAILED),)


def test_only_the_node_of_the_charged_failure_ends_the_job() -> None:
    state, actions = after_verdict(verdict(final=True, mine=False))
    assert isinstance(actions[0], words.Restart)
    _, actions = decide(state, words.Closed(failed=True, refused=True))
    assert actions == (words.Finish(WorkerState.FAILED),)


def test_a_failure_that_a_lost_node_has_caused_is_followed_by_the_next_round() -> None:
    _, actions = after_verdict(verdict(charged=False), MEMBER._replace(remaining_restarts=0))
    assert actions == (words.Restart("a host"),)


def test_a_failure_that_a_restart_cannot_fix_ends_the_job_for_all_without_a_verdict() -> None:
    _, actions = decide(MEMBER, report(WorkerState.UNHEALTHY)._replace(hopeless=True))
    assert actions == (words.StopWorkers(report=True),)


def test_a_round_that_ends_while_it_forms_is_followed_by_the_next_one() -> None:
    state = AgentState(3, AgentPhase.FORMING)
    state, actions = decide(state, words.RoundOver(1, "node b was lost", 5.0))
    assert actions == ()
    state, actions = decide(state, words.Formed(6.0, 1, shared=True))
    assert actions == (words.Restart("node b was lost"),)


def test_a_node_at_the_exit_barrier_restarts_when_the_round_ends() -> None:
    waiting, _ = decide(MEMBER, report(WorkerState.SUCCEEDED))
    for notification in (
        words.RoundOver(2, "node b was lost", 200.0),
        words.BarrierOver(200.0, passed=False),
    ):
        state, (action,) = decide(waiting, notification)
        assert isinstance(action, words.Restart)
        assert state.phase is AgentPhase.FORMING


def test_a_node_that_succeeded_and_finds_the_job_closed_has_succeeded() -> None:
    state, _ = decide(MEMBER, report(WorkerState.SUCCEEDED))
    state, _ = decide(state, words.BarrierOver(200.0, passed=False))
    _, actions = decide(state, words.Closed(failed=False, refused=True))
    assert actions == (words.Finish(WorkerState.SUCCEEDED),)


def test_a_job_that_is_closed_without_a_failure_continues_and_restarts_nothing() -> None:
    state, actions = decide(MEMBER, words.Closed(failed=False))
    assert (state.phase, actions) == (AgentPhase.RUNNING, ())
    assert decide(state, words.RoundOver(2, "node b was lost", 200.0))[1] == ()
    assert decide(state, words.Failing())[1] == (words.ReportFailure(),)
    assert decide(state, report(WorkerState.FAILED))[1] == (words.StopWorkers(report=True),)


def test_a_failure_that_finds_the_job_closed_is_the_result_of_the_run() -> None:
    state = MEMBER._replace(phase=AgentPhase.FORMING, verdict=verdict(charged=True))
    refused = words.Closed(failed=False, refused=True)
    assert decide(state, refused)[1] == (words.Finish(WorkerState.FAILED),)
    assert decide(state._replace(verdict=None), refused)[1] == (words.Raise(),)


def test_waiting_nodes_join_one_second_after_the_last_or_five_after_the_first() -> None:
    state = MEMBER
    for second in range(5):
        now = 200.0 + 0.9 * second
        state, _ = decide(state, words.JoinRequested(2, second + 1, full=False, now=now))
        assert state.gather_until == pytest.approx(min(now + core.GATHER_S, 205.0))
    state, actions = decide(state, words.GatherOver(204.0, 5))
    assert actions == ()
    state, actions = decide(state, words.GatherOver(204.7, 5))
    assert actions == (
        words.Restart("5 nodes wait to join", announce=True, full_grace=True, keep=True),
    )


def test_the_last_free_seat_is_not_waited_for() -> None:
    _, actions = decide(MEMBER, words.JoinRequested(2, 2, full=True, now=200.0))
    assert actions == (
        words.Restart("2 nodes wait to join", announce=True, full_grace=True, keep=True),
    )


def test_the_waiting_hosts_are_named_if_they_are_known() -> None:
    def why(hosts: list[str], number: int) -> str:
        asked = words.JoinRequested(2, len(hosts), True, 200.0, tuple(hosts))
        state, _ = decide(MEMBER._replace(started_at=200.0, quick_ends=9), asked)
        _, (restart,) = decide(state, words.GatherOver(300.0, number))
        assert isinstance(restart, words.Restart)
        return restart.reason

    assert why(["node3 (10.0.0.3)"], 1) == "host node3 (10.0.0.3) waits to join"
    assert why(["a", "b", "c"], 3) == "hosts a, b and c wait to join"
    assert why(["a", "b", "c", "d", "e"], 30) == "hosts a, b, c, d and 26 more wait to join"
    assert why(["a", "b"], 1) == "1 node waits to join"  # one of them has left


def test_a_waiting_node_that_left_causes_no_restart() -> None:
    state, _ = decide(MEMBER, words.JoinRequested(2, 1, full=False, now=200.0))
    state, actions = decide(state, words.GatherOver(201.0, 0))
    assert (state.phase, state.gather_until, actions) == (AgentPhase.RUNNING, None, ())


def test_only_the_first_node_counts_the_time_for_which_others_wait() -> None:
    member = MEMBER._replace(leads=False, quick_ends=4)
    member, actions = decide(member, words.JoinRequested(2, 1, full=True, now=101.0))
    assert actions == ()
    _, actions = decide(member, words.RoundOver(2, "1 node waits to join", 102.0, keep=True))
    assert actions == (words.Restart("1 node waits to join", keep=True),)


@pytest.mark.parametrize("why", ["1 node waits to join", "host b: its agent got SIGTERM"])
def test_workers_that_may_live_on_are_not_paused_after_quick_attempts(why: str) -> None:
    """The notification about waiting nodes may come after the one about the end of the round."""
    member = MEMBER._replace(leads=False, quick_ends=4)
    after, actions = decide(member, words.RoundOver(2, why, 102.0, keep=True))
    assert actions == (words.Restart(why, keep=True),)
    assert after.quick_ends == 5, "the next crash is paused"


def test_workers_live_on_in_a_round_that_is_over_before_this_node_has_formed_it() -> None:
    forming = AgentState(3, AgentPhase.FORMING, round=1, started_at=99.0, quick_ends=1)
    formed = words.Formed(101.0, 2, shared=True)
    joined = words.RoundOver(2, "1 node waits to join", 100.0, full_grace=True, keep=True)
    _, actions = decide(decide(forming, joined)[0], formed)
    assert actions == (words.Restart("1 node waits to join", keep=True),)
    lost = words.RoundOver(2, "node b was lost", 100.0, lost=True)
    _, actions = decide(decide(forming._replace(quick_ends=0), lost)[0], formed)
    assert actions == (words.Restart("node b was lost", keep=True),)


def test_nodes_that_wait_while_a_round_forms_join_after_it() -> None:
    state, _ = decide(
        AgentState(3, AgentPhase.FORMING), words.JoinRequested(1, 1, full=False, now=5.0)
    )
    state, actions = decide(state, words.Formed(6.0, 1, shared=True))
    assert words.Gather(1, 7.0) in actions


def test_a_host_that_joins_and_leaves_pauses_the_job_for_less_than_a_last_call() -> None:
    state, pauses = MEMBER, []
    for number in range(2, 9):
        state, (action,) = decide(state, words.RoundOver(number, "node b was lost", 101.0))
        pauses.append(action.seconds if isinstance(action, words.Delay) else 0.0)
        state = state._replace(phase=AgentPhase.RUNNING, round=number + 1)
    assert pauses == [0, 1, 2, 4, 8, 15, 15]


def test_an_expired_lease_is_announced_and_ends_no_worker_of_other_nodes() -> None:
    _, actions = decide(MEMBER, words.LeaseOver(2, "its lease was over", 200.0))
    assert actions == (words.Restart("its lease was over", announce=True, keep=True),)


def test_a_lease_that_expires_while_workers_start_is_no_failure() -> None:
    state, _ = decide(
        AgentState(3, AgentPhase.FORMING), words.LeaseOver(1, "its lease was over", 5.0)
    )
    _, actions = decide(state, words.Formed(6.0, 1, shared=True))
    assert actions == (words.Restart("its lease was over", announce=True, keep=True),)
    _, actions = decide(state, words.Formed(6.0, 2, shared=True))
    assert actions == (words.CheckWorkers(),)


def graces(actions: tuple[words.Action, ...]) -> list[bool]:
    """Return for each restart, at once or after a pause, whether workers have the whole grace."""
    return [a.full_grace for a in actions if isinstance(a, words.Restart | words.Delay)]


def shortens(actions: tuple[words.Action, ...]) -> bool:
    return any(isinstance(action, words.ShortenGrace) for action in actions)


def test_a_loss_or_a_failure_elsewhere_leaves_workers_the_short_grace() -> None:
    lost = words.RoundOver(2, "node b was lost", 200.0)
    failed = words.RoundOver(2, "node b: its workers failed", 200.0, failed=True)
    quick = MEMBER._replace(started_at=199.0, quick_ends=3)
    for state in (MEMBER, quick, MEMBER._replace(gathered=1)):
        for event in (lost, failed):
            assert graces(decide(state, event)[1]) == [False]


def test_a_change_without_a_failure_leaves_workers_the_whole_grace() -> None:
    joined = words.RoundOver(2, "1 node waits to join", 200.0, full_grace=True)
    quick = MEMBER._replace(started_at=199.0, quick_ends=3)
    for state in (MEMBER, quick, MEMBER._replace(gathered=1)):
        assert graces(decide(state, joined)[1]) == [True]


@pytest.mark.parametrize(
    ("event", "gathered", "keep"),
    [
        (words.RoundOver(2, "node b was lost", 200.0, lost=True), 0, True),
        (words.RoundOver(2, "node b was lost", 200.0, lost=True), 1, True),
        (words.RoundOver(2, "nodes wait", 200.0, full_grace=True, keep=True), 1, True),
        (words.RoundOver(2, "nodes wait", 200.0, full_grace=True), 1, False),
        (words.RoundOver(2, "it leaves to join", 200.0, full_grace=True), 0, False),
        (words.RoundOver(2, "its workers failed", 200.0, failed=True), 0, False),
        (words.RoundOver(2, "its workers failed", 200.0, failed=True, lost=True), 1, False),
    ],
)
def test_workers_live_on_after_the_loss_of_a_host_and_when_one_joins(
    event: words.RoundOver, gathered: int, keep: bool
) -> None:
    _, (action,) = decide(MEMBER._replace(gathered=gathered), event)
    assert isinstance(action, words.Restart)
    assert action.keep is keep


def test_workers_are_stopped_for_a_pause() -> None:
    quick = MEMBER._replace(started_at=199.0, quick_ends=3)
    _, (action,) = decide(quick, words.RoundOver(2, "node b was lost", 200.0, lost=True))
    assert isinstance(action, words.Delay)
    _, (action,) = decide(quick, words.LeaseOver(2, "its lease expired", 200.0))
    assert isinstance(action, words.Delay)


def test_a_failure_that_may_end_the_job_leaves_the_whole_grace_until_the_job_continues() -> None:
    failed = words.RoundOver(2, "node b: its workers failed", 200.0, failed=True)
    state, actions = decide(MEMBER._replace(remaining_restarts=0), failed)
    assert graces(actions) == [True]
    assert decide(state, words.JobContinues(1))[1] == ()  # of an older round
    assert decide(state, words.JobContinues(2))[1] == (words.ShortenGrace(),)


def test_a_loss_while_nodes_join_shortens_the_grace() -> None:
    state, actions = decide(MEMBER, words.JoinRequested(2, 2, full=True, now=200.0))
    assert graces(actions) == [True]
    assert decide(state, words.RoundOver(2, "node b was lost", 201.0))[1] == (words.ShortenGrace(),)


def test_a_verdict_shortens_the_grace_unless_it_ends_the_job() -> None:
    waiting, _ = decide(MEMBER._replace(checking=False), words.Failing())
    not_charged = words.Verdict(False, False, False, "node b was lost", 200.0)
    assert shortens(decide(waiting, not_charged)[1])
    final = words.Verdict(True, True, True, "worker failure", 200.0)
    assert not shortens(decide(waiting, final)[1])


def test_a_verdict_that_ends_the_job_lengthens_the_grace() -> None:
    # A replacement on another node may have spent the last restart: no node knew that it is final.
    waiting, _ = decide(MEMBER._replace(checking=False), words.Failing())
    final = words.Verdict(True, True, True, "worker failure", 200.0)
    assert decide(waiting, final)[1] == (words.LengthenGrace(), words.CheckWorkers())
    failed = words.RoundOver(2, "node b: its workers failed", 200.0, failed=True)
    state, actions = decide(MEMBER, failed)
    assert graces(actions) == [False]
    assert decide(state, words.JobEnds(1))[1] == ()  # of an older round
    assert decide(state, words.JobEnds(2))[1] == (words.LengthenGrace(),)


def test_the_failure_of_the_job_lengthens_the_grace_of_workers_that_are_being_stopped() -> None:
    lost = words.RoundOver(2, "node b was lost", 200.0)
    state, _ = decide(MEMBER, lost)
    assert decide(state, words.Closed(failed=False))[1] == ()
    assert decide(state, words.Closed(failed=True))[1] == (words.LengthenGrace(),)
    paused, _ = decide(MEMBER._replace(started_at=199.0, quick_ends=3), lost)
    assert decide(paused, words.Closed(failed=True))[1] == (
        words.LengthenGrace(),
        words.StopWorkers(),
    )
