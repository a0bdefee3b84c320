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
from regrow.heartbeat._beater import Beater
from regrow.heartbeat._beats import Plan
from regrow.heartbeat._fate import Callback, Death
from regrow.heartbeat._merge import NO_STEP, clip
from regrow.heartbeat._store_exchange import StoreExchange
from regrow.heartbeat._terms import FAILURES, HEARTBEAT_ENV, STALLED_AFTER, timeout_of
from regrow.heartbeat._world import world
from regrow.utils import get_logger
from regrow.utils._limits import LONGEST_S

if TYPE_CHECKING:
    from regrow.heartbeat._exchange import AllReduce, Exchange, Meeting, Progress
    from regrow.heartbeat._failure import HeartbeatFailure
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
            as if it was None.
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
    rank, world_size = world(*_of(exchange, rank, world_size))
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
    _check(plan, on_stall)
    return _begin(plan, exchange, store, on_failure)


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
    _check(plan, "report")
    return _begin(plan, None, None, None)


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
) -> threading.Event:
    global _beating
    with _lock:
        if _beating is not None and _beating.beater.alive:
            logger.warning("a heartbeat is running already; this start of another does nothing")
            return _beating.beater.event
        fate = Death(plan) if on_failure is None else Callback(plan, on_failure)
        beater = Beater(plan, _meeting(plan, exchange, store), fate, _how_far)
        if not plan.patient:
            beater.agree()
        beater.start()
        _beating = _Beating(beater, _last_error())
        _leave_when_it_ends()
    return beater.event


def _of(
    exchange: object, rank: int | None, world_size: int | None
) -> tuple[int | None, int | None]:
    """The rank and world size that were given, here or to the exchange."""
    rank = getattr(exchange, "rank", None) if rank is None else rank
    world_size = getattr(exchange, "world_size", None) if world_size is None else world_size
    return rank, world_size


def _check(plan: Plan, on_stall: str) -> None:
    for name, count in (("failures", plan.failures), ("stalled_after", plan.stalled_after)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name}={count!r}: give a whole number, at least 1")
    for name, value in (
        ("period", plan.period),
        ("timeout", plan.timeout),
        ("start_timeout", plan.start_timeout),
    ):
        if not 0.0 < value <= LONGEST_S:
            raise ValueError(
                f"{name}={value}: give a number of seconds greater than zero, and at most"
                f" {LONGEST_S}"
            )
    if on_stall not in ("report", "fatal"):
        raise ValueError(f"on_stall={on_stall!r}: give 'report' or 'fatal'")


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
