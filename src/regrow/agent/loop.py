"""`Loop`: takes a message from the inbox, calls `decide`, and carries out the actions.

The loop waits for the next message and for nothing else. It submits long work as an operation,
together with a function that turns the result into an event for `decide`. At most one operation at
a time changes the job; checks of the workers run between such operations.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent.api import RunResult
from regrow.agent.decisions import events
from regrow.agent.decisions.decide import AgentPhase, AgentState, decide
from regrow.agent.inbox import Inbox, Message, Operations
from regrow.rendezvous import RendezvousClosedError
from regrow.workers import SignalException

if TYPE_CHECKING:
    from regrow.agent.attempt.attempt import Attempt
    from regrow.agent.job import Job

Meaning = Callable[[Any], events.Event | None]
"""Turns the result of an operation into an event for `decide`."""


class Loop:
    """Runs the agent's jobs, one at a time.

    Args:
        job: what the parts of the agent share.
        inbox: source of all messages.
        attempt: runs the operations.
        poll_interval: returns the seconds between two checks of the workers; None if all changes
            are pushed.
    """

    def __init__(
        self, job: Job, inbox: Inbox, attempt: Attempt, poll_interval: Callable[[], float | None]
    ) -> None:
        self.job = job
        self.inbox = inbox
        self.attempt = attempt
        self.operations: Operations | None = None
        """Runs the operations, and reports their ends to the inbox; set for a run by the agent."""
        self.on_signal: Callable[[events.Signaled], events.Event | None] = lambda event: event
        """Returns the event for `decide` after a signal of this process."""
        self._poll_interval = poll_interval
        self._run: object | None = None  # identifies the run in progress
        self._deadline: float | None = None  # monotonic: end of the running back-off
        self._error: BaseException | None = None  # error of the last operation

    def run(self) -> RunResult:
        """Run the job to its end.

        Raises:
            SignalException: a signal ended the job.
            Exception: an operation raised it.
        """
        state = AgentState(remaining_restarts=self.job.remaining_restarts)
        actions: tuple[events.Action, ...] = (events.Form(),)
        self._run, self._deadline = object(), None
        try:
            while True:
                for action in actions:
                    result = self._act(action)
                    if result is not None:
                        return result
                while (event := self._next_event(state)) is None:
                    pass
                known = self.job.remaining_restarts
                state, actions = decide(state._replace(remaining_restarts=known), event)
                if state.remaining_restarts != known:  # another thread may write it as well
                    self.job.remaining_restarts = state.remaining_restarts
        finally:
            self._run = None

    def _act(self, action: events.Action) -> RunResult | None:
        """Carry out or submit an action; return the run's result if the run is over."""
        match action:
            case events.Finish(final):
                return self.attempt.conclude(final)
            case events.Interrupt(signum):
                sigval = signal.Signals(signum)
                raise SignalException(f"the agent got {sigval.name}", sigval=sigval)
            case events.Raise(message):
                if message or self._error is None:
                    raise RuntimeError(f"[{self.job.group.spec.role}] {message}")
                raise self._error
            case events.Gather(waiting, until):
                delay_s = until - monotonic()
                self.job.recorder.emit("regrow.job.gathering", waiting=waiting, delay_s=delay_s)
            case events.ShortenGrace():
                self.attempt.shorten_grace()
            case events.LengthenGrace():
                self.attempt.lengthen_grace()
            case _:
                assert self.operations is not None
                call, meaning = self._operation(action)
                self.operations.submit(call, partial(self._ended, self._run, meaning))
        return None

    def _operation(self, action: events.Action) -> tuple[Callable[[], Any], Meaning]:
        attempt, recorder, delayed = self.attempt, self.job.recorder, self._deadline is not None
        self._deadline = None
        match action:
            case events.Form():
                return attempt.form, self._formed
            case events.Restart(reason, announce, full_grace, keep):
                if not delayed:
                    recorder.restarting(reason, 0.0)

                def restart() -> None:
                    if not delayed:
                        attempt.log_restart(reason, 0.0)
                    attempt.restart(reason, announce, full_grace, keep)

                return restart, self._formed
            case events.CheckWorkers():
                return attempt.check, self._checked
            case events.ReportFailure():
                return attempt.report_failure, attempt.peers.verdict
            case events.Delay(seconds, reason, announce, full_grace):
                recorder.restarting(reason, seconds)
                self._deadline = monotonic() + seconds

                def pause() -> None:
                    attempt.log_restart(reason, seconds)
                    # The remaining workers must not run while the agent waits.
                    attempt.pause(reason, announce, full_grace)

                return pause, lambda _: None
            case events.StopWorkers(report):
                return lambda: attempt.stop_for_good(report), lambda _: events.Stopped()
            case events.Barrier():
                return attempt.exit_barrier, _barrier_over
        raise AssertionError(f"not an operation: {action}")

    def _ended(
        self, run: object, meaning: Meaning, result: object, error: BaseException | None
    ) -> events.Event | None:
        """Handle the end of an operation, unless its run is over."""
        if run is not self._run:
            return None
        if error is None:
            return meaning(result)
        self._error = error
        if not isinstance(error, RendezvousClosedError):
            raise error
        return events.Closed(self.attempt.peers.on_close(error), refused=True)

    def _formed(self, _: object) -> events.Event:
        job = self.job
        number = job.round if job.numbered else None
        return events.Formed(monotonic(), number, job.shared, job.group.group_rank == 0)

    def _checked(self, found: tuple[RunResult, int]) -> events.Event:
        result, waiting = found
        self.attempt.store_result(result)
        return events.CheckResult(result.state, waiting, monotonic(), self.job.hopeless)

    # --- incoming messages

    def _next_event(self, state: AgentState) -> events.Event | None:
        timeout = None
        if self._deadline is not None:
            timeout = max(0.0, self._deadline - monotonic())
        elif state.phase in (AgentPhase.RUNNING, AgentPhase.AWAITING_VERDICT):
            timeout = None if state.checking else self._poll_interval()
            if state.gather_until is not None:
                left = max(0.0, state.gather_until - monotonic())
                timeout = left if timeout is None else min(left, timeout)
        message = self.inbox.get(timeout)
        if isinstance(message, events.Signaled):
            return self.on_signal(message)
        if message is not None:
            return _event_of(message)
        if self._deadline is not None:
            return events.DelayOver()
        now = monotonic()
        if state.gather_until is not None and now >= state.gather_until:
            return events.GatherOver(now, self.job.handler.num_nodes_waiting())
        return events.Changed()

    def handle_waiting(self) -> None:
        """Handle all messages in the inbox; make no decisions."""
        while (message := self.inbox.get(0)) is not None:
            _event_of(message)

    def wait_for(self, call: Callable[[], object], on_signal: Callable[[], None]) -> None:
        """Run a call on its own thread, and handle messages until the call ends.

        Args:
            call: the call.
            on_signal: called for each signal that arrives while the call runs.

        Raises:
            BaseException: the call raised it.
        """
        operations, outcome = Operations(self.inbox), list[BaseException | None]()
        operations.submit(call, lambda _, error: outcome.append(error))
        operations.close()
        while not outcome:
            match self.inbox.get():
                case events.Signaled():
                    on_signal()
                case message if message is not None:
                    _event_of(message)
        if outcome[0] is not None:
            raise outcome[0]


def _event_of(message: Message) -> events.Event | None:
    """Return the event of a message; a message that is a function is called."""
    return message() if callable(message) else message


def _barrier_over(passed: object) -> events.Event:
    # Older hooks, written for torch, return None.
    return events.BarrierOver(monotonic(), passed=passed is not False)
