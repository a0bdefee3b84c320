"""The loop: one message from the inbox, what `_decide` says that it means, and that carried out.

Nothing here waits but the loop itself, for the next message. What takes time is submitted as an
operation, with what its result means to the decisions; there is at most one at a time that changes
anything, and looks at the workers between them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from regrow.agent import _words as words
from regrow.agent._company import Company, News
from regrow.agent._decide import decide
from regrow.agent._inbox import Done, Operations, Probe
from regrow.agent._state import Phase, State
from regrow.agent._types import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from regrow.metrics import put_metric
from regrow.rendezvous import RendezvousClosedError
from regrow.workers import SignalException


class Loop(Company):
    """The loop of an agent, over what a subclass provides."""

    _operations: Operations | None
    _hopeless: bool  # no restart can help
    _error: BaseException | None = None  # of the last operation
    _monitor_workers: Callable[[WorkerGroup], RunResult]

    def _poll_interval(self) -> float | None:
        """Seconds between looks at the workers; None where every change is pushed."""
        return self._worker_group.spec.monitor_interval

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        state = State(remaining_restarts=self._remaining_restarts)
        event: words.Event | None = words.Begin()
        deadline: float | None = None  # of the running back-off
        in_flight: dict[object, Callable[[Any], words.Event | None]] = {}
        while True:
            if event is not None:
                state = replace(state, remaining_restarts=self._remaining_restarts)
                state, actions = decide(state, event)
                self._remaining_restarts = state.remaining_restarts
                for action in actions:
                    match action:
                        case words.Finish(final):
                            return self._conclude(final)
                        case words.Interrupt(signum):
                            sigval = signal.Signals(signum)
                            raise SignalException(f"the agent got {sigval.name}", sigval=sigval)
                        case words.GiveUp(message):
                            raise RuntimeError(f"[{self._worker_group.spec.role}] {message}")
                        case words.Raise():
                            assert self._error is not None
                            raise self._error
                        case words.Gather(waiting, until):
                            self._emit(
                                "regrow.job.gathering", waiting=waiting, delay_s=until - monotonic()
                            )
                        case words.Delay(seconds, reason):
                            self._emit_restarting(reason, seconds)
                            deadline = monotonic() + seconds
                            self._perform(action, in_flight, delayed=True)
                        case _:
                            self._perform(action, in_flight, delayed=deadline is not None)
                            deadline = None
            event = self._next_event(state, deadline, in_flight)

    def _perform(
        self,
        action: words.Action,
        in_flight: dict[object, Callable[[Any], words.Event | None]],
        *,
        delayed: bool,
    ) -> None:
        group = self._worker_group
        match action:
            case words.Form():
                call: Callable[[], Any] = lambda: self._initialize_workers(group)  # noqa: E731
                then: Callable[[Any], words.Event | None] = self._formed
            case words.Restart(reason, announce):
                if not delayed:
                    self._emit_restarting(reason, 0.0)
                call, then = lambda: self._restart(reason, announce), self._formed
            case words.Look():
                call, then = self._look, self._report
            case words.Tell():
                call, then = self._tell_failure, self._verdict
            case words.Delay(_, reason, announce):
                # What is left of a group does not run on while the agent waits.
                call = lambda: self._pause(reason, announce)  # noqa: E731
                then = lambda _: None  # noqa: E731
            case words.Stop(tell):
                call, then = lambda: self._stop_for_good(tell), lambda _: words.Stopped()
            case words.Barrier():
                call, then = self._exit_barrier, _barrier_ended
            case _:
                raise AssertionError(f"not an operation: {action}")
        assert self._operations is not None
        in_flight[self._operations.submit(call)] = then

    def _next_event(
        self,
        state: State,
        deadline: float | None,
        in_flight: dict[object, Callable[[Any], words.Event | None]],
    ) -> words.Event | None:
        timeout = None
        if deadline is not None:
            timeout = max(0.0, deadline - monotonic())
        elif state.phase in (Phase.RUNNING, Phase.JUDGING):
            timeout = None if state.looking else self._poll_interval()
            if state.gather_until is not None:
                left = max(0.0, state.gather_until - monotonic())
                timeout = left if timeout is None else min(left, timeout)
        message = self._inbox.get(timeout)
        match message:
            case None if deadline is not None:
                return words.DelayOver()
            case None:
                now = monotonic()
                due = state.gather_until is not None and now >= state.gather_until
                if due:
                    waiting = self._worker_group.spec.rdzv_handler.num_nodes_waiting()
                    return words.GatherOver(now, waiting)
                return words.Changed()
            case Done(operation, result, error):
                then = in_flight.pop(operation, None)
                if error is not None and then is not None:
                    self._error = error
                    if not isinstance(error, RendezvousClosedError):
                        raise error
                    return words.Closed(self._learn_end(error.report), refused=True)
                return then(result) if then is not None else None
            case News():
                return self._hear(message.what)
            case Probe(answered):
                answered.set()
                return None
        return self._heed(message)

    def _heed(self, message: object) -> words.Event | None:
        """What a message means that is no operation's end; subclasses add their own kinds."""
        return message if isinstance(message, words.Event) else None

    def _look(self) -> tuple[RunResult, int]:
        result = self._monitor_workers(self._worker_group)
        waiting = 0
        told = self._pushes and self._numbered
        if result.state == WorkerState.HEALTHY and not told:
            waiting = self._worker_group.spec.rdzv_handler.num_nodes_waiting()
        return result, waiting

    def _report(self, found: tuple[RunResult, int]) -> words.Event:
        result, waiting = found
        role = self._worker_group.spec.role
        self._last_result = result
        self._worker_group.state = result.state
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.{result.state.name.lower()}", 1)
        if not WorkerState.is_running(result.state):
            self._end_attempt(result)
        return words.Report(result.state, waiting, monotonic(), self._hopeless)

    # --- operations, and what their results mean

    def _formed(self, _: object) -> words.Event:
        number = self._round if self._numbered else None
        leads = self._worker_group.group_rank == 0
        return words.Formed(monotonic(), number, self._shared, leads)

    def _restart(self, reason: str, announce: bool) -> None:
        if announce:
            self._announce(reason)
        self._restart_workers(self._worker_group)

    def _pause(self, reason: str, announce: bool) -> None:
        if announce:
            self._announce(reason)
        self._stop_attempt(self._worker_group)


def _barrier_ended(passed: object) -> words.Event:
    # Hooks of torch's time return nothing.
    return words.BarrierBroken(monotonic()) if passed is False else words.BarrierPassed()
