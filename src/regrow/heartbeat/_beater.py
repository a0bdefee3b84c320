"""The thread that beats: it does what the rules (`_beats`) say, and tells them what came of it.

Whatever can happen to it is a message in one queue: that somebody asks it to stop, and what the
meeting has to tell between two exchanges. It waits for that queue or for an exchange, and for
nothing else; a process that is about to end waits for it in turn, until it has left.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from regrow.heartbeat import _beats as beats
from regrow.heartbeat._failure import NOBODY, Kind, Ranks, failure_of
from regrow.heartbeat._merge import Beat, Broken, Failed, Outcome
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.heartbeat._exchange import Meeting
    from regrow.heartbeat._fate import Fate

__all__ = ["Beater"]

logger = get_logger(__name__)


class _Stop(threading.Event):
    """The event that stops the beating when it is set."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def set(self) -> None:
        """Ask the beating to stop; it leaves the others first, which is not waited for."""
        super().set()
        self._tell()


class Beater:
    """One worker's beating.

    Args:
        plan: how it beats.
        meeting: the way to the others; closed at the end.
        fate: what becomes of this process.
        how_far: returns the step and the phase that this worker is at.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        plan: beats.Plan,
        meeting: Meeting,
        fate: Fate,
        how_far: Callable[[], tuple[int, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.meeting = meeting
        self._fate = fate
        self._how_far = how_far
        self._clock = clock
        self._inbox: queue.SimpleQueue[beats.Event] = queue.SimpleQueue()
        self._exchanging = False
        self._met = threading.Event()
        """All have come, or it is over."""
        self._incarnation = secrets.randbelow(2**62) + 1
        token = secrets.randbelow(65535) + 1 if plan.rank == 0 else 0
        self._state, self._due = beats.begin(plan, token, clock())
        self.event = _Stop(lambda: self._inbox.put(beats.Stop(clock())))
        self._thread = threading.Thread(target=self._run, name="regrow-heartbeat", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether it beats, or is about to; one that is over may still be tidying up."""
        return self._thread.is_alive() and not self._state.over

    @property
    def left(self) -> Ranks:
        """The others whose leaving has ended the beating."""
        return self._state.left

    def agree(self) -> None:
        """Have the first exchange, in the thread of the caller.

        Raises:
            HeartbeatFailure: the workers are not a group.
        """
        try:
            while not self._state.beats and not self._state.over:
                self._turn()
            *now, last = self._due
            if isinstance(last, beats.Fail):
                raise last.failure
            # Here, as whoever called may be about to leave the thread no time to do anything.
            for action in now:
                self._do(action)
            self._due = (last,)
        except BaseException:
            self._fate.end()
            self.meeting.close()
            raise

    def start(self) -> None:
        """Beat from now on, in a thread."""
        self._thread.start()

    def judge(self, stalled_after: int | None, *, stall_is_fatal: bool) -> None:
        """Think differently of workers that stand still, from the next beat on; see `Plan`."""
        self._inbox.put(beats.Judge(stalled_after, stall_is_fatal, self._clock()))

    def meet(self, seconds: float) -> None:
        """Wait until all have come, or it is over; for one that is patient.

        Raises:
            HeartbeatFailure: that has not happened in so many seconds; who came is still there.
        """
        if self._met.wait(seconds):
            return
        kind: Kind = "no exchange"
        missing, why = NOBODY, "all came, but never at the same time"
        try:
            come = {row.rank for row in self.meeting.table(self.plan.timeout)}
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody can be asked
            why = f"{type(error).__name__}: {error}"
        else:
            missing = Ranks.of(set(range(self.plan.size)) - come - {self.plan.rank})
            kind, why = ("never started", "") if missing.total else (kind, why)
        raise failure_of(
            kind,
            missing,
            why,
            rank=self.plan.rank,
            world_size=self.plan.size,
            beat=0,
            seconds=seconds,
            failures=1,
        )

    def leave(self) -> None:
        """Stop, and wait until the others know it.

        They may have met already where this worker has not heard of it yet.
        """
        self.event.set()
        if self._exchanging:
            self.meeting.leave(self._beat(self._state)._replace(leaving=True))
        self._thread.join(self.plan.cycle + self.plan.timeout)

    def _run(self) -> None:
        try:
            while self._due:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - or this would beat no more, and live
                    broken = Broken("no exchange", NOBODY, repr(error))
                    heard = beats.Heard(broken, self._clock())
                    self._state, self._due = beats.step(self._state, heard)
        finally:
            self._fate.end()
            self.meeting.close()
            self.event.set()
            self._met.set()

    def _turn(self) -> None:
        """Do what is to be done, and take in what comes of the last of it."""
        due, self._due = self._due, ()
        for action in due:
            event = self._do(action)
        if event is not None:
            self._state, self._due = beats.step(self._state, event)

    def _do(self, action: beats.Action) -> beats.Event | None:
        match action:
            case beats.Exchange(timeout, final):
                return self._exchange(timeout, final)
            case beats.Sleep(until):
                return self._sleep(until)
            case beats.Listen():
                self.meeting.listen(self._tell)
            case beats.Rearm(seconds):
                self._fate.arm(seconds)
                self._met.set()
            case beats.Say(level, text):
                logger.log(level, text)
            case beats.Stalled(standing, text):
                self._fate.stalled(standing, text)
            case beats.Fail(failure):
                self._fate.fatal(failure)
            case beats.End():
                pass
        return None

    def _exchange(self, timeout: float, final: bool) -> beats.Event:
        self._fate.alive()
        self._exchanging = True
        outcome: Outcome
        try:
            outcome = self.meeting.beat(self._beat(self._state)._replace(final=final), timeout)
        except Exception as error:  # noqa: BLE001 - whatever it was, there was no exchange
            outcome = Failed(f"{type(error).__name__}: {error}")
        self._exchanging = False
        return beats.Heard(outcome, self._clock())

    def _beat(self, state: beats.Beating) -> Beat:
        step, phase = self._how_far()
        return Beat(
            self.plan.rank,
            state.token,
            self._incarnation,
            bool(state.beats),
            step,
            phase,
            state.leaving,
        )

    def _sleep(self, until: float) -> beats.Event:
        left = min(max(until - self._clock(), 0.0), threading.TIMEOUT_MAX)
        try:
            return self._inbox.get(timeout=left)
        except queue.Empty:
            return beats.Woke(self._clock())

    def _tell(self, outcome: Outcome) -> None:
        self._inbox.put(beats.Heard(outcome, self._clock()))
