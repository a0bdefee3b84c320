"""Measure what views cost the agent: the page of `regrow web`, metrics, and bad clients of both.

    python benchmarks/views.py [-n RUNS] [--json FILE] [--check]

1. Detection and restart: one of two workers exits again and again. The time from its exit until the
   agent's loop notices it, and until all workers run again (without the agent's deliberate pause),
   quiet and under views: 1,000 connections to the exporter that send a request and never read, 100
   pages that never read (as a stopped browser), and both the exporter and `regrow web` stopped by
   SIGSTOP in the middle. The runs alternate.
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

from _agents import launched
from _arguments import parser
from _procs import descendants, usage

from regrow.events import read_events, story
from regrow.utils import PortReservation

FAILURES = 3
CONNECTIONS, PAGES = 1_000, 100
MOST_LONGER_S = 0.02
"""Most seconds by which views, which share the processors, may lengthen a median."""
IDLE_MB_BOUND, IDLE_CPU_BOUND = 50.0, 0.2
IDLE_S = 20.0
DEADLINE_S = 60.0
CRASH = f"""
import os, time, regrow
regrow.step(1)
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


def disturb(stack: ExitStack, folder: Path, agent: int, port: int) -> None:
    """Attach the views, their bad clients, and stop them."""
    command = [sys.executable, "-m", "regrow", "web", "--port=0", str(folder / "runs")]
    web = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(web.kill)
    assert web.stdout is not None
    address, _, token = web.stdout.readline().split()[-1].partition("/#token=")
    web_port = int(address.rpartition(":")[2])
    header = f"Authorization: Bearer {token}\r\n\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", web_port, timeout=DEADLINE_S)
    connection.request("GET", "/api/jobs", headers={"Authorization": f"Bearer {token}"})
    key = json.loads(connection.getresponse().read())[0]["key"]
    for _ in range(PAGES):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", web_port)))
        client.sendall(f"GET /api/jobs/{key}/live HTTP/1.1\r\nhost: x\r\n{header}".encode())
    exporter = exporter_of(agent)
    for number in range(CONNECTIONS):
        client = stack.enter_context(socket.socket())
        client.settimeout(0.2)
        with suppress(OSError):  # it is full, or the exporter is stopped
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        if number == CONNECTIONS // 2:
            os.kill(exporter, signal.SIGSTOP)
            stack.callback(os.kill, web.pid, signal.SIGCONT)
            web.send_signal(signal.SIGSTOP)


def restarts(*, views: bool) -> dict[str, list[float]]:
    """Return the seconds of each detection and each restart of a job."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_views_")))
        port = stack.enter_context(PortReservation()).port
        flags = [f"--metrics-port={port}"] if views else []
        with job(folder, CRASH, *flags) as process:
            if views:
                deadline = time.monotonic() + DEADLINE_S
                while not list((folder / "runs").glob("*/events.jsonl")):
                    if time.monotonic() > deadline:
                        raise SystemExit("benchmark: the job does not start")
                    time.sleep(0.01)
                disturb(stack, folder, process.pid, port)
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
