"""What becomes of a process by its heartbeat: it lives on, is told, or ends.

Whoever gives no `on_failure` has chosen certain death, with deadlines that hold when nothing runs
here any more (`_death`). Whoever gives one has taken that over, and there are no deadlines: a timer
of the kernel's knows nothing of what a user would rather do.

Under `regrow run --heartbeat` a worker beats before its script has had its say, so the choice comes
later, at any moment, from another thread. Until it does, it is death; once a failure is being
handled, it is too late. The agent's watch over a worker that hangs is not the script's to give up:
it is about this process alone, which then could not act on anything.

In a restarter in place (`regrow.inprocess`), whoever is lost or hangs is the restarter's to see to,
which goes on with the others: nobody dies for that, unless it was asked for by `on_stall="fatal"`.
Heartbeats are over then, as they were of all workers; the restarter has time-outs of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from regrow._progress import STANDS_ALONE, standing
from regrow.heartbeat import _death
from regrow.heartbeat._agent_timer import tell_stall
from regrow.heartbeat._failure import Ranks
from regrow.heartbeat._reports import speaks
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.heartbeat._beats import Plan
    from regrow.heartbeat._failure import HeartbeatFailure
    from regrow.heartbeat._merge import Standing

__all__ = ["Callback", "Death", "Fate", "Provisional"]

logger = get_logger(__name__)


class Fate(Protocol):
    """What becomes of the process."""

    def alive(self) -> None:
        """The thread is about to do something."""
        ...

    def arm(self, seconds: float) -> None:
        """All were there; the process may live for so many seconds."""
        ...

    def stalled(self, standing: Standing, text: str) -> None:
        """Somebody's training stands still."""
        ...

    def fatal(self, failure: HeartbeatFailure) -> None:
        """It is fatal; this may or may not return."""
        ...

    def end(self) -> None:
        """There will be no more beats, and no need to die."""
        ...


class Callback:
    """The `Fate` of a process whose user says what to do."""

    def __init__(self, plan: Plan, on_failure: Callable[[HeartbeatFailure], object]) -> None:
        self._rank = plan.rank
        self._on_failure = on_failure

    def alive(self) -> None:
        """See `Fate`."""

    def arm(self, seconds: float) -> None:
        """See `Fate`."""

    def stalled(self, standing: Standing, text: str) -> None:
        """See `Fate`; each worker says it, those that it is about and rank 0 louder."""
        concerned = self._rank == 0 or self._rank in standing.stalled.named
        logger.log(logging.WARNING if concerned else logging.INFO, text)
        if self._rank in standing.stalled.named:
            tell_stall(text)

    def fatal(self, failure: HeartbeatFailure) -> None:
        """See `Fate`."""
        try:
            self._on_failure(failure)
        except BaseException:  # sys.exit, for one, would end this thread and nothing else
            logger.exception("on_failure raised, so this process ends")
            _death.die(failure)

    def end(self) -> None:
        """See `Fate`."""


class Death(Callback):
    """The `Fate` of a process that ends with its heartbeat."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, _death.die)
        self._plan = plan
        self._deadline = _death.Deadline(plan.bound, plan.timeout)

    def alive(self) -> None:
        """See `Fate`."""
        self._deadline.alive()

    def arm(self, seconds: float) -> None:
        """See `Fate`."""
        self._deadline.arm(seconds)

    def fatal(self, failure: HeartbeatFailure) -> None:
        """See `Fate`; a worker is left to who stops it, or has it restart in place."""
        if standing() != STANDS_ALONE and failure.kind != "stalled":
            loud = speaks(self._plan, Ranks(failure.ranks, failure.count))
            logger.log(
                logging.WARNING if loud else logging.INFO,
                "%s; that is for the restarter in place to see to, and the beating is over",
                failure,
            )
        elif _death.is_spared():
            logger.info("%s; this worker is being stopped anyway", failure)
        else:
            super().fatal(failure)

    def end(self) -> None:
        """See `Fate`."""
        self._deadline.disarm()


class Provisional(Death):
    """The `Fate` of a process whose script may yet say what to do: `Death` until then."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._lock = threading.Lock()
        """Between the thread that beats and the script's."""
        self._scripts: Callback | None = None
        self._decided = False

    def hand_over(self, on_failure: Callable[[HeartbeatFailure], object]) -> bool:
        """From now on, a failure is the script's affair; whether that came in time.

        Args:
            on_failure: as of `regrow.heartbeat.start`.
        """
        with self._lock:
            if self._decided:
                return False
            self._scripts = Callback(self._plan, on_failure)
            self._deadline.leave_to_agent()
            return True

    def alive(self) -> None:
        """See `Fate`."""
        with self._lock:
            super().alive()

    def arm(self, seconds: float) -> None:
        """See `Fate`."""
        with self._lock:
            super().arm(seconds)

    def fatal(self, failure: HeartbeatFailure) -> None:
        """See `Fate`."""
        with self._lock:
            self._decided = True
            scripts = self._scripts
        if scripts is None:
            super().fatal(failure)
            return
        self._deadline.disarm()  # it may take its time
        scripts.fatal(failure)

    def end(self) -> None:
        """See `Fate`."""
        with self._lock:
            self._decided = True
            super().end()
