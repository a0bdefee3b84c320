"""Measure how long a job stands still when it loses a node, beside torchrun of the installed torch.

    python benchmarks/node_loss.py [-n RUNS] [--torchrun-runs RUNS] [--json FILE] [--check]

Three agents on this host, `--nnodes=1:3` with one worker each, meet at a port of the loopback and
repeat all-reduces over gloo. Each agent has an address of its own (`--local-addr`), as on three
hosts. Then one agent, its worker and all processes it has started get SIGKILL at one moment. First
it is the third agent, which neither is rank 0 nor serves the store. Then it is the agent of the
endpoint, with the store server. With an etcd on the host, regrow runs over that as well: three
members, one on each "host". The loss of the endpoint's node is then that of the first agent and of
the member that leads. Two measures for each:

1. time from that moment to the first line of both survivors' new workers
2. time from that moment to their first all-reduce

All get the same command line and their own defaults, one after the other. torchrun may
never recover, so each run has a limit of LIMIT_S. A goal that is not reached by then counts as not
within LIMIT_S. The medians and ratios count it as LIMIT_S, which favours torchrun.

`--check` compares regrow's times to BOUNDS and exits with 1 if a run missed one.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from _agents import kill_at_once, listens, wait
from _etcd import Member, etcd
from _procs import descendants

import regrow

WORKER = Path(__file__).with_name("_node_worker.py")
LAUNCHERS = {
    "regrow": ("regrow.run", "c10d"),
    "regrow, etcd": ("regrow.run", "etcd"),
    "torchrun": ("torch.distributed.run", "c10d"),
}
"""By name: the module of the launcher, and the backend of its rendezvous."""
ETCD_MEMBERS = 3
NODES = 3
VICTIMS = {"a node": NODES - 1, "the endpoint's node": 0}
"""Which agent is killed, by its number."""
STARTED = "SIGKILL of {} to the new workers' first lines"
REDUCED = "SIGKILL of {} to their first all-reduce"

# Seconds, for every run of regrow. The second one includes the start of another server.
BOUNDS = {STARTED.format("a node"): 1.0, STARTED.format("the endpoint's node"): 1.5}

FORMING_S = 120.0
SETTLE_S = 2.0
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stamp:
    """A line that a worker wrote."""

    what: str
    rank: int
    world_size: int
    pid: int
    monotonic_s: float


def read_stamps(path: Path) -> list[Stamp]:
    """Return the stamps that the workers have written so far."""
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [Stamp(w, int(r), int(n), int(p), int(ns) / 1e9) for w, r, n, p, ns in rows]


@contextmanager
def agents(
    module: str, work: Path, members: list[Member]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the agents of one job; kill all its processes at the end."""
    backend, endpoint = "etcd", ",".join(member.endpoint for member in members)
    if not members:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            backend, endpoint = "c10d", f"127.0.0.1:{probe.getsockname()[1]}"
    ports = [int(at.rpartition(":")[2]) for at in endpoint.split(",")]
    command = [sys.executable, "-m", module, f"--nnodes=1:{NODES}", "--nproc-per-node=1"]
    command += [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=loss"]
    command += ["--max-restarts=3"]
    env = {**os.environ, "BENCH_STAMPS": str(work / "stamps"), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(NODES):
            with open(work / f"output.{number}", "wb") as output:
                started.append(
                    subprocess.Popen(
                        [*command, f"--local-addr=127.0.0.{number + 1}", str(WORKER)],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )
            if number == 0:  # the first agent serves the store; the last one is killed
                wait(lambda: all(map(listens, ports)), FORMING_S)
        yield started
    finally:
        for process in started:
            kill_at_once(descendants(process.pid))
            process.wait()
        for stamp in read_stamps(work / "stamps"):  # workers that outlived their agent
            with suppress(ProcessLookupError):
                os.kill(stamp.pid, signal.SIGKILL)


def lose_a_node(name: str, who: str) -> dict[str, float | None]:
    """Run a job and kill one of its nodes; return the seconds to each goal, None if not reached.

    Args:
        name: one of `LAUNCHERS`.
        who: the node, one of `VICTIMS`.
    """
    module, backend = LAUNCHERS[name]
    with tempfile.TemporaryDirectory(prefix="bench_node_loss_") as folder, ExitStack() as stack:
        work = Path(folder)
        stamps = work / "stamps"
        members = stack.enter_context(etcd(ETCD_MEMBERS)) if backend == "etcd" else []
        with agents(module, work, members) as processes:
            if not wait(lambda: _count(stamps, "reduced", NODES) == NODES, FORMING_S):
                text = (work / "output.0").read_text(errors="replace")
                sys.exit(f"{module}: no world of {NODES} nodes; the first agent wrote:\n{text}")
            time.sleep(SETTLE_S)
            family = descendants(processes[VICTIMS[who]].pid)
            led = [member.pid for member in members if member.leads()] if not VICTIMS[who] else []
            killed_s = kill_at_once({*family, *led}) / 1e9
            survivors = NODES - 1
            others = [process for process in processes if process.pid not in family]
            wait(
                lambda: (
                    _count(stamps, "reduced", survivors) >= survivors
                    or all(process.poll() is not None for process in others)
                ),
                LIMIT_S,
            )
            seen = [s for s in read_stamps(stamps) if s.world_size == survivors]
        times: dict[str, float | None] = {}
        for goal, what in ((STARTED, "started"), (REDUCED, "reduced")):
            reached = sorted(s.monotonic_s - killed_s for s in seen if s.what == what)
            seconds = reached[survivors - 1] if len(reached) >= survivors else None
            times[goal.format(who)] = seconds
        return times


def _count(path: Path, what: str, world_size: int) -> int:
    return sum(s.what == what and s.world_size == world_size for s in read_stamps(path))


def measure(runs: dict[str, int]) -> dict[str, dict[str, list[float | None]]]:
    """Return the seconds of every run, for each goal and launcher."""
    times: dict[str, dict[str, list[float | None]]] = {
        goal.format(who): {name: [] for name in runs}
        for who in VICTIMS
        for goal in (STARTED, REDUCED)
    }
    for who in VICTIMS:
        for name, count in runs.items():
            for run in range(count):
                result = lose_a_node(name, who)
                for goal, seconds in result.items():
                    times[goal][name].append(seconds)
                shown = "  ".join(map(_shown, result.values()))
                print(f"{who}: run {run + 1}/{count} {name:12}  {shown}", file=sys.stderr)
    return times


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure the loss of a node beside torchrun.")
    parser.add_argument("-n", "--runs", type=int, default=3, help="of regrow")
    parser.add_argument("--torchrun-runs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    args = parser.parse_args()

    # pip does this for an installed package such as torch, but not for an editable checkout.
    compileall.compile_dir(Path(regrow.__file__).parent, quiet=1)
    runs = {"regrow": args.runs, "regrow, etcd": args.runs, "torchrun": args.torchrun_runs}
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        del runs["regrow, etcd"]
    times = measure(runs)
    missed = [
        f"{goal}: {_shown(seconds)} is over {bound:g} s"
        for goal, bound in BOUNDS.items()
        for seconds in times[goal]["regrow"]
        if seconds is None or seconds > bound
    ]

    print(f"{NODES} agents, one killed with its worker; medians of seconds (least to most)")
    print(f"{'':62}" + "".join(f"{name:>24}" for name in runs) + f"{'ratio':>8}")
    for goal, by_name in times.items():
        cells = "".join(f"{_median_and_range(by_name[name]):>24}" for name in runs)
        print(f"{goal:62}{cells}{_ratio(by_name):>8}  {_verdict(goal, by_name['regrow'])}")
    if args.json:
        args.json.write_text(json.dumps({"seconds": times, "missed": missed}, indent=2) + "\n")
    if missed and args.check:
        print("bounds missed: " + "; ".join(missed), file=sys.stderr)
        return 1
    return 0


def _shown(seconds: float | None) -> str:
    return f"not within {LIMIT_S:g}" if seconds is None else f"{seconds:.3f}"


def _median_and_range(values: list[float | None]) -> str:
    known = [LIMIT_S if value is None else value for value in values]
    median, least, most = statistics.median(known), min(known), max(known)
    if median == LIMIT_S:
        return _shown(None)
    return f"{median:.3f} ({least:.3f}-{f'{most:.3f}' if most < LIMIT_S else 'never'})"


def _ratio(by_name: dict[str, list[float | None]]) -> str:
    regrow, torchrun = (
        statistics.median(LIMIT_S if value is None else value for value in by_name[name])
        for name in ("regrow", "torchrun")
    )
    return f"{'<' if torchrun == LIMIT_S else ''}{regrow / torchrun:.3f}"


def _verdict(goal: str, values: list[float | None]) -> str:
    if goal not in BOUNDS:
        return ""
    held = all(value is not None and value <= BOUNDS[goal] for value in values)
    return f"{'ok' if held else 'MISSED'} (each <= {BOUNDS[goal]:g} s)"


if __name__ == "__main__":
    sys.exit(main())
