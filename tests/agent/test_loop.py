"""The loop and the attempt of an agent, each with simple replacements of the other parts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE
from regrow.agent import RunResult, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent.attempt import attempt as attempt_module
from regrow.agent.attempt.attempt import Attempt
from regrow.agent.decisions import events
from regrow.agent.decisions.decide import AgentState, Decision, decide
from regrow.agent.features import Feature
from regrow.agent.inbox import Ended, Inbox, Message, Operations
from regrow.agent.job import Job
from regrow.agent.loop import Loop
from regrow.rendezvous import RendezvousClosedError
from regrow.rendezvous.foreign import adapted
from regrow.workers import ProcessFailure, SignalException

HEALTHY, FAILED, SUCCEEDED = WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.SUCCEEDED


def group(max_restarts: int = 1) -> WorkerGroup:
    made = WorkerGroup(
        WorkerSpec("trainer", 1, PlainHandler(), entrypoint="x", max_restarts=max_restarts)
    )
    made.workers[0].global_rank, made.workers[0].world_size = 0, 1
    return made


def job(post: Callable[[Message], None] = print, **numbers: Any) -> Job:
    return Job(group(), adapted(PlainHandler()), post, **numbers)


class AtOnce:
    """Operations that are run when they are submitted."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def submit(self, call: Callable[[], Any], ended: Ended) -> None:
        try:
            message = partial(ended, call(), None)
        except Exception as error:  # noqa: BLE001 - handed to the loop
            message = partial(ended, None, error)
        self._inbox.put(message)


class Script:
    """Replaces an attempt; each check returns the next of the given states."""

    def __init__(self, inbox: Inbox, *states: WorkerState | Exception) -> None:
        self._inbox = inbox
        self.states = list(states)
        self.peers = SimpleNamespace(on_close=lambda error: False)
        self.calls: list[str] = []
        self.after_check: Callable[[], None] = lambda: inbox.put(events.Changed())

    def form(self) -> None:
        self.calls.append("form")

    def log_restart(self, reason: str, delay_s: float) -> None:
        self.calls.append(f"log: {reason}")

    def restart(self, reason: str, announce: bool, full_grace: bool, keep: bool) -> None:
        self.calls.append(f"restart: {reason}")

    def check(self) -> tuple[RunResult, int]:
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        self.after_check()
        return RunResult(state), 0

    def store_result(self, result: RunResult) -> None:
        self.calls.append(result.state.value)

    def stop_for_good(self, report: bool) -> None:
        self.calls.append("stop for good")

    def exit_barrier(self) -> None:
        self.calls.append("barrier")

    def conclude(self, final: WorkerState) -> RunResult:
        return RunResult(final)


class Jobs:
    """A loop over a scripted attempt."""

    def __init__(self, *states: WorkerState | Exception) -> None:
        self.inbox = Inbox()
        self.job = job(self.inbox.put)
        self.attempt = Script(self.inbox, *states)
        self.restarts: list[str] = []
        self.job.recorder = cast(
            Any, SimpleNamespace(restarting=lambda reason, delay_s: self.restarts.append(reason))
        )
        self.loop = Loop(self.job, self.inbox, cast(Any, self.attempt), lambda: None)
        self.loop.operations = cast(Operations, AtOnce(self.inbox))

    def run(self) -> RunResult:
        return self.loop.run()


def test_the_loop_checks_the_workers_after_every_change_until_they_succeed() -> None:
    jobs = Jobs(HEALTHY, HEALTHY, SUCCEEDED)
    assert jobs.run().state is SUCCEEDED
    assert jobs.attempt.calls == ["form", "HEALTHY", "HEALTHY", "SUCCEEDED", "barrier"]


def test_a_failure_is_restarted_and_recorded_until_the_budget_is_spent() -> None:
    jobs = Jobs(FAILED, FAILED)
    assert jobs.run().state is FAILED
    assert jobs.attempt.calls == [
        *("form", "FAILED", "log: worker failure", "restart: worker failure"),
        *("FAILED", "stop for good"),
    ]
    assert (jobs.restarts, jobs.job.remaining_restarts) == (["worker failure"], 0)


def test_a_restart_that_another_thread_counts_during_a_decision_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = Jobs(HEALTHY, SUCCEEDED)

    def slow(state: AgentState, event: events.Event) -> Decision:
        jobs.job.remaining_restarts = 0
        return decide(state, event)

    monkeypatch.setattr("regrow.agent.loop.decide", slow)
    jobs.run()
    assert jobs.job.remaining_restarts == 0


