"""`Wrapper`: the decorator, its arguments, and the setup and cleanup of one call.

The names, defaults and inequalities of the arguments come from both generations of
nvidia-resiliency-ext. Intervals are accepted and checked as in that package. Here they bound
fallbacks only, because regrow sends faults as messages where it can.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from regrow.inprocess import rank_assignment as assignments
from regrow.inprocess import rank_filter as filters
from regrow.inprocess.abort import Abort, AbortTorchDistributed
from regrow.inprocess.call.call import CallWrapper
from regrow.inprocess.call.moving import RoundLeft, open_moves
from regrow.inprocess.call.restart import Heap, release
from regrow.inprocess.completion import Completion
from regrow.inprocess.compose import Compose
from regrow.inprocess.exception import RestartAbort
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.group.group_server import has_called
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.initialize import Initialize
from regrow.inprocess.param_utils import count_type_in_params
from regrow.inprocess.store import TCPStore
from regrow.inprocess.terminate import Terminate
from regrow.utils import headline, repr_of

P = ParamSpec("P")
T = TypeVar("T")


def _explained(wrapper: type[Wrapper]) -> type[Wrapper]:
    """Give the constructor better errors for unexpected arguments than Python's own."""
    init = wrapper.__init__

    @functools.wraps(init)
    def explained(self: Wrapper, *given: Any, **arguments: Any) -> None:
        if given:
            raise TypeError(
                f"Wrapper takes keyword arguments only, but received {repr_of(given[0])}: write "
                f"@Wrapper(), with the parentheses, above a function. Arguments: "
                f"{', '.join(_ARGUMENTS)}"
            )
        for name in arguments:
            if name not in _ARGUMENTS:
                from difflib import get_close_matches

                close = get_close_matches(name, _ARGUMENTS, n=1)
                meant = f"; did you mean {close[0]!r}" if close else ""
                raise TypeError(
                    f"Wrapper() has no argument {name!r}{meant}. It takes {', '.join(_ARGUMENTS)}"
                )
        init(self, **arguments)

    wrapper.__init__ = explained  # type: ignore[method-assign]
    return wrapper


