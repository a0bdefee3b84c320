"""The calls of a script: `start`, `step` and `progress`.

A process has at most one heartbeat, because it is one worker. A forked child has none, because the
heartbeat's thread does not exist there. Also, neither the child's steps nor the child's end are
those of the worker.
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
from regrow.heartbeat.beater import Beater
from regrow.heartbeat.beats import HeartbeatPlan
from regrow.heartbeat.failure_policy import FailurePolicy
from regrow.heartbeat.merge import NO_STEP, clip
from regrow.heartbeat.store_exchange import StoreExchange
from regrow.heartbeat.terms import FAILURES, HEARTBEAT_ENV, STALLED_AFTER, timeout_of, world
from regrow.utils import LONGEST_S, get_logger

if TYPE_CHECKING:
    from regrow.heartbeat.failure import HeartbeatFailure
    from regrow.heartbeat.merge import AllReduce, AllReduceExchange, Meeting, WorkerProgress
    from regrow.store import StoreClient

    AnyExchange = AllReduceExchange | AllReduce | StoreExchange

__all__ = ["progress", "start", "start_by_itself", "step"]

logger = get_logger(__name__)

MOST_STEPS: Final = 2**53
"""The highest step number."""

running: Running | None = None
"""The heartbeat of this process; it may have ended already."""
lock = threading.Lock()
own_step = NO_STEP
own_phase = ""


class Running(NamedTuple):
    """A heartbeat that was started."""

    beater: Beater
    error: object
    """The last uncaught exception of the process when the heartbeat started."""
    policy: FailurePolicy | None = None
    """Set if the heartbeat started automatically, and the script has not called `start` yet."""

    @property
    def missed(self) -> bool:
        """Whether an automatic heartbeat has ended because a faster worker left.

        A new heartbeat would wait for that worker without end.
        """
        return self.policy is not None and self.beater.left.total > 0


def start(
    period: float,
    *,
    exchange: AnyExchange | None = None,
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
    """Start the heartbeat: agree on a token with all workers, and exchange it each period.

    Every worker calls this function, with the same period and time-outs. It returns when all
    workers have called it. From then on, all workers detect a worker that is missing, restarted, or
    part of another run. They detect it within `failures` x (`period` + `timeout`) seconds. If the
    workers meet in a store and the worker's process has ended, they detect it within a second. A
    second call while the heartbeat runs logs a warning and returns the same event.

    Under `regrow run --heartbeat` the heartbeat already runs. The first call then also logs a
    warning and returns the event of that heartbeat. `on_failure`, `stalled_after` and `on_stall`
    apply from then on. Settings that all workers must have in common stay as the agent set them.
    The call waits for the other workers only if `start_timeout` is given. If another worker has
    left by then, the heartbeat has ended. The call still logs a warning and returns that event.

    All workers begin together, so a process that replaces another one cannot take part
    (`inprocess.Wrapper(replace=True)`). The call then logs a warning and returns an event that is
    set.

    When the program ends, the worker leaves, and the other workers stop their heartbeats without an
    error. If the program ends with an exception other than SystemExit, the worker does not leave,
    so the other workers detect the failure.

    Args:
        period: seconds from one exchange to the next.
        exchange: how the workers exchange data; None: through a regrow store, which needs no
            framework. A function is called with a vector and a time-out, and returns the sums.
        rank: rank of this worker; None: RANK, else DTENSOR_CLIENT_ID.
        world_size: number of workers; None: WORLD_SIZE, else DTENSOR_NUM_CLIENTS.
        timeout: seconds that an exchange may take; None: `period` - 10, at least 2. An exchange
            after a failed one begins at once, and may take `period` seconds longer.
        failures: number of consecutive failed exchanges that is fatal.
        on_failure: what to do on a fatal failure. None: this process ends in any state, by SIGABRT,
            and by SIGKILL if SIGABRT does not end it. A function is called once with the failure,
            in the heartbeat's thread, and decides how the process ends. If the function raises, the
            process ends as with None. Under `--heartbeat`, the agent still kills a worker that
            hangs, because a hung worker cannot call a function.
        start_timeout: seconds within which all workers must arrive; None: the time that it takes to
            detect a missing worker.
        stalled_after: number of beats for which a worker's step may stay the same while other
            workers are ahead or make progress; None: this heartbeat ignores steps. A worker that
            reports no steps never stalls.
        on_stall: whether a stall is reported, or fatal.
        store: a session with a store server that runs the service "heartbeat"; None: the session of
            `regrow.store.worker_store`.

    Returns:
        The event of the heartbeat. Setting it stops the heartbeat, and a heartbeat that ends sets
        it.

    Raises:
        HeartbeatFailure: not all workers arrived, or the workers that arrived are not one group.
        ValueError: an argument is invalid, or the rank is not known.
    """
    if os.environ.get(HEARTBEAT_ENV):
        from regrow.heartbeat import automatic

        automatic.wait()  # the automatic heartbeat comes first, on all workers alike
    if rank is None:
        rank = getattr(exchange, "rank", None)
    if world_size is None:
        world_size = getattr(exchange, "world_size", None)
    rank, world_size = world(rank, world_size)
    seconds = timeout_of(period) if timeout is None else timeout
    plan = HeartbeatPlan(
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
    if _replaces_another():
        logger.warning(
            "heartbeat of rank %s: this process replaces another one while the heartbeat of the"
            " other workers runs or has ended, so it sends no heartbeat",
            rank,
        )
        over = threading.Event()
        over.set()
        return over
    beater = _begin(plan, exchange, store, on_failure)
    if beater.plan.patient and start_timeout is not None:
        beater.meet(start_timeout)
    return beater.event


def start_by_itself(period: float) -> threading.Event:
    """Start the heartbeat like `start`, but wait for the others in the background, without a limit.

    For a worker with a launcher that monitors the start of all workers. The wait is logged from
    time to time.

    Args:
        period: seconds from one exchange to the next.

    Raises:
        ValueError: the period is invalid, or the rank is not known.
    """
    rank, world_size = world(None, None)
    seconds = timeout_of(period)
    bound = FAILURES * (period + seconds)
    plan = HeartbeatPlan(rank, world_size, period, seconds, FAILURES, bound, True, STALLED_AFTER)
    _check(plan, "report")
    return _begin(plan, None, None, None).event


def step(n: int, phase: str | None = None) -> None:
    """Report the training progress of this worker, for its next beat and for the launcher.

    Args:
        n: the training step just finished, counted from the start of the job; not negative.
        phase: what the worker is doing, 24 bytes at most; None: the same as before.

    Raises:
        ValueError: `n` is not a valid step.
    """
    global own_step, own_phase
    number = index(n)
    if not 0 <= number <= MOST_STEPS:
        raise ValueError(f"step({n}): give a number from 0 to 2**53")
    own_step = number
    if phase is not None:
        own_phase = clip(phase)
    board.step(number)


def progress() -> list[WorkerProgress]:
    """Return the progress of every worker at its last beat, by rank.

    The list is empty after the heartbeat has ended, and in a process that replaces another one.

    Raises:
        RuntimeError: no heartbeat was started in this process.
        StoreError: the store is not reachable.
    """
    if running is None and _replaces_another():
        return []
    if running is None:
        raise RuntimeError(
            "no heartbeat was started in this process: call regrow.heartbeat.start first"
        )
    beater = running.beater
    return beater.meeting.table(beater.plan.timeout) if beater.alive else []


def _replaces_another() -> bool:
    return int(os.environ.get(board.INCARNATION_ENV) or 0) > 0


def _begin(
    plan: HeartbeatPlan,
    exchange: AnyExchange | None,
    store: StoreClient | None,
    on_failure: Callable[[HeartbeatFailure], object] | None,
) -> Beater:
    """Start the heartbeat, or join the one that this process already has."""
    global running
    with lock:
        if running is not None and (running.beater.alive or running.missed):
            _join(running, plan, on_failure)
            return running.beater
        policy = FailurePolicy(plan, on_failure)
        beater = Beater(plan, make_meeting(plan, exchange, store), policy, _how_far)
        if not plan.patient:
            beater.agree()
        beater.start()
        running = Running(beater, last_error(), policy if plan.patient else None)
        leave_at_exit()
    return beater


def _join(
    began: Running, plan: HeartbeatPlan, on_failure: Callable[[HeartbeatFailure], object] | None
) -> None:
    """Apply the first `start` of the script to a heartbeat that started automatically."""
    global running
    beater, policy = began.beater, began.policy
    if policy is None:
        logger.warning(
            "heartbeat: this process already runs a heartbeat; this call of heartbeat.start is "
            "ignored"
        )
        return
    running = began._replace(policy=None)
    if began.missed:
        logger.warning(
            "heartbeat: the heartbeat of `regrow run --heartbeat` has ended, because %s left; this "
            "call of heartbeat.start is ignored",
            beater.left,
        )
        return
    logger.warning(
        "heartbeat: `regrow run --heartbeat` has already started a heartbeat every %g s; this call "
        "of heartbeat.start sets only on_failure, stalled_after and on_stall",
        beater.plan.period,
    )
    if on_failure is not None and not policy.hand_over(on_failure):
        logger.warning("heartbeat: it has failed already, so on_failure is not called")
    beater.set_stall_rule(plan.stalled_after, is_fatal=plan.stall_is_fatal)


def make_meeting(
    plan: HeartbeatPlan,
    exchange: AnyExchange | None,
    store: StoreClient | None,
) -> Meeting:
    """The connection to the other workers; the arguments are those of `start`."""
    if plan.size == 1 and exchange is None:  # there are no others
        exchange = _alone
    if exchange is None:
        exchange = StoreExchange(store, rank=plan.rank, world_size=plan.size)
    if isinstance(exchange, StoreExchange):
        return exchange
    from regrow.heartbeat.vector_exchange import VectorMeeting

    return VectorMeeting(exchange, plan.size)


def _alone(vector: Sequence[int], timeout: float) -> Sequence[int]:
    return vector


def _how_far() -> tuple[int, str]:
    """The latest step number, and the text that the user gave as `phase`."""
    latest = board.latest() if own_step == NO_STEP else own_step
    return (NO_STEP if latest is None else latest), own_phase


def leave_at_exit() -> None:
    """Register `leave` to run when this process ends, before the session that it uses is closed."""
    atexit.unregister(leave)
    atexit.register(leave)
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:  # multiprocessing runs no atexit handlers in its children
        multiprocessing.Finalize(None, leave, exitpriority=0)


def leave() -> None:
    """Leave the heartbeat, unless this process is failing; only the first call has an effect."""
    global running
    began, running = running, None
    if began is None:
        return
    error = sys.exc_info()[1]  # a multiprocessing child still handles its exception here
    clean = error is None or (isinstance(error, SystemExit) and not error.code)
    if clean and last_error() is began.error:
        began.beater.leave()


def last_error() -> object:
    """The uncaught exception that ended the main thread, if any."""
    return getattr(sys, "last_value", None)


def _after_fork() -> None:
    """Reset the heartbeat in a forked child; a thread of the parent may have held the lock."""
    global running, lock
    running, lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _check(plan: HeartbeatPlan, on_stall: str) -> None:
    """Check the arguments of `start`.

    Raises:
        ValueError: an argument is invalid.
    """
    for name in ("failures", "stalled_after"):
        count = getattr(plan, name)
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name}={count!r}: give a whole number, at least 1")
    for name in ("period", "timeout", "start_timeout"):
        value = getattr(plan, name)
        if not 0.0 < value <= LONGEST_S:
            raise ValueError(
                f"{name}={value}: give a number of seconds greater than zero, and at most"
                f" {LONGEST_S}"
            )
    if on_stall not in ("report", "fatal"):
        raise ValueError(f"on_stall={on_stall!r}: give 'report' or 'fatal'")
