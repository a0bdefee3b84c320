"""Run in-process restarts under simulated faults: many seeds, or one seed again, in `tests/`.

    python -m simulator.restarts --seeds 10000
    python -m simulator.restarts --seed 131 --trace

If a promise was broken, it exits with 1 and prints the command that repeats the case.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from simulator.restarts.bugs import BUGS, NO_BUG
from simulator.restarts.run import Outcome, simulate

BATCH = 25
"""Seeds that a process runs at a time."""
COUNTED = ("events", "iterations", "faults", "lost", "replaced", "repeated", "completed")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run restarts under simulated faults.")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--plant", choices=sorted(BUGS), help="with --seed: plant this bug")
    options = parser.parse_args(arguments)
    if options.seed is None:
        return _search(range(options.first, options.first + options.seeds), options.jobs)
    bug = BUGS.get(options.plant, NO_BUG)
    outcome = simulate(options.seed, print if options.trace else None, bug)
    print(outcome)
    return int(bool(outcome.violation))


def _search(seeds: range, jobs: int) -> int:
    begun = time.monotonic()
    total: Counter[str] = Counter()
    broken = 0
    with ProcessPoolExecutor(jobs) as pool:
        for outcomes in pool.map(
            _batch, [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
        ):
            for outcome in outcomes:
                total += Counter({name: getattr(outcome, name) for name in COUNTED})
                if outcome.violation:
                    broken += 1
                    print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
                    print(f"  again: {sys.argv[0]} --seed {outcome.seed} --trace", flush=True)
    print(f"{len(seeds)} seeds in {time.monotonic() - begun:.0f} s:")
    print(", ".join(f"{total[name]} {name}" for name in COUNTED))
    print(f"{broken} broken promises")
    return int(bool(broken))


def _batch(seeds: range) -> list[Outcome]:
    return [simulate(seed) for seed in seeds]


if __name__ == "__main__":
    sys.exit(main())
