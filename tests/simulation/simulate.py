"""Run the rounds under simulated faults: `make simulate`, or one seed again.

    python tests/simulation/simulate.py --seeds 1000 --events 1000000
    python tests/simulation/simulate.py --driver nodes --seed 1160 --trace

The first runs seeds from 0 on, over both drivers and on all processors, until there were as many
seeds and as many events as asked for; then one job of thousands of nodes. It ends with status 1 if
a promise was broken, and prints the command that shows it again. The second runs one seed of one
driver and, with --trace, prints what happened in it.
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


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; returns the exit status."""
    options = _parser().parse_args(arguments)
    drivers = (options.driver,) if options.driver else DRIVERS
    if options.seed is not None:
        return _replay(options.seed, drivers, options.trace, options.plant)
    return _search(options.seeds, options.events, drivers, options.jobs, options.nodes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the rounds under simulated faults.")
    parser.add_argument("--seeds", type=int, default=1000, help="at least so many, of each driver")
    parser.add_argument("--events", type=int, default=1_000_000, help="at least so many, in all")
    parser.add_argument("--driver", choices=DRIVERS, help="who runs the rules (default: both)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--nodes", type=int, default=2048, help="of the one large job; 0: none")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--plant", choices=sorted(BUGS), help="with --seed: make this mistake")
    return parser


def _replay(seed: int, drivers: tuple[str, ...], trace: bool, bug: str | None) -> int:
    broken = False
    for driver in drivers:
        with planted(bug) if bug else nullcontext():
            outcome = simulate(seed, driver, trace=print if trace else None)
        print(f"{driver}: {outcome}")
        broken = broken or bool(outcome.violation)
    return int(broken)


def _search(seeds: int, events: int, drivers: tuple[str, ...], jobs: int, nodes: int) -> int:
    begun = time.monotonic()
    total: Counter[str] = Counter()
    broken: list[tuple[str, Outcome]] = []
    with ProcessPoolExecutor(jobs) as pool:
        large = pool.submit(simulate_many, nodes) if nodes else None
        first = 0
        while first < seeds or total["events"] < events:
            work = [
                (driver, pool.submit(_batch, driver, at))
                for at in range(first, first + BATCH * 2 * jobs, BATCH)
                for driver in drivers
            ]
            first += BATCH * 2 * jobs
            for driver, batch in work:
                for outcome in batch.result():
                    total += _counts(outcome)
                    if outcome.violation:
                        broken.append((driver, outcome))
                        print(_report(driver, outcome), flush=True)
            print(f"{first} seeds, {total['events']} events", file=sys.stderr, flush=True)
        print(f"{first} seeds with each driver ({', '.join(drivers)}): {total['events']} events")
        print(f"in {total['seconds']} s of virtual, {time.monotonic() - begun:.0f} s of real time:")
        print(", ".join(f"{total[name]} {name}" for name in COUNTED))
        if large is not None:
            outcome = large.result()
            total += _counts(outcome)
            print(
                f"{nodes} nodes: {outcome.events} events, {outcome.rounds} rounds, "
                f"{outcome.losses} losses: {outcome.violation or 'settled'}"
            )
            if outcome.violation:
                broken.append(("server", outcome))
    print(f"{len(broken)} broken promises")
    return int(bool(broken))


COUNTED = ("rounds", "losses", "evictions", "charged", "forgiven", "closed")


def _counts(outcome: Outcome) -> Counter[str]:
    values = outcome._asdict()
    return Counter({name: int(values[name]) for name in ("events", "seconds", *COUNTED)})


def _batch(driver: str, first: int) -> list[Outcome]:
    return [simulate(seed, driver) for seed in range(first, first + BATCH)]


def _report(driver: str, outcome: Outcome) -> str:
    again = f"python tests/simulation/simulate.py --driver {driver} --seed {outcome.seed} --trace"
    return f"seed {outcome.seed} ({driver}): {outcome.violation}\n  again: {again}"


if __name__ == "__main__":
    sys.exit(main())
