"""The heartbeat's thread: it executes the actions of the rules (`beats`) and returns the results.

Every event of the thread is a message in one queue: a request to stop, or a report of the meeting
between two exchanges. The thread waits only for this queue or for an exchange. A process that ends
waits until the thread has left the heartbeat.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from regrow.heartbeat import beats
from regrow.heartbeat.failure import NEVER_TOGETHER, NO_RANKS, HeartbeatFailure, Ranks
from regrow.heartbeat.merge import Beat, Broken, ExchangeFailed, Outcome
from regrow.utils import describe, get_logger, headline

if TYPE_CHECKING:
    from regrow.heartbeat.failure_policy import FailurePolicy
    from regrow.heartbeat.merge import Meeting

logger = get_logger(__name__)


class _Stop(threading.Event):
    """An event that also calls a function when it is set."""

    def __init__(self, on_set: Callable[[], None]) -> None:
        super().__init__()
        self._on_set = on_set

    def set(self) -> None:
        """Stop the heartbeat; the thread then leaves the others, without a wait in this call."""
        super().set()
        self._on_set()


class Beater:
    """The heartbeat of one worker.

    Args:
        plan: settings of this worker.
        meeting: connection to the other workers; closed at the end.
        policy: what this process does on a failure.
        how_far: returns the step and the phase of this worker.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        plan: beats.HeartbeatPlan,
        meeting: Meeting,
        policy: FailurePolicy,
        how_far: Callable[[], tuple[int, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.meeting = meeting
        self._policy = policy
        self._how_far = how_far
        self._clock = clock
        self._inbox: queue.SimpleQueue[beats.Event] = queue.SimpleQueue()
        self._exchanging = False
        self._met = threading.Event()
        """Set when all workers have arrived, or the heartbeat has ended."""
        self._incarnation = secrets.randbelow(2**62) + 1
        token = secrets.randbelow(65535) + 1 if plan.rank == 0 else 0
        self._state, self._due = beats.begin(plan, token, clock())
        self.event = _Stop(lambda: self._inbox.put(beats.LeaveRequest(clock())))
        self._thread = threading.Thread(target=self._run, name="regrow-heartbeat", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the heartbeat runs or is starting; the thread may run a moment longer."""
        return self._thread.is_alive() and not self._state.over

    @property
    def left(self) -> Ranks:
        """The other ranks that left and so ended the heartbeat."""
        return self._state.left

    @property
    def succeeded(self) -> int:
        """The number of exchanges that succeeded."""
        return self._state.beats

    def agree(self) -> None:
        """Run the first exchange, in the thread of the caller.

        Raises:
            HeartbeatFailure: the workers are not one group.
        """
        try:
            while not self._state.beats and not self._state.over:
                self._turn()
            *now, last = self._due
            if isinstance(last, beats.Fail):
                raise last.failure
            # Here, because native code of the caller may block the new thread at once.
            for action in now:
                self._do(action)
            self._due = (last,)
        except BaseException:
            self._policy.end()
            self.meeting.close()
            raise

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_stall_rule(self, stalled_after: int | None, *, is_fatal: bool) -> None:
        """Change the rule for stalled workers, from the next beat on; see `HeartbeatPlan`."""
        self._inbox.put(beats.SetStallRule(stalled_after, is_fatal, self._clock()))

    def meet(self, seconds: float) -> None:
        """Wait until all workers have arrived, or the heartbeat has ended; for a patient plan.

        Raises:
            HeartbeatFailure: neither happened within `seconds`; the heartbeat continues to wait.
        """
        if self._met.wait(seconds):
            return
        missing, why = NO_RANKS, NEVER_TOGETHER
        try:
            present = {row.rank for row in self.meeting.table(self.plan.timeout)}
        except Exception as error:  # noqa: BLE001 - any exchange may fail in its own way
            why = headline(error)
        else:
            missing = Ranks.of(set(range(self.plan.size)) - present - {self.plan.rank})
        raise HeartbeatFailure(
            "never started" if missing.total else "no exchange",
            missing,
            "" if missing.total else why,
            rank=self.plan.rank,
            world_size=self.plan.size,
            beat=0,
            seconds=seconds,
        )

    def leave(self) -> None:
        """Stop the heartbeat, and wait until the other workers are notified."""
        self.event.set()
        if self._exchanging:  # the other workers may already have their answers to a first exchange
            self.meeting.leave(self._beat(leaving=True))
        self._thread.join(self.plan.cycle + self.plan.timeout)

    def _run(self) -> None:
        try:
            while self._due:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - it must not end the thread silently
                    broken = Broken("no exchange", NO_RANKS, describe(error))
                    result = beats.Result(broken, self._clock())
                    self._state, self._due = beats.step(self._state, result)
        finally:
            self._policy.end()
            self.meeting.close()
            self.event.set()
            self._met.set()

    def _turn(self) -> None:
        """Execute the actions that are due, and apply the event of the last one."""
        due, self._due = self._due, ()
        event = None
        for action in due:
            event = self._do(action)
        if event is not None:
            self._state, self._due = beats.step(self._state, event)

    def _do(self, action: beats.Action) -> beats.Event | None:
        match action:
            case beats.TryExchange(timeout, final):
                return self._exchange(timeout, final)
            case beats.Sleep(until):
                return self._sleep(until)
            case beats.Listen():
                self.meeting.listen(
                    lambda outcome: self._inbox.put(beats.Result(outcome, self._clock()))
                )
            case beats.Extend(seconds):
                self._policy.arm(seconds)
                self._met.set()
            case beats.LogLine(level, text):
                logger.log(level, text)
            case beats.Stalled(steps, text):
                self._policy.stalled(steps.ranks, text)
            case beats.Fail(failure):
                self._policy.fatal(failure)
        return None

    def _exchange(self, timeout: float, final: bool) -> beats.Event:
        self._policy.alive()
        self._exchanging = True
        outcome: Outcome
        try:
            outcome = self.meeting.beat(self._beat(final=final), timeout)
        except Exception as error:  # noqa: BLE001 - any exchange may fail in its own way
            outcome = ExchangeFailed(headline(error))
        self._exchanging = False
        return beats.Result(outcome, self._clock())

    def _beat(self, *, leaving: bool = False, final: bool = False) -> Beat:
        state = self._state
        step, phase = self._how_far()
        return Beat(
            self.plan.rank,
            state.token,
            self._incarnation,
            bool(state.beats),
            step,
            phase,
            leaving or state.leaving,
            final,
        )

    def _sleep(self, until: float) -> beats.Event:
        left = min(max(until - self._clock(), 0.0), threading.TIMEOUT_MAX)
        try:
            return self._inbox.get(timeout=left)
        except queue.Empty:
            return beats.Woke(self._clock())
