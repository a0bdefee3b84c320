"""Plug-ins of two generations, called with what each of them takes.

| plug-in | first generation | today |
|---|---|---|
| initialize, abort | `(state) -> state` | the same |
| finalize, health check | `(state, exception) -> (state, exception)` | `(state) -> state` |
| completion, terminate | none | `(state) -> state` |
| rank assignment | `(state, terminated) -> (state, terminated)` | `(ctx) -> ctx` |
| rank filter | `(state) -> state` | a rank assignment |

What is passed on between the parts of a `Compose`, and from the wrapper to it, is today's form: a
state or a `RankAssignmentCtx`. A plug-in that takes two positional arguments is of the first
generation, and gets them taken from that; what it returns is put back. So the parts of one chain
may be of either, and each is looked at by itself. Other code calls plug-ins, too: a class derived
from a built-in one calls that with the arguments that it got. `both_generations` lets the built-in
answer in kind.

A plug-in that returns nothing has passed on what it was given. In a chain, where the next one waits
for what it returns, that is warned of.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar, cast

from ._assignment import RankAssignmentCtx, without_active
from .exception import RestartError
from .rank_filter import RankFilter
from .state import FrozenState, Mode, State

__all__ = ["apply", "assign", "both_generations", "call", "positional"]

Method = TypeVar("Method", bound=Callable[..., Any])
_State = TypeVar("_State", bound=State | FrozenState)


def call(plugin: Callable[..., Any], state: FrozenState) -> FrozenState:
    """Call an initialize, abort, finalize, health check, completion or terminate.

    Returns:
        what the plug-in made of `state`; `state` itself if that is nothing.

    Raises:
        BaseException: what the plug-in raised.
    """
    return _called(plugin, state)


def assign(
    assignment: Callable[..., Any],
    ctx: RankAssignmentCtx,
    rank_filter: Callable[..., Any] | None = None,
) -> State:
    """Number the living ranks and choose the active ones.

    Args:
        assignment: the rank assignment, of either generation.
        ctx: what it is given; `ctx.state.store` is set to its store.
        rank_filter: a choice of active ranks that is made at the end, of either generation.

    Returns:
        this rank's state in the next iteration; its mode is active or inactive.

    Raises:
        RankDiscarded: this rank has no place in it.
        RestartError: terminated ranks are left over: no assignment in the chain removes them.
    """
    left = _assigned(assignment, ctx)
    if left.terminated_ranks:
        raise RestartError(
            f"terminated_ranks={sorted(left.terminated_ranks)} are left over by {assignment!r}: "
            "compose it with one that takes them out, as rank_assignment.ShiftRanks()"
        )
    if left.state.mode is Mode.INITIALIZED:
        left.state.activate_all_ranks()
    return left.state if rank_filter is None else _assigned(rank_filter, left).state


def apply(part: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call one part of a `Compose`; take and return the arguments that are passed along."""
    match given:
        case (RankAssignmentCtx() as ctx,):
            return (_assigned(part, ctx, warn=True),)
        case (State() | FrozenState() as state,):
            return (_called(part, state, warn=True),)
        case (State() as state, Collection() as terminated):
            ctx = RankAssignmentCtx(state, state.store, set(terminated))
            ctx = _assigned(part, ctx, warn=True)
            return (ctx.state, ctx.terminated_ranks)
        case (State() | FrozenState() as state, BaseException() | None as error):
            state = _called(part, _with_exception(state, error), warn=True)
            return (state, state.fn_exception)
    returned = part(*given)
    if returned is None and given == ():
        return ()
    if returned is None and given != (None,):
        _warn_of_nothing(part, "None")
    return returned if isinstance(returned, tuple) else (returned,)


def both_generations(method: Method) -> Method:
    """Have a built-in's `__call__`, written for one argument, take the older two as well."""

    @functools.wraps(method)
    def called(self: Any, *given: Any, **named: Any) -> Any:
        given += tuple(named.values())
        if len(given) == 1:
            return method(self, *given)
        return apply(functools.partial(method, self), given)

    return cast(Method, called)


def _called(plugin: Callable[..., Any], state: _State, *, warn: bool = False) -> _State:
    if _takes_two(plugin):
        returned = plugin(state, state.fn_exception)
        returned = returned[0] if isinstance(returned, tuple) else returned
    else:
        returned = plugin(state)
    if returned is None:
        if warn:
            _warn_of_nothing(plugin, "what it was given")
        return state
    return _with_store(cast(_State, returned), state.store)


def _assigned(
    assignment: Callable[..., Any], ctx: RankAssignmentCtx, *, warn: bool = False
) -> RankAssignmentCtx:
    ctx.state.store = ctx.store
    returned: Any
    if isinstance(assignment, RankFilter):
        returned = assignment(ctx.state)
        ctx.state = returned or ctx.state
    elif _takes_two(assignment):
        returned = assignment(ctx.state, ctx.terminated_ranks)
        state, ctx.terminated_ranks = returned or (ctx.state, ctx.terminated_ranks)
        # The first generation's assignments choose no active ranks: filters do, after them.
        ctx.state = without_active(state)
    else:
        returned = assignment(ctx)
        ctx = returned or ctx
    if returned is None and warn:
        _warn_of_nothing(assignment, "what it was given")
    ctx.state.store = ctx.store
    return ctx


def positional(called: Callable[..., Any]) -> tuple[int, int]:
    """How many positional arguments a callable needs, and how many it takes."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # written in C, and silent about what it takes
        return 1, 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = [parameter for parameter in parameters if parameter.kind in kinds]
    needed = [each for each in by_place if each.default is inspect.Parameter.empty]
    return len(needed), len(by_place)


def _takes_two(plugin: Callable[..., Any]) -> bool:
    needed, taken = positional(plugin)  # the exception may have had a default
    return needed <= 2 <= taken


def _warn_of_nothing(plugin: object, instead: str) -> None:
    warnings.warn(f"{plugin!r} returned nothing; {instead} is passed on", stacklevel=5)


def _with_exception(state: _State, error: BaseException | None) -> _State:
    if state.fn_exception is error:
        return state
    return _with_store(replace(state, fn_exception=cast(Exception | None, error)), state.store)


def _with_store(state: _State, store: object) -> _State:
    if state.store is None and store is not None:
        object.__setattr__(state, "_store", store)
    return state
