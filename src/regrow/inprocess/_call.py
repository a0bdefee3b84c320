"""One call of a wrapped function: its iterations, from the first meeting of the ranks to the last.

The main thread goes through these steps, each of which is one question to the store or none:

    join ─► assign ─► enter ─► initialize, health check, the function ─► completed ─► done
              ▲                                   │
              │                                   ▼ a fault, wherever it was
              └── ready ◄─ health check ◄─ finalize ◄─ (follower: last call, abort, interrupt)

What leaves this circle, leaves for good: a `BaseException` that is none of the package's, what
`finalize` or the health check raises, and what the link says. The rank then tells the others, who
go on without it, and raises what it was.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from regrow import _progress as board
from regrow.inprocess._assignment import RankAssignmentCtx
from regrow.inprocess._atomic import Atomic
from regrow.inprocess._body import Body, LinkFailed, check_health
from regrow.inprocess._config import Config
from regrow.inprocess._follower import Ending, Follower
from regrow.inprocess._generations import assign, call
from regrow.inprocess._interrupt import Interrupter
from regrow.inprocess._leaving import complete, leave, terminate
from regrow.inprocess._link import Link
from regrow.inprocess._logging import describe
from regrow.inprocess._open import group_name, open_link, open_monitor
from regrow.inprocess._pause import LONGEST, Pauses
from regrow.inprocess._progress import Watch
from regrow.inprocess._progress_watch import SoftWatch
from regrow.inprocess._restart import Next, Timeline, after
from regrow.inprocess._retold import tell
from regrow.inprocess.attribution import Interruption
from regrow.inprocess.exception import InternalError
from regrow.inprocess.param_utils import substitute_param_value
from regrow.inprocess.state import Mode, State
from regrow.inprocess.store import PrefixStore, TCPStore
from regrow.store import StoreError
from regrow.utils import get_logger

logger = get_logger(__name__)


class CallWrapper:
    """The live call of a wrapped function, for the function itself.

    A parameter annotated `CallWrapper`, or `CallWrapper | None`, is given it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pid = os.getpid()  # the child of a fork has no part in this, and no say
        self._state = State.from_env()
        self._atomic = Atomic()
        self._stack = ExitStack()
        self._iteration = 0  # as the link counts; the state's is advanced by the assignment
        self._timeline: Timeline | None = None  # of the restart that is under way
        self._pauses = Pauses()
        self._has_paused = False
        self._groups_seen = False
        self._left = False

    def __enter__(self) -> CallWrapper:
        with ExitStack() as stack:
            config, state = self._config, self._state
            assert state.rank is not None  # it is None for a terminated rank only
            make = partial(config.store_factory, **(config.store_kwargs or {}))
            self._store = make()
            if isinstance(self._store, TCPStore):
                stack.callback(self._store.close)
            clone = getattr(self._store, "clone", None)
            self._group = group_name()
            self._link: Link = open_link(
                self._store,
                clone or make,
                self._group,
                state.rank,
                state.world_size,
                config.timeouts,
            )
            stack.callback(self._link.close)
            self._interrupter = stack.enter_context(Interrupter())
            self._follower = Follower(self._link, self._atomic, config.abort)
            stack.callback(self._follower.stop)
            stack.callback(self._link.close)
            self._watch: Watch = SoftWatch(
                config.soft_timeout.total_seconds(),
                config.progress_watchdog_interval.total_seconds(),
                self._overdue,
                self._look_at_groups,
                open_monitor(self._store, self._link, self._group, state.rank, config),
                config.hard_timeout.total_seconds(),
            )
            stack.callback(self._watch.close)
            stack.callback(self._stand_alone_again)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        if os.getpid() == self._pid:
            self._stack.close()

    def _stand_alone_again(self) -> None:
        if not self._left:
            board.stand(board.STANDS_ALONE)

    @property
    def iteration(self) -> int:
        """The number of the present call of the function, from 0."""
        return self._state.iteration

    def ping(self) -> None:
        """Say that the function makes progress.

        From the first time on that it is called in an iteration, it has to be called again within
        the soft time-out, or all ranks restart.
        """
        self._watch.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A section of the function in which no restart begins.

        The abort and the interrupt wait until it is left. Where they have begun, the section is not
        entered.
        """
        with self._atomic.section():
            yield

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A section of the function that may take as long as it likes; exceptions restart it."""
        with self._watch.unjudged():
            yield

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call the function until all ranks are done; for `Wrapper`."""
        args, kwargs = substitute_param_value(fn, args, kwargs, {CallWrapper: self})
        try:
            self._iteration = self._state.iteration = self._link.join()
            self._assign(set())
            board.stand(board.IN_RESTARTER)
            while True:
                over, value = self._iterate(fn, args, kwargs)
                if over:
                    break
        except BaseException as error:
            if os.getpid() == self._pid:
                self._leave(error)
            raise
        complete(self._config.completion, self._state)
        return value

    # ------------------------------------------------------------ one iteration

    def _iterate(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[bool, Any]:
        """Make one call of the function; returns whether all are done, and its value."""
        state = self._state
        assert state.rank is not None  # it is living
        guarded = self._interrupter.call()
        ending = self._follower.follow(guarded, state.freeze())
        ended = self._link.enter(self._iteration, state.rank, state.world_size)
        value, error = None, None
        if ended is None:
            self._restarted()
            self._watch.begin(self._iteration)
            try:
                body = Body(self._config, self._link, self._watch, state.freeze(), self._iteration)
                value, ended = guarded.run(body.run, fn, args, kwargs)
            except BaseException as raised:  # noqa: BLE001 - looked at below
                error = raised
            finally:
                self._watch.rest()
        step = after(
            error,
            ended=ended is not None,
            interrupted=guarded.requested,
            told=ending.faults is not None,
        )
        if step is Next.RETURN:
            return True, value
        if step is Next.LEAVE:
            assert error is not None  # or it would have returned
            raise error.error if isinstance(error, LinkFailed) else error
        if step is Next.REPORT:
            assert isinstance(error, Exception)  # only such are reported
            self._report(error)
        value = error = None  # they hold what the function has left behind
        self._restart(ending)
        return False, None

    # ---------------------------------------------------------------- a restart

    def _report(self, error: Exception) -> None:
        left_at = time.monotonic()
        self._state.fn_exception = error
        kind, text = Interruption.EXCEPTION.name, describe(error)
        try:
            self._link.report(self._iteration, kind, text, time.monotonic() - left_at)
        finally:  # others wait for the report, and nobody for the log, which may be slow
            logger.error(
                "rank %s failed in iteration %d", self._state.rank, self._iteration, exc_info=error
            )

    def _restart(self, ending: Ending) -> None:
        """Go from the end of an iteration to the next one, ready to enter."""
        ending.heard.wait()
        self._watch.recover()  # with the abort, which all wait for
        ending.over.wait()
        if ending.error is not None:
            raise ending.error
        if ending.faults is None:
            raise InternalError(f"an iteration has ended by no fault: {self._state}")
        timeline = Timeline(ending.faults, ending.told_at)
        timeline.reached("aborted", ending.aborted_at)
        state = self._state.freeze()
        if self._config.finalize is not None:
            call(self._config.finalize, state)
        timeline.reached("finalized", time.monotonic())
        check_health(self._config.health_check, state)
        self._state.fn_exception = None  # it holds the function's frames, and nobody needs it now
        del state
        timeline.reached("checked", time.monotonic())
        meeting = self._follower.ready(self._iteration)
        ending.groups.clear()  # after the garbage, of which models may be part
        self._watch.rest()
        met = meeting.result()
        timeline.reached("met", time.monotonic())
        timeline.faults = met.faults._replace(now=timeline.faults.now)
        timeline.lost = met.lost
        left, self._iteration = self._iteration, met.iteration  # a pause can be interrupted
        self._pause(self._pauses.after(met.faults, ending.told_at))
        self._timeline = timeline
        self._assign(set(met.terminated))
        self._state.advance()
        if self._state.rank == 0:
            self._forget(left)

    def _pause(self, seconds: float) -> None:
        """Wait, if the function fails again and again."""
        if not seconds:
            return
        if not self._has_paused:
            self._has_paused = True
            logger.log(
                logging.WARNING if self._state.rank == 0 else logging.INFO,
                "the function fails again and again: restarts wait from now on, up to %g s each;"
                " initialize=RetryController(max_iterations=...) gives them a bound",
                LONGEST,
            )
        time.sleep(seconds)

    def _assign(self, terminated: set[int]) -> None:
        """Take this rank's place among the living, and tell the function by the environment."""
        config = self._config
        store = PrefixStore(f"{self._group}/{self._iteration}", self._store)
        ctx = RankAssignmentCtx(self._state, store, terminated)
        self._watch.recover()
        self._state = assign(config.rank_assignment, ctx, config.rank_filter)
        self._watch.rest()
        self._state.store = store
        self._state.set_distributed_vars()

    def _forget(self, iteration: int) -> None:
        """Delete the keys of an iteration, which all have left, from a store of ours."""
        if isinstance(self._store, TCPStore):
            with suppress(StoreError):  # a lost store is the link's to tell
                self._store.forget(f"{self._group}/{iteration}")

    def _restarted(self) -> None:
        """A restart is through: all have entered, and the function is about to be called."""
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return
        timeline.reached("called", time.monotonic())
        tell(timeline, self._state)

    def _overdue(self, iteration: int, message: str) -> None:
        self._link.report(iteration, Interruption.SOFT_TIMEOUT.name, message)

    def _look_at_groups(self) -> None:
        """Warn, once, of process groups that end the process before the hard time-out would."""
        distributed = sys.modules.get("torch.distributed")
        if self._groups_seen or distributed is None or not distributed.is_initialized():
            return
        from regrow.inprocess import _torch_abort

        self._groups_seen = True
        _torch_abort.warn_of_short_timeouts(self._config.hard_timeout)

    def _leave(self, error: BaseException) -> None:
        """End this rank's part."""
        self._watch.recover()
        self._left = leave(self._link, self._state, self._iteration, error)
        self._state.mode = Mode.TERMINATED
        terminate(self._config.terminate, self._state, error)