def test_the_loop_calls_a_posted_function_and_handles_the_event_that_it_returns() -> None:
    jobs = Jobs(HEALTHY, SUCCEEDED)
    calls: list[str] = []

    def post() -> None:
        jobs.inbox.put(lambda: calls.append("no event"))
        jobs.inbox.put(events.Changed)

    jobs.attempt.after_check = post
    assert jobs.run().state is SUCCEEDED
    assert "no event" in calls


def test_a_signal_ends_the_job_by_its_exception() -> None:
    jobs = Jobs(HEALTHY)
    jobs.attempt.after_check = lambda: jobs.inbox.put(events.Signaled(signal.SIGTERM))
    with pytest.raises(SignalException) as caught:
        jobs.run()
    assert caught.value.sigval is signal.SIGTERM


def test_an_error_of_an_operation_is_raised_and_a_refused_round_is_one_too() -> None:
    with pytest.raises(ZeroDivisionError):
        Jobs(ZeroDivisionError()).run()
    jobs = Jobs(FAILED)
    jobs.attempt.restart = lambda *_: refuse()  # type: ignore[method-assign]

    def refuse() -> None:
        raise RendezvousClosedError("the job is over")

    with pytest.raises(RendezvousClosedError, match="the job is over"):
        jobs.run()


def test_a_call_that_is_waited_for_may_be_cut_short_by_each_signal() -> None:
    jobs = Jobs()
    signals: list[int] = []

    def call() -> None:
        for _ in range(2):
            jobs.inbox.put(events.Signaled(signal.SIGTERM))

    jobs.loop.wait_for(call, lambda: signals.append(1))
    assert signals == [1, 1]


# --- the attempt


