"""Measure what `--preload torch` costs a training without a fault.

    python benchmarks/preload.py [-n RUNS] [--steps STEPS] [--json FILE] [--check]

Two workers train a small model over gloo, with and without the flag, in turn. The template imports
torch once, beside the training; on a machine without a spare core it starts 5 s after the workers.
So the whole training pays one import. The median step shows what the template costs after that.
`--check` exits with 1 if the median step is more than 5 % longer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _arguments import parser

WORKER = Path(__file__).with_name("_steps.py")
WITHOUT, WITH = "without", "with --preload torch"
FLAGS = {WITHOUT: [], WITH: ["--preload=torch"]}
LONGEST = 1.05
"""Longest median step, as a share of the step without the flag."""
DEADLINE_S = 300.0


def run(flags: list[str], steps: int) -> list[float]:
    """Return the seconds of each step of rank 0."""
    with tempfile.TemporaryDirectory(prefix="bench_preload_") as folder:
        command = [sys.executable, "-m", "regrow.run", "--standalone", "--nproc-per-node=2"]
        command += [f"--log-dir={folder}", *flags, str(WORKER), str(steps)]
        job = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        events = "".join(path.read_text() for path in Path(folder).glob("*/events.jsonl"))
    ready = "regrow.template.ready" in events
    if job.returncode or ready != bool(flags):
        raise SystemExit(f"benchmark: {flags}: {job.stdout[-500:]} {job.stderr[-2000:]}")
    line = next(line for line in job.stdout.splitlines() if "seconds [" in line)
    seconds: list[float] = json.loads(line[line.index("[") :])
    return seconds


def main() -> int:
    """Run the benchmark; return 1 if the bound is missed."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=1000, help="steps of a training")
    args = made.parse_args()
    found: dict[str, list[list[float]]] = {way: [] for way in FLAGS}
    for _ in range(args.runs):
        for way, flags in FLAGS.items():
            found[way].append(run(flags, args.steps))
    if args.json:
        args.json.write_text(json.dumps(found))
    print(f"a training of {args.steps} steps on 2 workers, {args.runs} runs of each way, in turn")
    steps: dict[str, float] = {}
    for way, runs in found.items():
        steps[way] = statistics.median(statistics.median(run) for run in runs)
        totals = sorted(sum(run) for run in runs)
        spread = f"{statistics.median(totals):.2f} s ({totals[0]:.2f} to {totals[-1]:.2f})"
        print(f"  {way:22} step {steps[way] * 1e3:6.3f} ms   all steps {spread}")
    ratio = steps[WITH] / steps[WITHOUT]
    print(f"the step with the flag takes {ratio:.3f} of the step without it")
    return int(args.check and ratio > LONGEST)


if __name__ == "__main__":
    sys.exit(main())
