"""Measure how late a hung worker is reaped, with its stacks in the report, per kind of hang.

    python benchmarks/hangs.py [-n RUNS] [--json FILE] [--check]

Each run is a job, `regrow run --timers --max-restarts=1`. Its first attempt hangs in one way:

- an endless loop in Python
- `time.sleep`
- a gloo all-reduce that the other of two workers does not join
- native code that holds the GIL
- SIGSTOP, after which the worker cannot print its stacks

The figures come from the job's events, which all use the host's monotonic clock. Each time starts
at the deadline of the timer. There are three times: until the server notices the deadline, until
the kernel has ended the worker, and until the last worker of the next attempt writes its first
line. A run fails if its report does not name the place where the worker hung.

`--check` compares each run to BOUND_S and exits with 1 if a run missed it.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _arguments import parser

import regrow

#: Limit of the seconds from the deadline to the end of the worker, for every run.
BOUND_S = 0.1

LIMIT_S = 120.0

SCRIPT = """
import os, signal, sys, time
with open(os.environ["BENCH_LINES"], "a") as lines:
    lines.write(f"{{os.environ['REGROW_ATTEMPT']}} {{time.monotonic()}}\\n")
if os.environ["REGROW_ATTEMPT"] == "1":
    sys.exit()
from regrow.timer import expires
{before}
def step():
    {hang}
if os.environ["RANK"] == "0":
    with expires(after=0.5, scope="step"):
        step()
time.sleep({limit})
"""

GLOO = "import torch, torch.distributed as dist; dist.init_process_group('gloo')"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to hang."""

    name: str
    hang: str
    """The statement that does not end."""
    stood: str
    """The start of the line with which the report names the worker's place."""
    before: str = ""
    workers: int = 1


KINDS = (
    Kind("endless loop in Python", "while True: pass", "in step (train.py:"),
    Kind("time.sleep", f"time.sleep({LIMIT_S})", "in step (train.py:"),
    Kind(
        "all-reduce without the other", "dist.all_reduce(torch.ones(1))", "in all_reduce", GLOO, 2
    ),
    Kind(
        "native code with the GIL",
        "import ctypes as c; c.PyDLL(None).read(os.pipe()[0], c.create_string_buffer(1), 1)",
        "in step (train.py:",
    ),
    Kind("SIGSTOP", "os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the deadline of the timer to three events."""

    noticed_s: float
    dead_s: float
    again_s: float
    """Until the last worker of the next attempt has written its first line."""


def run(kind: Kind) -> Times:
    """Run one job; raises RuntimeError if it did not hang as planned, or the report is wrong."""
    with tempfile.TemporaryDirectory(prefix="bench_hangs_") as folder:
        work = Path(folder)
        script = work / "train.py"
        script.write_text(SCRIPT.format(before=kind.before, hang=kind.hang, limit=LIMIT_S))
        command = [sys.executable, "-m", "regrow.run", "--standalone", "--timers"]
        command += [f"--nproc-per-node={kind.workers}", "--max-restarts=1", f"--log-dir={work}"]
        ended = subprocess.run(
            [*command, str(script)],
            env={**os.environ, "BENCH_LINES": str(work / "lines"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{kind.name}: exit code {ended.returncode}\n{ended.stderr}")
        (log,) = work.glob("*/events.jsonl")
        events = [json.loads(line) for line in log.read_text().splitlines()]
        expired = next(e for e in events if e["name"] == "regrow.timer.expired")
        failed = next(e for e in events if e["name"] == "regrow.worker.failed")
        if failed["pid"] != expired["pid"] or not expired["stood"].startswith(kind.stood):
            raise RuntimeError(f"{kind.name}: not explained: {expired}\n{ended.stderr}")
        starts = [line.split() for line in (work / "lines").read_text().splitlines()]
        again = max(float(at) for attempt, at in starts if attempt == "1")
        deadline: float = expired["deadline_monotonic"]
        return Times(
            expired["noticed_monotonic"] - deadline,
            failed["exited_monotonic"] - deadline,
            again - deadline,
        )


def main() -> int:
    """Measure, print the table, and return the exit code."""
    args = parser("Measure how late hung workers are reaped.", "of each kind").parse_args()

    # pip does this for an installed package, but not for an editable checkout.
    compileall.compile_dir(Path(regrow.__file__).parent, quiet=1)
    times = {kind.name: [run(kind) for _ in range(args.runs)] for kind in KINDS}
    missed = [
        f"{name}: {each.dead_s:.3f} s"
        for name, found in times.items()
        for each in found
        if each.dead_s > BOUND_S
    ]

    print(f"milliseconds from a timer's deadline, of {args.runs} runs the median (and the most)")
    print(f"{'hang':30}{'noticed':>20}{'dead, stacks taken':>20}{'next attempt':>20}")
    for name, found in times.items():
        cells = (
            _median_and_most([each.noticed_s for each in found]),
            _median_and_most([each.dead_s for each in found]),
            _median_and_most([each.again_s for each in found]),
        )
        verdict = "MISSED" if any(name in miss for miss in missed) else "ok"
        print(f"{name:30}{''.join(f'{cell:>20}' for cell in cells)}  {verdict}")
    print(f"bound: dead within {BOUND_S * 1000:g} ms of the deadline, every run")
    if (load := os.getloadavg()[0]) > (os.cpu_count() or 1):
        print(f"others kept this machine busy (load {load:.1f}): on a quiet one it is less")
    if args.json:
        figures = {
            name: [(each.noticed_s, each.dead_s, each.again_s) for each in found]
            for name, found in times.items()
        }
        args.json.write_text(json.dumps({"seconds": figures, "missed": missed}, indent=2) + "\n")
    if missed and args.check:
        print("bound missed: " + "; ".join(missed), file=sys.stderr)
        return 1
    return 0


def _median_and_most(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.1f} ({max(seconds) * 1000:.1f})"


if __name__ == "__main__":
    sys.exit(main())
