"""Measure how soon workers detect a lost one, the cost of a beat, and its cost to a training.

    python benchmarks/heartbeat.py [--check] [--sizes 2,8,32,128,512] [--both 2,8,32] [--runs 3]
    python benchmarks/heartbeat.py --quiet MINUTES

**Loss.** Workers beat with a period of 1 s and a time-out of 2 s. One worker is lost. The time runs
until the last of the other workers detects the loss. regrow's workers are light clients (see
`_beaters.py`): real connections and the real rules, many workers in a process, one server. Up to
the sizes in `--both`, they alternate with DTensor's algorithm over gloo, which has one process for
each rank (see `_gloo_beat.py`). That algorithm has two times: to the first failed exchange, and to
the third. The third is meant to be fatal, but a mistake in the algorithm makes the first fatal.

"Killed" is a process that ends. It ends at a quarter, a half or three quarters of a period after a
beat, in turn. "Silent" is a process that stays and does nothing. Only waiting detects a silent one,
and regrow waits for the time that it documents: 3 x (1 + 2) s after the last beat.

**Faults.** A fault is injected into one of a few real worker processes. The time runs until the
last of all processes has ended (see `_beat_faults.py`).

**Cost.** The period is 0.2 s. Figures: messages and bytes per worker and beat, both ways together;
the processor time of a real worker's process per beat; and the processor time of the server, per
beat of all workers and per worker.

**Training.** The digits example on two workers (`_beat_training.py`), in blocks of steps, in turn
without a heartbeat and with one of 1 s. Figures: the median ratio of the steps per second in a pair
of blocks, the interval that holds the true median with 95 %, and the noise. The noise is the median
difference of two successive blocks without a heartbeat. The processor time of a step is printed as
well, because it depends less on other load of the machine.

**Quiet.** Only with `--quiet`, which runs nothing else: 8 worker processes at a period of 1 s, each
with a main thread that computes without a pause. One more process for each core does the same. No
false alarm may be raised; exchanges that failed are counted.

`--check` compares with the bounds and exits with 1 if one is missed. An alarm also exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from _beat_faults import faults

from regrow.store import ServerProcess, make_token, start_server

SERVICES = {"heartbeat": "regrow.heartbeat.service:create"}
HERE = Path(__file__).parent
PROCESSES = 2
LIMIT_S = 300.0

PERIOD_S = 1.0
TIMEOUT_S = 2.0
BOUND_S = 3 * (PERIOD_S + TIMEOUT_S)
PHASES = (0.5, 0.25, 0.75)
COST_PERIOD_S = 0.2
HOLD_S = 6.0

KILLED_BOUND_S = 1.0
"""`heartbeat.start` logs this: the end of a process is detected within a second."""
LATE_S = 0.5
"""Allowance for the last of hundreds of simulated workers, on two cores, to receive the result."""
MESSAGES = 2.0
MANY = 32
"""Number of workers from which on two figures are compared with their bounds.

The bytes of a beat: for few workers they vary, because a beat names up to eight ranks. The server's
time: for fewer workers it is mostly that of waking up.
"""
BYTES_GROWTH_BOUND = 1.1  # bytes of one worker: the largest job against a job of `MANY` workers
WORKER_GROWTH_BOUND = 1.5  # its processor time, against the smallest job; processor speed varies
SERVER_GROWTH_BOUND = 1.5  # the server's time for each worker, from `MANY` on
SLOWDOWN_BOUND = 0.01  # slowdown of a training that is statistically certain
QUIET_WORKERS = 8


# --- crowds of light clients


class Crowds:
    """The processes that together hold the simulated workers of one job."""

    def __init__(
        self, server: ServerProcess, token: bytes, size: int, simulated: int, period: float
    ) -> None:
        shares = [simulated // PROCESSES + (turn < simulated % PROCESSES) for turn in range(2)]
        firsts = [0, shares[0]]
        self._processes = [
            _python(
                "_beaters.py",
                server.endpoint,
                token.decode(),
                size,
                first,
                share,
                period,
                TIMEOUT_S,
            )
            for first, share in zip(firsts, shares, strict=True)
            if share
        ]
        self._answers()

    def order(self, words: str) -> list[Any]:
        """Send an order to all processes; return their answers."""
        self.begin(words)
        return self._answers()

    def begin(self, words: str) -> None:
        """Send an order to all processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(words + "\n")
            process.stdin.flush()

    def _answers(self) -> list[Any]:
        return [_line(process) for process in self._processes]

    answers = _answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()


def _python(file: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / file), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"benchmark: {process.args!r} ended with {process.wait()}")
    return json.loads(line)


@contextmanager
def job(size: int, simulated: int, period: float) -> Iterator[tuple[ServerProcess, bytes, Crowds]]:
    """Start a server, and a crowd of workers that are connected to it."""
    token = make_token()
    with start_server(token=token, services=SERVICES) as server:
        crowds = Crowds(server, token, size, simulated, period)
        yield server, token, crowds
        crowds.close()


