"""Measure the cost of the launcher itself, beside torchrun of the installed torch.

    python benchmarks/launch.py [-n RUNS] [--nproc WORKERS] [--json FILE] [--check]

Both launchers start the same worker script with the same arguments. They alternate, so that a
machine that becomes slower half-way affects both. Four measures:

1. time from the command to the first line of every worker; the script imports nothing
2. time from a worker's exit(1) until every worker of the next attempt has started
3. time from that exit to the end of their first all-reduce over gloo
4. measure 3 of regrow with `--preload torch`, beside torchrun's without; and what the preload costs
   the start of the job: time from the command to the end of the first all-reduce
5. resident memory and processor time of the idle agent and all its helper processes, while the
   workers sleep

Measure 5 uses one long window with both launchers at once. The kernel counts processor time in
ticks of 10 ms, so a short window is too coarse. Neither figure depends on other processes.

torchrun is started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without it, `--standalone` of torch
2.13 uses one store for the workers of every attempt. The workers of the second attempt then find
the addresses that the first attempt left. Most of the runs that were tried spent their restarts on
refused connections, or hung, so measure 3 had no result.

Every time is the difference of two stamps of the monotonic clock; the last worker takes the later
one. `--check` compares with the bounds in BOUNDS and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import _agents
from _procs import Usage, descendants, usage

import regrow

WORKER = Path(__file__).with_name("_worker.py")
LAUNCHERS = {"regrow": "regrow.run", "torchrun": "torch.distributed.run"}
FIRST_LINE = "command to first line of every worker"
RESTART = "exit(1) to all workers of the next attempt"
ALL_REDUCE = "exit(1) to their first all-reduce"
PRELOADED = "the same, regrow with --preload torch"
START = "command to the first all-reduce"
START_PRELOADED = "command to it, regrow with --preload torch"

# (measure, bound): for times, a share of torchrun's median; for the idle agent, absolute.
BOUNDS = {FIRST_LINE: 0.10, RESTART: 0.30, PRELOADED: 0.20}
IDLE_MB_BOUND = 45.0
IDLE_CPU_BOUND = 0.2  # per cent of one core

DEADLINE_S = 120.0
SETTLE_S = 3.0
TEMPLATE_S = 12.0  # after which the template is ready


@dataclass(frozen=True, slots=True)
class Stamp:
    """A line that a worker wrote."""

    what: str
    attempt: int
    rank: int
    pid: int
    monotonic_s: float


def read_stamps(path: Path) -> list[Stamp]:
    """Return the stamps that the workers have written so far."""
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [Stamp(w, int(a), int(r), int(p), int(ns) / 1e9) for w, a, r, p, ns in rows]


@contextmanager
def launched(
    module: str, mode: str, workers: int, work: Path, preload: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher on `_worker.py mode` in the folder `work`; stop it at the end."""
    command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={workers}"]
    command += [f"--preload={preload}"] if preload else []
    command += ["--max-restarts=3", f"--log-dir={work / 'logs'}", str(WORKER), mode]
    env = {
        **os.environ,
        "BENCH_STAMPS": str(work / "stamps"),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if preload:
        env["BENCH_CRASH_AFTER_S"] = str(TEMPLATE_S)
    with _agents.launched(command, work / "output", DEADLINE_S, env) as process:
        yield process


def crash_run(
    module: str, mode: str, workers: int, preload: str = ""
) -> tuple[float, float, float]:
    """Run a job in which the last rank exits with 1 in the first attempt.

    Returns three times in seconds. The first runs from the command to the first line of every
    worker. The second runs from that exit to the last `started` (mode `crash`) or `reduced` (mode
    `allreduce`) of the next attempt. The third runs from the command to the last `reduced` of the
    first attempt, and is 0 in the mode `crash`.
    """
    with tempfile.TemporaryDirectory(prefix="bench_launch_") as folder:
        work = Path(folder)
        began_s = time.monotonic()
        with launched(module, mode, workers, work, preload) as process:
            code = process.wait(DEADLINE_S)
        stamps = read_stamps(work / "stamps")
        goal = "reduced" if mode == "allreduce" else "started"
        first = [s.monotonic_s for s in stamps if (s.what, s.attempt) == ("started", 0)]
        again = [s.monotonic_s for s in stamps if (s.what, s.attempt) == (goal, 1)]
        crash = [s.monotonic_s for s in stamps if s.what == "crashed"]
        if code != 0 or (len(first), len(again), len(crash)) != (workers, workers, 1):
            text = (work / "output").read_text(errors="replace")
            sys.exit(f"{module} {mode}: exit code {code}, stamps {stamps}; its output:\n{text}")
        reduced = [s.monotonic_s for s in stamps if (s.what, s.attempt) == ("reduced", 0)]
        begun = max(reduced) - began_s if reduced else 0.0
        return max(first) - began_s, max(again) - crash[0], begun


def idle_run(workers: int, seconds: float) -> dict[str, list[Usage]]:
    """Return, per launcher, the usage of its own processes during `seconds` without work."""
    with tempfile.TemporaryDirectory(prefix="bench_launch_") as folder:
        works = {name: Path(folder) / name for name in LAUNCHERS}
        for work in works.values():
            work.mkdir()
        with (
            launched(LAUNCHERS["regrow"], "idle", workers, works["regrow"]) as regrow,
            launched(LAUNCHERS["torchrun"], "idle", workers, works["torchrun"]) as torchrun,
        ):
            roots = {"regrow": regrow.pid, "torchrun": torchrun.pid}
            deadline_s = time.monotonic() + DEADLINE_S
            while any(len(read_stamps(work / "stamps")) < workers for work in works.values()):
                if time.monotonic() > deadline_s:
                    sys.exit(f"the idle workers did not start within {DEADLINE_S} s")
                time.sleep(0.05)
            time.sleep(SETTLE_S)
            before = {name: _own(pid, works[name]) for name, pid in roots.items()}
            time.sleep(seconds)
            after = {name: _own(pid, works[name]) for name, pid in roots.items()}
    return {name: _difference(before[name], after[name]) for name in LAUNCHERS}


def _own(root: int, work: Path) -> list[Usage]:
    """Return the usage of the launcher and its helpers: all processes below it but the workers."""
    workers = {stamp.pid for stamp in read_stamps(work / "stamps")}
    below_workers = set().union(*(descendants(pid) for pid in workers))
    return [usage(pid) for pid in sorted(descendants(root) - below_workers)]


def _difference(before: list[Usage], after: list[Usage]) -> list[Usage]:
    """Return `after` with the processor time since `before`."""
    spent = {entry.pid: entry.cpu_s for entry in before}
    return [
        Usage(u.pid, u.command, u.resident_mb, u.proportional_mb, u.cpu_s - spent.get(u.pid, 0.0))
        for u in after
    ]


def measure(runs: int, workers: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every run, for each measure and launcher."""
    measures = (FIRST_LINE, RESTART, ALL_REDUCE, PRELOADED, START, START_PRELOADED)
    times: dict[str, dict[str, list[float]]] = {m: {n: [] for n in LAUNCHERS} for m in measures}
    for module in LAUNCHERS.values():  # warm-up: compiles the files and caches them in memory
        crash_run(module, "allreduce", workers)
    for run in range(runs):
        for name in sorted(LAUNCHERS, reverse=bool(run % 2)):
            first_line, restart, _ = crash_run(LAUNCHERS[name], "crash", workers)
            _, all_reduce, start = crash_run(LAUNCHERS[name], "allreduce", workers)
            preloaded, start_preloaded = all_reduce, start
            if name == "regrow":
                _, preloaded, start_preloaded = crash_run(
                    LAUNCHERS[name], "allreduce", workers, "torch"
                )
            found = first_line, restart, all_reduce, preloaded, start, start_preloaded
            for what, seconds in zip(measures, found, strict=True):
                times[what][name].append(seconds)
            print(
                f"run {run + 1}/{runs} {name:8}",
                *(f" {each:.3f}" for each in found),
                file=sys.stderr,
            )
    return times


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure the launcher beside torchrun.")
    parser.add_argument("-n", "--runs", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2, help="workers of each job")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="window of measure 5")
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    args = parser.parse_args()

    # pip does this for an installed package such as torch, but not for an editable checkout. If
    # Python may not write byte code, it would compile the checkout again at every start.
    compileall.compile_dir(Path(regrow.__file__).parent, quiet=1)
    times = measure(args.runs, args.nproc)
    idle = idle_run(args.nproc, args.idle_seconds)
    missed: list[str] = []

    def verdict(value: float, bound: float | None, unit: str = "") -> str:
        if bound is None:
            return ""
        if value > bound:
            missed.append(f"{value:.3g}{unit} is over {bound:g}{unit}")
        return f"{'ok' if value <= bound else 'MISSED'} (<= {bound:g}{unit})"

    print(f"{args.nproc} workers, {args.runs} runs, medians of seconds (least to most)")
    print(f"{'':45}{'regrow':>24}{'torchrun':>24}{'ratio':>8}")
    for what, by_name in times.items():
        ratio = statistics.median(by_name["regrow"]) / statistics.median(by_name["torchrun"])
        cells = "".join(f"{_median_and_range(by_name[name]):>24}" for name in LAUNCHERS)
        print(f"{what:45}{cells}{ratio:8.3f}  {verdict(ratio, BOUNDS.get(what))}")
    resident = {name: sum(u.resident_mb for u in used) for name, used in idle.items()}
    cpu = {
        name: 100 * sum(u.cpu_s for u in used) / args.idle_seconds for name, used in idle.items()
    }
    for what, unit, by, bound in (
        ("idle agent and helpers, resident", " MB", resident, IDLE_MB_BOUND),
        ("idle agent and helpers, processor", " %", cpu, IDLE_CPU_BOUND),
    ):
        cells = "".join(f"{by[name]:>{24 - len(unit)}.2f}{unit}" for name in LAUNCHERS)
        ratio = by["regrow"] / by["torchrun"] if by["torchrun"] else float("nan")
        print(f"{what:45}{cells}{ratio:8.3f}  {verdict(by['regrow'], bound, unit)}")
    for name, used in idle.items():
        for entry in used:
            memory = (
                f"{entry.resident_mb:.1f} MB resident, {entry.proportional_mb:.1f} MB own share"
            )
            print(f"  {name}: {memory}, {entry.cpu_s:.2f} s: {entry.command}")
    if args.json:
        used_by = {name: [asdict(u) for u in used] for name, used in idle.items()}
        figures = {"workers": args.nproc, "seconds": times, "idle": used_by, "missed": missed}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if missed and args.check:
        print("bounds missed: " + "; ".join(missed), file=sys.stderr)
        return 1
    return 0


def _median_and_range(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
