"""`--metrics-port` and `--otel-spans`: the helper process, its metrics and its spans."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Status
from prometheus_client.parser import text_string_to_metric_families

from helpers.commands import ROOT, run
from helpers.jobs.e2e_job import Job
from helpers.processes import PATIENCE, alive, children_of, wait_until
from helpers.views.written_job import WrittenJob
from regrow.ledger import read_ledgers
from regrow.utils import PortReservation
from regrow.views import JobWatch, Library, listen, refusal
from regrow.views.prometheus import METRICS, exposition
from regrow.views.spans import Sender

TRAIN = """
import regrow
for n in range(1 + 10 * ATTEMPT, 10**6):
    time.sleep(0.02)
    regrow.step(n)
    if ATTEMPT == 0 and RANK == 1 and n == 20:
        raise ValueError("twenty")
"""


@pytest.fixture
def port() -> Iterator[int]:
    with PortReservation() as reserved:
        yield reserved.port


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


def start(jobs: list[Job], folder: Path, *flags: str, script: str = TRAIN, **env: str) -> Job:
    job = Job(folder, script, ["--nproc-per-node", "2", "--max-restarts", "2", *flags], env)
    jobs.append(job)
    return job


def helper_of(job: Job) -> int:
    """Return the process of the exporter."""

    def find() -> int | None:
        for pid in children_of(job.process.pid):
            with suppress(OSError):
                if b"exporter_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    return wait_until(find, "the exporter runs")


def scrape(port: int, path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def samples(text: str) -> dict[str, float]:
    """Return the values of an exposition by name and labels."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_job_is_exported_through_a_restart(jobs: list[Job], tmp_path: Path, port: int) -> None:
    job = start(jobs, tmp_path, "--metrics-port", str(port))
    job.await_event("worker.first_step", lambda event: event["attempt"] == 1)

    def restarted() -> dict[str, float] | None:
        status, text = scrape(port)
        found = samples(text) if status == 200 else {}
        recovered = 'regrow_recovery_seconds_count{"phase": "first_step", "rung": "3"}'
        is_there = recovered in found and found.get('regrow_step{"rank": "0"}', 0) > 10
        return found if is_there else None

    found = wait_until(restarted, "the restart is exported", pause=0.1)
    assert found['regrow_restarts_total{"cause": "exception", "rung": "3"}'] == 1
    assert found["regrow_attempt{}"] == 1
    assert found["regrow_restarts_left{}"] == 1
    assert found['regrow_workers{"state": "running"}'] == 2
    assert found["regrow_lost_steps_total{}"] >= 9
    assert 0 < found["regrow_job_goodput_ratio{}"] < 1  # the first attempt has made 20 steps
    assert scrape(port, "/other")[0] == 404
    job.signal(signal.SIGTERM)
    job.finish()


def test_the_goodput_is_not_exported_before_the_time_of_the_workers_is_recorded(
    jobs: list[Job], tmp_path: Path, port: int
) -> None:
    # The first account of a running worker comes after a minute, so an alert would fire until then.
    script = TRAIN.replace("n == 20", "n < 0")
    flags = ["--metrics-port", str(port), "--chaos=stop rank=0 at=500ms for=10ms"]
    job = start(jobs, tmp_path, *flags, script=script)
    job.await_event("chaos.injected")
    wait_until(lambda: len(job.events("worker.first_step")) == 2, "both ranks train")

    def steps() -> dict[str, float] | None:
        status, text = scrape(port)
        found = samples(text) if status == 200 else {}
        return found if 'regrow_step{"rank": "0"}' in found else None

    found = wait_until(steps, "the steps are exported", pause=0.1)
    assert "regrow_job_goodput_ratio{}" not in found
    (ledger,) = read_ledgers([str(job.log_dir)], print)
    assert (ledger.running, ledger.goodput, ledger.seconds["unknown"]) == (True, None, 0)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_helper_ends_with_a_killed_agent(
    jobs: list[Job], tmp_path: Path, port: int, stopped: bool
) -> None:
    job = start(jobs, tmp_path, "--metrics-port", str(port))
    job.await_event("attempt.started")
    helper = helper_of(job)
    wait_until(lambda: scrape(port)[0] == 200, "served")
    if stopped:
        os.kill(helper, signal.SIGSTOP)
    job.signal(signal.SIGKILL)
    wait_until(lambda: not alive(helper), "ended")


def test_the_helper_ignores_the_signals_of_a_terminal_and_a_scheduler(
    jobs: list[Job], tmp_path: Path, port: int
) -> None:
    job = start(jobs, tmp_path, "--metrics-port", str(port))
    job.await_event("attempt.started")
    helper = helper_of(job)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP):
        os.kill(helper, signum)
    assert scrape(port)[0] in (200, 503)
    assert alive(helper)


def test_the_end_of_the_helper_is_nothing_to_the_job(
    jobs: list[Job], tmp_path: Path, port: int
) -> None:
    job = start(jobs, tmp_path, "--metrics-port", str(port), script="time.sleep(0.5)")
    os.kill(helper_of(job), signal.SIGKILL)
    assert job.finish() == 0