# --- loss


def our_loss(size: int, how: str, phase: float) -> float:
    """Return the seconds from the loss of a regrow worker until the last other one detects it."""
    with job(size, size, PERIOD_S) as (_, _, crowds):
        crowds.order("form")
        answers = crowds.order(f"lose {how} {size // 2} {phase}")
    lost = next(at for at, _, _ in answers if at is not None)
    kinds = {kind for _, _, kinds in answers for kind in kinds}
    if kinds != {"lost" if how == "killed" else "missing"}:
        raise SystemExit(f"benchmark: a {how} worker was told to be {kinds}")
    seconds: float = max(knew for _, knew, _ in answers) - lost
    return seconds


def gloo_loss(size: int, how: str, phase: float) -> tuple[float, float]:
    """Return the seconds until the last other rank has met its first failure, and its third."""
    process = _python("_gloo_beat.py", size, PERIOD_S, TIMEOUT_S, how, phase)
    out, _ = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise SystemExit(f"benchmark: gloo with {size} ranks ended with {process.returncode}")
    found = json.loads(out)
    return found["first"] - found["lost"], found["third"] - found["lost"]


def losses(sizes: list[int], both: list[int], runs: int) -> list[str]:
    """Measure and print the first table; return the bounds that were missed."""
    print(
        f"seconds from the loss of a worker to the last of the others knowing; period "
        f"{PERIOD_S:g} s, time-out {TIMEOUT_S:g} s;\n"
        f"killed: median (most) of {runs} runs, silent: one\n"
    )
    heads = ("killed", "gloo, 1st failure", "3rd", "silent", "gloo, 1st", "3rd")
    print(f"{'workers':>8}" + "".join(f"{head:>19}" for head in heads))
    failures = []
    for size in sizes:
        ours: list[float] = []
        theirs: list[tuple[float, float]] = []
        for run in range(runs):
            phase = PHASES[run % len(PHASES)]
            ours.append(our_loss(size, "killed", phase))
            if size in both:
                theirs.append(gloo_loss(size, "killed", phase))
        silent = our_loss(size, "silent", PHASES[0])
        gloo_silent = [gloo_loss(size, "silent", PHASES[0])] if size in both else []
        cells = [_cell(ours), *_two(theirs), f"{silent:.2f}", *_two(gloo_silent)]
        print(f"{size:8}" + "".join(f"{cell:>19}" for cell in cells), flush=True)
        if max(ours) > KILLED_BOUND_S:
            failures.append(
                f"a killed one of {size} is known after {max(ours):.2f} s, not {KILLED_BOUND_S:g}"
            )
        if silent > BOUND_S + LATE_S:
            failures.append(
                f"a silent one of {size} is known after {silent:.2f} s, not {BOUND_S:g}"
            )
    return failures


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


def _two(found: list[tuple[float, float]]) -> list[str]:
    return [_cell([each[turn] for each in found]) for turn in range(2)]


# --- cost


def cost(size: int) -> tuple[float, float, float, float]:
    """Return messages and bytes per worker and beat, and µs of a real worker and of the server."""
    with job(size, size - 1, COST_PERIOD_S) as (server, token, crowds):
        real = _python(
            "_beat_idly.py",
            *(server.endpoint, token.decode(), COST_PERIOD_S, TIMEOUT_S, HOLD_S),
            RANK=str(size - 1),
            WORLD_SIZE=str(size),
        )
        crowds.order("form")
        before = _processor_ns(server.pid)
        answers = crowds.order(f"hold {HOLD_S}")
        spent = _processor_ns(server.pid) - before
        found = _line(real)
        real.communicate()
    done = sum(beats for _, _, beats in answers)
    messages = sum(part * beats for part, _, beats in answers) / done
    volume = sum(part * beats for _, part, beats in answers) / done
    all_beats = done * size / (size - 1)  # includes the beats of the real worker
    return messages, volume, found["us_of_a_beat"], spent / 1000 / all_beats


