"""Measure how long a job stands still when a spare host takes the place of a lost one.

    python benchmarks/spare_host.py [-n RUNS] [--torchrun-runs RUNS] [--json FILE] [--check]

Four agents on this host meet at a port of the loopback, with `--nnodes=3` and one worker each, so
the fourth one waits. The workers train over gloo. Then the third agent, its worker and all
processes that it has started get SIGKILL at one moment. The measure is the time from that moment to
the first step of all three ranks of the next round. Five ways, in turn:

1. torchrun of the installed torch
2. regrow: all workers start again, and import torch
3. regrow with `--preload torch`: the same, and all of them are forked from a template; that of the
   fourth agent has imported torch while the agent waited
4. regrow with `--preload torch` and `Wrapper(elastic=True)`: the two other workers live on
5. the same with `--standby 1` in place of `--preload`: the fourth agent has a process that has run
   the script up to the wrapped call

The first three ways start again at step 0. A real training would load a checkpoint, and build its
model again. The fourth and fifth way have the state of the survivors. The time to load a model and
to make a CUDA context is in none of the figures. `--build SECONDS` lets the script sleep before its
wrapped call, in place of a model that it builds and data that it loads; the fifth way does that
while the fourth agent waits.

`--check` exits with 1 if the third, fourth and fifth way are not faster than the second one by
SHARE, or if the fourth or fifth one has done more than one step again or has lost the process of a
survivor.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from _agents import kill_at_once, listens, wait
from _procs import descendants

WORKER = Path(__file__).with_name("_spare_worker.py")
NODES = 3
TORCHRUN, COLD, WARM = "torchrun", "start again", "--preload"
ELASTIC, STANDING_BY = "--preload, elastic", "--standby, elastic"
WAYS: dict[str, tuple[str, list[str], str]] = {
    TORCHRUN: ("torch.distributed.run", [], "0"),
    COLD: ("regrow.run", [], "0"),
    WARM: ("regrow.run", ["--preload=torch,regrow.inprocess,regrow.state"], "0"),
    ELASTIC: ("regrow.run", ["--preload=torch,regrow.inprocess,regrow.state"], "1"),
    STANDING_BY: ("regrow.run", ["--standby=1"], "1"),
}
SHARE = 0.9
"""Longest median, as a share of that of the second way."""
FORMING_S = 120.0
SETTLE_S = 30.0
"""Seconds in which the fourth agent and the templates get ready. They start after 10 s."""
LIMIT_S = 60.0


class Stamp(NamedTuple):
    """A line that a worker wrote."""

    what: str
    round: int
    rank: int
    pid: int
    ns: int
    step: int


class Loss(NamedTuple):
    """The loss of a node."""

    seconds: float | None
    """Until all ranks have done a step of the next round; None: not within `LIMIT_S`."""
    kept: int
    """Number of survivors whose process is the same."""
    redone: int
    """Number of steps that rank 0 has done again."""


def read_stamps(path: Path) -> list[Stamp]:
    """Return the stamps that the workers have written so far."""
    text = path.read_text() if path.exists() else ""
    rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Stamp(row[0], *map(int, row[1:])) for row in rows]


def world(path: Path, but: int = -1) -> dict[int, Stamp]:
    """Return the first step of each rank in the first whole round that is not `but`, if any."""
    rounds: dict[int, dict[int, Stamp]] = {}
    for stamp in read_stamps(path):
        if stamp.round != but:
            rounds.setdefault(stamp.round, {}).setdefault(stamp.rank, stamp)
    return next((ranks for ranks in rounds.values() if len(ranks) == NODES), {})


def lose(way: str, build_s: float) -> Loss:
    """Run a job in one of `WAYS`, and kill its third agent; `build_s` as in `--build`."""
    module, flags, elastic = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="bench_spare_") as folder:
        stamps, started = Path(folder) / "stamps", list[subprocess.Popen[bytes]]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", module, f"--nnodes={NODES}", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=spare"]
        command += ["--max-restarts=3", *flags, str(WORKER)]
        more = {"BENCH_STAMPS": str(stamps), "ELASTIC": elastic, "OMP_NUM_THREADS": "1"}
        more["BENCH_BUILD_S"] = str(build_s)
        try:
            for number in range(NODES + 1):
                with open(f"{folder}/output.{number}", "wb") as output:
                    started.append(
                        subprocess.Popen(
                            command,
                            env=os.environ | more,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                        )
                    )
                if number == 0:  # this agent serves the rendezvous; another one is killed
                    wait(lambda: listens(port), FORMING_S)
                if number == NODES - 1 and not wait(lambda: bool(world(stamps)), FORMING_S):
                    sys.exit(f"{way}: no world; {Path(folder, 'output.0').read_text()[-3000:]}")
            before = world(stamps)
            time.sleep(SETTLE_S)
            killed_ns = kill_at_once(descendants(started[NODES - 1].pid))
            last = max(s.step for s in read_stamps(stamps) if s.rank == 0)
            wait(lambda: bool(world(stamps, before[0].round)), LIMIT_S)
            after = world(stamps, before[0].round)
        finally:
            for process in started:
                kill_at_once(descendants(process.pid))
                process.wait()
            for stamp in read_stamps(stamps):
                with suppress(ProcessLookupError):
                    os.kill(stamp.pid, signal.SIGKILL)
    if not after:
        return Loss(None, 0, last)
    pids = {stamp.pid for stamp in before.values()}
    kept = sum(stamp.pid in pids for stamp in after.values())
    seconds = (max(stamp.ns for stamp in after.values()) - killed_ns) / 1e9
    return Loss(seconds, kept, max(0, last + 1 - after[0].step))


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", "--runs", type=int, default=5, help="of each way of regrow")
    parser.add_argument("--torchrun-runs", type=int, default=1)
    parser.add_argument("--build", type=float, default=0.0, help="seconds before the wrapped call")
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    args = parser.parse_args()
    found: dict[str, list[Loss]] = {way: [] for way in WAYS}
    for run in range(max(args.runs, args.torchrun_runs)):
        for way in WAYS:
            if run < (args.torchrun_runs if way == TORCHRUN else args.runs):
                found[way].append(lose(way, args.build))
                print(f"run {run + 1}: {way}: {found[way][-1]}", file=sys.stderr)
    medians = {}
    print("seconds from the loss of a host to a step of all ranks, with a spare host")
    for way, losses in found.items():
        times = [LIMIT_S if loss.seconds is None else loss.seconds for loss in losses]
        medians[way] = statistics.median(times) if times else LIMIT_S
        kept, redone = ([getattr(loss, name) for loss in losses] for name in ("kept", "redone"))
        spread = f"({min(times, default=0):.2f}-{max(times, default=0):.2f})"
        print(f"{way:20} {medians[way]:7.2f} {spread:15} kept {kept}  steps redone {redone}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    missed = [
        f"{way} takes {medians[way]:.2f} s, and {COLD} {medians[COLD]:.2f} s"
        for way in (WARM, ELASTIC, STANDING_BY)
        if medians[way] > SHARE * medians[COLD]
    ]
    moved = [*found[ELASTIC], *found[STANDING_BY]]
    missed += [f"{loss}" for loss in moved if loss.kept < NODES - 1 or loss.redone > 1]
    if missed and args.check:
        print("bounds missed: " + "; ".join(missed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