def test_scrapers_that_never_read_do_not_stop_others(
    jobs: list[Job], tmp_path: Path, port: int
) -> None:
    job = start(jobs, tmp_path, "--metrics-port", str(port))
    job.await_event("attempt.started")
    with ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            with suppress(OSError):  # an older one gives way
                client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        assert scrape(port)[0] == 200


def test_a_port_in_use_is_an_error_before_the_job_starts(tmp_path: Path, port: int) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    regrow = [sys.executable, "-m", "regrow.run", "--standalone"]
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        done = run([*regrow, f"--metrics-port={port}", "train.py"], cwd=tmp_path)
    assert done.code == 2
    assert f"--metrics-port {port}: Address already in use" in done.output
    done = run([*regrow, f"--metrics-port={port}", "--log-dir=/dev/null", "train.py"], cwd=tmp_path)
    assert (done.code, "need a log directory" in done.output) == (2, True)


@pytest.mark.parametrize("value", ["x", "-1", "65536", "1.2.3.4", "1:2:x"])
def test_a_port_that_is_none_is_refused(value: str) -> None:
    found = refusal(value, spans=False)
    assert found is not None
    assert "give for example 9400" in found


def test_metrics_are_for_this_host_unless_an_address_is_given() -> None:
    for value, address in (
        ("0", "127.0.0.1"),
        ("127.0.0.2:0", "127.0.0.2"),
        ("0.0.0.0:0", "0.0.0.0"),
    ):
        with listen(value) as listener:
            assert listener.getsockname()[0] == address
    with pytest.raises(ValueError, match=r"--metrics-port 203\.0\.113\.1:0"):
        listen("203.0.113.1:0")


# --- names


def test_every_metric_is_documented_and_exported(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/watching.md").read_text()
    table = dict(re.findall(r"^\| `(regrow_[a-z_]+)(?:\{([a-z_,]+)\})?` \|", page, re.M))
    suffix = {"counter": "_total"}
    named = {
        name + suffix.get(metric.kind, ""): ",".join(metric.labels)
        for name, metric in METRICS.items()
    }
    assert table == named
    job = WrittenJob(tmp_path)
    library = Library([str(tmp_path)])
    text = exposition(JobWatch(library, library.jobs()[0]).snapshot()).decode()
    for name in named:
        assert f"# HELP {name} " in text
    job.close()


def test_the_dashboard_uses_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "contrib/grafana/regrow.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"\bregrow_[a-z_]+", query)}
    known = {
        name + end
        for name, metric in METRICS.items()
        for end in {"counter": ["_total"], "summary": ["_sum", "_count"]}.get(metric.kind, [""])
    }
    assert len(queries) > 8
    assert used <= known


# --- spans


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A receiver of spans by OTLP over HTTP: its address, and what it has received."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_spans_of_a_job_arrive(
    jobs: list[Job],
    tmp_path: Path,
    collector: tuple[str, list[ExportTraceServiceRequest]],
    end: signal.Signals,
) -> None:
    endpoint, received = collector
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "my-training"}
    job = start(jobs, tmp_path, "--otel-spans", **env)
    job.await_event("worker.first_step", lambda event: event["attempt"] == 1)
    job.signal(end)

    def found() -> list[Span]:
        return [
            span
            for request in received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    wait_until(lambda: any(span.name == "job" for span in found()), "sent")
    spans = {span.span_id: span for span in found()}
    tree = sorted(
        (span.name, spans[span.parent_span_id].name if span.parent_span_id else "")
        for span in spans.values()
    )
    assert tree == [
        *[("attempt", "round")] * 2,
        ("job", ""),
        ("restart", "attempt"),
        *[("round", "job")] * 2,
    ]
    assert len({span.trace_id for span in spans.values()}) == 1
    (failed,) = (s for s in spans.values() if s.name == "attempt" and "twenty" in s.status.message)
    (restart,) = (span for span in spans.values() if span.name == "restart")
    assert restart.parent_span_id == failed.span_id
    about = {each.key: each.value for each in received[0].resource_spans[0].resource.attributes}
    assert about["service.name"].string_value == "my-training"


class Nowhere(SpanExporter):
    """Drops all spans; `errors` are the objects that only a failed span and its copy refer to."""

    def __init__(self) -> None:
        self.errors: list[weakref.ref[Status]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.errors += [weakref.ref(span.status) for span in spans if not span.status.is_ok]
        return SpanExportResult.SUCCESS


def test_spans_that_were_sent_are_not_kept(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    nowhere = Nowhere()
    sender = Sender(str(job.directory), nowhere)
    for _ in range(20):
        job.start()
        job.fail(1, "ValueError: no")
        job.emit("job.restarting", restart_count=1, restarts_left=2, delay_s=0, reason="failed")
    job.finish("FAILED")
    sender.close()
    gc.collect()
    assert len(nowhere.errors) > 20, "those of the attempts, and of the job"
    assert not any(error() for error in nowhere.errors)
