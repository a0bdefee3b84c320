"""Measure the time from `kill -9` of one of four ranks to the next all-reduce of all four.

    python benchmarks/replace.py [-n RUNS] [--json FILE] [--check]

Four ways to continue with four ranks, which alternate:

1. regrow replaces the rank, and its process starts as usual (`Wrapper(replace=True)`)
2. the same, with a process that is forked from a template (`--preload torch`)
3. the same, with a process that waits at the wrapped function (`--standby 1`)
4. torchrun starts all workers again

The peer of the in-process wrapper, nvidia-resiliency-ext, cannot do this: it continues with three
ranks. Its time to their next all-reduce, with its best settings, is measured in turn with the
others, by `inprocess.py`, which installs it. The time of the others ends with the last of the four
ranks, by stamps of the monotonic clock. torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the
reason that `launch.py` gives. `--check` compares with BOUNDS and exits with 1 if one is missed.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _agents import launched
from _arguments import parser

import inprocess

WORKER = Path(__file__).with_name("_replace_worker.py")
RANKS = 4
VICTIM = 2
DEADLINE_S = 120.0
TEMPLATE_S = 12.0
"""Seconds after which the template or the standby process is ready."""

COLD, FORKED, TORCHRUN = "regrow", "regrow --preload torch", "torchrun"
STANDBY = "regrow --standby 1"
PEER = "the peer, with 3 ranks"
PRELOAD = "--preload=torch,regrow.inprocess"
WAYS = {
    COLD: ("regrow.run", "wrapped", []),
    FORKED: ("regrow.run", "wrapped", [PRELOAD]),
    STANDBY: ("regrow.run", "wrapped", ["--standby=1"]),
    TORCHRUN: ("torch.distributed.run", "plain", []),
}
BOUNDS = {FORKED: 0.25, STANDBY: 0.15}
"""Longest median, in seconds."""
SHARES = {FORKED: 0.1, STANDBY: 0.1}
"""Longest median, as a share of torchrun's."""


def stamps(folder: Path) -> list[tuple[int, int, float]]:
    """Return rank, process id and seconds of each stamp."""
    path = folder / "stamps"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(rank), int(pid), int(ns) / 1e9) for rank, pid, ns in rows]


def wait_for(folder: Path, after: float, job: subprocess.Popen[bytes]) -> dict[int, float]:
    """Wait until each rank has a stamp after a time; return the first one of each."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found: dict[int, float] = {}
        for rank, _, at in stamps(folder):
            if at > after:
                found.setdefault(rank, at)
        if len(found) == RANKS:
            return found
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"benchmark: no all-reduce of all ranks: {stamps(folder)}")
        time.sleep(0.01)


def run(way: str) -> float:
    """Return the seconds from the SIGKILL to the last rank's next all-reduce."""
    module, mode, flags = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="bench_replace_") as name:
        folder = Path(name)
        command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=3", f"--log-dir={folder / 'logs'}", *flags, str(WORKER), mode]
        env = {
            **os.environ,
            "BENCH_FOLDER": name,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with launched(command, folder / "output", DEADLINE_S, env) as job:
            wait_for(folder, 0.0, job)
            time.sleep(TEMPLATE_S if flags else 1.0)
            victim = next(pid for rank, pid, _ in stamps(folder) if rank == VICTIM)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            again = wait_for(folder, killed, job)
            (folder / "finish").touch()
            if job.wait(DEADLINE_S):
                raise SystemExit(f"benchmark: {way}: {(folder / 'output').read_text()[-2000:]}")
        return max(again.values()) - killed


def report(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Print the table, and return the median of each way."""
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    print(f"kill -9 of one of {RANKS} ranks to the next all-reduce of all {RANKS}, s (median)")
    for way, median in medians.items():
        ratio = median / medians[TORCHRUN]
        spread = f"{min(seconds[way]):.3f} to {max(seconds[way]):.3f}"
        print(f"  {way:24} {median:7.3f}   ({spread})   {ratio:.3f} of torchrun's")
    return medians


def main() -> int:
    """Run the benchmark; return 1 if a bound is missed."""
    args = parser(__doc__).parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in (*WAYS, PEER)}
    inprocess.install()
    inprocess.adopt_orphans()
    for _ in range(args.runs):
        for way in WAYS:
            seconds[way].append(run(way))
        with inprocess.scene(None) as stage:
            peer = inprocess.Restarts(stage)
            seconds[PEER].append(peer.once(inprocess.AT_ITS_BEST, "kill computing"))
            peer.close()
    medians = report(seconds)
    if args.json:
        args.json.write_text(json.dumps(seconds))
    missed = [way for way, bound in BOUNDS.items() if medians[way] > bound]
    missed += [way for way, bound in SHARES.items() if medians[way] > bound * medians[TORCHRUN]]
    for way in missed:
        print(f"MISSED: {way}: {medians[way]:.3f} s", file=sys.stderr)
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
