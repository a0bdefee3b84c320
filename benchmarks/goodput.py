"""Measure the steps of one small training under the same seeded faults, for three systems.

    python benchmarks/goodput.py [--minutes 10] [--every 20] [--seed 7] [--only SYSTEM]
                                 [--json FILE] [--plot FILE] [--show]

The training (`_goodput_training.py`) has 4 ranks on gloo, steps of 50 ms, and a checkpoint every
100 steps. It runs under

1. regrow: `Wrapper(replace=True)` and `State`, with `--preload` and `--standby 1`
2. torchrun
3. nvidia-resiliency-ext, at its shortest intervals, under torchrun

All have the same `--max-restarts`, and the same time-out of collectives. The wrappers of 1 and 3
have the same soft and hard time-out, their means against hangs; torchrun has the time-out of the
collectives. That is the shortest of the three, because the peer does not wake a rank that waits in
a collective of gloo: such a rank takes part in its restart after this time.

This process injects the faults, from outside: every 20 s, counted from the first step, a rank that
is drawn

- is killed by SIGKILL,
- raises an exception,
- hangs in Python code, without end, or
- is stopped by SIGSTOP for `STOP_S`.

The training has the exception and the hang by itself, when it finds a file of this process. The
kinds come in turn, in a drawn order. A fault waits until the rank has done a step after the time of
the fault. If the training does no step until the next fault is due, the fault is missed: it
is not injected, and not survived. So a system that recovers slowly has fewer faults, not more.

- *steps done*: the highest step that was reached. A step that is done again does not count.
- *share of steps*: steps done, divided by the steps of a run without faults in the same time. That
  run is measured first, for a minute under torchrun.
- *survived*: faults after which the training has gone beyond the step that it had reached.
- *recovery*: seconds from the fault to the first new step; the median of each kind.

`--json` keeps the figures of each system that was run, and adds to those that the file has. So the
systems can be run one by one (`--only`). `--show` prints a file; `--plot` draws it (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from _procs import descendants

import inprocess

SCRIPT = Path(__file__).with_name("_goodput_training.py")
PROGRESS = struct.Struct("=qqd")
RANKS = 4
MAX_RESTARTS = 100
STOP_S = 3.0
SOFT_S, HARD_S = 9.0, 15.0
COLLECTIVE_S = 6.0
KINDS = ("kill", "raise", "hang", "stop")
BASELINE_MINUTES = 1.0
SAMPLE_S = 0.02
KEPT_S = 0.5
START_S = 180.0
LAUNCH = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={MAX_RESTARTS}"]
OURS = ["--preload=torch,regrow.inprocess,regrow.state", "--standby=1"]
SYSTEMS = {
    "without faults": ("torch.distributed.run", "plain", []),
    "regrow": ("regrow.run", "regrow", OURS),
    "torchrun": ("torch.distributed.run", "plain", []),
    "nvidia-resiliency-ext": ("torch.distributed.run", "peer", []),
}
BASELINE = "without faults"


class Fault(NamedTuple):
    """One fault of the schedule."""

    at_s: float
    """Seconds from the first step."""
    kind: str
    rank: int


def schedule(seconds: float, every_s: float, seed: int) -> list[Fault]:
    """Return the faults of a run; the kinds come in turn, in a drawn order."""
    draw, found = random.Random(seed), []
    kinds: list[str] = []
    for number in range(1, int(seconds / every_s)):
        kinds = kinds or draw.sample(KINDS, len(KINDS))
        found.append(Fault(number * every_s, kinds.pop(), draw.randrange(RANKS)))
    return found


class Progress(NamedTuple):
    """The latest report of one rank."""

    pid: int
    step: int
    at: float
    """Monotonic seconds."""


def read(folder: Path) -> dict[int, Progress]:
    """Return the latest report of each rank."""
    found = {}
    for rank in range(RANKS):
        with suppress(FileNotFoundError, struct.error):
            found[rank] = Progress(*PROGRESS.unpack((folder / f"progress.{rank}").read_bytes()))
    return found


class Run:
    """One system with its faults, from the first step to the end of the time."""

    def __init__(self, system: str, seconds: float, faults: list[Fault], log: Path | None) -> None:
        self._system, self._seconds, self._todo = system, seconds, faults
        self._log = log
        self._samples: list[tuple[float, int]] = []
        self._injected: list[dict[str, Any]] = []
        self._missed = 0
        self._step = 0
        self._stopped: list[tuple[float, int]] = []

    def measure(self) -> dict[str, Any]:
        """Run the job, and return its figures."""
        with tempfile.TemporaryDirectory(prefix="bench_goodput_") as name:
            folder = Path(name)
            job = self._start(folder)
            try:
                self._follow(folder, job)
            finally:
                job.terminate()
                with suppress(subprocess.TimeoutExpired):
                    job.wait(20)
                inprocess.end(descendants(os.getpid()) - {os.getpid()})
        return {
            "seconds": self._seconds,
            "steps": self._step,
            "missed": self._missed,
            "faults": self._injected,
            "samples": self._samples,
        }

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        module, mode, flags = SYSTEMS[self._system]
        limits = [str(each) for each in (SOFT_S, HARD_S, COLLECTIVE_S)]
        command = [sys.executable, "-m", module, *LAUNCH, *flags]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Each attempt has a store of its own, also under torchrun: the wrapper of the peer
            # would find its own keys of the attempt before.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
        }
        if mode == "peer":
            path = [str(inprocess.PEER), os.environ.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with open(self._log or os.devnull, "ab") as output:
            return subprocess.Popen(
                [*command, f"--log-dir={folder / 'logs'}", str(SCRIPT), mode, str(folder), *limits],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _follow(self, folder: Path, job: subprocess.Popen[bytes]) -> None:
        """Read the progress, and inject the faults, until the time is over or the job ends."""
        limit = time.monotonic() + START_S
        while not (ranks := read(folder)):
            if job.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"benchmark: {self._system} does no step; see --log")
            time.sleep(SAMPLE_S)
        start = min(each.at for each in ranks.values())
        pending: Fault | None = None
        while (now := time.monotonic() - start) < self._seconds and job.poll() is None:
            ranks = read(folder)
            self._note(now, max(each.step for each in ranks.values()))
            while self._todo and self._todo[0].at_s <= now:
                self._missed += pending is not None
                pending = self._todo.pop(0)
            if pending and (of := ranks.get(pending.rank)) and of.at - start > pending.at_s:
                self._inject(folder, pending, of.pid, now)
                pending = None
            self._resume(now)
            time.sleep(SAMPLE_S)
        self._missed += (pending is not None) + len(self._todo)
        self._resume(float("inf"))

    def _note(self, now: float, step: int) -> None:
        if step > self._step:
            self._step = step
            for fault in self._injected:
                # One step more may have been under way on other ranks when the fault came.
                if fault["recovery_s"] is None and step > fault["step"] + 1:
                    fault["recovery_s"] = now - fault["at_s"]
        if not self._samples or now - self._samples[-1][0] >= KEPT_S:
            self._samples.append((round(now, 2), self._step))

    def _inject(self, folder: Path, fault: Fault, pid: int, now: float) -> None:
        known = {"kind": fault.kind, "rank": fault.rank, "at_s": now, "step": self._step}
        self._injected.append({**known, "recovery_s": None})
        if fault.kind in ("raise", "hang"):
            partial = folder / "order"
            partial.write_text(fault.kind)
            partial.rename(folder / f"order.{fault.rank}")
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            if fault.kind == "stop":
                self._stopped.append((now + STOP_S, pid))

    def _resume(self, now: float) -> None:
        for at, pid in list(self._stopped):
            if at <= now:
                self._stopped.remove((at, pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    plain = found[BASELINE]
    rate = plain["steps"] / plain["seconds"]
    kinds = " | ".join(f"recovery: {kind}" for kind in KINDS)
    lines = [f"| | steps done | share of steps | faults survived | {kinds} |", "|---" * 8 + "|"]
    for system in SYSTEMS:
        if system == BASELINE or system not in found:
            continue
        run = found[system]
        cells = [f"{run['steps']:,} of {rate * run['seconds']:,.0f}"]
        cells.append(f"{run['steps'] / (rate * run['seconds']):.1%}")
        survived = [each for each in run["faults"] if each["recovery_s"] is not None]
        cells.append(f"{len(survived)} of {len(run['faults']) + run['missed']}")
        for kind in KINDS:
            seconds = [each["recovery_s"] for each in survived if each["kind"] == kind]
            cells.append(f"{statistics.median(seconds):.1f} s" if seconds else "-")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the steps of all systems over time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "regrow", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
    plain = found[BASELINE]
    systems = [system for system in SYSTEMS if system in found and system != BASELINE]
    seconds = max(found[system]["seconds"] for system in systems)
    rate = plain["steps"] / plain["seconds"]
    axes.plot([0, seconds], [0, rate * seconds], "--", color="#888888", label=BASELINE)
    colors = dict(zip(list(SYSTEMS)[1:], ("#1a7f37", "#c2410c", "#6d28d9"), strict=True))
    for system in systems:
        run = found[system]
        share = run["steps"] / (rate * run["seconds"])
        axes.plot(*zip(*run["samples"], strict=True), color=colors[system])
        axes.plot([], [], color=colors[system], label=f"{system}: {share:.0%}")
    for fault in found[systems[0]]["faults"]:
        axes.axvline(fault["at_s"], color="#dddddd", linewidth=0.6, zorder=0)
    axes.set(xlabel="seconds (a grey line is a fault)", ylabel="steps done", xlim=(0, seconds))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Run the systems, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each system")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", choices=tuple(SYSTEMS), help="run this one only")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--plot", type=Path, help="draw the figures into this file (SVG)")
    parser.add_argument("--show", action="store_true", help="run nothing; print the file of --json")
    parser.add_argument("--log", type=Path, help="append the output of the jobs to this file")
    options = parser.parse_args()
    inprocess.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    found: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    for system in [] if options.show else [options.only] if options.only else SYSTEMS:
        if SYSTEMS[system][1] == "peer":
            inprocess.install()
        seconds = options.minutes * 60
        faults = schedule(seconds, options.every, options.seed)
        if system == BASELINE:
            seconds, faults = min(seconds, BASELINE_MINUTES * 60), []
        found[system] = Run(system, seconds, faults, options.log).measure()
        print(f"{system}: {found[system]['steps']} steps in {seconds:g} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))
    if BASELINE not in found:
        return 0
    print(table(found))
    if options.plot:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
