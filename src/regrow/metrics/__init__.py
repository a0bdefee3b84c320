"""Numbers that a job publishes: how long something took, how often it failed.

A metric belongs to a group; a group has a handler, which sends its metrics
somewhere. Without a handler of its own a group uses the default one, which
drops them:

    from regrow import metrics

    metrics.configure(metrics.ConsoleMetricHandler(), group="my_app")
    metrics.put_metric("batches", 12, "my_app")

    @metrics.prof(group="my_app")      # my_module.load.success, .failure, .duration.ms
    def load() -> None: ...
"""

from __future__ import annotations

from ._api import (
    ConsoleMetricHandler,
    JsonLinesMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    initialize_metrics,
    publish_metric,
    put_metric,
)
from ._prof import prof, profile

__all__ = [
    "ConsoleMetricHandler",
    "JsonLinesMetricHandler",
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
