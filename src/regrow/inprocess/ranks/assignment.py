"""Base class of rank assignments; calls, checks and time limits of the plug-ins of a wrapper.

| plug-in | first generation | current generation |
|---|---|---|
| initialize, abort | `(state) -> state` | the same |
| finalize, health check | `(state, exception) -> (state, exception)` | `(state) -> state` |
| completion, terminate | none | `(state) -> state` |
| rank assignment | `(state, terminated) -> (state, terminated)` | `(ctx) -> ctx` |
| rank filter | `(state) -> state` | a rank assignment |

The wrapper and the parts of a `Compose` pass on the current form: a state or a
`RankAssignmentCtx`. A plug-in with two positional parameters belongs to the first generation. It
receives its two arguments from the current form, and its results are put back there. Each part of
a chain is inspected separately, so a chain may mix both generations. Other code calls plug-ins,
too: a class derived from a built-in calls the built-in with its own arguments.
`both_generations` lets the built-in accept either form and return the same form.

A plug-in may return None, True or another value of the wrong type. Then its input is passed on. In
a chain, where the next plug-in needs the result, this gives a warning. A rank assignment outside a
chain also gives it, unless it returned None.

**Checks.** Arguments are checked when a plug-in is constructed. Otherwise a wrong value would raise
in the first call of the plug-in, on all ranks, and in `initialize` at each restart.

**Time limits.** Python cannot end a thread. So a function that exceeds its limit continues in a
daemon thread, which does not delay the end of the process. An exception within the limit is raised
in the caller, because a failed check must not look like a passed one.
"""

from __future__ import annotations

import abc
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

from regrow.inprocess.exception import RestartError, TimeoutError
from regrow.inprocess.state import FrozenState, Mode, State
from regrow.utils import call_in_thread, repr_of


class RankDiscarded(RestartError):
    """This rank has no place in the next iteration."""


@dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment.

    Attributes:
        state: state of this rank; its `rank` counts the ranks of the iteration that ended.
        store: store that all living ranks share and that has no other use; each key is used once.
        terminated_ranks: ranks that do not continue, numbered like `state.rank`. The set is the
            same on all ranks. It is empty after an assignment has removed these ranks.
    """

    state: State
    store: Any
    terminated_ranks: set[int]

    def __post_init__(self) -> None:
        self.given = self.state


class RankAssignment(abc.ABC):
    """Base class of `rank_assignment` plug-ins: number the living ranks, choose the active ones.

    The wrapper calls it on every living rank with the same terminated ranks. It must compute the
    same result on every rank. Active ranks call the wrapped function; the others wait in reserve.
    `Compose` chains several; the assignments that number the ranks run first. If none of the chain
    chooses active ranks, all ranks are active.

    A process that replaces another one (`Wrapper(replace=True)`) calls it for the first time after
    a restart, with the rank that the ended process had.
    """

    keeps_state = False
    """Whether it keeps what it learned in earlier iterations, which a new process does not have."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Change `ctx` and return it.

        Raises:
            RankDiscarded: this rank has no place in the next iteration.
        """


def with_active(state: State, size: int) -> State:
    """Return `state` with the first `size` living ranks active."""
    assert state.rank is not None  # terminated ranks were discarded before
    active = state.rank < size
    return replace(
        state,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
        active_rank=state.rank if active else None,
        active_world_size=size,
    )


def without_active(state: State) -> State:
    """Return `state` without a choice of active ranks."""
    return replace(state, mode=Mode.INITIALIZED, active_rank=None, active_world_size=None)


Method = TypeVar("Method", bound=Callable[..., Any])
_State = TypeVar("_State", bound=State | FrozenState)


def call_plugin(plugin: Callable[..., Any] | None, state: _State, *, warn: bool = False) -> _State:
    """Call an initialize, abort, finalize, health check, completion or terminate plug-in.

    Args:
        plugin: the plug-in, of either generation; None: there is none.
        state: the state that it receives.
        warn: warn if the plug-in returns something else than a state.

    Returns:
        The state that the plug-in returned, or `state` if it returned something else.

    Raises:
        BaseException: the exception of the plug-in.
    """
    if plugin is None:
        return state
    if _takes_two(plugin):
        returned = plugin(state, state.fn_exception)
        returned = returned[0] if isinstance(returned, tuple) and returned else returned
    else:
        returned = plugin(state)
    if not isinstance(returned, State | FrozenState):
        if warn:
            _warn(plugin, returned, "what it was given")
        return state
    return _with_store(cast(_State, returned), state.store)


def assign(
    assignment: Callable[..., Any],
    ctx: RankAssignmentCtx,
    rank_filter: Callable[..., Any] | None = None,
) -> State:
    """Number the living ranks and choose the active ones.

    Args:
        assignment: the rank assignment, of either generation.
        ctx: its input; `ctx.state.store` is set to the context's store.
        rank_filter: plug-in that chooses the active ranks at the end, of either generation.

    Returns:
        The state of this rank in the next iteration; its mode is active or inactive.

    Raises:
        RankDiscarded: this rank has no place in the next iteration.
        RestartError: terminated ranks are left over, because no assignment in the chain removes
            them; or a rank or a size is not an integer.
    """
    left = _assigned(assignment, ctx)
    if left.terminated_ranks:
        raise RestartError(
            f"{repr_of(assignment)} did not remove terminated_ranks="
            f"{sorted(left.terminated_ranks)}: compose it with an assignment that does, such as "
            f"rank_assignment.ShiftRanks()"
        )
    if left.state.mode is Mode.INITIALIZED:
        left.state.activate_all_ranks()
    state = left.state if rank_filter is None else _assigned(rank_filter, left).state
    _make_whole(state, assignment)
    return state


def _make_whole(state: State, assignment: object) -> None:
    """Convert the ranks and sizes of a state to int, because user code may set other types."""
    for name in ("rank", "world_size", "active_rank", "active_world_size"):
        value = getattr(state, name)
        if value is None and name.startswith("active"):
            continue
        try:
            setattr(state, name, whole(name, value))
        except (TypeError, ValueError) as error:
            raise RestartError(f"{repr_of(assignment)} leaves a state with {error}") from None


def apply(part: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call one part of a `Compose`; receive and return the arguments that the chain passes on."""
    match given:
        case (RankAssignmentCtx() as ctx,):
            return (_assigned(part, ctx, warn=True),)
        case (State() | FrozenState() as state,):
            return (call_plugin(part, state, warn=True),)
        case (State() as state, Collection() as terminated):
            ctx = RankAssignmentCtx(state, state.store, set(terminated))
            ctx = _assigned(part, ctx, warn=True)
            return (ctx.state, ctx.terminated_ranks)
        case (State() | FrozenState() as state, BaseException() | None as error):
            state = call_plugin(part, _with_exception(state, error), warn=True)
            return (state, state.fn_exception)
    returned = part(*given)
    if returned is None and given == ():
        return ()
    if returned is None and given != (None,):
        _warn(part, None, "None")
    return returned if isinstance(returned, tuple) else (returned,)


def both_generations(method: Method) -> Method:
    """Make a built-in's `__call__` of one argument also accept the two older arguments."""

    @functools.wraps(method)
    def called(self: Any, *given: Any, **named: Any) -> Any:
        given += tuple(named.values())
        if len(given) == 1:
            return method(self, *given)
        if given[0] is None:  # called without a wrapper, by code without a state
            method(self, FrozenState(None, 0, fn_exception=given[1]))
            return given
        return apply(functools.partial(method, self), given)

    return cast(Method, called)


