"""Measure the time and the cost of in-process restart, beside nvidia-resiliency-ext.

    python benchmarks/inprocess.py [--check] [--runs 7] [--only restarts|memory|training|protocol]
                                   [--cases PART] [--pairs 10] [--steps 300] [--log FILE]

The peer, nvidia-resiliency-ext, runs in two settings: with its defaults, and at its best, with all
intervals at 10 ms and without a last call. The benchmark installs it once into a folder of the
user's cache (`PEER`), without the dependencies of its other parts. Both packages run in the same
interpreter with the same torch.

**Restarts.** Four ranks on gloo are forked from a process that has loaded torch. Rank 2 has a fault
in its first call of the function. It raises or kills itself, while the other ranks compute or wait
in an all-reduce; or it continues to compute and no longer calls `ping`. The time runs from the
fault until the last rank has done the first all-reduce of the next iteration. For a hang, it runs
from the soft time-out. Each run measures the three tools in turn. A tool that has not restarted in
time counts as infinite.

**Memory.** Four ranks start as separate processes. The figures are the proportional (PSS) and the
resident memory of all other processes that the wrapper has started, divided by the ranks. For
regrow they include the store's server, which the peer runs inside rank 0.

**Training.** Two ranks take steps in blocks, in turn without a wrapper and with a default wrapper
and one `ping` per step. The figures are the median ratio of the speeds in a pair, and the interval
that holds the true median with 95 %.

**Protocol.** A restart of 1,024 simulated ranks; see `_restarters.py`.

`--check` compares with the bounds and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from _procs import descendants, usage
from _restarters import restart_run

HERE = Path(__file__).parent
VERSION = "0.6.0"
PEER = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / f"regrow-bench-nvidia-resiliency-ext-{VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
)
PLATFORMS = ("manylinux_2_39_x86_64", "manylinux2014_x86_64", "any")
"""The peer's wheel requires a newer C library than the part that is measured here needs."""

RANKS = 4
SOFT_S = 2.0
LIMIT_S = 40.0
TRAINING_LIMIT_S = 300.0
PR_SET_CHILD_SUBREAPER = 36

OF_DEFAULT = 0.1
OF_BEST = 0.25
BLOCKED_BOUND_S = 0.3
MEMORY_BOUND = 0.2
SLOWDOWN_BOUND = 0.01  # slowdown of a training that is statistically certain
CROWD = 1024
CROWD_BOUND_S = 1.0

BEST = {
    "monitor_thread_interval": 0.01,
    "monitor_process_interval": 0.01,
    "heartbeat_interval": 0.01,
    "progress_watchdog_interval": 0.01,
    "last_call_wait": 0.0,
}


class Tool(NamedTuple):
    """A package and its settings, as measured here."""

    name: str
    package: str
    settings: dict[str, float]


OURS = Tool("regrow", "regrow", {})
AS_IT_COMES = Tool("its defaults", "nvidia_resiliency_ext", {})
AT_ITS_BEST = Tool("its best", "nvidia_resiliency_ext", BEST)
TOOLS = (OURS, AS_IT_COMES, AT_ITS_BEST)

CASES = {
    "raise computing": "a rank raises, the others compute",
    "kill computing": "a rank is killed, the others compute",
    "raise blocked": "a rank raises, the others wait in gloo",
    "kill blocked": "a rank is killed, the others wait in gloo",
    "hang computing": f"a rank makes no progress, after {SOFT_S:g} s",
}


# --- the peer, and processes


def install() -> None:
    """Install the peer, unless it is installed already."""
    if (PEER / "installed").exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(PEER)]
    platforms = [f"--platform={each}" for each in PLATFORMS]
    name = f"nvidia-resiliency-ext=={VERSION}"
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", *platforms, name], check=True)
    subprocess.run([*pip, "psutil", "defusedxml", "packaging", "httpx", "PyYAML"], check=True)
    (PEER / "installed").touch()


