"""Handlers, groups and the publishing of single metrics, under torch's names."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from regrow.utils import JsonLinesFile

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class MetricData(NamedTuple):
    """One value of one metric."""

    timestamp: float
    """Wall time, seconds since the epoch."""
    group_name: str
    """The group that the metric belongs to."""
    name: str
    """The metric."""
    value: float
    """Its value; durations are in milliseconds."""


class MetricsConfig:
    """What `initialize_metrics` is to set up; see there for the parameters."""

    __slots__ = ("params",)

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = dict(params or {})


class MetricHandler(ABC):
    """Sends metrics somewhere; to be subclassed."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Send one value on. What this raises reaches whoever published it."""


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


class JsonLinesMetricHandler(MetricHandler):
    """Appends each value to a file as a line `{"time", "group", "name", "value"}`.

    It never raises: a full disk is reported once on stderr, and the values are lost.

    Args:
        path: the file; several processes may share it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = JsonLinesFile(path, "metrics")

    def emit(self, metric_data: MetricData) -> None:
        """Append the value."""
        timestamp, group, name, value = metric_data
        self._file.append({"time": timestamp, "group": group, "name": name, "value": value})


class MetricStream:
    """A group and the handler that its metrics go to."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Publish one value of the group's metric `metric_name`."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}
"""The handler of each group; that of None is the default."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send the metrics of `group` (None: of every group without a handler) to `handler`."""
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:
    """The group `group` with the handler that is configured for it now."""
    handler = _handlers.get(group)
    return MetricStream(group, handler if handler is not None else _handlers[None])


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Publish one value of the metric `metric_name` of `metric_group`."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Deprecated: use `put_metric`, whose arguments come in another order."""
    import warnings

    warnings.warn(
        "publish_metric is deprecated: use put_metric(metric_name, metric_value, metric_group)",
        FutureWarning,
        stacklevel=2,
    )
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since the wall-clock time `start_time_in_seconds` (`time.time()`)."""
    return int((time.time() - start_time_in_seconds) * 1000)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Set handlers up from a launcher's configuration; an empty one changes nothing.

    Parameters: `handler` (`console`, `null` or `file`), `file` (the path for `file`) and
    `group` (default: every group without a handler of its own). Others are left to handlers
    that a platform configures itself.

    Raises:
        ValueError: an unknown handler, or `file` without a path.
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
    elif name == "file":
        if not params.get("file"):
            raise ValueError("metrics: handler 'file' needs the parameter 'file', a path")
        handler = JsonLinesMetricHandler(params["file"])
    else:
        raise ValueError(f"metrics: unknown handler {name!r}; known: console, file, null")
    configure(handler, params.get("group"))