@_explained
@dataclass(kw_only=True, eq=False)
class Wrapper:
    """Decorator that restarts a function in the same processes until all ranks complete it.

    When a rank fails, the function ends on all ranks. It is then called again on the ranks that are
    left and healthy. `Wrapper(...)(fn)` returns the function with this behaviour.

    Args:
        store_factory: makes the store in which the ranks meet: `inprocess.store.TCPStore`, or a
            callable that returns a c10d store.
        store_kwargs: keyword arguments for `store_factory`.
        initialize: runs on each rank before each call of the function.
        abort: runs in another thread after a fault, to free the main thread.
        finalize: runs after the function has ended.
        health_check: checks whether this rank is fit to continue.
        rank_assignment: numbers the living ranks, and may choose the active ones.
        rank_filter: chooses the active ranks; interface of the first generation.
        completion: runs at the end, when all ranks are done.
        terminate: runs on a rank that leaves for good.
        monitor_thread_interval: bound for the checks that the rank itself polls.
        monitor_process_interval: bound for the checks that the monitor process polls.
        heartbeat_interval: bound for the pause between signs of life.
        progress_watchdog_interval: pause between two checks of automatic progress.
        soft_timeout: a rank restarts with all others after this time without progress.
        hard_timeout: a rank is ended after this time without progress.
        heartbeat_timeout: bound for the silence of a rank; its connection ends earlier.
        barrier_timeout: how long ranks wait for the last one to begin an iteration.
        completion_timeout: how long ranks that are done wait for the others.
        last_call_wait: longest time that the ranks wait for concurrent faults of each other.
        termination_grace_time: from SIGTERM to SIGKILL when a rank is ended.
        monitor_process_logfile: absolute path; "{rank}" is replaced by the initial rank.
        monitor_process_pidfile: absolute path; "{rank}" is replaced by the initial rank.
        replace: under `regrow run`, another process takes the place of a rank whose process ended,
            for one of its `--max-restarts`; the other ranks wait for it in their processes.
        replace_timeout: how long they wait for it, from the loss until it calls the function.
        elastic: with `replace=True`, the first call of the function in each process goes on in the
            same process when a host is lost or joins; `WORLD_SIZE` may change.
        enabled: False leaves the function unchanged.

    Raises:
        TypeError: an argument has the wrong type or an unknown name.
        ValueError: two arguments contradict each other; the text names the broken inequality.
    """

    store_factory: Callable[..., Any] = TCPStore
    store_kwargs: dict[str, Any] | None = None
    initialize: Initialize | Compose | None = None
    abort: Abort | Compose | None = AbortTorchDistributed()  # noqa: RUF009 - it has no state
    finalize: Finalize | Compose | None = None
    health_check: HealthCheck | Compose | None = None
    rank_assignment: assignments.RankAssignment | Compose = assignments.ShiftRanks()  # noqa: RUF009
    rank_filter: filters.RankFilter | assignments.RankFilter | Compose | None = None
    completion: Completion | Compose | None = None
    terminate: Terminate | Compose | None = None
    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    heartbeat_interval: timedelta = timedelta(seconds=1)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    replace: bool = False
    replace_timeout: timedelta = timedelta(seconds=60)
    elastic: bool = False
    enabled: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _check_values(self)

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]:
        """Return the function with restarts; it returns None on a rank in reserve.

        Raises:
            TypeError: the function cannot be wrapped: it is a coroutine function, a generator
                function or wrapped already, or has several parameters for the `CallWrapper`.
        """
        if not self.enabled:
            return fn
        why = _why_not(fn)
        if why:
            raise TypeError(f"Wrapper() cannot wrap {repr_of(fn)}: {why}")
        if count_type_in_params(fn, CallWrapper) > 1:
            raise TypeError(
                f"{repr_of(fn)} has more than one parameter for the CallWrapper: remove all but one"
            )

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
            result: T | None = _run(self, fn, args, kwargs)
            return result

        setattr(wrapped, _MARK, True)
        return wrapped


_MARK: Final = "_regrow_wrapped"
"""Attribute of a wrapped function; `functools.wraps` copies it."""
_ARGUMENTS: Final = tuple(field.name for field in fields(Wrapper))


