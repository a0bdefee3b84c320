"""Run the rounds under simulated faults: `make simulate`, or one seed again.

    python tests/simulation/simulate.py --seeds 1000 --events 1000000
    python tests/simulation/simulate.py --driver nodes --seed 1160 --trace
    python tests/simulation/simulate.py --driver server --crowd 1000 --seed 2

The first runs seeds from 0 on, over both drivers and on all processors, until there were as many
seeds and as many events as asked for. Besides, it runs some jobs of hundreds of nodes with each
driver under the same faults, which befall many hosts at once there; and one job of thousands that
loses some of them. It ends with status 1 if a promise was broken, and prints the command that shows
it again. The others run one seed of one driver, of a job of a few nodes or of so many, and with
--trace print what happened in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from sim_bugs import BUGS, planted
from sim_run import Outcome, simulate, simulate_many

DRIVERS = ("server", "nodes")
BATCH = 5
"""Seeds that a process runs at a time."""
CROWD = {"server": 300, "nodes": 100}
"""Nodes of a job of many, unless told otherwise. Where they run the rules, every one looks at each
change that another makes."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; returns the exit status."""
    options = _parser().parse_args(arguments)
    options.drivers = (options.driver,) if options.driver else DRIVERS
    return _search(options) if options.seed is None else _replay(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the rounds under simulated faults.")
    parser.add_argument("--seeds", type=int, default=1000, help="at least so many, of each driver")
    parser.add_argument("--events", type=int, default=1_000_000, help="at least so many, in all")
    parser.add_argument("--driver", choices=DRIVERS, help="who runs the rules (default: both)")
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
            print(f"{crowd} nodes ({driver}), seed {outcome.seed}: {_told(outcome)}", flush=True)
            broken += _report(outcome, driver, crowd)
        if large is not None:
            outcome = large.result()
            print(f"{options.nodes} nodes: {_told(outcome)}")
            broken += bool(outcome.violation)
    print(f"{broken} broken promises")
    return int(bool(broken))


COUNTED = ("rounds", "losses", "evictions", "mistaken", "charged", "forgiven", "closed")


def _counts(outcome: Outcome) -> Counter[str]:
    values = outcome._asdict()
    return Counter({name: int(values[name]) for name in ("events", "seconds", *COUNTED)})


def _told(outcome: Outcome) -> str:
    counts = ", ".join(f"{getattr(outcome, name)} {name}" for name in ("events", *COUNTED[:-1]))
    return f"{counts}: {outcome.violation or 'settled'}"


def _batch(driver: str, first: int) -> list[Outcome]:
    return [simulate(seed, driver) for seed in range(first, first + BATCH)]


def _report(outcome: Outcome, driver: str, crowd: int = 0) -> bool:
    """Print a promise that was broken, and how to see it again; return whether one was."""
    if outcome.violation:
        again = f"python tests/simulation/simulate.py --driver {driver} --seed {outcome.seed}"
        again += f" --crowd {crowd}" if crowd else ""
        print(f"seed {outcome.seed} ({driver}): {outcome.violation}")
        print(f"  again: {again} --trace", flush=True)
    return bool(outcome.violation)


if __name__ == "__main__":
    sys.exit(main())