def _assigned(
    assignment: Callable[..., Any], ctx: RankAssignmentCtx, *, warn: bool = False
) -> RankAssignmentCtx:
    from regrow.inprocess.rank_filter import RankFilter  # it imports this module

    ctx.state.store = ctx.store
    returned: Any
    first_generation = False
    if isinstance(assignment, RankFilter):
        returned = assignment(ctx.state)
    elif first_generation := _takes_two(assignment):
        returned = assignment(ctx.state, ctx.terminated_ranks)
    else:
        returned = assignment(ctx)
    match returned:
        case RankAssignmentCtx():
            ctx = returned
        case State():
            ctx.state = returned
        case (State() as state, Collection() as terminated):
            ctx.state, ctx.terminated_ranks = state, set(terminated)
        case _ if warn or returned is not None:
            _warn(assignment, returned, "what it was given")
    if first_generation:  # only its filters choose active ranks, and they run later
        ctx.state = without_active(ctx.state)
    ctx.state.store = ctx.store
    return ctx


def positional(called: Callable[..., Any]) -> tuple[int, int]:
    """Return how many positional arguments a callable needs, and how many it accepts."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return 1, 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = [parameter for parameter in parameters if parameter.kind in kinds]
    needed = [each for each in by_place if each.default is inspect.Parameter.empty]
    return len(needed), len(by_place)


def _takes_two(plugin: Callable[..., Any]) -> bool:
    needed, taken = positional(plugin)  # the exception may have a default
    return needed <= 2 <= taken


def _warn(plugin: object, returned: object, instead: str) -> None:
    what = "nothing" if returned is None else repr_of(returned)
    warnings.warn(f"{repr_of(plugin)} returned {what}; {instead} is passed on", stacklevel=5)


def _with_exception(state: _State, error: BaseException | None) -> _State:
    if state.fn_exception is error:
        return state
    return _with_store(replace(state, fn_exception=cast(Exception | None, error)), state.store)


def _with_store(state: _State, store: object) -> _State:
    if state.store is None and store is not None:
        object.__setattr__(state, "_store", store)
    return state


C = TypeVar("C", bound=Callable[..., Any])


def whole(name: str, value: Any, least: int = 0) -> int:
    """Check that a value is an integer, and return it as int.

    Args:
        name: name of the argument, for the error text.
        value: the value; any integer type except bool.
        least: the smallest valid value.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}={repr_of(value)} is not an integer") from None
    if number < least:
        raise ValueError(f"{name}={number} is too small: pass {least} or more")
    return number


def whole_or_none(name: str, value: Any, least: int = 0) -> int | None:
    """Check an integer as `whole` does; None is also valid."""
    return None if value is None else whole(name, value, least)


def duration(name: str, value: Any) -> timedelta:
    """Check that a value is a duration of 0 or more, and return it.

    Args:
        name: name of the argument, for the error text.
        value: the value.

    Raises:
        TypeError: the value is not a timedelta.
        ValueError: the value is negative.
    """
    if not isinstance(value, timedelta):
        raise TypeError(
            f"{name}={repr_of(value)} is not a timedelta: pass datetime.timedelta(seconds=...)"
        )
    if value < timedelta(0):
        raise ValueError(f"{name}={value} is negative")
    return value


def function(name: str, value: C) -> C:
    """Check that a value is callable, and return it.

    Args:
        name: name of the argument, for the error text.
        value: the value.

    Raises:
        TypeError: the value is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name}={repr_of(value)} cannot be called")
    return value


def run_timed(function: Callable[[], object], timeout: timedelta, name: str) -> None:
    """Run a function in a thread, and return when it has finished.

    Args:
        function: the function.
        timeout: how long to wait for it.
        name: name of the thread, also for the error text.

    Raises:
        TimeoutError: the function did not finish within `timeout`; its thread continues.
        BaseException: the exception of the function.
    """
    called = call_in_thread(function, name)
    if not wait([called], timeout.total_seconds()).done:
        raise TimeoutError(f"{name} did not finish within {timeout.total_seconds():g} s")
    error = called.exception()
    if error is not None:  # `result` does not raise an exception that is false
        try:
            raise error
        finally:
            del error, called  # the exception holds this frame
