"""Measure what views cost the agent: the page of `regrow web`, metrics, and bad clients of both.

    python benchmarks/views.py [-n RUNS] [--json FILE] [--check]

1. Detection and restart: one of two workers exits again and again. The time from its exit until the
   agent's loop notices it, and until all workers run again (without the agent's deliberate pause),
   quiet and under views. The runs alternate. Under views, before the first failure 1,000 clients
   connect to the exporter and 1,000 pages to `regrow web`. They send a request and never read, as a
   stopped browser. The exporter keeps the latest 32 of them and `regrow web` the first 200; the
   others are closed. After the first failure both are stopped by SIGSTOP, and another 1,000 clients
   connect to the exporter: the kernel lets in as many as the queue of its socket holds.
2. Memory and processor time of the idle agent with `--metrics-port`, scraped once a second, and of
   its exporter.

`--check` exits with 1 if the median of a time under views is more than MOST_LONGER longer, or the
idle agent takes more than IDLE_MB_BOUND or IDLE_CPU_BOUND.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from _agents import launched, wait
from _arguments import parser
from _procs import descendants, usage

from regrow.events import read_events, story
from regrow.utils import PortReservation

FAILURES = 3
CONNECTIONS = 1_000
MOST_LONGER_S = 0.02
"""Most seconds by which views, which share the processors, may lengthen a median."""
IDLE_MB_BOUND, IDLE_CPU_BOUND = 50.0, 0.2
IDLE_S = 20.0
DEADLINE_S = 60.0
CRASH = f"""
import os, time, regrow
regrow.step(1)
while not os.path.exists("go"):
    time.sleep(0.01)
time.sleep(0.4)
if os.environ["RANK"] == "1" and int(os.environ["REGROW_ATTEMPT"]) < {FAILURES}:
    os._exit(1)
"""
IDLE = "import time, regrow; regrow.step(1); time.sleep(1000)"


@contextmanager
def job(folder: Path, script: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job with two workers."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "regrow.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={FAILURES}", f"--log-dir={folder / 'runs'}", *flags]
    with launched([*command, str(folder / "train.py")], folder / "output", DEADLINE_S) as process:
        yield process


def exporter_of(agent: int) -> int:
    """Return the pid of the agent's exporter, once it serves."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for pid in descendants(agent):
            with suppress(OSError):
                if b"exporter_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        time.sleep(0.01)
    raise SystemExit("benchmark: there is no exporter")


def connect(stack: ExitStack, port: int, request: str, timeout_s: float) -> int:
    """Connect clients that send a request and never read; return how many are connected.

    Args:
        stack: closes the clients.
        port: port of the loopback.
        request: the request, without its end.
        timeout_s: most seconds for one client; 0 does not wait for the server.
    """
    clients = [stack.enter_context(socket.socket()) for _ in range(CONNECTIONS)]
    for client in clients:
        client.settimeout(timeout_s)
        with suppress(OSError):  # its queue is full, or it has closed the connection already
            client.connect(("127.0.0.1", port))
            client.sendall(f"{request}\r\nhost: x\r\n\r\n".encode())
    return sum(map(is_connected, clients))


def is_connected(client: socket.socket) -> bool:
    """Return whether the other end has accepted a client, or its kernel has."""
    try:
        client.getpeername()
    except OSError:
        return False
    return True