class Scene:
    """The folder of a run, and the jobs that were started in it."""

    def __init__(self, work: Path, log: int) -> None:
        self.work = work
        self._log = log
        self._jobs = 0

    def start(self, tool: Tool, *arguments: str) -> subprocess.Popen[str]:
        """Start a rank, or the process that forks ranks."""
        return subprocess.Popen(
            [sys.executable, str(HERE / "_restart_ranks.py"), tool.package, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": str(PEER),
                "PYTHONWARNINGS": "ignore",
                # Each time the peer polls its store, a time-out occurs. torch would log each with
                # a stack, and it takes seconds to resolve the names in that stack.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
        )

    def job(self, tool: Tool, case: str, size: int, ports: int, **more: Any) -> list[Any]:
        """Describe a job in the form that the ranks read."""
        self._jobs += 1
        settings = dict(tool.settings)
        if case.startswith("hang"):
            settings |= {"soft_timeout": SOFT_S, "hard_timeout": LIMIT_S * 1.5}
        group = more.get("group") or str(self.work / f"group{self._jobs}")
        lines = str(self.work / f"job{self._jobs}")
        return [case, size, settings, free_ports(ports), group, lines, more.get("steps", 0)]


@contextmanager
def scene(log: Path | None) -> Iterator[Scene]:
    """Create a folder; at the end, kill all remaining processes."""
    with (
        tempfile.TemporaryDirectory(prefix="bench_inprocess_") as folder,
        open(log or os.devnull, "a") as errors,
    ):
        try:
            yield Scene(Path(folder), errors.fileno())
        finally:
            end(descendants(os.getpid()) - {os.getpid()})


def adopt_orphans() -> None:
    """Make every process that a rank leaves behind a child of this process; it ends with it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(pids: set[int]) -> None:
    """Kill processes, and reap the children of this process. All orphans are its children."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while pids & descendants(os.getpid()) and time.monotonic() < deadline:
        for pid in pids:
            reaped(pid)
        time.sleep(0.005)


def reaped(pid: int) -> bool:
    """Reap a process if it has ended and is a child of this process."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def events(path: str) -> list[dict[str, Any]]:
    """Return the events that the ranks of a job have recorded."""
    file = Path(path)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(path: str, event: str, count: int) -> None:
    """Wait until `count` ranks have recorded an event."""
    deadline = time.monotonic() + LIMIT_S
    while sum(each["event"] == event for each in events(path)) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"benchmark: no {count} ranks have {event}; see --log")
        time.sleep(0.05)


# --- restarts


class Restarts:
    """Lets ranks restart in process, and measures the time."""

    def __init__(self, stage: Scene) -> None:
        import torch.distributed as dist  # after memory is measured: forked ranks would share it

        self._scene = stage
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._forks = {tool.package: stage.start(tool) for tool in TOOLS[:2]}

    def once(self, tool: Tool, case: str) -> float:
        """Return the seconds of one restart; infinite if there was none in time."""
        job = self._scene.job(tool, case, RANKS, 1, group=str(self._store.port))
        process = self._forks[tool.package]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        keep = {os.getpid(), *(each.pid for each in self._forks.values())}
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            for pid in descendants(process.pid) - keep:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if process.stdout.readline() != "over\n":
            raise SystemExit(f"benchmark: {tool.package} cannot be run; see --log")
        end(descendants(os.getpid()) - keep)
        return self._seconds(case, events(job[5]))

    @staticmethod
    def _seconds(case: str, reports: list[dict[str, Any]]) -> float:
        faults = [each["at"] for each in reports if each["event"] == "fault"]
        if len(faults) != 1:
            raise SystemExit(f"benchmark: {len(faults)} faults in {case!r}; see --log")
        done = [each["at"] for each in reports if each.get("iteration") == 1]
        if len(done) != RANKS - case.startswith("kill"):
            return math.inf
        return float(max(done) - faults[0] - (SOFT_S if case.startswith("hang") else 0.0))

    def close(self) -> None:
        """End the processes that fork the ranks."""
        for process in self._forks.values():
            process.communicate()


def restarts(stage: Scene, options: argparse.Namespace) -> list[str]:
    """Measure and print the table; return the bounds that were missed."""
    cases = [case for case in CASES if options.cases in case]
    found: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
    crowd = Restarts(stage)
    print(f"milliseconds from the fault to the next all-reduce; median (most) of {options.runs}\n")
    heads = (*(tool.name for tool in TOOLS), "of its defaults", "of its best")
    print(f"{'':44}" + "".join(f"{head:>18}" for head in heads))
    failures = []
    for case in cases:
        for run in range(options.runs):
            for tool in TOOLS[run % 3 :] + TOOLS[: run % 3]:
                found[case].setdefault(tool.name, []).append(crowd.once(tool, case))
        ours, default, best = (statistics.median(found[case][tool.name]) for tool in TOOLS)
        ratios = ours / default, ours / best
        cells = [*(_cell(found[case][tool.name]) for tool in TOOLS), *(f"{r:.3f}" for r in ratios)]
        print(f"{CASES[case]:44}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
        if not math.isfinite(ours):
            failures.append(f"{CASES[case]}: not restarted within {LIMIT_S:g} s")
        elif case.endswith("blocked") and ours > BLOCKED_BOUND_S:
            failures.append(f"{CASES[case]}: {ours:.3f} s, not {BLOCKED_BOUND_S:g}")
        elif case.endswith("computing"):
            bounds = zip(ratios, (OF_DEFAULT, OF_BEST), heads[3:], strict=True)
            failures += [
                f"{CASES[case]}: {ratio:.3f} {name}, not {bound:g}"
                for ratio, bound, name in bounds
                if ratio > bound
            ]
    crowd.close()
    return failures


def _cell(seconds: list[float]) -> str:
    middle, most = statistics.median(seconds), max(seconds)
    return " ".join(
        (
            f"{middle * 1000:.0f}" if math.isfinite(middle) else "never",
            f"({most * 1000:.0f})" if math.isfinite(most) else "(never)",
        )
    )


# --- memory


def beside(stage: Scene, tool: Tool) -> tuple[float, float, int]:
    """Return proportional and resident MB beside each rank, and the number of processes."""
    job = stage.job(tool, "none computing", RANKS, 1)
    ranks = [stage.start(tool, json.dumps(job), str(rank)) for rank in range(RANKS)]
    wait_for(job[5], "reduced", RANKS)
    time.sleep(2.0)  # the peer's monitors are still loading
    pids = descendants(os.getpid()) - {os.getpid(), *(rank.pid for rank in ranks)}
    held = [usage(pid) for pid in pids if not reaped(pid)]
    end(pids | {rank.pid for rank in ranks})
    for rank in ranks:
        rank.communicate()
    return (
        sum(each.proportional_mb for each in held) / RANKS,
        sum(each.resident_mb for each in held) / RANKS,
        len(held),
    )


def memory(stage: Scene, options: argparse.Namespace) -> list[str]:
    """Measure and print the memory beside the ranks; return the bounds that were missed."""
    ours, its = beside(stage, OURS), beside(stage, AS_IT_COMES)
    print(f"\nmemory beside each of {RANKS} ranks\n")
    for tool, (proportional, resident, count) in ((OURS, ours), (AS_IT_COMES, its)):
        print(
            f"{tool.name:14}{proportional:8.1f} MB proportional, {resident:6.1f} MB resident, in "
            f"{count} processes"
        )
    print(f"{ours[0] / its[0]:.3f} of its")
    if ours[0] > MEMORY_BOUND * its[0]:
        return [f"{ours[0] / its[0]:.3f} of the memory beside a rank, not {MEMORY_BOUND:g}"]
    return []


# --- training


def training(stage: Scene, options: argparse.Namespace) -> list[str]:
    """Measure and print the slowdown of a training; return the bounds that were missed."""
    failures = []
    print(f"\ntraining on 2 ranks, {options.pairs} pairs of blocks of {options.steps} steps\n")
    for tool in (OURS, AS_IT_COMES):
        job = stage.job(tool, "training", 2, options.pairs, steps=options.steps)
        ranks = [stage.start(tool, json.dumps(job), str(rank)) for rank in range(2)]
        try:
            for rank in ranks:
                rank.communicate(timeout=TRAINING_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"benchmark: {tool.package} does not end; see --log") from None
        blocks = [each for each in events(job[5]) if each["rank"] == 0]
        if len(blocks) != 2 * options.pairs:
            raise SystemExit(f"benchmark: {len(blocks)} blocks of {tool.package}; see --log")
        without = [each for each in blocks if not each["wrapped"]]
        pairs = list(zip(without, (e for e in blocks if e["wrapped"]), strict=True))
        lost, low, high = _interval([b["seconds"] / a["seconds"] - 1 for a, b in pairs])
        spent, spent_low, spent_high = _interval([b["spent"] / a["spent"] - 1 for a, b in pairs])
        noise = statistics.median(
            abs(b["seconds"] / a["seconds"] - 1) for a, b in pairwise(without)
        )
        print(
            f"{tool.name:14}{lost:+.2%} time ({low:+.2%} to {high:+.2%}), two blocks without "
            f"differ by {noise:.2%};\n{'':14}{spent:+.2%} processor time ({spent_low:+.2%} to "
            f"{spent_high:+.2%})",
            flush=True,
        )
        if tool is OURS and low > SLOWDOWN_BOUND:
            failures.append(f"a training is slower by at least {low:.2%}, not {SLOWDOWN_BOUND:.0%}")
    return failures


def _interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median of the sample, and the 95 % interval of the true one, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[-51]


# --- protocol


def protocol(stage: Scene, options: argparse.Namespace) -> list[str]:
    """Measure and print restarts of many simulated ranks; return the bounds that were missed."""
    few, many = restart_run(RANKS, options.runs), restart_run(CROWD, options.runs)
    print("\nthe protocol alone\n")
    for run in (few, many):
        print(
            f"{run.ranks:5} ranks: {statistics.median(run.seconds) * 1000:.1f} ms a restart (most "
            f"{max(run.seconds) * 1000:.1f}), {run.messages:.2f} messages and {run.bytes:.0f} "
            f"bytes a rank"
        )
    failures = []
    if (seconds := statistics.median(many.seconds)) > CROWD_BOUND_S:
        failures.append(f"{CROWD} ranks restart in {seconds:.2f} s, not {CROWD_BOUND_S:g}")
    if many.messages > few.messages:
        failures.append(f"{many.messages:.2f} messages among {CROWD}, {few.messages:.2f} among few")
    return failures


def main() -> int:
    """Run the comparison, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail where a bound is missed")
    parser.add_argument("--runs", type=int, default=7, help="of each case")
    parser.add_argument("--cases", default="", help="only those whose name has this part")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks of the training")
    parser.add_argument("--steps", type=int, default=300, help="steps of such a block")
    parser.add_argument("--log", type=Path, help="write the reports of the ranks into this file")
    parts: dict[str, Callable[[Scene, argparse.Namespace], list[str]]] = {
        "memory": memory,
        "restarts": restarts,
        "training": training,
        "protocol": protocol,
    }
    parser.add_argument("--only", choices=tuple(parts), help="only this part")
    options = parser.parse_args()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    install()
    with scene(options.log) as stage:
        failures = [
            each
            for name, part in parts.items()
            if options.only in (None, name)
            for each in part(stage, options)
        ]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
