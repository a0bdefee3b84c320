"""OpenTelemetry spans of a job: job > round > attempt > restart; needs the extra `otel`.

`spans` derives the spans from the events of one agent and the restarts of its snapshot: a pure
function. `Sender` exports each span once, when it has ended, by OTLP over HTTP. The standard
variables configure the export (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`,
`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, ...). Each agent sends one trace of its own; the
attribute `regrow.run_id` joins the traces of a job's hosts.

The restart of a failed attempt lasts longer than the attempt: it is a child of the attempt, because
that is what failed, and ends with the first step after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Status, StatusCode, Tracer

from regrow.events.evidence import Record, integer, one_line, real, text
from regrow.views.exporter import FLUSH_S
from regrow.views.job_snapshot import Snapshot
from regrow.views.restarts import Restart
from regrow.views.runs import EventReader, Library
from regrow.views.watch import JobWatch


@dataclass(frozen=True, slots=True)
class JobSpan:
    """A span; times in seconds since the epoch."""

    name: str
    """job, round, attempt or restart."""
    key: str
    """Distinguishes the spans of a job."""
    parent: str | None
    """Key of the parent."""
    start: float
    end: float | None = None
    """None: it has not ended."""
    error: str | None = None
    """Description of the failure; None if it has not failed."""
    attributes: Mapping[str, Any] = field(default_factory=dict)


def spans(events: Sequence[Record], restarts: Sequence[Restart], *, is_over: bool) -> list[JobSpan]:
    """Derive the spans of an agent; a parent comes before its children.

    Args:
        events: the events of the agent's log.
        restarts: the restarts of its job.
        is_over: whether the agent has ended. What is open then ends with the last event.
    """
    found: dict[str, JobSpan] = {}
    round_key: str | None = None
    attempt_keys: dict[int, str] = {}
    last = 0.0

    def end(key: str | None, at: float, error: str | None = None) -> None:
        if key in found and found[key].end is None:
            found[key] = replace(found[key], end=max(at, found[key].start), error=error)

    for event in events:
        at, attempt = real(event, "time") or last, integer(event, "attempt") or 0
        last = max(last, at)
        match text(event, "name"):
            case "regrow.job.started":
                found["job"] = JobSpan("job", "job", None, at)
            case "regrow.rendezvous.completed":
                end(round_key, at)
                number = integer(event, "round")
                round_key = f"round {number}"
                about = {"regrow.round": number, "regrow.nodes": event.get("group_world_size")}
                found[round_key] = JobSpan("round", round_key, "job", at, attributes=_known(about))
            case "regrow.attempt.started":
                key = attempt_keys[attempt] = f"attempt {attempt}"
                about = {"regrow.attempt": attempt, "regrow.world_size": event.get("world_size")}
                parent = round_key or "job"
                found[key] = JobSpan("attempt", key, parent, at, attributes=_known(about))
            case "regrow.attempt.ended":
                failed = text(event, "state") == "FAILED"
                reason = one_line(text(event, "reason") or "failed")
                end(attempt_keys.get(attempt), at, reason if failed else None)
            case "regrow.round.ended":
                end(round_key, at)
            case "regrow.job.finished":
                failed = text(event, "state") in ("FAILED", "ERROR")
                end(round_key, at)
                end("job", at, one_line(text(event, "reason") or "failed") if failed else None)
    for restart in restarts:
        if restart.time is not None and restart.restarted:
            key = f"restart {restart.rung} {restart.attempt} {restart.time:.3f}"
            found[key] = _restart(key, restart, attempt_keys, is_over=is_over)
    if is_over:
        was_killed = "job" in found and found["job"].end is None
        for key in found:
            end(key, last, "the log ends here: the agent was killed" if was_killed else None)
    return [each for each in found.values() if each.parent is None or each.parent in found]


def _restart(key: str, restart: Restart, attempts: Mapping[int, str], *, is_over: bool) -> JobSpan:
    assert restart.time is not None
    about = {
        "regrow.rung": restart.rung,
        "regrow.cause": restart.cause,
        "regrow.rank": restart.rank,
        "regrow.lost_steps": restart.lost_steps,
        "regrow.what": restart.what,
    }
    phases = {f"regrow.{name.replace(' ', '_')}_s": after for name, after in restart.phases}
    # New workers end it with their first step. A script that reports none leaves that open.
    is_complete = is_over or restart.rung <= 2 or "first step" in dict(restart.phases)
    lasted = max((after for _, after in restart.phases), default=0.0)
    return JobSpan(
        "restart",
        key,
        attempts.get(restart.attempt, "job"),
        restart.time,
        restart.time + lasted if is_complete else None,
        attributes=_known(about | phases),
    )


def _known(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if value is not None}


class Sender:
    """Sends the spans of one agent.

    Args:
        directory: the log directory of the agent's run.
        exporter: receives the spans; None for OTLP over HTTP.
    """

    def __init__(self, directory: str, exporter: SpanExporter | None = None) -> None:
        self._library = Library([directory])
        self._reader = EventReader(directory)
        self._watch: JobWatch | None = None
        self._exporter = exporter
        self._provider: TracerProvider | None = None
        self._open: dict[str, trace.Span] = {}
        self._sent: set[str] = set()

    def send_new(self, *, is_over: bool = False) -> None:
        """Send the spans that have ended since the last call."""
        if self._watch is None:
            if not (jobs := self._library.jobs()):
                return
            self._watch = JobWatch(self._library, jobs[0])
        try:
            is_changed = self._reader.read()
        except OSError:
            return
        if not (is_changed or is_over):
            return
        snapshot = self._watch.snapshot()
        tracer = self._tracer(snapshot)
        for each in spans(self._reader.events, snapshot.restarts, is_over=is_over):
            self._send(tracer, each)

    def close(self) -> None:
        """Send what is left, for at most `FLUSH_S`."""
        self.send_new(is_over=True)
        if self._provider is not None:
            self._provider.force_flush(int(FLUSH_S * 1000))
            self._provider.shutdown()

    def _tracer(self, snapshot: Snapshot) -> Tracer:
        if self._provider is None:
            about = {
                "host.name": snapshot.nodes[0].host,
                "regrow.run_id": snapshot.run_id or "?",
                "regrow.script": snapshot.script or "?",
            }
            own = Resource.create(about)
            if str(own.attributes["service.name"]).startswith("unknown_service"):
                own = own.merge(Resource({"service.name": "regrow"}))
            self._provider = TracerProvider(resource=own)
            exporter = self._exporter or OTLPSpanExporter(timeout=FLUSH_S / 2)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        return self._provider.get_tracer("regrow")

    def _send(self, tracer: Tracer, each: JobSpan) -> None:
        if each.key in self._sent:
            return
        span = self._open.get(each.key)
        if span is None:
            parent = self._open.get(each.parent or "")
            context = trace.set_span_in_context(parent) if parent is not None else None
            span = tracer.start_span(each.name, context, start_time=_ns(each.start))
            self._open[each.key] = span
        if each.end is None:
            return
        span.set_attributes(each.attributes)
        if each.error is not None:
            span.set_status(Status(StatusCode.ERROR, each.error))
        span.end(_ns(each.end))
        # A child needs the context of its parent only, and a job may have thousands of spans.
        self._open[each.key] = trace.NonRecordingSpan(span.get_span_context())
        self._sent.add(each.key)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