def page_of(web: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the port of `regrow web`, and the request of a page."""
    assert web.stdout is not None
    address, _, token = web.stdout.readline().split()[-1].partition("/#token=")
    port = int(address.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", "/api/jobs", headers={"Authorization": f"Bearer {token}"})
    key = json.loads(connection.getresponse().read())[0]["key"]
    return port, f"GET /api/jobs/{key}/live HTTP/1.1\r\nAuthorization: Bearer {token}"


def wait_for(event: str, folder: Path) -> None:
    """Wait until the job has recorded an event."""

    def is_recorded() -> bool:
        logs = (folder / "runs").glob("*/events.jsonl")
        return any(f'"regrow.{event}"' in log.read_text() for log in logs)

    if not wait(is_recorded, DEADLINE_S):
        raise SystemExit(f"benchmark: no {event}: {(folder / 'output').read_text()[-2000:]}")


def disturb(stack: ExitStack, folder: Path, agent: int, port: int, go: Path) -> None:
    """Attach the views and their bad clients, let the worker fail, and stop the views."""
    command = [sys.executable, "-m", "regrow", "web", "--port=0", str(folder / "runs")]
    web = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(web.kill)
    exporter = exporter_of(agent)
    clients = {
        "exporter": connect(stack, port, "GET /metrics HTTP/1.1", DEADLINE_S),
        "pages": connect(stack, *page_of(web), DEADLINE_S),
    }
    go.touch()
    wait_for("worker.failed", folder)
    os.kill(exporter, signal.SIGSTOP)
    web.send_signal(signal.SIGSTOP)
    clients["stopped exporter"] = connect(stack, port, "GET /metrics HTTP/1.1", 0)
    print("connected: " + ", ".join(f"{name} {count}" for name, count in clients.items()))


def restarts(*, views: bool) -> dict[str, list[float]]:
    """Return the seconds of each detection and each restart of a job."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_views_")))
        port = stack.enter_context(PortReservation()).port
        flags = [f"--metrics-port={port}"] if views else []
        go = folder / "go"
        with job(folder, CRASH.replace('"go"', repr(str(go))), *flags) as process:
            wait_for("worker.first_step", folder)
            if views:
                disturb(stack, folder, process.pid, port, go)
            go.touch()
            if process.wait(DEADLINE_S) != 0:
                raise SystemExit(f"benchmark: {(folder / 'output').read_text()[-2000:]}")
        failures = story(read_events(folder / "runs")).failures
    assert len(failures) == FAILURES
    return {
        "detected": [each.detected_after_s or 0.0 for each in failures],
        "restarted": [(e.restarted_after_s or 0.0) - (e.backoff_s or 0.0) for e in failures],
    }


def idle() -> dict[str, float]:
    """Return memory in MB and processor time in per cent of an idle agent and of its exporter."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_views_")))
        port = stack.enter_context(PortReservation()).port
        process = stack.enter_context(job(folder, IDLE, f"--metrics-port={port}"))
        exporter = exporter_of(process.pid)
        time.sleep(3)
        begun = time.monotonic(), usage(process.pid).cpu_s, usage(exporter).cpu_s
        while time.monotonic() - begun[0] < IDLE_S:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            time.sleep(1)
        lasted = time.monotonic() - begun[0]
        agent, helper = usage(process.pid), usage(exporter)
    return {
        "agent, MB": agent.resident_mb,
        "agent, %": 100 * (agent.cpu_s - begun[1]) / lasted,
        "exporter, MB": helper.resident_mb,
        "exporter, %": 100 * (helper.cpu_s - begun[2]) / lasted,
    }


def main() -> int:
    """Run the benchmark; return 1 if a bound is missed."""
    args = parser(__doc__).parse_args()
    figures: dict[bool, dict[str, list[float]]] = {
        views: {"detected": [], "restarted": []} for views in (False, True)
    }
    for _ in range(args.runs):
        for views in (False, True):
            for name, seconds in restarts(views=views).items():
                figures[views][name] += seconds
    missed = []
    for name in ("detected", "restarted"):
        quiet, under = (figures[views][name] for views in (False, True))
        medians = statistics.median(quiet), statistics.median(under)
        texts = [
            f"{1000 * median:.1f} ms (most {1000 * max(all_of):.1f})"
            for median, all_of in zip(medians, (quiet, under), strict=True)
        ]
        print(f"exit(1) until {name}: quiet {texts[0]}, under views {texts[1]}")
        if medians[1] - medians[0] > MOST_LONGER_S:
            missed.append(f"{name} takes {1000 * (medians[1] - medians[0]):.1f} ms longer")
    found = idle()
    print("idle with metrics: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    if found["agent, MB"] > IDLE_MB_BOUND or found["agent, %"] > IDLE_CPU_BOUND:
        missed.append("the idle agent takes too much")
    if args.json:
        named = {"views" if views else "quiet": each for views, each in figures.items()}
        args.json.write_text(json.dumps({**named, "idle": found}, indent=2))
    if args.check:
        for each in missed:
            print(f"missed: {each}", file=sys.stderr)
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
