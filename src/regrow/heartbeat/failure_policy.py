"""Reaction of a process to a failed heartbeat, and the timers that end it when no code runs.

Without `on_failure`, the process always ends: by `death.die`, and by deadlines that work when this
process runs no code. With `on_failure`, the user's function decides. Then there are no deadlines,
because a kernel timer cannot call a function.

Under `regrow run --heartbeat`, the heartbeat starts before the script. So the script sets
`on_failure` later, at any moment, from another thread (`hand_over`). Until then the process ends on
a failure. While the process handles a failure, `hand_over` comes too late. The script cannot switch
off the agent's timer for a worker that hangs, because such a worker cannot call `on_failure`.

Inside an in-process wrapper (`regrow.inprocess`), the wrapper handles a rank that is lost or
hangs, and continues with the other ranks. Then a failure ends the heartbeats of all workers but
ends no process, unless `on_stall="fatal"` asked for that. The wrapper has time-outs of its own.

The agent monitors this process with a countdown timer. Each turn of the heartbeat's thread arms the
timer again, after successful and after failed exchanges: the agent monitors this process and not
the others. When the timer expires, the agent reads the stacks, writes the error file and kills the
worker. It does so shortly before the other workers detect that this worker is missing
(`terms.lead`). So the first failure of the job is the failure that caused the others.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from regrow._progress import OTHERS_GO_ON, heartbeat, restart_state
from regrow.heartbeat import death
from regrow.heartbeat.failure import Ranks, reports_loudly
from regrow.heartbeat.terms import SCOPE, STALLED, TIMER_FILE, lead
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.heartbeat.beats import HeartbeatPlan
    from regrow.heartbeat.failure import HeartbeatFailure
    from regrow.timer import FileTimerClient

logger = get_logger(__name__)


class FailurePolicy:
    """What this process does when its heartbeat fails, and the timers of a process without code.

    Args:
        plan: settings of this worker.
        on_failure: see `regrow.heartbeat.start`; None: the process ends, also by the timers.
    """

    def __init__(
        self, plan: HeartbeatPlan, on_failure: Callable[[HeartbeatFailure], object] | None = None
    ) -> None:
        self._plan = plan
        self._on_failure = on_failure
        self._kernel = death.kernel_timers(warn=True) if on_failure is None else []
        self._agent = _timer_client() if on_failure is None else None
        self._armed = False
        self._decided = False
        self._lock = threading.Lock()
        """Guards the decision between the heartbeat's thread and the script's thread."""

    def hand_over(self, on_failure: Callable[[HeartbeatFailure], object]) -> bool:
        """Let the script decide from now on; return False if the heartbeat has already failed.

        The kernel's timers are closed. The agent continues to monitor the process.

        Args:
            on_failure: see `regrow.heartbeat.start`.
        """
        with self._lock:
            if self._decided:
                return False
            self._on_failure = on_failure
            self._close_timers()
            return True

    def alive(self) -> None:
        """Show the agent that the heartbeat's thread is about to run an exchange.

        Before the first `arm`, the call does nothing, because there is no time limit until all
        workers have started their heartbeats.
        """
        with self._lock:
            if self._armed:
                self._arm_agent(self._plan.bound)

    def arm(self, seconds: float) -> None:
        """Record a complete beat: the process may live for `seconds`.

        SIGABRT comes `death.ABORT_S` after that time, and SIGKILL comes `KILL_S` after it.
        """
        heartbeat(monotonic())
        with self._lock:
            self._armed = True
            for timer, more in self._kernel:
                timer.set(seconds + more)
            self._arm_agent(seconds)

    def stalled(self, ranks: Ranks, text: str) -> None:
        """Report a stalled training.

        To the agent of the stalled rank, the report is a timer that expires at once and requests no
        signal. The agent then reads the stacks of this process, which continues, and warns. Without
        an agent, the stalled rank and rank 0 warn.

        Args:
            ranks: the stalled ranks.
            text: one line with the rank, the place and the duration.
        """
        own, agent = self._plan.rank in ranks.named, _timer_client(signal=0)
        warns = agent is None and (own or self._plan.rank == 0)
        logger.log(logging.WARNING if warns else logging.INFO, text)
        if agent is not None and own:
            agent.acquire_in(STALLED + text.removeprefix("heartbeat: "), 0.0)

    def fatal(self, failure: HeartbeatFailure) -> None:
        """React to a failure; this call may not return."""
        with self._lock:
            self._decided = True
            on_failure = self._on_failure
        if on_failure is not None:
            self.end()  # `on_failure` may take a long time
            try:
                on_failure(failure)
            except BaseException:  # for example, sys.exit would end this thread only
                logger.exception("heartbeat: on_failure raised an exception, so this process ends")
                death.die(failure)
        elif restart_state() & OTHERS_GO_ON and failure.kind != "stalled":
            loud = reports_loudly(self._plan, Ranks(failure.ranks, failure.count))
            logger.log(
                logging.WARNING if loud else logging.INFO,
                "%s; in-process restart handles this fault; heartbeats stop until the workers are "
                "started again",
                failure,
            )
        elif death.is_being_stopped():
            logger.info("%s; the agent is already stopping this worker", failure)
        else:
            death.die(failure)

    def end(self) -> None:
        """End the policy: no beat and no failure follows."""
        with self._lock:
            self._decided = True
            if self._armed:  # else this process may already run its next heartbeat
                heartbeat(0.0)
            self._armed = False
            self._close_timers()
            if self._agent is not None:
                self._agent.release(SCOPE)

    def _arm_agent(self, seconds: float) -> None:
        """Postpone the moment at which the agent treats this process as hung.

        Args:
            seconds: time after which all others detect a loss, if this call is the last sign of
                life.
        """
        if self._agent is not None:
            left = seconds - lead(self._plan.bound, self._plan.timeout)
            self._agent.acquire_in(SCOPE, max(left, 0.0))

    def _close_timers(self) -> None:
        timers, self._kernel = self._kernel, []
        for timer, _ in timers:
            timer.close()


def _timer_client(**options: int) -> FileTimerClient | None:
    """The client of the agent's timer server; None: there is no such agent."""
    path = os.environ.get(TIMER_FILE)
    if not path:
        return None
    from regrow.timer import FileTimerClient

    return FileTimerClient(path, **options)
