"""Prometheus metrics of a snapshot, by the official client; needs the extra `metrics`.

`METRICS` lists every metric with its labels and its meaning; `docs/guides/watching.md` has the same
list. Counters are computed from the whole log, so they survive a restart of the exporter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from regrow.explain import RUNG_NAMES
from regrow.views.job_snapshot import Snapshot

NODE_STATES = ("waiting", "starting", "running", "restarting", "stopping", "over")
_RUNGS = ", ".join(f"{rung} {RUNG_NAMES[rung]}" for rung in range(1, 5))  # those within a job
RANK_STATES = (
    *("running", "suspended", "hung", "stalled", "replacing", "lost", "failed"),
    *("stopped", "succeeded", "unknown"),
)


class Described(NamedTuple):
    """A metric as users see it."""

    kind: str
    """gauge, counter or summary."""
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "regrow_job_info": Described(
        "gauge", "Always 1; the labels describe the job.", ("run_id", "script", "host")
    ),
    "regrow_job_running": Described("gauge", "1 while the agent runs, else 0."),
    "regrow_job_seconds": Described("gauge", "Seconds since the start of the agent."),
    "regrow_attempt": Described("gauge", "Number of the latest attempt, from 0."),
    "regrow_world_size": Described("gauge", "Workers of the latest attempt, all nodes."),
    "regrow_nodes": Described("gauge", "Agents seen in the logs, by state.", ("state",)),
    "regrow_workers": Described("gauge", "Workers of this agent, by state.", ("state",)),
    "regrow_step": Described("gauge", "Last reported step of a rank.", ("rank",)),
    "regrow_step_seconds": Described(
        "gauge", "Mean seconds of a step of late, of a running rank.", ("rank",)
    ),
    "regrow_step_age_seconds": Described(
        "gauge", "Seconds since the last step of a running rank.", ("rank",)
    ),
    "regrow_steps_behind": Described(
        "gauge", "Steps behind the first rank of this agent.", ("rank",)
    ),
    "regrow_restarts_left": Described("gauge", "Failures that the job can still recover from."),
    "regrow_restarts": Described(
        "counter",
        f"Recoveries by rung ({_RUNGS}).",
        ("rung", "cause"),
    ),
    "regrow_recovery_seconds": Described(
        "summary",
        "Seconds from the fault to the end of a phase of its recovery.",
        ("rung", "phase"),
    ),
    "regrow_lost_steps": Described("counter", "Steps that were done again."),
    "regrow_job_goodput_ratio": Described(
        "gauge", "Productive share of the worker-seconds of this agent's workers, a minute old."
    ),
}
"""Every metric by its name; a counter's samples have the suffix `_total`."""


def exposition(snapshot: Snapshot, goodput: float | None = None) -> bytes:
    """Return the metrics of a job in Prometheus's text format.

    Args:
        snapshot: the job.
        goodput: the goodput in its ledger; None: not known.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot, goodput))
    return generate_latest(registry)


_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "summary": SummaryMetricFamily,
}
Values: TypeAlias = dict[tuple[Any, ...], Any]
"""Values of a metric by its labels: a number, or the count and the sum of a summary."""


class _Collector:
    def __init__(self, snapshot: Snapshot, goodput: float | None) -> None:
        self._snapshot, self._goodput = snapshot, goodput

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        values = dict(_values(self._snapshot))
        if self._goodput is not None:
            values["regrow_job_goodput_ratio"] = {(): self._goodput}
        for name, described in METRICS.items():
            family = _FAMILIES[described.kind](name, described.help, labels=described.labels)
            for labels, value in values.get(name, {}).items():
                texts = [str(label) for label in labels]
                if isinstance(family, SummaryMetricFamily):
                    count, total = value
                    family.add_metric(texts, count_value=count, sum_value=total)
                else:
                    family.add_metric(texts, value)
            yield family


def _values(s: Snapshot) -> Iterator[tuple[str, Values]]:
    """Yield the values of each metric by their labels; what is unknown has no value."""
    single = {
        "regrow_job_running": 0 if s.is_over else 1,
        "regrow_job_seconds": s.duration_s,
        "regrow_attempt": s.attempt,
        "regrow_world_size": s.world_size,
        "regrow_restarts_left": s.restarts_left,
        "regrow_lost_steps": s.lost_steps,
    }
    for name, value in single.items():
        if value is not None:
            yield name, {(): value}
    yield "regrow_job_info", {(s.run_id, s.script, node.host): 1 for node in s.nodes}
    states = Counter(n.state if n.state in NODE_STATES else "over" for n in s.nodes)
    yield "regrow_nodes", {(state,): states[state] for state in NODE_STATES}
    workers = Counter(rank.state for rank in s.ranks)
    yield "regrow_workers", {(state,): workers[state] for state in RANK_STATES}
    steps = {rank.rank: rank for rank in s.ranks if rank.step is not None}
    yield "regrow_step", {(number,): rank.step for number, rank in steps.items()}
    yield "regrow_steps_behind", {(number,): rank.behind for number, rank in steps.items()}
    live = {number: rank for number, rank in steps.items() if rank.step_age_s is not None}
    yield "regrow_step_seconds", {(n,): 1 / r.pace for n, r in live.items() if r.pace}
    yield "regrow_step_age_seconds", {(n,): r.step_age_s for n, r in live.items()}
    healed = [restart for restart in s.restarts if restart.restarted]
    yield "regrow_restarts", dict(Counter((each.rung, each.cause) for each in healed))
    seconds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for restart in healed:
        for phase, after in restart.phases:
            seconds[restart.rung, phase.replace(" ", "_")].append(after)
    yield (
        "regrow_recovery_seconds",
        {labels: (len(each), sum(each)) for labels, each in seconds.items()},
    )