_DURATIONS: Final = tuple(field.name for field in fields(Wrapper) if field.type == "timedelta")
_PATHS: Final = ("monitor_process_logfile", "monitor_process_pidfile")
_LESS: Final = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""Pairs of durations; the first must be less than the second."""


def _check_types(config: Wrapper) -> None:
    wanted: dict[str, tuple[type, ...]] = {
        "store_kwargs": (dict, type(None)),
        "initialize": (Initialize, type(None)),
        "abort": (Abort, type(None)),
        "finalize": (Finalize, type(None)),
        "health_check": (HealthCheck, type(None)),
        "rank_assignment": (assignments.RankAssignment,),
        "rank_filter": (filters.RankFilter, assignments.RankFilter, type(None)),
        "completion": (Completion, type(None)),
        "terminate": (Terminate, type(None)),
        "replace": (bool,),
        "elastic": (bool,),
        "enabled": (bool,),
        **dict.fromkeys(_DURATIONS, (timedelta,)),
        **dict.fromkeys(_PATHS, (str, type(None))),
    }
    for name, types in wanted.items():
        value = getattr(config, name)
        if not isinstance(value, types):
            names = [kind.__qualname__ for kind in types if kind is not type(None)]
            or_none = " or None" if type(None) in types else ""
            raise TypeError(f"{name}={repr_of(value)} is not of type {' or '.join(names)}{or_none}")
    if not callable(config.store_factory):
        raise TypeError(
            f"store_factory={repr_of(config.store_factory)} cannot be called: pass a class of "
            f"stores, such as inprocess.store.TCPStore"
        )


def _check_values(config: Wrapper) -> None:
    for name in _DURATIONS:
        if (duration := getattr(config, name)) < timedelta(0):
            raise ValueError(f"{name} is {duration.total_seconds():g} s: give 0 or more")
    for less, more in _LESS:
        first, second = getattr(config, less), getattr(config, more)
        if not first < second:
            raise ValueError(
                f"{less} < {more} does not hold: {first.total_seconds():g} s is not less than "
                f"{second.total_seconds():g} s"
            )
    if config.elastic and not config.replace:
        raise ValueError(
            "elastic=True needs replace=True: until the next round begins, the other ranks wait "
            "for the rank that was lost"
        )
    if config.replace and _keeps_state(config.rank_assignment):
        raise ValueError(
            f"replace=True cannot be used with {repr_of(config.rank_assignment)}: it keeps what it "
            f"learned in its first call, which a new process does not have"
        )
    for name in _PATHS:
        path = getattr(config, name)
        if path is None:
            continue
        if not Path(path).is_absolute():
            raise ValueError(f"{name}={path!r} is not an absolute path")
        try:
            path.format(rank=0).encode("utf-8")
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{name}={path!r} cannot be used as a file name: {{rank}} is the only placeholder; "
                f"write a literal brace as {{{{ or }}}} ({headline(error)})"
            ) from None
        if "\0" in path:
            raise ValueError(f"{name}={path!r} is not a file name: it contains a null character")


def _keeps_state(assignment: object) -> bool:
    if isinstance(assignment, Compose):
        return any(map(_keeps_state, assignment.instances))
    return getattr(assignment, "keeps_state", False) is True


def _why_not(fn: Any) -> str:
    """Return why a function cannot be wrapped; empty if it can."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not callable(fn):
        return "it cannot be called"
    call = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__
    if any(
        getattr(each, _MARK, False) is True for each in (fn, call)
    ):  # a mock has every attribute
        return "it is wrapped already; remove one of the two wrappers"
    if inspect.iscoroutinefunction(call):
        return "a coroutine function only makes a coroutine; wrap a function that runs it"
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        return "a generator function only makes a generator; wrap a function that runs it"
    return ""


_live: dict[int, int] = {}
"""Thread of the running call, by process id. So a forked child has no running call."""


def _run(wrapper: Wrapper, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a wrapped function until all ranks are done.

    Returns:
        The value of the function, or None on a rank in reserve.

    Raises:
        ValueError: torch.distributed is initialized.
        RestartAbort: another wrapped function makes this call.
        RuntimeError: another thread of this process runs a call.
        BaseException: the exception that ended this rank.
    """
    standby = sys.modules.get("regrow._standby")
    if standby is not None:
        standby.take_place()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ValueError(
            "torch.distributed is initialized: call init_process_group in the wrapped function, "
            "which each restart calls again"
        )
    pid = os.getpid()
    if _live.get(pid) == threading.get_ident():
        raise RestartAbort(
            "a wrapped function calls another one, in which no restart is possible: wrap the outer "
            "function only"
        )
    if pid in _live:
        raise RuntimeError(
            "another thread of this process is running a wrapped function: a process can run only "
            "one at a time, so call this one after the other has returned"
        )
    _live[pid] = threading.get_ident()
    heap = Heap()
    # No generators of contextlib here: they set attributes of an exception, and its class may
    # refuse.
    try:
        return _call(wrapper, heap, fn, args, kwargs)
    except BaseException as error:
        release(error)
        raise
    finally:
        heap.close()
        del _live[pid]


def _call(
    wrapper: Wrapper, heap: Heap, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    moves = open_moves(wrapper.elastic and not has_called())
    number = None
    try:
        while True:
            call = CallWrapper(wrapper, heap, number, moves)
            try:
                with call:
                    return call(fn, args, kwargs)
            except RoundLeft:
                assert moves is not None
            number = call.number
            moves.park()  # no thread of the call is left
            moves.join()
    finally:
        if moves is not None:
            moves.close()
