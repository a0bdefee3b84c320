"""Measure the cost and the lateness of countdown timers, beside torch's in the same run.

    python benchmarks/timers.py [--check] [--runs 7] [--load-seconds 30] [--json FILE]

Two kinds of timer, over a named pipe and over a multiprocessing queue, each of regrow and of torch.
The four run in turn, each with its server in its own process (`_timer_scene.py`):

1. The cost of one `with expires(...)` to its worker, with one block every millisecond. A burst of
   blocks without a pause shows whether any block fails.
2. A worker that hangs: the time from its deadline until the server acts, and until the kernel
   reports the worker dead. In between, regrow's server asks the worker for its stack.
3. The processor time of a server with one timer that does not expire.
4. 64 workers that together arm and release 1,000 timers a second: workers that are reaped,
   requests that are lost, and the processor time of the server.

torch's servers check their timers every 0.1 s, which torch's agent sets. Their own defaults are
10 s (pipe) and 60 s (queue), and they notice a deadline later by that much.

`--check` compares with the bounds below and exits with 1 if one is missed. The bounds on lateness
hold for a machine without other load; the table says whether there was other load.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCENE = Path(__file__).with_name("_timer_scene.py")
PAIRS = ("regrow file", "torch file", "regrow queue", "torch queue")
OURS = ("regrow file", "regrow queue")

COST_BOUND = 0.5  # share of torch's cost, for the median and the 99th percentile
NOTICED_BOUND_MS = 5.0  # median of the runs
DEAD_BOUND_MS = 100.0  # in every run
IDLE_BOUND = 0.1  # per cent of one core
LOAD_CPU_BOUND = 15.0  # per cent of one core

BLOCKS = 2000
BURST = 10_000
WORKERS, TIMERS_PER_SECOND = 64, 1000
IDLE_S = 10.0
DEADLINE_S = 120.0

Report = dict[str, Any]


def start(pair: str, task: str, *numbers: float) -> subprocess.Popen[str]:
    """Start a process that runs one task for a pair."""
    return subprocess.Popen(
        [sys.executable, str(SCENE), pair, task, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def reports(scene: subprocess.Popen[str], within_s: float = DEADLINE_S) -> list[Report]:
    """Return the lines that a scene prints until it ends; none if it does not end in time."""
    try:
        output, _ = scene.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        scene.kill()
        scene.communicate()
        return []
    return [json.loads(line) for line in output.splitlines()]


def reap_run(pair: str) -> tuple[float, float]:
    """Return the ms from a hung worker's deadline until it is noticed, and until it is dead."""
    scene = start(pair, "reap")
    assert scene.stdout is not None
    hung: Report = json.loads(scene.stdout.readline())
    death = select.poll()
    death.register(pidfd := os.pidfd_open(hung["pid"]))
    if not death.poll(DEADLINE_S * 1000):
        sys.exit(f"{pair}: a hung worker was not reaped within {DEADLINE_S} s")
    dead_s = time.monotonic()
    os.close(pidfd)
    noticed_s = reports(scene)[0]["noticed_s"]
    return 1000 * (noticed_s - hung["deadline_s"]), 1000 * (dead_s - hung["deadline_s"])


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Table:
    """Rows of figures, and the bounds that were missed."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self.figures: dict[str, dict[str, float | None]] = {}
        print(f"{'':48}" + "".join(f"{pair:>14}" for pair in PAIRS))

    def row(self, what: str, by_pair: dict[str, float | None], unit: str = "") -> None:
        """Print a row; None means that the pair has no such figure."""
        self.figures[what] = by_pair
        cells = ("-" if by_pair[pair] is None else f"{by_pair[pair]:.4g}" for pair in PAIRS)
        print(f"{f'{what}, {unit}' if unit else what:48}" + "".join(f"{c:>14}" for c in cells))

    def hold(self, what: str, pair: str, value: float | None, bound: float) -> None:
        """Compare a figure with its upper bound."""
        if value is None or value > bound:
            self.missed.append(f"{pair}: {what} is {value if value is None else f'{value:.4g}'}")
        met = value is not None and value <= bound
        print(f"  {pair}: {what} {'ok' if met else 'MISSED'} (<= {bound:g})")


def cost(table: Table, runs: int) -> None:
    """Measure the cost of a block to its worker."""
    medians: dict[str, list[float]] = {pair: [] for pair in PAIRS}
    tails: dict[str, list[float]] = {pair: [] for pair in PAIRS}
    bursts: dict[str, Report] = {}
    for run in range(runs):
        for pair in PAIRS:
            lines = reports(start(pair, "cost", BLOCKS, BURST if run == 0 else 0))
            if not lines:
                sys.exit(f"{pair}: the worker did not end within {DEADLINE_S} s")
            took_us = [ns / 1000 for ns in lines[0]["paced_ns"]]
            medians[pair].append(statistics.median(took_us))
            tails[pair].append(percentile(took_us, 0.99))
            bursts.setdefault(pair, lines[0])
    median: dict[str, float | None] = {p: statistics.median(medians[p]) for p in PAIRS}
    tail: dict[str, float | None] = {p: statistics.median(tails[p]) for p in PAIRS}
    table.row("one block, median", median, "us")
    table.row("one block, 99th percentile", tail, "us")
    table.row(
        f"one of {BURST} without a pause",
        {p: bursts[p]["burst_ns"] / BURST / 1000 for p in PAIRS},
        "us",
    )
    table.row("  of these blocks, failed", {p: float(bursts[p]["failed"]) for p in PAIRS})
    for pair in OURS:
        for what, by_pair in (("median", median), ("99th percentile", tail)):
            ours, theirs = by_pair[pair], by_pair[pair.replace("regrow", "torch")]
            assert ours is not None
            assert theirs is not None
            table.hold(f"share of torch's {what}", pair, ours / theirs, COST_BOUND)
        table.hold("blocks that fail in a burst", pair, float(bursts[pair]["failed"]), 0)


def lateness(table: Table, runs: int) -> None:
    """Measure when a hung worker is noticed and dead."""
    times: dict[str, list[tuple[float, float]]] = {pair: [] for pair in PAIRS}
    for _ in range(runs):
        for pair in PAIRS:
            times[pair].append(reap_run(pair))
    noticed = {p: [n for n, _ in times[p]] for p in PAIRS}
    dead = {p: [d for _, d in times[p]] for p in PAIRS}
    for what, values in (("noticed", noticed), ("dead", dead)):
        table.row(
            f"deadline to {what}, median", {p: statistics.median(values[p]) for p in PAIRS}, "ms"
        )
        table.row(f"deadline to {what}, worst", {p: max(values[p]) for p in PAIRS}, "ms")
    for pair in OURS:
        table.hold("ms to notice, median", pair, statistics.median(noticed[pair]), NOTICED_BOUND_MS)
        table.hold("ms to death, worst", pair, max(dead[pair]), DEAD_BOUND_MS)


def idleness(table: Table) -> None:
    """Measure the idle servers, all at once."""
    scenes = {pair: start(pair, "idle", IDLE_S) for pair in PAIRS}
    share: dict[str, float | None] = {
        pair: 100 * reports(scene)[-1]["cpu_s"] / IDLE_S for pair, scene in scenes.items()
    }
    table.row("idle server, of one core", share, "%")
    for pair in OURS:
        table.hold("% of a core, idle", pair, share[pair], IDLE_BOUND)


def load(table: Table, seconds: float) -> None:
    """Measure the servers under many workers, one after the other."""
    rows: dict[str, dict[str, float | None]] = {}
    for pair in PAIRS:
        *workers, server = reports(
            start(pair, "load", WORKERS, TIMERS_PER_SECOND, seconds), seconds + DEADLINE_S
        ) or [{}]
        ended = "armed" in server
        blocks, sent = (sum(worker[what] for worker in workers) for what in ("blocks", "sent"))
        figures = {
            "timers a second": blocks / seconds if ended else None,
            "blocks that failed": sum(w["failed"] for w in workers) if ended else None,
            "requests lost": sent - server["armed"] - server["released"] if ended else None,
            "workers reaped for nothing": server["killed"] if ended else None,
            "workers that could not end": server["stuck"] if ended else None,
            "server, % of one core": 100 * server["cpu_s"] / server["took_s"] if ended else None,
        }
        for what, value in figures.items():
            rows.setdefault(what, {})[pair] = value
    print(f"{WORKERS} workers, {TIMERS_PER_SECOND} timers a second together, for {seconds:g} s:")
    for what, by_pair in rows.items():
        table.row(f"  {what}", by_pair)
    for pair in OURS:
        table.hold("requests lost", pair, rows["requests lost"][pair], 0)
        table.hold("workers reaped", pair, rows["workers reaped for nothing"][pair], 0)
        table.hold(
            "% of a core under load", pair, rows["server, % of one core"][pair], LOAD_CPU_BOUND
        )


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure countdown timers beside torch's.")
    parser.add_argument("-n", "--runs", type=int, default=7)
    parser.add_argument("--load-seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    args = parser.parse_args()
    busy = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, {busy:.1f} processes wanted them when this began")
    table = Table()
    cost(table, min(args.runs, 3))
    lateness(table, args.runs)
    idleness(table)
    load(table, args.load_seconds)
    if args.json:
        figures = {"load_average": busy, "figures": table.figures, "missed": table.missed}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if table.missed and args.check:
        print("bounds missed: " + "; ".join(table.missed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
