"""What a script calls: `start`, `step` and `progress`.

There is one heartbeat in a process, as there is one worker. A forked child has none of it: the
thread is not there, what the child says of itself is not the worker's, and its end is not the
worker's end.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from regrow import _progress as board
from regrow.heartbeat import _arguments as arguments
from regrow.heartbeat._beater import Beater
from regrow.heartbeat._beats import Plan
from regrow.heartbeat._fate import Callback, Death, Provisional
from regrow.heartbeat._merge import NO_STEP, clip
from regrow.heartbeat._store_exchange import StoreExchange
from regrow.heartbeat._terms import FAILURES, HEARTBEAT_ENV, STALLED_AFTER, timeout_of
from regrow.heartbeat._world import world
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.heartbeat._exchange import AllReduce, Exchange, Meeting, Progress
    from regrow.heartbeat._failure import HeartbeatFailure
    from regrow.heartbeat._fate import Fate
    from regrow.store import StoreClient

__all__ = ["progress", "start", "start_by_itself", "step"]

logger = get_logger(__name__)

MOST_STEPS: Final = 2**53
"""The greatest step."""

_beating: _Beating | None = None
_end_is_heeded = False
"""Whether this process leaves when it ends."""
_lock = threading.Lock()
_step = NO_STEP
_phase = ""


class _Beating(NamedTuple):
    beater: Beater
    error: object
    """The last exception that nobody had caught when it began."""
    provisional: Provisional | None = None
    """Its fate, if the script may still say what that is."""

    @property
    def missed(self) -> bool:
        """Whether it is over, as a worker that was faster has left, before the script's `start`.

        It had begun by itself. To another one, that worker would not come.
        """
        return self.provisional is not None and self.beater.left.total > 0


def start(
    period: float,
    *,
    exchange: Exchange | AllReduce | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    failures: int = FAILURES,
    on_failure: Callable[[HeartbeatFailure], object] | None = None,
    start_timeout: float | None = None,
    stalled_after: int | None = STALLED_AFTER,
    on_stall: Literal["report", "fatal"] = "report",
    store: StoreClient | None = None,
) -> threading.Event:
    """Agree with all workers on a token, and show it to each other every period from now on.

    Every worker calls it, with the same period and time-outs; it returns when all have. A worker
    that is missing, was started again, or is of another run is then noticed by all of them within
    `failures` x (`period` + `timeout`) seconds, and where they meet in a store and the worker's
    process has ended, within a second. Called again while the heartbeat runs, it warns and returns
    the same event.

    Under `regrow run --heartbeat` the worker beats already. The first call warns and returns that
    event, too, and `on_failure`, `stalled_after` and `on_stall` hold from then on; what all workers
    must have in common stays as the agent has it, and the others are only waited for if
    `start_timeout` is given. Where another worker has left by then, and the beating is over, it
    warns and returns that event all the same.

    When the program ends, the worker leaves, and the others stop beating without alarm. If it ends
    by an exception other than SystemExit, it does not leave, so that the others learn of it.

    Args:
        period: seconds from one exchange to the next.
        exchange: how the workers reach each other; None: by a regrow store, which needs no
            framework. A function is called with a vector and a time-out, and returns the sums.
        rank: of this worker; None: RANK, else DTENSOR_CLIENT_ID.
        world_size: how many workers there are; None: WORLD_SIZE, else DTENSOR_NUM_CLIENTS.
        timeout: seconds that an exchange may take; None: `period` - 10, at least 2. One that
            follows a failure begins at once, and may take `period` seconds more.
        failures: how many exchanges in a row may not succeed; the last of them is fatal.
        on_failure: what to do when it is. None: this process ends, whatever it is doing: by
            SIGABRT, and if that does not help by SIGKILL. Else it is called once with the failure,
            in the thread that beats, and how to end is its affair; if it raises, the process ends
            as if it was None. Under `--heartbeat`, a worker that hangs is killed by its agent all
            the same, as it cannot call anything.
        start_timeout: seconds within which all must have come; None: as long as it may take to
            notice that one is missing.
        stalled_after: for how many beats a worker's step may stay the same while others are ahead,
            or go on; None: that is nothing to this heartbeat. One that tells no steps never is.
        on_stall: whether it is reported, or fatal.
        store: a session with a store server that runs the service "heartbeat"; None: the one that
            `regrow.store.worker_store` finds.

    Returns:
        The event that stops it when it is set; it is also set when the beating has ended.

    Raises:
        HeartbeatFailure: not all workers came, or what came is not one group.
        ValueError: an argument makes no sense, or which worker this is, is not known.
    """
    if os.environ.get(HEARTBEAT_ENV):
        from regrow.heartbeat import _automatic

        _automatic.wait()  # in all workers alike, the one that begins by itself comes first
    rank, world_size = world(*arguments.of(exchange, rank, world_size))
    seconds = timeout_of(period) if timeout is None else timeout
    plan = Plan(
        rank,
        world_size,
        period,
        seconds,
        failures,
        failures * (period + seconds) if start_timeout is None else start_timeout,
        stalled_after=stalled_after,
        stall_is_fatal=on_stall == "fatal",
    )
    arguments.check(plan, on_stall)
    beater = _begin(plan, exchange, store, on_failure)
    if beater.plan.patient and start_timeout is not None:
        beater.meet(start_timeout)
    return beater.event


def start_by_itself(period: float) -> threading.Event:
    """Beat as `start` does, but wait for the other workers in the background, however long.

    For a worker whose launcher watches over the starting of all. Waiting is logged now and then.

    Args:
        period: seconds from one exchange to the next.

    Raises:
        ValueError: the period makes no sense, or which worker this is, is not known.
    """
    rank, world_size = world(None, None)
    seconds = timeout_of(period)
    bound = FAILURES * (period + seconds)
    plan = Plan(rank, world_size, period, seconds, FAILURES, bound, True, STALLED_AFTER)
    arguments.check(plan, "report")
    return _begin(plan, None, None, None).event


def step(n: int, phase: str | None = None) -> None:
    """Say how far this worker's training is, for its next beat and for the launcher.

    Args:
        n: the training step just finished, counted from the start of the job; not negative.
        phase: what is being done, 24 bytes at most; None: the same as before.

    Raises:
        ValueError: `n` is no step.
    """
    global _step, _phase
    number = index(n)
    if not 0 <= number <= MOST_STEPS:
        raise ValueError(f"step({n}): steps are numbers from 0 to 2**53")
    _step = number
    if phase is not None:
        _phase = clip(phase)
    board.step(number)


def progress() -> list[Progress]:
    """Return how far every worker is, by rank, as of its last beat; empty once that is over.

    Raises:
        RuntimeError: no heartbeat was started in this process.
        StoreError: the store cannot be asked.
    """
    if _beating is None:
        raise RuntimeError("no heartbeat was started here: call regrow.heartbeat.start first")
    beater = _beating.beater
    return beater.meeting.table(beater.plan.timeout) if beater.alive else []


def _begin(
    plan: Plan,
    exchange: Exchange | AllReduce | None,
    store: StoreClient | None,
    on_failure: Callable[[HeartbeatFailure], object] | None,
) -> Beater:
    """Beat, unless this process does already; return what beats."""
    global _beating
    with _lock:
        if _beating is not None and (_beating.beater.alive or _beating.missed):
            _join(_beating, plan, on_failure)
            return _beating.beater
        fate = _fate_of(plan, on_failure)
        beater = Beater(plan, _meeting(plan, exchange, store), fate, _how_far)
        if not plan.patient:
            beater.agree()
        beater.start()
        _beating = _Beating(beater, _last_error(), fate if isinstance(fate, Provisional) else None)
        _leave_when_it_ends()
    return beater


def _fate_of(plan: Plan, on_failure: Callable[[HeartbeatFailure], object] | None) -> Fate:
    if on_failure is not None:
        return Callback(plan, on_failure)
    return Provisional(plan) if plan.patient else Death(plan)


def _join(
    beating: _Beating, plan: Plan, on_failure: Callable[[HeartbeatFailure], object] | None
) -> None:
    """Take over what a script may say of a beating that began by itself, once."""
    global _beating
    beater, fate = beating.beater, beating.provisional
    if fate is None:
        logger.warning("a heartbeat is running already; this start of another does nothing")
        return
    _beating = beating._replace(provisional=None)
    if beating.missed:
        logger.warning(
            "the heartbeat of `regrow run --heartbeat` is over already, as %s left in peace; this "
            "start does nothing",
            beater.left,
        )
        return
    logger.warning(
        "a heartbeat is running already, every %g s, as `regrow run --heartbeat` has it; of this "
        "start, on_failure, stalled_after and on_stall hold, and the rest does nothing",
        beater.plan.period,
    )
    if on_failure is not None and not fate.hand_over(on_failure):
        logger.warning("the heartbeat has failed already, and on_failure comes too late")
    beater.judge(plan.stalled_after, stall_is_fatal=plan.stall_is_fatal)


def _meeting(
    plan: Plan, exchange: Exchange | AllReduce | None, store: StoreClient | None
) -> Meeting:
    if plan.size == 1 and exchange is None:  # there is nobody to meet
        exchange = _alone
    if exchange is None:
        exchange = StoreExchange(store, rank=plan.rank, world_size=plan.size)
    if isinstance(exchange, StoreExchange):
        return exchange
    from regrow.heartbeat._vector import VectorMeeting

    return VectorMeeting(exchange, plan.size)


def _alone(vector: Sequence[int], timeout: float) -> Sequence[int]:
    return vector


def _how_far() -> tuple[int, str]:
    """The step and the phase of this process."""
    told = board.latest() if _step == NO_STEP else _step
    return (NO_STEP if told is None else told), _phase


def _leave_when_it_ends() -> None:
    """Have this process leave when it ends."""
    global _end_is_heeded
    if _end_is_heeded:
        return
    _end_is_heeded = True
    atexit.register(_at_exit)
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:  # a child of which runs no handlers of atexit
        multiprocessing.Finalize(None, _at_exit, exitpriority=0)


def _at_exit() -> None:
    """Leave the others, unless this process fails; once, though both may call it."""
    global _beating
    beating, _beating = _beating, None
    if beating is None:
        return
    now = sys.exc_info()[1]  # a child of multiprocessing still has it in hand
    clean = now is None or (isinstance(now, SystemExit) and not now.code)
    if clean and _last_error() is beating.error:
        beating.beater.leave()


def _last_error() -> object:
    """The exception that ended the main thread, if one has."""
    return getattr(sys, "last_value", None)


def _after_fork() -> None:
    """Begin anew in a child; a thread of the parent's may have held the lock."""
    global _beating, _end_is_heeded, _lock
    _beating, _end_is_heeded, _lock = None, False, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
