"""Measure what `regrow.step` and `regrow.phase` cost a worker.

    python benchmarks/goodput_marks.py [--check] [--runs 500]

A worker of a real agent calls each of them in short loops. The figure is the best of the runs, less
the empty loop, because other load only adds to it. `--check` exits with 1 if one of them
costs more than `BOUND_US`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

BOUND_US = 1.0  # enter and exit of a phase; a step
CALLS = 2000  # a few milliseconds, so that some runs are not interrupted

WORKER = """
import json, sys, time
import regrow

runs, calls = int(sys.argv[1]), int(sys.argv[2])

def nothing():
    for n in range(calls):
        pass

def step():
    report = regrow.step
    for n in range(calls):
        report(n)

def phase():
    for n in range(calls):
        with regrow.phase("data"):
            pass

def best(loop):
    took = []
    for _ in range(runs):
        begun = time.perf_counter()
        loop()
        took.append(time.perf_counter() - begun)
    return min(took)

empty = best(nothing)
figures = {loop.__name__: (best(loop) - empty) / calls * 1e6 for loop in (step, phase)}
with open(sys.argv[3], "w") as file:
    json.dump(figures, file)
"""


def measure(runs: int) -> dict[str, float]:
    """Return the microseconds of one step and of one phase, in a worker of a real agent."""
    with tempfile.TemporaryDirectory() as folder:
        script, figures = Path(folder, "worker.py"), Path(folder, "figures.json")
        script.write_text(WORKER)
        command = [sys.executable, "-m", "regrow", "run", "--standalone", str(script)]
        subprocess.run(
            [*command, str(runs), str(CALLS), str(figures)], check=True, capture_output=True
        )
        found: dict[str, float] = json.loads(figures.read_text())
    return found


def main() -> None:
    """Print the figures, and check the bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--runs", type=int, default=500)
    args = parser.parse_args()
    missed = False
    for name, took_us in measure(args.runs).items():
        missed |= took_us > BOUND_US
        verdict = "ok" if took_us <= BOUND_US else "MISSED"
        print(f"regrow.{name:8} {took_us:6.3f} us  {verdict} (<= {BOUND_US:g})")
    sys.exit(args.check and missed)


if __name__ == "__main__":
    main()
