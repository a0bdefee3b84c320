"""Run the rendezvous under simulated faults: `make simulate`, or one seed again, in `tests/`.

    python -m simulator --seeds 1000 --events 1000000
    python -m simulator --driver nodes --seed 1160 --trace
    python -m simulator --driver server --crowd 1000 --seed 2

The first command runs seeds from 0 on, with all drivers and on all processors. It stops after the
given number of seeds and of events. It also runs some jobs of hundreds of nodes with each
driver under the same faults; there, a fault strikes many hosts at once. And it runs one job of
thousands of nodes that loses some of its nodes. If a promise was broken, it exits with 1 and prints
the command that repeats the case.

The other commands run one seed of one driver, for a job of a few nodes or of a given number. With
--trace they print the events of the job.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from simulator.bugs import BUGS, planted
from simulator.run import Outcome, simulate, simulate_many

DRIVERS = ("server", "nodes", "hosts", "witness")
BATCH = 5
"""Seeds that a process runs at a time."""
CROWD = {"server": 300, "nodes": 100, "hosts": 100}
"""Default number of nodes of a large job.

It is smaller for the driver in which nodes run the rules: there, every node reads each change that
another node makes.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    options.drivers = (options.driver,) if options.driver else DRIVERS
    return _search(options) if options.seed is None else _replay(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the rounds under simulated faults.")
    parser.add_argument("--seeds", type=int, default=1000, help="at least so many, of each driver")
    parser.add_argument("--events", type=int, default=1_000_000, help="at least so many, in all")
    parser.add_argument("--driver", choices=DRIVERS, help="runs the rules (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--nodes", type=int, default=2048, help="of the one large job; 0: none")
    parser.add_argument("--crowds", type=int, default=3, help="seeds of jobs of many nodes")
    parser.add_argument(
        "--crowd", type=int, help=f"their nodes (default: {CROWD}); with --seed: of that job"
    )
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--plant", choices=sorted(BUGS), help="with --seed: make this mistake")
    return parser


def _replay(options: argparse.Namespace) -> int:
    broken = False
    for driver in options.drivers:
        with planted(options.plant) if options.plant else nullcontext():
            trace = print if options.trace else None
            outcome = simulate(options.seed, driver, nodes=options.crowd or 0, trace=trace)
        print(f"{driver}: {outcome}")
        broken = broken or bool(outcome.violation)
    return int(broken)


def _search(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    drivers, jobs = options.drivers, options.jobs
    total: Counter[str] = Counter()
    broken = 0
    with ProcessPoolExecutor(jobs) as pool:
        large = pool.submit(simulate_many, options.nodes) if options.nodes else None
        crowds = [
            (driver, crowd, pool.submit(simulate, seed, driver, nodes=crowd))
            for seed in range(options.crowds)
            for driver in drivers
            if driver in CROWD
            for crowd in [options.crowd or CROWD[driver]]
        ]
        first = 0
        while first < options.seeds or total["events"] < options.events:
            work = [
                (driver, pool.submit(_batch, driver, at))
                for at in range(first, first + BATCH * 2 * jobs, BATCH)
                for driver in drivers
            ]
            first += BATCH * 2 * jobs
            for driver, batch in work:
                for outcome in batch.result():
                    total += _counts(outcome)
                    broken += _report(outcome, driver)
            print(f"{first} seeds, {total['events']} events", file=sys.stderr, flush=True)
        print(f"{first} seeds with each driver ({', '.join(drivers)}): {total['events']} events")
        print(f"in {total['seconds']} s of virtual, {time.monotonic() - begun:.0f} s of real time:")
        print(", ".join(f"{total[name]} {name}" for name in COUNTED))
        for driver, crowd, run in crowds:
            outcome = run.result()
            print(f"{crowd} nodes ({driver}), seed {outcome.seed}: {_summary(outcome)}", flush=True)
            broken += _report(outcome, driver, crowd)
        if large is not None:
            outcome = large.result()
            print(f"{options.nodes} nodes: {_summary(outcome)}")
            broken += bool(outcome.violation)
    print(f"{broken} broken promises")
    return int(bool(broken))


COUNTED = (
    "rounds",
    "losses",
    "evictions",
    "mistaken",
    "charged",
    "forgiven",
    "takeovers",
    "spent",
    "closed",
)


def _counts(outcome: Outcome) -> Counter[str]:
    values = outcome._asdict()
    return Counter({name: int(values[name]) for name in ("events", "seconds", *COUNTED)})


def _summary(outcome: Outcome) -> str:
    counts = ", ".join(f"{getattr(outcome, name)} {name}" for name in ("events", *COUNTED[:-1]))
    return f"{counts}: {outcome.violation or 'settled'}"


def _batch(driver: str, first: int) -> list[Outcome]:
    return [simulate(seed, driver) for seed in range(first, first + BATCH)]


def _report(outcome: Outcome, driver: str, crowd: int = 0) -> bool:
    """Print a broken promise and the command to repeat it; return whether there was one."""
    if outcome.violation:
        again = f"python -m simulator --driver {driver} --seed {outcome.seed}"
        again += f" --crowd {crowd}" if crowd else ""
        print(f"seed {outcome.seed} ({driver}): {outcome.violation}")
        print(f"  again: {again} --trace", flush=True)
    return bool(outcome.violation)


if __name__ == "__main__":
    sys.exit(main())
