"""Metric handlers, groups, single metrics, and timing decorators, under torch's names."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import wraps
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar, overload

from regrow.utils import SignalInterrupt, get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class MetricData(NamedTuple):
    """One value of one metric."""

    timestamp: float
    """Wall time, seconds since the epoch."""
    group_name: str
    """Name of the metric's group."""
    name: str
    """Name of the metric."""
    value: float
    """Value of the metric; durations are in milliseconds."""


class MetricsConfig:
    """Configuration for `initialize_metrics`, which documents the parameters."""

    __slots__ = ("params",)

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = dict(params or {})


class MetricHandler(ABC):
    """Sends metrics to a destination; base class for handlers."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Send one value; an exception reaches the code that published the value."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value to stdout."""

    def emit(self, metric_data: MetricData) -> None:
        """Print the value."""
        timestamp, group, name, value = metric_data
        print(f"[{timestamp}][{group}]: {name}={value}")


class NullMetricHandler(MetricHandler):
    """Drops each value."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class MetricStream:
    """A group and its handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Publish one value of the group's metric `metric_name`."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}
"""Handlers by group; the key None holds the default handler."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send the metrics of `group` to `handler`; None means every group without a handler."""
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:
    """Return the group `group` with its current handler."""
    handler = _handlers.get(group)
    return MetricStream(group, handler if handler is not None else _handlers[None])


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Publish one value of the metric `metric_name` of `metric_group`."""
    getStream(metric_group).add_value(metric_name, metric_value)


def try_put_metric(
    metric_name: str, metric_value: float, metric_group: str = "torchelastic"
) -> None:
    """Publish a value as `put_metric` does; log an exception of the handler and continue."""
    try:
        put_metric(metric_name, metric_value, metric_group)
    except SignalInterrupt:
        raise
    except Exception:  # noqa: BLE001 - of a handler of the user
        get_logger(__name__).exception(
            "the metric handler of the group %s raised on %s; the value is lost",
            metric_group,
            metric_name,
        )


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Publish one value; deprecated: use `put_metric`, which has another argument order."""
    import warnings

    warnings.warn(
        "publish_metric is deprecated: use put_metric(metric_name, metric_value, metric_group)",
        FutureWarning,
        stacklevel=2,
    )
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return whole milliseconds since `start_time_in_seconds`, a time of `time.time()`."""
    return int((time.time() - start_time_in_seconds) * 1000)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Set up handlers from a launcher's configuration; an empty configuration changes nothing.

    Parameters: `handler` (`console` or `null`) and `group` (default: every group without a
    handler). Other names are ignored: a platform configures such handlers itself.

    Raises:
        ValueError: unknown handler.
    """
    params = cfg.params if cfg is not None else {}
    name = params.get("handler")
    if name is None:
        return
    handler: MetricHandler
    if name == "console":
        handler = ConsoleMetricHandler()
    elif name == "null":
        handler = NullMetricHandler()
    else:
        raise ValueError(f"metrics: unknown handler {name!r}; known: console, null")
    configure(handler, params.get("group"))


# --- decorators


@overload
def prof(fn: Callable[_P, _T], group: str = ...) -> Callable[_P, _T]: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def prof(
    fn: Callable[_P, _T] | None = None, group: str = "torchelastic"
) -> Callable[_P, _T] | Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Publish `<name>.success` or `.failure` (1) and `<name>.duration.ms` for each call.

    `<name>` is `Class.method`, or `module.function` with the last part of the module's name. Use
    it as `@prof` or `@prof(group="my_app")`. An exception of the handler does not affect the call;
    it is logged.
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
            try_put_metric(f"{name}.{outcome}", 1, group)
            try_put_metric(f"{name}.duration.ms", int(took * 1000), group)

    return wrapper


def _metric_name(function: Callable[_P, _T]) -> str:
    name = function.__qualname__
    if "." in name or not function.__module__:
        return name
    return f"{function.__module__.rpartition('.')[2]}.{name}"
