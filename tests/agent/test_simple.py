"""`SimpleElasticAgent` under subclasses as users write them, without any process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import wait_until
from regrow import metrics
from regrow.agent import RunResult, SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent import agent as agent_module
from regrow.agent.attempt.attempt import not_due_to
from regrow.agent.decisions import decide as core
from regrow.agent.decisions import ranks
from regrow.agent.decisions.events import Signaled
from regrow.agent.inbox import Inbox, signals_into
from regrow.events import Event, handlers
from regrow.metrics import MetricData, MetricHandler, NullMetricHandler, configure
from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from regrow.rendezvous.protocol.messages import Departed
from regrow.store import MemoryStore, PrefixStore, StoreSessionLost
from regrow.workers import ProcessFailure, SignalException


class Rendezvous(PlainHandler):
    """A rendezvous of one node that the test controls."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0
        self.waiting: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.triple = False

    def next_rendezvous(self) -> Any:
        self.before()
        self.rounds += 1
        if self.round is not None:
            return self.round
        if self.triple:
            return MemoryStore(), 0, 1
        return RendezvousInfo(MemoryStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 29501))

    def num_nodes_waiting(self) -> int:
        return self.waiting.pop(0) if self.waiting else 0


class Agent(SimpleElasticAgent):
    """An agent with scripted workers: each check returns the next of the given states."""

    def __init__(
        self, states: list[WorkerState], max_restarts: int = 1, exit_barrier_timeout: float = 300
    ) -> None:
        self.rendezvous = Rendezvous()
        self.calls: list[str] = []
        self.states = states
        super().__init__(
            WorkerSpec(
                role="trainer",
                local_world_size=2,
                rdzv_handler=self.rendezvous,
                entrypoint="train",
                max_restarts=max_restarts,
                monitor_interval=0.001,
            ),
            exit_barrier_timeout,
        )
        self.emitted: list[Event] = []
        self.add_event_sinks(self.emitted.append)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        return {0: 100, 1: 101}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self.states.pop(0)
        if state is WorkerState.SUCCEEDED:
            return RunResult(state, return_values={0: "a", 1: "b"})
        if state is WorkerState.FAILED:
            return RunResult(state, failures={1: self.failure()})
        return RunResult(state)

    def form(self) -> None:
        """Form a round and start the workers, without a run."""
        self._initialize_workers(self.get_worker_group())

    def wait_at_the_end(self) -> None:
        """Wait for the other agents."""
        self._exit_barrier()

    def failure(self) -> ProcessFailure:
        return ProcessFailure(1, 101, 3, "<N/A>")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self.calls.append(f"shutdown {death_sig.name} {timeout}")


HEALTHY, FAILED, SUCCEEDED = WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.SUCCEEDED


def test_workers_that_succeed_end_the_run_with_their_values() -> None:
    agent = Agent([HEALTHY, HEALTHY, SUCCEEDED])
    assert agent.run().return_values == {0: "a", 1: "b"}
    assert agent.calls == ["start", "shutdown SIGTERM 30"]


def test_a_failure_is_restarted_in_a_new_round_and_spends_the_budget() -> None:
    agent = Agent([HEALTHY, FAILED, SUCCEEDED])
    assert not agent.run().is_failed()
    assert agent.calls == ["start", "stop", "start", "shutdown SIGTERM 30"]
    assert agent.rendezvous.rounds == 2
    assert agent.emitted[-1].metadata["restarts_left"] == 0


def test_a_failure_without_budget_is_the_result() -> None:
    agent = Agent([FAILED], max_restarts=0)
    result = agent.run()
    assert result.is_failed()
    assert result.failures[1].exitcode == 3
    assert agent.calls == ["start", "stop", "shutdown SIGTERM 30"]