class Hooks:
    """Replaces the agent; records the calls of torch's hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.calls.append("rendezvous")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        return {0: 100}

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self.calls.append(f"stop {is_restart}")

    def _shutdown(self, death_sig: signal.Signals, timeout: float) -> None:
        self.calls.append(f"shutdown {death_sig.name} {timeout}")


class Calls:
    """Replaces parts of an agent; records their calls."""

    def __init__(self, calls: list[str], **answers: Any) -> None:
        self._calls, self._answers = calls, answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self._calls.append(name)
            return self._answers.get(name)

        return call


class Stops:
    """Replaces the workers of a host; records how they are stopped."""

    kept = ()

    def __init__(self, calls: list[str], parks: bool = False) -> None:
        self._calls, self._parks = calls, parks
        self.guardian, self.reports = Calls(calls), None

    def send_signal(self, signum: signal.Signals, grace: float) -> None:
        self._calls.append(f"{signum.name} {grace}")

    def sources(self) -> dict[int, str]:
        return {}

    def wrappers(self) -> dict[int, dict[str, object]]:
        return {}

    def log_files(self) -> dict[int, dict[str, str]]:
        return {}

    def ends(self) -> dict[str, object]:
        return {}

    def park(self, timeout: float, *, own_hooks: bool) -> bool:
        self._calls.append(f"park {timeout} {own_hooks}")
        return self._parks


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


def attempt(
    hooks: Hooks, *features: Feature, shared: Job | None = None, peers: Any = None
) -> Attempt:
    calls = cast(Any, Calls(hooks.calls))
    shared = shared or job()
    shared.handler, shared.features = calls, [*features]
    made = Attempt(cast(Any, hooks), shared)
    made.peers = peers or calls
    return made


def test_workers_start_in_a_round_whose_lease_has_begun(hooks: Hooks) -> None:
    shared = job()
    attempt(hooks, shared=shared).initialize(group())
    assert hooks.calls == ["rendezvous", "begin_attempt", "start"]
    assert shared.attempt == 0


def test_a_round_that_is_over_before_the_lease_begins_is_followed_by_another(hooks: Hooks) -> None:
    shared = job(round=1, numbered=True, over=1)
    made = attempt(hooks, shared=shared)
    made.lease.renew(0.0)
    formed: list[int] = []

    def form(worker_group: WorkerGroup) -> None:
        formed.append(shared.round)
        if len(formed) == 2:
            made.lease.renew(None)

    hooks._rendezvous = form  # type: ignore[method-assign]
    made.initialize(group())
    assert len(formed) == 2


def test_features_see_the_workers_before_they_are_stopped(hooks: Hooks) -> None:
    class Last(Feature):
        def before_stop(self) -> None:
            hooks.calls.append("last check")

    attempt(hooks, Last()).stop(group())
    assert hooks.calls == ["last check", "stop True"]


def test_features_see_the_workers_once_before_an_agent_leaves_or_stops_them_again(
    hooks: Hooks,
) -> None:
    class Last(Feature):
        def before_stop(self) -> None:
            hooks.calls.append("last check")

    made = attempt(hooks, Last())
    made.initialize(group())
    made.stop(group())
    made.leave(signal.SIGTERM)
    assert hooks.calls[-3:] == ["last check", "stop True", "shutdown SIGTERM 30.0"]
    made.initialize(group())
    made.leave(signal.SIGTERM)
    assert hooks.calls[-3:] == ["start", "last check", "shutdown SIGTERM 30.0"]


def test_other_nodes_are_notified_before_workers_are_stopped_for_a_restart(hooks: Hooks) -> None:
    made = attempt(hooks)
    made.pause("two nodes wait to join", announce=True, full_grace=True)
    assert (hooks.calls, made.restart_grace) == (["leaving", "stop True"], 30.0)
    made.pause("worker failure", announce=False, full_grace=False)
    assert (hooks.calls[2:], made.restart_grace) == (["stop True"], 5.0)


class RestartingHooks(Hooks):
    """The same, with the hooks of a restart."""

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("restart")

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("initialize")


@pytest.mark.parametrize(
    ("keep", "parks", "calls"),
    [
        (True, True, ["park 4.0 True", "initialize"]),
        (True, False, ["park 4.0 True", "restart"]),
        (False, True, ["restart"]),
    ],
)
def test_workers_that_have_left_their_round_are_not_stopped_for_the_next_one(
    keep: bool, parks: bool, calls: list[str]
) -> None:
    hooks = RestartingHooks()
    made = attempt(hooks)
    made.workers = cast(Any, Stops(hooks.calls, parks))
    made.restart("node b was lost", announce=False, full_grace=False, keep=keep)
    assert hooks.calls == calls


@pytest.mark.parametrize(
    ("full_grace", "spent", "left"), [(False, 4, 1), (True, 4, 26), (False, 9, 0)]
)
def test_the_time_in_which_workers_did_not_leave_their_round_is_a_part_of_their_grace(
    monkeypatch: pytest.MonkeyPatch, full_grace: bool, spent: float, left: float
) -> None:
    hooks, now = RestartingHooks(), iter((100.0, 100.0 + spent))
    made = attempt(hooks)
    made.workers = cast(Any, Stops(hooks.calls))
    monkeypatch.setattr("regrow.agent.attempt.attempt.monotonic", lambda: next(now))
    made.restart("node b was lost", announce=False, full_grace=full_grace, keep=True)
    assert made.restart_grace == left


def test_an_agent_that_leaves_stops_its_workers_with_the_signal_and_the_whole_grace(
    hooks: Hooks,
) -> None:
    attempt(hooks).leave(signal.SIGUSR1)
    assert hooks.calls == ["shutdown SIGUSR1 30.0"]


def test_an_agent_leaves_although_the_start_of_its_workers_hangs(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "START_S", 0.01)
    hangs, released = threading.Event(), threading.Event()

    def start(worker_group: WorkerGroup) -> dict[int, Any]:
        hangs.set()
        released.wait(PATIENCE)
        return {0: 100}

    hooks._start_workers = start  # type: ignore[method-assign]
    made = attempt(hooks, shared=job(shutdown_timeout=0.01))
    made.workers = cast(Any, Stops(hooks.calls))
    starting = threading.Thread(target=made.initialize, args=(group(),))
    starting.start()
    try:
        assert hangs.wait(PATIENCE)
        del hooks.calls[:]
        made.leave(signal.SIGTERM)
    finally:
        released.set()
        starting.join(PATIENCE)
    assert hooks.calls == ["wake", "SIGTERM 0.01", "SIGKILL 0", "shutdown SIGTERM 0.01"]


def test_a_job_that_failed_on_another_node_ends_with_that_failure(hooks: Hooks) -> None:
    failure = ProcessFailure(0, 42, 3, "")
    peers = SimpleNamespace(job_failure=(7, failure))
    assert attempt(hooks, peers=peers).conclude(FAILED).failures == {7: failure}
    assert attempt(hooks, peers=peers).conclude(SUCCEEDED).failures == {}