def _processor_ns(pid: int) -> int:
    """Return the processor time of all threads of a process, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def costs(sizes: list[int]) -> list[str]:
    """Measure and print the second table; return the bounds that were missed."""
    print(f"\na beat, at a period of {COST_PERIOD_S:g} s\n")
    heads = ("messages of a worker", "bytes", "µs of a worker", "µs of the server", "for each")
    print(f"{'workers':>8}" + "".join(f"{head:>22}" for head in heads))
    found = {}
    for size in sizes:
        found[size] = messages, volume, worker, server = cost(size)
        cells = (f"{messages:.2f}", f"{volume:.0f}", f"{worker:.0f}", f"{server * size:.0f}")
        print(
            f"{size:8}" + "".join(f"{cell:>22}" for cell in (*cells, f"{server:.1f}")), flush=True
        )
    failures = []
    least, most = min(sizes), max(sizes)
    for size, (messages, *_) in found.items():
        if abs(messages - MESSAGES) > 0.1:
            failures.append(f"{messages:.2f} messages of a worker and beat among {size}")
    bounds = [
        ("bytes of a worker", 1, min(most, MANY), BYTES_GROWTH_BOUND),
        ("processor time of a worker", 2, least, WORKER_GROWTH_BOUND),
        ("processor time of the server for each worker", 3, min(most, MANY), SERVER_GROWTH_BOUND),
    ]
    for what, column, first, bound in bounds:
        growth = found[most][column] / found[first][column] if first in found else 0.0
        if growth > bound:
            failures.append(f"{what} grows by {growth:.2f} from {first} to {most}, not {bound}")
    return failures


# --- training


def training(pairs: int, steps: int) -> list[str]:
    """Measure and print the slowdown of a training; return the bounds that were missed."""
    token = make_token()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with start_server(token=token, services=SERVICES) as server:
        ranks = [
            _python(
                "_beat_training.py",
                *(server.endpoint, token.decode(), PERIOD_S, pairs, steps),
                RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank in range(2)
        ]
        blocks = _line(ranks[0])
        for rank in ranks:
            rank.communicate()
    ratios = [beating[0] / without[0] for without, beating in blocks]
    speeds = [without[0] for without, _ in blocks]
    noise = statistics.median(abs(later / earlier - 1) for earlier, later in pairwise(speeds))
    low, high = _interval(ratios)
    spent = [beating[1] / without[1] - 1 for without, beating in blocks]
    spent_low, spent_high = _interval(spent)
    print(
        f"\ndigits training on 2 workers, {pairs} pairs of blocks of {steps} steps, heartbeat "
        f"every {PERIOD_S:g} s:\n{statistics.median(speeds):.1f} steps/s without, "
        f"{statistics.median(beating[0] for _, beating in blocks):.1f} with; "
        f"slower by {1 - statistics.median(ratios):.2%} "
        f"({1 - high:.2%} to {1 - low:.2%}); two blocks without differ by {noise:.2%}\n"
        f"processor time of a step: more by {statistics.median(spent):.2%} "
        f"({spent_low:.2%} to {spent_high:.2%})"
    )
    if 1 - high > SLOWDOWN_BOUND:
        return [f"a training is slower by at least {1 - high:.2%}, not {SLOWDOWN_BOUND:.0%}"]
    return []


def _interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the population's median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


# --- quiet


def quiet(minutes: float) -> list[str]:
    """Beat under full load; return the alarms and other mistakes."""
    token = make_token()
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        with start_server(token=token, services=SERVICES) as server:
            began = time.monotonic()
            workers = [
                _python(
                    "_beat_quietly.py",
                    *(server.endpoint, token.decode(), PERIOD_S, minutes * 60),
                    RANK=str(rank),
                    WORLD_SIZE=str(QUIET_WORKERS),
                )
                for rank in range(QUIET_WORKERS)
            ]
            results = [_line(worker) for worker in workers]
            for worker in workers:
                worker.communicate()
    finally:
        for process in load:
            process.kill()
            process.wait()
    failed = [line for each in results for line in each["failed"]]
    beats = min(each["beats"] for each in results)
    print(
        f"{QUIET_WORKERS} workers on {os.cpu_count()} cores under full load (load average "
        f"{os.getloadavg()[0]:.1f}), {time.monotonic() - began:.0f} s: {beats} beats, "
        f"{len(failed)} exchanges failed, "
        f"{sum(each['alarm'] is not None for each in results)} alarms"
    )
    for line in failed:
        print(f"  {line}")
    wrong = [f"a false alarm: {each['alarm']}" for each in results if each["alarm"]]
    if not wrong and min(each["seconds"] for each in results) < 0.99 * minutes * 60:
        wrong.append("the heartbeat ended early")
    return wrong


# --- main


def main() -> int:
    """Run the comparison, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail where a bound is missed")
    parser.add_argument("--sizes", type=_numbers, default=[2, 8, 32, 128, 512], help="workers")
    parser.add_argument("--both", type=_numbers, default=[2, 8, 32], help="workers beside gloo's")
    parser.add_argument("--runs", type=int, default=3, help="runs of killed workers")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks of the training")
    parser.add_argument("--steps", type=int, default=500, help="steps of such a block")
    parser.add_argument(
        "--only", choices=("loss", "faults", "cost", "training"), help="only this part"
    )
    parser.add_argument("--quiet", type=float, metavar="MINUTES", help="only this, for so long")
    options = parser.parse_args()
    if options.quiet:
        failures = quiet(options.quiet)
    else:
        parts: dict[str, Callable[[], list[str]]] = {
            "loss": lambda: losses(options.sizes, options.both, options.runs),
            "faults": lambda: faults(PERIOD_S, TIMEOUT_S),
            "cost": lambda: costs(options.sizes),
            "training": lambda: training(options.pairs, options.steps),
        }
        only = options.only
        failures = [each for name, part in parts.items() if only in (None, name) for each in part()]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures and (options.check or options.quiet) else 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