def test_an_error_file_that_can_be_read_but_not_written_again_is_the_result() -> None:
    class Nested(Agent):
        def failure(self) -> ProcessFailure:
            failed = super().failure()
            for _ in range(10_000):  # the reader may be less deep in calls than the writer
                failed.error_file_data = {"message": failed.error_file_data}
            return failed

    assert Nested([FAILED], max_restarts=0).run().failures[1].exitcode == 3


def test_a_connection_that_breaks_while_ranks_are_exchanged_costs_a_round_and_not_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(MemoryStore):
        def set(self, *args: Any, **options: Any) -> None:
            raise StoreSessionLost("the session is lost after 0.5 s of grace")

    agent = Agent([SUCCEEDED], max_restarts=0)
    where = RendezvousStoreInfo("127.0.0.1", 29501)
    rounds = [
        RendezvousInfo(Broken(), 0, 2, where, 1, 0),
        RendezvousInfo(MemoryStore(), 0, 1, where, 2, 0),
    ]
    agent.rendezvous.next_rendezvous = lambda: rounds.pop(0)  # type: ignore[method-assign]
    assert not agent.run().is_failed()
    assert "round 1 cannot begin; joining the next round: the session is lost" in caplog.text


def test_all_nodes_that_are_lost_are_recorded_when_no_further_round_forms() -> None:
    agent = Agent([FAILED] * 1000, max_restarts=1)  # it may check again before the verdict
    lost = [Departed("node1/7/a", 1, "silence"), Departed("node2/7/b", 2, "silence")]

    rounds = [round_of_two(MemoryStore(), 1)]

    def next_rendezvous() -> RendezvousInfo:
        if rounds:
            return rounds.pop()
        raise RendezvousTimeoutError("too few nodes", departed=lost)

    agent.rendezvous.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    with pytest.raises(RendezvousTimeoutError):
        agent.run()
    (event,) = (each for each in agent.emitted if each.name == "regrow.round.departed")
    assert event.metadata["ended_round"] == 1
    assert [node["node"] for node in event.metadata["nodes"]] == ["node1/7/a", "node2/7/b"]


