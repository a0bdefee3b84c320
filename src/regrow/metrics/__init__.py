"""Metrics of a job, for example the duration of a call or the number of its failures.

A metric belongs to a group. The group's handler sends its metrics to a destination. A group
without a handler uses the default handler, which drops the metrics:

    from regrow import metrics

    metrics.configure(metrics.ConsoleMetricHandler(), group="my_app")
    metrics.put_metric("batches", 12, "my_app")

    @metrics.prof(group="my_app")      # my_module.load.success, .failure, .duration.ms
    def load() -> None: ...
"""

from __future__ import annotations

from .api import *  # noqa: F403
from .api import __all__ as __all__
from .api import try_put_metric
