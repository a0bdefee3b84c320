"""Decorators that publish how often a function succeeds and how long it takes."""

from __future__ import annotations

from functools import wraps
from time import monotonic
from typing import TYPE_CHECKING, ParamSpec, TypeVar, overload

from ._api import put_metric

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def prof(fn: Callable[_P, _T], group: str = ...) -> Callable[_P, _T]: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def prof(
    fn: Callable[_P, _T] | None = None, group: str = "torchelastic"
) -> Callable[_P, _T] | Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Publish `<name>.success` or `.failure` (1) and `<name>.duration.ms` for each call.

    `<name>` is `Class.method`, or `module.function` with the last part of the module's name.
    Used as `@prof` or `@prof(group="my_app")`.
    """

    def wrap(function: Callable[_P, _T]) -> Callable[_P, _T]:
        return _timed(function, _metric_name(function), group)

    return wrap if fn is None else wrap(fn)


def profile(group: str = "torchelastic") -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Deprecated: use `prof`, which qualifies the function's name."""
    import warnings

    warnings.warn("profile is deprecated: use prof(group=...)", FutureWarning, stacklevel=2)

    def wrap(function: Callable[_P, _T]) -> Callable[_P, _T]:
        return _timed(function, function.__name__, group)

    return wrap


def _timed(function: Callable[_P, _T], name: str, group: str) -> Callable[_P, _T]:
    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        start = monotonic()
        outcome = "failure"
        try:
            result = function(*args, **kwargs)
            outcome = "success"
            return result
        finally:
            took = monotonic() - start
            put_metric(f"{name}.{outcome}", 1, group)
            put_metric(f"{name}.duration.ms", int(took * 1000), group)

    return wrapper


def _metric_name(function: Callable[_P, _T]) -> str:
    name = function.__qualname__
    if "." in name or not function.__module__:
        return name
    return f"{function.__module__.rpartition('.')[2]}.{name}"