class DistNetworkError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    "error",
    [StoreSessionLost("the session is lost after 0.5 s of grace"), DistNetworkError("broken pipe")],
    ids=lambda error: type(error).__name__,
)
def test_an_agent_that_loses_the_store_in_the_exit_barrier_joins_the_next_round(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Lost(MemoryStore):
        def wait(self, *args: Any, **options: Any) -> None:
            raise error

    agent = Agent([SUCCEEDED, SUCCEEDED], max_restarts=0)
    rounds = [round_of_two(Lost(), 1), RendezvousInfo(MemoryStore(), 0, 1, WHERE, 2, 0)]
    agent.rendezvous.next_rendezvous = lambda: rounds.pop(0)  # type: ignore[method-assign]
    assert not agent.run().is_failed()
    assert agent.calls.count("start") == 2
    assert "lost the store of round 1 while waiting for the other agents" in caplog.text
    assert str(error) in caplog.text


def test_an_exit_barrier_that_takes_too_long_is_logged_and_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = Agent([SUCCEEDED], max_restarts=0, exit_barrier_timeout=0.01)
    rounds = [round_of_two(MemoryStore(), 1)]
    agent.rendezvous.next_rendezvous = lambda: rounds.pop(0)  # type: ignore[method-assign]
    assert not agent.run().is_failed()
    assert "Error waiting on the exit barrier for 2 agents" in caplog.text


WHERE = RendezvousStoreInfo("127.0.0.1", 29501)


def round_of_two(store: MemoryStore, number: int) -> RendezvousInfo:
    """A round in which the other agent has published its role."""
    store.set(f"{ranks.ROLE_INFO_PREFIX}1", ranks.RoleInfo("trainer", 1, 2).encode())
    return RendezvousInfo(store, 0, 2, WHERE, number, 0)


class Brief(Agent):
    """Every second of its rounds is over as soon as the workers have been started."""

    number = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.number % 2 == 0:
            worker_group.store.close()
        return super()._start_workers(worker_group)


def join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def together(*calls: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_the_rounds_of_a_long_job_leave_no_keys_behind() -> None:
    keys = MemoryStore(20)
    agents = [Brief([]) for _ in range(3)]

    def meet(rank: int, number: int) -> None:
        store = PrefixStore(f"round.{number}", keys.session())
        info = RendezvousInfo(store, rank, 3, WHERE, number, 0)
        agents[rank].rendezvous.next_rendezvous = lambda: info  # type: ignore[method-assign]
        agents[rank].number = number
        agents[rank].form()

    def clear() -> None:
        join(t for t in threading.enumerate() if t.name == "regrow-leftovers")

    for number in range(1, 50):
        join(together(*(partial(meet, rank, number) for rank in range(3))))
        clear()
        if number % 2:  # two are done when the third ends the round
            assert keys.num_keys() == 0
            waiting = together(agents[0].wait_at_the_end, agents[2].wait_at_the_end)
            counted = f"round.{number}/torchelastic/agent/terminal_state/num_members"
            wait_until(lambda: keys.add(counted, 0) == 2, "two nodes do not wait")  # noqa: B023
            for agent in agents:
                agent.get_worker_group().store.close()
            join(waiting)
        else:
            # Two keys of each node's rank exchange, two offers of the workers' store, and the
            # barrier of the last round.
            assert keys.num_keys() == 3 * 2 + 2 + 1
    join(together(*(partial(meet, rank, 51) for rank in range(3))))
    clear()
    assert keys.num_keys() == 0


def test_keys_of_a_store_that_cannot_delete_stay_there() -> None:
    class Keeping(MemoryStore):
        def delete_key(self, key: str, /) -> bool:
            refused.append(key)
            raise RuntimeError("deleteKey not implemented")

    refused: list[str] = []
    agent = Agent([])
    rounds = [round_of_two(Keeping(), 1)]
    agent.rendezvous.next_rendezvous = lambda: rounds.pop(0)  # type: ignore[method-assign]
    agent.form()
    join(t for t in threading.enumerate() if t.name == "regrow-leftovers")
    assert refused == ["torchelastic/role_info/0"]
    assert agent.get_worker_group().state is HEALTHY


def test_what_is_left_of_a_failed_group_is_stopped_before_the_back_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "BACKOFF_BASE_S", 0.001)
    agent = Agent([FAILED, FAILED, SUCCEEDED], max_restarts=2)
    assert not agent.run().is_failed()
    first, second = ["start", "stop"], ["start", "stop", "stop"]
    assert agent.calls == [*first, *second, "start", "shutdown SIGTERM 30"]


def test_waiting_nodes_restart_the_group_for_free() -> None:
    agent = Agent([HEALTHY, HEALTHY, SUCCEEDED], max_restarts=0)
    agent.rendezvous.waiting = [1]
    assert not agent.run().is_failed()
    assert agent.rendezvous.rounds == 2


def test_an_unknown_state_of_the_workers_raises() -> None:
    agent = Agent([WorkerState.UNKNOWN])
    with pytest.raises(RuntimeError, match="Worker group in UNKNOWN state"):
        agent.run()
    assert agent.calls[-1] == "shutdown SIGTERM 30"


def test_a_handler_that_returns_the_references_triple_works() -> None:
    agent = Agent([SUCCEEDED])
    agent.rendezvous.triple = True
    assert not agent.run().is_failed()
    assert agent.get_worker_group().master_addr == "127.0.0.1"


def test_an_address_that_the_rendezvous_does_not_give_is_exchanged_over_the_rounds_store() -> None:
    store = MemoryStore()
    store.set("torchelastic/assigned_ranks/1", b"[2, 4, 2, 4]")
    store.set("MASTER_ADDR", b"10.0.0.1")
    store.set("MASTER_PORT", b"4711")
    agent = Agent([FAILED], max_restarts=0)
    agent.rendezvous.round = (store, 1, 2)
    agent.run()
    group = agent.get_worker_group()
    assert (group.master_addr, group.master_port) == ("10.0.0.1", 4711)


def test_a_lost_rendezvous_is_an_event_with_the_exit_code_that_asks_for_a_retry() -> None:
    agent = Agent([])

    def lose() -> None:
        raise RendezvousConnectionError("10.0.0.1:29400 does not answer")

    agent.rendezvous.before = lose
    with pytest.raises(RendezvousConnectionError):
        agent.run()
    names = [event.name for event in agent.emitted]
    assert names[-2:] == ["regrow.rendezvous.lost", "regrow.job.finished"]
    assert agent.emitted[-1].metadata["exit_code"] == 75


def test_a_graceful_exit_of_the_rendezvous_ends_the_run_quietly() -> None:
    agent = Agent([])

    def leave() -> None:
        raise RendezvousGracefulExitError("enough nodes without this one")

    agent.rendezvous.before = leave
    assert agent.run().state is WorkerState.STOPPED
    assert agent.calls == ["shutdown SIGTERM 30"]


def test_an_error_of_a_hook_is_raised_and_the_workers_are_stopped() -> None:
    agent = Agent([])
    with pytest.raises(IndexError):
        agent.run()
    assert agent.calls == ["start", "shutdown SIGTERM 30"]


def test_a_signal_during_a_rendezvous_that_blocks_ends_the_run_with_that_signal() -> None:
    agent = Agent([])
    release = threading.Event()

    def blocked() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        release.wait()

    agent.rendezvous.before = blocked
    before = signal.getsignal(signal.SIGUSR1)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR1"
    try:
        with pytest.raises(SignalException) as caught:
            agent.run()
    finally:
        release.set()
        del os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    assert caught.value.sigval is signal.SIGUSR1
    assert agent.calls == ["shutdown SIGUSR1 30"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_keyboard_interrupt_ends_the_run_as_sigint_does() -> None:
    class Interrupted(Agent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            raise KeyboardInterrupt

    agent = Interrupted([])
    with pytest.raises(KeyboardInterrupt):
        agent.run()
    assert agent.calls == ["start", "shutdown SIGINT 30"]
    last = agent.emitted[-1].metadata
    assert (last["state"], last["signal"], last["exit_code"]) == ("SIGNALED", "SIGINT", 130)


def test_a_signal_that_a_loop_of_its_own_hides_raises_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OwnLoop(Agent):
        def _invoke_run(self, role: str = "default") -> RunResult:
            with suppress(SignalException):
                signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # at once: the loop may clean up
            monkeypatch.setattr(agent_module, "RAISED_S", 0.0)
            signal.raise_signal(signal.SIGUSR1)
            raise AssertionError("the signal has no effect")

    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
    agent = OwnLoop([])
    with pytest.raises(SignalException):
        agent.run()


def test_an_agent_can_be_run_again() -> None:
    agent = Agent([SUCCEEDED, HEALTHY, SUCCEEDED])
    assert agent.run().state is SUCCEEDED
    assert agent.run().state is SUCCEEDED


def test_a_second_signal_ends_the_grace_also_while_workers_are_being_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = threading.Event()

    class Slow(Agent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert killed.wait(20), "the second signal had no effect"
            return super()._start_workers(worker_group)

        def _kill_now(self) -> None:
            killed.set()

    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1,SIGUSR2")
    agent = Slow([])
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert killed.is_set()
    assert agent.calls == ["start", f"shutdown {caught.value.sigval.name} 30"]


def test_the_first_signal_of_a_job_that_an_error_ends_does_not_end_the_grace() -> None:
    killed = threading.Event()

    class Saving(Agent):
        def _shutdown(
            self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30
        ) -> None:
            super()._shutdown(death_sig, timeout)
            handled = threading.Event()
            self.interrupt(signal.SIGTERM)
            self._regrow.inbox.put(handled.set)
            assert handled.wait(20)
            assert not killed.is_set()
            self.interrupt(signal.SIGTERM)
            assert killed.wait(20), "the second signal had no effect"

        def _kill_now(self) -> None:
            killed.set()

    agent = Saving([])
    with pytest.raises(IndexError):
        agent.run()
    assert agent.calls == ["start", "shutdown SIGTERM 30"]


def test_an_attempt_that_a_signal_interrupts_at_its_start_has_all_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopping = threading.Event()

    class Signaled(Agent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stopping.wait(20)
            return super()._start_workers(worker_group)

    agent = Signaled([HEALTHY] * 100)
    emitted: list[str] = []

    def sink(event: Event) -> None:
        name = event.name.removeprefix("regrow.")
        if name == "job.stopping":  # at any time from the signal on
            stopping.set()
        else:
            stopped = any(call.startswith("shutdown") for call in agent.calls)
            emitted.append(f"{name} stopped" if stopped else name)

    agent.add_event_sinks(sink)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
    with pytest.raises(SignalException):
        agent.run()
    assert emitted == [
        "job.started",
        "rendezvous.completed",
        "attempt.started",
        "attempt.ended stopped",
        "job.finished stopped",
    ]


def test_only_failures_before_the_signal_that_ends_the_job_are_reported() -> None:
    def failed(code: int, at: float) -> ProcessFailure:
        return ProcessFailure(0, 1, code, "", exited_monotonic=at)

    crash = {0: failed(-signal.SIGTERM, 2.0), 1: failed(-signal.SIGSEGV, 1.0)}
    assert not_due_to(signal.SIGTERM, crash) == crash
    for code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        notice = {0: failed(code, 1.0), 1: failed(1, 2.0)}
        assert not_due_to(signal.SIGTERM, notice) == {}
    assert not_due_to(signal.SIGTERM, {}) == {}


def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    inbox = Inbox()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_into(inbox, "SIGHUP,SIGUSR1"):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert inbox.get(20) == Signaled(signal.SIGUSR1)
            assert inbox.get(0) is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_hooks_of_torch_2_6_are_called_with_the_arguments_they_have() -> None:
    seen: list[Any] = []

    class Older(Agent):
        def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
            seen.append(("stop", is_restart))

        def _shutdown(  # type: ignore[override]
            self, death_sig: signal.Signals = signal.SIGTERM, is_restart: bool = False
        ) -> None:
            seen.append(("shutdown", death_sig, is_restart))

    assert not Older([FAILED, SUCCEEDED]).run().is_failed()
    assert seen == [("stop", True), ("shutdown", signal.SIGTERM, False)]


def test_a_hook_with_any_keywords_passes_on_what_it_gets_to_older_hooks() -> None:
    class Forwarding(Agent):
        def _stop_workers(self, *args: Any, **more: Any) -> None:
            super()._stop_workers(*args, **more)

        def _shutdown(self, *args: Any, **more: Any) -> None:
            super()._shutdown(*args, **more)

    agent = Forwarding([FAILED, SUCCEEDED])
    assert not agent.run().is_failed()
    assert agent.calls == ["start", "stop", "start", "shutdown SIGTERM 30"]


def test_overridden_steps_of_the_loop_are_used() -> None:
    class Counting(Agent):
        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            self.calls.append("initialize")
            super()._initialize_workers(worker_group)

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            self.calls.append("restart")
            super()._restart_workers(worker_group)

        def _exit_barrier(self) -> None:
            self.calls.append("barrier")

    agent = Counting([FAILED, SUCCEEDED])
    agent.run()
    assert agent.calls == [
        *("initialize", "start", "restart", "stop", "initialize", "start", "barrier"),
        "shutdown SIGTERM 30",
    ]


def test_overridden_steps_of_a_round_and_of_the_records_are_used() -> None:
    class Custom(Agent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            self.calls.append("rendezvous")
            super()._rendezvous(worker_group)

        def _assign_worker_ranks(self, *args: Any) -> list[Worker]:
            self.calls.append("ranks")
            return super()._assign_worker_ranks(*args)

        def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
            self.calls.append(f"state of {worker.global_rank}")
            return super()._get_worker_state(worker, result)

        def _record_metrics(self, group_results: RunResult) -> None:
            self.calls.append("metrics")
            super()._record_metrics(group_results)

    agent = Custom([SUCCEEDED])
    agent.run()
    assert agent.calls == [
        *("rendezvous", "ranks", "start", "metrics", "state of 0", "state of 1"),
        "shutdown SIGTERM 30",
    ]


def test_workers_whose_ranks_changed_after_their_success_have_succeeded() -> None:
    class Reseated(Agent):
        def _exit_barrier(self) -> None:
            for worker in self.get_worker_group().workers:
                worker.global_rank += 2  # as by a round that is formed and closed at once

    assert Reseated([SUCCEEDED]).run().return_values == {0: "a", 1: "b"}


def test_torchs_attributes_are_there_for_subclasses() -> None:
    class Reader(Agent):
        def _exit_barrier(self) -> None:
            self.seen = [self._store, self._remaining_restarts, self._exit_barrier_timeout]

    agent = Reader([FAILED, SUCCEEDED])
    agent.run()
    assert agent.seen == [agent.get_worker_group().store, 0, 300]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"local_world_size": 0}, "local_world_size must be positive, got 0"),
        ({"monitor_interval": 0}, "monitor_interval must be positive, got 0"),
        ({"max_restarts": -1}, "max_restarts must not be negative, got -1"),
        ({"entrypoint": None}, "needs an entrypoint"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_with_its_value(
    wrong: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {
        "role": "r",
        "local_world_size": 1,
        "rdzv_handler": Rendezvous(),
        "entrypoint": "train",
    }
    with pytest.raises(AssertionError, match=message):
        WorkerSpec(**fields | wrong)


def test_the_deprecated_fn_is_an_entrypoint_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="entrypoint"):
        spec = WorkerSpec("r", 1, Rendezvous(), fn=print)
    assert spec.entrypoint is print


def test_handlers_of_events_and_metrics_that_raise_change_nothing_about_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise OSError("the collector of metrics is gone")

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the collector of events is gone")

    monkeypatch.setattr("regrow.metrics.api._handlers", {None: Gone()})
    monkeypatch.setitem(handlers._log_handlers, "null", Broken())
    agent = Agent([HEALTHY, FAILED, SUCCEEDED])
    assert agent.run().return_values == {0: "a", 1: "b"}


def test_the_metrics_of_its_steps_have_torchs_names() -> None:
    names: list[str] = []

    class Names(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            names.append(metric_data.name)

    configure(Names(), "torchelastic")
    try:
        Agent([FAILED, SUCCEEDED]).run()
    finally:
        configure(NullMetricHandler(), "torchelastic")
    steps = {name for name in names if not name.startswith("workers.")}
    for step in ("_rendezvous", "_assign_worker_ranks", "_initialize_workers", "_restart_workers"):
        assert f"SimpleElasticAgent.{step}.success" in steps
    assert {name.split(".")[0] for name in steps} == {"SimpleElasticAgent"}


def test_a_master_address_that_this_host_does_not_know_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*args: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    agent = Agent([FAILED, SUCCEEDED])
    agent.rendezvous.round = RendezvousInfo(
        MemoryStore(), 0, 1, RendezvousStoreInfo("node7", 29501)
    )
    agent.run()
    for thread in threading.enumerate():
        if thread.name == "regrow-master-addr":
            thread.join()
    (warning,) = (text for text in caplog.messages if "MASTER_ADDR" in text)
    assert "cannot resolve MASTER_ADDR 'node7'" in warning
    assert "--local-addr ADDRESS" in warning
