"""One call of a wrapped function on one rank: a loop of iterations with a restart between them.

The main thread runs these steps. A step sends one question to the store, or none:

    join ─► assign ─► enter ─► initialize, health check, function ─► completed ─► done ─► confirm
              ▲                                   │
              │                                   ▼ a fault on any rank
              └── ready ◄─ health check ◄─ finalize ◄─ (follower: last call, abort, interrupt)

Three kinds of exceptions end the loop: a `BaseException` that the package does not define, an
exception of `finalize` or of the health check, and an error of the link. The rank then reports its
exit to the other ranks, which continue without it, and raises the exception.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast
from weakref import WeakSet

from regrow import _progress as board
from regrow._stopping import begin_iteration
from regrow.inprocess.attribution import Interruption
from regrow.inprocess.call.follower import Atomic, Ending, IterationFollower
from regrow.inprocess.call.moving import Moves, RoundLeft
from regrow.inprocess.call.restart import (
    FIRST,
    LONGEST,
    Heap,
    Next,
    Pauses,
    Timeline,
    after,
    cause_of,
    describe_origin,
    exits_with_0,
    kept,
    may_be_replaced,
    release,
    report_exception,
    report_restart,
    root_cause,
    was_overdue,
)
from regrow.inprocess.compose import Compose
from regrow.inprocess.exception import (
    EvictedError,
    HealthCheckError,
    InternalError,
    LinkClosedError,
    LinkError,
    LinkLostError,
    RankShouldRestart,
    ReplaceRank,
    RestartAbort,
)
from regrow.inprocess.group.group_messages import Faults, Met, Timeouts
from regrow.inprocess.group.group_server import call_number, group_name, group_store
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.interrupt.interrupt import Interrupter
from regrow.inprocess.param_utils import substitute_param_value
from regrow.inprocess.ranks.assignment import RankAssignmentCtx, RankDiscarded, assign, call_plugin
from regrow.inprocess.state import FrozenState, Mode, State
from regrow.inprocess.store import PrefixStore, TCPStore
from regrow.inprocess.watchdog.monitor_client import open_monitor
from regrow.inprocess.watchdog.rank_progress import RankProgress, SoftWatch
from regrow.store import StoreError
from regrow.utils import describe, get_cause, get_traceback, is_a, place_of, str_of
from regrow.utils.logging import library_logger

if TYPE_CHECKING:
    from regrow.inprocess.call.wrapper import Wrapper

logger = library_logger(__name__)

T = TypeVar("T")


class CallWrapper:
    """The running call of a wrapped function, as an interface for the function itself.

    regrow passes this object to the parameter that is annotated `CallWrapper` or
    `CallWrapper | None`.
    """

    def __init__(
        self, config: Wrapper, heap: Heap, number: int | None = None, moves: Moves | None = None
    ) -> None:
        self._config = config
        self._heap = heap
        self._number = number  # of the call in this process
        self._moves = moves  # None: this rank does not go on in another round
        self._pid = os.getpid()  # a forked child takes no part in the call
        self._state = State.from_env()
        self._atomic = Atomic()
        self._stack = ExitStack()
        self._iteration = 0  # as the link counts; the assignment advances the state's
        self._timeline: Timeline | None = None  # the restart in progress
        self._pauses = Pauses()
        self._cause: BaseException | None = None  # cause of the latest restart
        self._lent: WeakSet[PrefixStore] = WeakSet()  # stores that plug-ins may have kept
        self._groups_seen = False
        self._left_as: int | None = None  # board state after this rank has left
        self._replaces = config.replace and board.has_agent()
        self._joined, self._replaced = False, tuple[int, ...]()
        self._abandon: Callable[[], object] = lambda: None  # closes the link, once there is one
        self._finalize_failed = False
        self._sent_traceback: str | None = None  # in this rank's latest event (`report_exception`)

    @property
    def number(self) -> int | None:
        """The number of the call in this process; None before it has begun."""
        return self._number

    def __enter__(self) -> CallWrapper:
        has_moved = self._number is not None
        with ExitStack() as stack:
            if self._moves is not None:  # an order to leave ends a connection attempt
                stack.callback(self._moves.listen(lambda: self._abandon()))
            try:
                self._connect(stack)
            except BaseException as error:
                if has_moved and self._goes_on(error):
                    raise RoundLeft from None
                raise
            self._stack = stack.pop_all()
        return self

    def _connect(self, stack: ExitStack) -> None:
        """Connect to the group of this call, and start the threads of this rank."""
        config, state = self._config, self._state
        assert state.rank is not None  # only a terminated rank has no rank
        stop = None if self._moves is None else self._moves.leaves
        more = {"stop": stop} if config.store_factory is TCPStore else {}
        self._store = config.store_factory(**(config.store_kwargs or {}), **more)
        if isinstance(self._store, TCPStore):
            stack.callback(self._close, self._store)
        if self._number is None:
            self._number = call_number()  # a call that cannot begin is not counted
        self._group = group_name(number=self._number)
        rank_and_size = state.rank, state.world_size
        timeouts = Timeouts(
            barrier=config.barrier_timeout.total_seconds(),
            completion=config.completion_timeout.total_seconds(),
            last_call=config.last_call_wait.total_seconds(),
            replacement=config.replace_timeout.total_seconds() if self._replaces else 0.0,
        )
        shared, group = group_store(self._store, self._group, *rank_and_size, timeouts.barrier)
        if shared is not self._store:
            stack.callback(self._close, shared)
        connect = partial(shared.session, stop=stop)
        self._link = ServiceLink(connect, group, *rank_and_size, timeouts)
        stack.callback(self._link.close)
        self._abandon = self._link.abandon
        if self._leaves:  # since the connection was there
            self._abandon()
        self._interrupter = stack.enter_context(Interrupter())
        self._follower = IterationFollower(
            self._link,
            self._atomic,
            config.abort,
            lambda: self._watch.aborting(),
            lambda: self._leaves,
        )
        stack.callback(self._follower.stop)
        stack.callback(self._link.close)
        soft, hard = config.soft_timeout.total_seconds(), config.hard_timeout.total_seconds()
        self._watch = SoftWatch(
            RankProgress(soft, hard),
            config.progress_watchdog_interval.total_seconds(),
            self._report_overdue,
            self._check_groups,
            open_monitor(shared, self._link, group, state.rank, config),
        )
        stack.callback(self._watch.close)

    def _close(self, store: TCPStore) -> None:
        if self._leaves:
            store.abandon()
        else:
            store.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() == self._pid:
            if error is None:
                board.set_restart_state(board.NOT_IN_WRAPPER)
            elif is_a(error, RoundLeft):
                pass  # the agent waits until this rank is parked
            elif not exits_with_0(error):  # no result: the board keeps "owes a result"
                left = self._left_as
                board.set_restart_state(
                    board.NOT_IN_WRAPPER if left is None else left & ~board.OWES_RESULT
                )
            if self._leaves and not is_a(error, RoundLeft):
                board.wake_agent()  # it waits for this rank to leave its round
            self._stack.close()
            # The function may keep this object. Closed parts are removed, which also frees their
            # cycles.
            self._watch = cast("SoftWatch", _CLOSED)
            for lent in self._lent:
                lent.let_go()
            self._state.store = self._state.fn_exception = self._cause = self._timeline = None
            self._abandon = lambda: None
            del self._store, self._link, self._interrupter, self._follower

    @property
    def iteration(self) -> int:
        """Number of the current call of the function, from 0."""
        return self._state.iteration

    @property
    def joined(self) -> bool:
        """Whether this process is new in this iteration, in place of one that ended.

        It is true only where `replaced` names this rank. In the first iteration of a call it is
        false on all ranks.
        """
        return self._joined

    @property
    def replaced(self) -> tuple[int, ...]:
        """The initial ranks whose processes are new in this iteration."""
        return self._replaced

    @property
    def state(self) -> FrozenState:
        """A copy of this rank's state: its ranks and the number of ranks, the iteration's store."""
        return self._state.freeze()

    def replace_me(self, reason: str) -> NoReturn:
        """End this process, and let another one take its place; see `Wrapper(replace=True)`.

        Args:
            reason: description for people.

        Raises:
            ReplaceRank: always; the wrapped function must not catch it.
        """
        raise ReplaceRank(reason)

    def ping(self) -> None:
        """Report that the function makes progress.

        The first ping of an iteration starts the check. From then on the function must ping again
        within the soft time-out, or all ranks restart.
        """
        self._watch.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Run a section of the function in which no restart begins.

        The abort and the interrupt wait until the section ends. The section does not start if they
        have begun.
        """
        with self._atomic.section():
            yield

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Suspend the time-outs for a section of the function; exceptions still restart it."""
        with self._watch.suspended():
            yield

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call the function until all ranks are done; for `Wrapper`."""
        args, kwargs = substitute_param_value(fn, args, kwargs, {CallWrapper: self})
        board.set_restart_state(self._owes_result)
        try:
            if not self._join():
                return None
            while True:
                over, value = self._iterate(fn, args, kwargs)
                if over:
                    break
        except BaseException as error:
            if os.getpid() != self._pid:
                raise
            if not self._moves_on(error):
                self._leave(error)
                raise
            release(error)
            error.__traceback__ = None
            raise RoundLeft from None
        config = self._config
        within = max(config.completion_timeout, config.hard_timeout)
        self._watch.recover(within.total_seconds())
        try:
            call_plugin(config.completion, self._state.freeze())
        except Exception:  # the work is done
            logger.exception("completion failed on rank %s", self._state.rank)
        return value

    def _join(self) -> bool:
        """Join the group, up to the point before `enter`; return False if the call is over."""
        incarnation = int(os.environ.get(board.INCARNATION_ENV) or 0)
        link = self._link
        reply = link.take_over(incarnation, describe_origin()) if incarnation else link.join()
        if reply is None:
            logger.warning("the call of the function has ended without this process")
            return False
        board.set_restart_state(self._in_wrapper)
        if isinstance(reply, int):
            self._iteration = self._state.iteration = reply
            self._assign(set())
            return True
        met = reply.met
        self._state.rank = reply.place
        self._state.iteration = met.faults.iteration
        self._timeline = Timeline(met.faults, time.monotonic())
        self._timeline.reached("met", time.monotonic())
        self._meet(met)
        self._joined = True
        return True

    @property
    def _owes_result(self) -> int:
        return board.OWES_RESULT | (board.MAY_STAY if self._moves is not None else 0)

    @property
    def _in_wrapper(self) -> int:
        replaced = board.MAY_BE_REPLACED if self._replaces else 0
        return board.IN_WRAPPER | replaced | self._owes_result

    @property
    def _leaves(self) -> bool:
        """Whether this rank leaves its round, and goes on in the next one."""
        return self._moves is not None and self._moves.leaving

    def _moves_on(self, error: BaseException) -> bool:
        """Return whether this rank goes on in the next round; then its function has ended.

        Args:
            error: why the call cannot continue here.
        """
        self._watch.rest()
        if not self._goes_on(error):
            return False
        self._watch.recover()
        self._follower.settle()  # the link may fail here before the abort has ended
        return True

    def _goes_on(self, error: BaseException) -> bool:
        within = self._config.replace_timeout.total_seconds()
        moves = None if self._finalize_failed else self._moves
        return moves is not None and moves.takes(error, within)

    # ------------------------------------------------------------ one iteration

    def _iterate(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[bool, Any]:
        """Run one iteration; return whether all ranks are done, and the value of the function."""
        state = self._state
        assert state.rank is not None  # a living rank has a number
        guarded = self._interrupter.call()
        ending = self._follower.follow(guarded, state.freeze())
        active = state.mode is Mode.ACTIVE
        ended = self._link.enter(self._iteration, state.rank, state.world_size, active=active)
        value = error = None
        if ended is None:
            if self._timeline is not None:
                self._timeline.reached("called", time.monotonic())
                report_restart(self._timeline, state)
                self._timeline = None
            logger.debug(
                "rank %s of %d begins iteration %d", state.rank, state.world_size, state.iteration
            )
            begin_iteration(self._number or 0, self._iteration)
            self._watch.begin(self._iteration)
            try:
                value, ended = guarded.run(self._play, state.freeze(), fn, args, kwargs)
            except BaseException as raised:  # noqa: BLE001 - classified by after()
                error = raised
            finally:
                self._watch.rest()
        if error is None and ended is None:
            return True, value
        if error is not None:
            received = ending.timeline is not None
            step = after(error, interrupted=guarded.requested, received=received)
            cut_off = is_a(error, LinkFailed) and self._is_cut_off(cast("LinkFailed", error).error)
            if step is Next.LEAVE and not cut_off:
                raise cast("LinkFailed", error).error if is_a(error, LinkFailed) else error
            if step is Next.REPORT:
                self._watch.recover()  # formatting a user's exception may take time
                try:
                    self._report(error)
                except LinkError as failed:
                    if not self._is_cut_off(failed):
                        raise
            elif was_overdue(ending.timeline, state.initial_rank):
                self._watch.recover()
                self._send_exception(error)  # its traceback shows where the function hung
            release(error)
        # Free all objects that the function left. A user that keeps its exception also keeps this
        # frame.
        value = error = None
        del guarded, state
        self._restart(ending)
        del ending
        return False, None

    def _play(
        self, state: FrozenState, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any, Faults | None]:
        """Call the function, or wait in reserve; then wait for the other ranks.

        This code may be interrupted anywhere. The range is from the plug-ins before the function to
        the barrier after it. An exception raised here is a fault of the function. An error of the
        link is none: `LinkFailed` wraps it, so that the user's `except Exception` does not catch
        it.

        Returns:
            The value of the function, and the faults that ended the iteration (None: all are done).

        Raises:
            LinkFailed: the link raised an error.
            HealthCheckError: this rank failed its health check.
            BaseException: the function or a plug-in raised it.
        """
        config, link = self._config, self._link
        try:
            call_plugin(config.initialize, state)
        except RestartAbort as abort:
            if abort.__cause__ is not None or abort.__suppress_context__:
                raise
            raise abort from self._cause
        check_health(config.health_check, state)
        value = None
        if state.mode is Mode.ACTIVE:
            value = fn(*args, **kwargs)
            self._watch.rest()
            self._ask(link.completed)
        else:
            self._watch.rest()
            ended = self._ask(link.wait_completed)
            if ended is not None:
                return None, ended
        ended = self._ask(link.done)
        if ended is None:
            # After all confirm, no rank continues in its place.
            board.set_restart_state(self._owes_result)
            ended = self._ask(link.confirm)
        return value, ended

    def _ask(self, question: Callable[[int], T]) -> T:
        try:
            return question(self._iteration)
        except LinkError as error:
            raise LinkFailed(error) from None

    # ---------------------------------------------------------------- a restart

    def _report(self, error: BaseException) -> None:
        left_at = time.monotonic()
        reason = get_cause(error) if is_a(error, RankShouldRestart) else error
        self._state.fn_exception = reason if isinstance(reason, Exception) else None
        kind, text = Interruption.EXCEPTION.name, f"{describe(error)}{place_of(error)}"
        raised = type(error), error, get_traceback(error)
        try:
            self._link.report(self._iteration, kind, text, time.monotonic() - left_at)
        finally:  # other ranks wait for the report; the log may be slow, so it comes second
            self._send_exception(error)
            logger.error(
                "rank %s failed in iteration %d", self._state.rank, self._iteration, exc_info=raised
            )

    def _send_exception(self, error: BaseException) -> None:
        rank = self._state.initial_rank
        self._sent_traceback = report_exception(self._iteration, rank, error, self._sent_traceback)

    def _restart(self, ending: Ending) -> None:
        """Go from the end of an iteration to the next one, up to the point before `enter`."""
        board.set_restart_state(self._in_wrapper)
        self._watch.rest()  # the last call waits for other ranks
        ending.last_call_over.wait()
        self._watch.recover()  # all ranks wait for the abort
        ending.over.wait()
        if ending.error is not None:
            if self._is_cut_off(ending.error):
                self._end_part(ending)
            raise ending.error
        timeline = ending.timeline
        if timeline is None:
            raise InternalError(
                f"the call has ended on the other ranks, so initial rank "
                f"{self._state.initial_rank} cannot restart with them"
            ) from self._state.fn_exception
        state = self._state.freeze()
        self._finalize(state)
        timeline.reached("finalized", time.monotonic())
        check_health(self._config.health_check, state)
        own, before, self._cause = kept(self._state.fn_exception), self._cause, None
        self._state.fn_exception = None  # frees the function's frames, unless kept() has it
        del state
        timeline.reached("checked", time.monotonic())
        meeting = self._follower.ready(self._iteration)
        ending.groups.clear()  # after the collection: models may be garbage
        self._heap.restarted()
        self._watch.rest()
        met = meeting.result()
        timeline.reached("met", time.monotonic())
        timeline.faults = met.faults._replace(now=timeline.faults.now)
        self._cause = cause_of(
            timeline.root, self._state.iteration, self._state.initial_rank, own, before
        )
        left, self._iteration = self._iteration, met.iteration  # the pause can be interrupted
        self._pause(met.faults)
        self._timeline = timeline
        self._meet(met)
        if self._state.rank == 0 and isinstance(self._store, TCPStore):
            with suppress(StoreError):  # the link reports a lost store
                self._store.forget(f"{self._group}/{left}")  # all ranks have left this iteration

    def _is_cut_off(self, error: BaseException) -> bool:
        """Return whether an error may be the end of this rank's round, and not of its call."""
        return self._moves is not None and is_a(error, LinkClosedError | LinkLostError)

    def _end_part(self, ending: Ending) -> None:
        """Finish an iteration for which the ranks do not meet again, as before the next one."""
        state = self._state.freeze()
        self._finalize(state)
        check_health(self._config.health_check, state)
        self._state.fn_exception = None
        del state
        gc.collect()
        ending.groups.clear()  # after the collection: models may be garbage
        self._heap.restarted()

    def _finalize(self, state: FrozenState) -> None:
        """Run `finalize`; its error ends this rank, also an error of a store."""
        try:
            call_plugin(self._config.finalize, state)
        except BaseException:
            self._finalize_failed = True
            raise

    def _meet(self, met: Met) -> None:
        """Take the place of this rank in the next iteration."""
        self._iteration = met.iteration
        self._joined, self._replaced = False, tuple(each.rank for each in met.joined)
        assert self._timeline is not None
        self._timeline.lost, self._timeline.joined = met.lost, met.joined
        self._state.world_size = met.world_size
        self._assign(set(met.terminated))
        self._state.advance()

    def _pause(self, faults: Faults) -> None:
        """Wait before the next call if the function fails repeatedly."""
        seconds = self._pauses.after(faults)
        if seconds == FIRST:
            logger.log(
                logging.WARNING if self._state.rank == 0 else logging.INFO,
                "the function fails again and again: each restart now waits up to %g s;"
                " initialize=RetryController(max_iterations=...) limits the number of restarts",
                LONGEST,
            )
        time.sleep(seconds)

    def _assign(self, terminated: set[int]) -> None:
        """Assign this rank its new rank, and set the distributed environment variables."""
        config = self._config
        store = PrefixStore(f"{self._group}/{self._iteration}", self._store)
        self._lent.add(store)
        ctx = RankAssignmentCtx(self._state, store, terminated)
        self._watch.recover()
        self._state = assign(config.rank_assignment, ctx, config.rank_filter)
        self._watch.rest()
        self._state.store = store
        self._state.set_distributed_vars()

    def _report_overdue(self, iteration: int, message: str) -> None:
        self._link.report(iteration, Interruption.SOFT_TIMEOUT.name, message)

    def _check_groups(self) -> None:
        """Warn once about process groups that end the process before the hard time-out."""
        distributed = sys.modules.get("torch.distributed")
        if self._groups_seen or distributed is None or not distributed.is_initialized():
            return
        from regrow.inprocess.torch import torch_abort

        self._groups_seen = True
        groups = torch_abort.process_groups()
        torch_abort.warn_of_short_timeouts(groups, self._config.hard_timeout)

    def _leave(self, error: BaseException) -> None:
        """End this rank's part in the call: report it to the other ranks, then run `terminate`."""
        self._watch.recover()
        replaced = self._replaces and may_be_replaced(error)
        if self._report_exit(error, replaced=replaced):
            self._left_as = board.IN_WRAPPER | (board.MAY_BE_REPLACED if replaced else 0)
        board.set_restart_state(board.OWES_RESULT if self._left_as is None else self._left_as)
        if self._left_as is not None and not is_a(error, LinkError | RestartAbort | RankDiscarded):
            self._send_exception(error)
        self._state.mode = Mode.TERMINATED
        self._watch.recover(self._config.hard_timeout.total_seconds())
        try:
            call_plugin(self._config.terminate, self._state.freeze())
        except Exception as failed:
            logger.error("terminate failed on rank %s: %s", self._state.rank, describe(failed))
            raise failed from error

    def _report_exit(self, error: BaseException, *, replaced: bool) -> bool:
        """Report the exit of this rank, and add the root cause to the error as a note.

        Args:
            error: the reason.
            replaced: whether another process may take the place of this one.

        Returns:
            Whether the others continue without this rank. The agent reads the same from the board.
        """
        left_at, rank = time.monotonic(), self._state.rank
        logger.error("rank %s leaves in iteration %d: %s", rank, self._iteration, describe(error))
        if is_a(error, EvictedError | LinkLostError):
            return is_a(error, EvictedError)  # the others know this already
        try:
            faults = self._link.terminated(
                self._iteration,
                Interruption.BASE_EXCEPTION.name,
                describe(error),
                discarded=is_a(error, RankDiscarded),
                replaced=replaced,
                lag=time.monotonic() - left_at,
            )
        except LinkError as refused:
            if str_of(refused) != str_of(error):
                logger.warning("no rank continues in place of rank %s: %s", rank, refused)
            return False
        root = root_cause(faults)
        if root is not None and root.rank != self._state.initial_rank:
            text = f"iteration {faults.iteration} ended by {root.kind} on initial rank {root.rank}"
            try:
                error.add_note(f"{text}: {root.message}")
            except Exception as refused:  # noqa: BLE001 - a user's class may reject notes
                kind = type(error).__name__
                logger.warning("%s (%s rejects notes: %s)", text, kind, describe(refused))
        return True


_CLOSED: Final = SimpleNamespace(ping=lambda: None, suspended=nullcontext)
"""Replaces the watch after the call: `ping` has no effect, and no time-out applies."""


class LinkFailed(BaseException):
    """The link failed during the function.

    It derives from BaseException, so that it is never taken for an exception of the function.
    """

    def __init__(self, error: LinkError) -> None:
        super().__init__(str(error))
        self.error = error


def check_health(check: HealthCheck | Compose | None, state: FrozenState) -> None:
    """Run the health check on this rank.

    Raises:
        HealthCheckError: the health check failed.
    """
    try:
        call_plugin(check, state)
    except Exception as error:
        raise HealthCheckError(
            f"rank {state.rank} (initial rank {state.initial_rank}) is not healthy enough to "
            f"continue: {describe(error)}"
        ) from error
